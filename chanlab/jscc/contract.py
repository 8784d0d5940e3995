"""The physical-layer contract of every codec and channel: symbols, power, SNR and bandwidth, defined once.

- A channel use carries one complex symbol; real latents become symbols by `pair_iq`, within an image.
- Power is constrained per image: the mean of |x|² over the symbols that an image sends is 1.
- SNR = E|x|² / E|n|² per complex symbol, one value per image; complex noise of variance N0 has N0/2 per real dimension.
- The bandwidth ratio is k/n: all channel uses of an image, side information and pilots included, over its n = C H W
  source values.

`Convention` reproduces definitions of earlier codes, so that their figures can be compared; nothing else changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional as F

from chanlab.errors import UsageError

FAINTEST = 1e-12
"""Least energy of a symbol, before power is normalised, that is brought to full power."""
SIDE_GAP_DB = 3.0
"""Distance of the code of the side information from capacity [dB]; see `side_information_uses`."""

BEST_DB = 100.0
"""PSNR that an image without any error counts as [dB]."""

LEAST_BOOST = 1e-3
"""Least power that a base may leave to a symbol; see `Transmission.boost`."""
_SUMMED = 2048  # values of a part of a long sum


@dataclass(frozen=True)
class Convention:
    """How power, noise and channel uses are counted.

    Attributes:
        name: As `find_convention` knows it.
        power: Mean of |x|² over sent symbols: 1, or 2 where each real dimension has unit power.
        noise_per: The noise has variance 1 / SNR per `complex` symbol, or per `real` dimension (twice as much).
        power_over: What the power is averaged over: each `image`, or the `batch`, where an image's power depends on
            its neighbours.
        uses_per_symbol: Channel uses that a complex symbol counts as: 1, or 2 where real symbols are counted.
    """

    name: str
    power: float = 1.0
    noise_per: str = "complex"
    power_over: str = "image"
    uses_per_symbol: int = 1

    def noise_variance(self, snr_db: Tensor) -> Tensor:
        """Variance of the complex noise at a nominal SNR [dB], same shape."""
        return (2.0 if self.noise_per == "real" else 1.0) * 10 ** (-snr_db / 10)

    @property
    def offset_db(self) -> float:
        """SNR per complex symbol over the nominal one [dB]."""
        return 10 * math.log10(self.power / (2.0 if self.noise_per == "real" else 1.0))


STANDARD = Convention("standard")
"""Complex noise, unit power per complex symbol and image: what chanlab reports."""

CONVENTIONS = {
    c.name: c
    for c in (
        STANDARD,
        Convention("nominal+3dB", power=2.0),
        Convention("real", power=2.0, noise_per="real"),
        Convention("batch-power", power_over="batch"),
    )
}
"""Definitions by name; `find_convention` tells who uses them."""


def find_convention(convention: Convention | str) -> Convention:
    """A convention by its name.

    - `standard`: this library and the text of most papers.
    - `nominal+3dB`: unit power per real dimension, complex noise of variance 1/SNR: the SNR is 3.01 dB above its name.
      chunbaobao/Deep-JSCC-PyTorch since its noise is halved (its issue 17), and so the published retrained figures of
      DeepJSCC; LorenzoPannacci/DJSCC-Semantic-Equalization (arXiv 2510.04674).
    - `real`: real noise: unit power and noise of variance 1/SNR in each real dimension. The SNR is ours, the scale of
      symbols and noise is √2 times as large. kurka/deepJSCC-feedback (`awgn`), early chunbaobao/Deep-JSCC-PyTorch.
    - `batch-power`: the power is averaged over the batch. WITT (`net/channel.py`), kaira.

    A code that counts real symbols as channel uses is `Convention(name, uses_per_symbol=2)` with its other definitions.

    Raises:
        UsageError: If the name is unknown.
    """
    if isinstance(convention, Convention):
        return convention
    if convention not in CONVENTIONS:
        raise UsageError(f"unknown convention {convention!r}; conventions are {', '.join(CONVENTIONS)}.")
    return CONVENTIONS[convention]


def source_values(image_shape: tuple[int, int, int]) -> int:
    """Source values n = C H W of an image (channels, height, width)."""
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise UsageError(f"an image shape is (channels, height, width), not {tuple(image_shape)}.")
    return math.prod(image_shape)


def exact_ratio(ratio: float | str | Fraction) -> Fraction:
    """The fraction that a number stands for: `1/6` of a string, and of a float that is one but for rounding.

    Args:
        ratio: A fraction, its text, or a float, which within 1e-12 of a fraction with a denominator up to 10,000 is it.

    Raises:
        UsageError: If it is no finite number.
    """
    try:
        given = Fraction(ratio)
    except (ValueError, OverflowError, ZeroDivisionError) as error:
        raise UsageError(f"a bandwidth ratio is a number or a fraction such as 1/6, not {ratio!r}.") from error
    exact = given.limit_denominator(10_000)
    return exact if abs(exact - given) < Fraction(1, 10**12) else given


def channel_uses(
    image_shape: tuple[int, int, int], ratio: float | Fraction, convention: Convention | str = STANDARD
) -> int:
    """Complex symbols that a bandwidth ratio allows: k = floor(ratio C H W), exactly.

    Args:
        image_shape: (channels, height, width).
        ratio: k/n; see `exact_ratio`.
        convention: Whose channel uses the ratio counts.

    Raises:
        UsageError: If not a single symbol is left.
    """
    symbols = math.floor(exact_ratio(ratio) * source_values(image_shape)) // find_convention(convention).uses_per_symbol
    if symbols < 1:
        raise UsageError(f"a bandwidth ratio of {ratio} leaves no symbol for an image {tuple(image_shape)}: raise it.")
    return symbols


def bandwidth_ratio(uses: Tensor, image_shape: tuple[int, int, int], convention: Convention | str = STANDARD) -> Tensor:
    """k/n of each image, float64 `[batch]`, of its channel uses `[batch]` (complex symbols)."""
    return uses.double() * find_convention(convention).uses_per_symbol / source_values(image_shape)


def side_information_uses(bits: Tensor, snr_db: Tensor, gap_db: float = SIDE_GAP_DB) -> Tensor:
    """Whole channel uses of side information that is sent with a code `gap_db` from capacity.

    ceil(bits / log2(1 + SNR / gap)): 3 dB is about what codes of a few hundred bits need at a block error rate of 1e-3
    (Polyanskiy, Poor and Verdú, 2010).

    Args:
        bits: `[batch]`.
        snr_db: SNR per complex symbol [dB], `[batch]`.
        gap_db: [dB].

    Returns:
        Int64 `[batch]`.
    """
    rate = torch.log2(1 + 10 ** ((snr_db.double() - gap_db) / 10))
    return torch.ceil(bits.double() / rate).where(bits > 0, 0.0).long()


def normalise_power(symbols: Tensor, used: Tensor | None = None, convention: Convention | str = STANDARD) -> Tensor:
    """Scale symbols to the power constraint; those that are not used become exactly zero.

    Args:
        symbols: Complex `[batch, k]`.
        used: Which symbols are sent, bool `[batch, k]`; None: all.
        convention: Whose constraint.

    Returns:
        Complex64 `[batch, k]`, mean |x|² = 1 over the used symbols of each image; an image without energy stays zero.

    Raises:
        UsageError: If shapes don't fit or symbols are not complex.
    """
    return scaled(symbols, used, power_scale(symbols, used, convention))


def scaled(symbols: Tensor, used: Tensor | None, scale: Tensor) -> Tensor:
    """Symbols times the scale of `power_scale`, complex64 `[batch, k]`; those that are not used become exactly zero."""
    return torch.view_as_complex(_sent_parts(symbols, used) * scale[:, None, None])


def power_scale(symbols: Tensor, used: Tensor | None = None, convention: Convention | str = STANDARD) -> Tensor:
    """What `normalise_power` multiplies symbols by, above 0, float32 `[batch]` (`[1]` where a batch shares power)."""
    _check_symbols(symbols, used)
    convention = find_convention(convention)
    # Squares of the parts: the gradient of |x| has none at 0.
    energy = _row_sums(_sent_parts(symbols, used).square().sum(2))
    count = energy.new_full(energy.shape, symbols.shape[1]) if used is None else used.sum(1).to(energy)
    if convention.power_over == "batch":
        energy, count = energy.sum(0, keepdim=True), count.sum(0, keepdim=True)
    count = count.clamp(min=1)  # an image that sends nothing has a scale that can be divided by
    # Below the floor an image is as good as empty: its gradient would be endless.
    floored = torch.maximum(energy, FAINTEST * count)
    return (convention.power * count / floored.where(energy > 0, 1.0)).sqrt()


def _row_sums(values: Tensor) -> Tensor:
    """Sums of rows, long ones by parts: compilers give each sum of a batch to one block of a device."""
    if values.shape[1] > 2 * _SUMMED:
        values = F.pad(values, (0, -values.shape[1] % _SUMMED))
        values = values.view(len(values), -1, _SUMMED).sum(2)
    return values.sum(1)


def power_left(uses: Tensor, base_uses: Tensor, base_power: Tensor) -> Tensor:
    """Power of each of an image's own symbols where its base's have another one, their mean being 1, float `[batch]`.

    Args:
        uses: Symbols of its own, int64 `[batch]`; an image without any gets 1.
        base_uses: Symbols of the base, int64 `[batch]`.
        base_power: Power of these, float `[batch]`.
    """
    left: Tensor = 1 + base_uses * (1 - base_power) / uses.clamp(min=1)
    return left.where(uses > 0, 1.0)


def pair_iq(latent: Tensor, order: Tensor | None = None) -> Tensor:
    """Symbols of real latents: the first half of an image's values are the in-phase parts, the second the quadratures.

    Args:
        latent: Real `[batch, ...]` with an even number of values per image.
        order: Which symbols are wanted, int64 `[batch, k]`; None: all.

    Returns:
        Complex64 `[batch, k]`.
    """
    flat = latent.flatten(1).float()
    if flat.shape[1] % 2:
        raise UsageError(
            f"{flat.shape[1]} real values per image can't be paired into complex symbols: take an even one."
        )
    return torch.view_as_complex(
        torch.stack([half if order is None else half.gather(1, order) for half in flat.chunk(2, 1)], -1)
    )


def split_iq(symbols: Tensor) -> Tensor:
    """The inverse of `pair_iq`, float32 `[batch, 2k]`."""
    return torch.cat([symbols.real, symbols.imag], 1)


def per_image(snr_db: Tensor | float, symbols: Tensor) -> Tensor:
    """SNRs as float32 `[batch]` on the device of the symbols; a single number is everyone's.

    Raises:
        UsageError: If there is neither one SNR nor one per image.
    """
    snr = torch.as_tensor(snr_db, dtype=torch.float32, device=symbols.device)
    if snr.ndim == 0:
        return snr.expand(len(symbols))
    if snr.shape != (len(symbols),):
        raise UsageError(f"snr_db must be [batch] = [{len(symbols)}], one per image, not {list(snr.shape)}.")
    return snr


@dataclass(frozen=True)
class Transmission:
    """What an encoder puts on air.

    Attributes:
        symbols: Complex64 `[batch, k]`, of unit power per image over those used; the others exactly zero.
        used: Which symbols are sent, bool `[batch, k]`.
        side_bits: What the receiver must know besides the symbols (a rate, a mask, a scale) [bit], float `[batch]`.
        side: What of that isn't the mask, as the codec's decoder takes it, float `[batch, values]`, or None.
        base_uses: Channel uses of what a digital link brings in the same frame (a compressed image, part of `side`),
            int64 `[batch]`, or None.
        base_loss: Probability that the digital link loses it, float `[batch]`, or None: never.
        base_power: Power of a symbol of its, over the mean of all that the image sends, float `[batch]`, or None: 1.
            What it leaves or takes is `boost`.
    """

    symbols: Tensor
    used: Tensor
    side_bits: Tensor
    side: Tensor | None = None
    base_uses: Tensor | None = None
    base_loss: Tensor | None = None
    base_power: Tensor | None = None

    def __post_init__(self) -> None:
        _check_symbols(self.symbols, self.used)
        if self.side_bits.shape != self.symbols.shape[:1]:
            raise UsageError(f"side_bits must be [batch], not {list(self.side_bits.shape)}.")
        of_base = self.base_uses, self.base_loss, self.base_power
        if any(value is not None and value.shape != self.side_bits.shape for value in of_base):
            raise UsageError("channel uses, loss and power of a base must be [batch].")

    @classmethod
    def of(cls, symbols: Tensor, used: Tensor | None = None, side_bits: Tensor | None = None) -> Transmission:
        """All symbols sent and no side information, unless told otherwise."""
        if used is None:
            used = torch.ones_like(symbols, dtype=torch.bool)
        if side_bits is None:
            side_bits = torch.zeros(len(symbols), device=symbols.device)
        return cls(symbols, used, side_bits)

    @property
    def power(self) -> Tensor:
        """Mean |x|² over the symbols that each image sends, `[batch]`."""
        energy = torch.view_as_real(self.symbols).square().sum((1, 2))
        return energy / self.used.sum(1).clamp(min=1)

    @property
    def boost(self) -> Tensor | None:
        """Power at which `symbols` are sent, over their own, so that with those of the base the mean is theirs.

        Float `[batch]`, not above 0 where the base takes all the power; None: 1.
        """
        if self.base_uses is None or self.base_power is None:
            return None
        return power_left(self.used.sum(1), self.base_uses, self.base_power)

    def uses(self, snr_db: Tensor | float, gap_db: float = SIDE_GAP_DB) -> Tensor:
        """Symbols of each image: those sent, those of the side information and of a base; without pilots.

        They are its channel uses where a channel use carries one symbol; `Received.uses` tells them for any channel.

        Args:
            snr_db: SNR per complex symbol, which decides the rate of the side information [dB], `[batch]`.
            gap_db: See `side_information_uses` [dB].

        Returns:
            Int64 `[batch]`.
        """
        uses = self.used.sum(1) + side_information_uses(self.side_bits, per_image(snr_db, self.symbols), gap_db)
        return uses if self.base_uses is None else uses + self.base_uses


@dataclass(frozen=True)
class Received:
    """What a receiver hands to the decoder: gain x + w, with E|w|² = gain² noise_variance.

    Attributes:
        symbols: Complex64 `[batch, k]`, equalised (MMSE) when the receiver has CSI; zero where none was sent.
        used: Which symbols were sent, bool `[batch, k]`; it is what the side information tells.
        snr_db: Nominal SNR as the receiver knows it [dB], `[batch]`.
        noise_variance: Variance of the noise on each symbol, the equaliser's gain taken out: power / effective SNR,
            `[batch, k]`; it includes the error of the channel's estimate. Finite also where no symbol was sent.
        gain: Real factor on the sent symbol (the bias of MMSE equalisation; 1 without), `[batch, k]`.
        data_uses: Channel uses of the sent symbols, of side information and of a base, which go in the same frame as
            further symbols (a MIMO channel use carries several symbols), int64 `[batch]`.
        pilot_uses: Channel uses of the pilots of that frame, int64 `[batch]`.
        power: Mean |x|² of sent symbols under the channel's convention.
        side: That of the transmission.
        base_lost: Whether the digital link lost the image's base, as its checksum tells, bool `[batch]`, or None: no.
    """

    symbols: Tensor
    used: Tensor
    snr_db: Tensor
    noise_variance: Tensor
    gain: Tensor
    data_uses: Tensor
    pilot_uses: Tensor
    power: float = 1.0
    side: Tensor | None = None
    base_lost: Tensor | None = None

    @property
    def symbol_snr_db(self) -> Tensor:
        """Effective SNR of each symbol [dB], `[batch, k]`."""
        return 10 * torch.log10(self.power / self.noise_variance)

    @property
    def unbiased(self) -> Tensor:
        """The sent symbols plus noise of `noise_variance`, complex64 `[batch, k]`: large where the channel fades."""
        return self.symbols / self.gain

    @property
    def uses(self) -> Tensor:
        """All channel uses of each image, side information and pilots included, int64 `[batch]`."""
        return self.data_uses + self.pilot_uses

    def shown(self, images: Tensor) -> Tensor:
        """Decoded images `[batch, 3, height, width]`, mid-grey where the base was lost that they rest on."""
        if self.base_lost is None:
            return images
        return torch.where(self.base_lost[:, None, None, None], 0.5, images)


def _sent_parts(symbols: Tensor, used: Tensor | None) -> Tensor:
    """Real and imaginary parts, float32 `[batch, k, 2]`, zero where no symbol is sent.

    Compilers fuse arithmetic on real tensors alone.
    """
    parts = torch.view_as_real(symbols.to(torch.complex64))
    return parts if used is None else torch.where(used[..., None], parts, 0.0)


def _check_symbols(symbols: Tensor, used: Tensor | None) -> None:
    if symbols.ndim != 2 or not symbols.is_complex():
        raise UsageError(
            f"symbols are complex [batch, k], not {list(symbols.shape)} ({symbols.dtype}): pair real values by pair_iq."
        )
    if used is not None and (used.shape != symbols.shape or used.dtype != torch.bool):
        raise UsageError(f"used must be bool {list(symbols.shape)}, not {list(used.shape)} ({used.dtype}).")
