"""Channels for symbols: what they share, and additive white Gaussian noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from chanlab.errors import UsageError
from chanlab.jscc.contract import (
    LEAST_BOOST,
    STANDARD,
    Convention,
    Received,
    Transmission,
    channel_uses,
    find_convention,
    per_image,
    source_values,
)
from chanlab.jscc.draws import Draws, Randomness

_EXCESS = 1e-3  # of power that rounding explains


class Equalised(NamedTuple):
    """What a channel's receiver makes of the symbols; see `Received`. Tensors broadcast to `[batch, k]`."""

    symbols: Tensor
    noise_variance: Tensor
    gain: Tensor


class SymbolChannel(nn.Module, ABC):
    """A channel with its receiver: symbols and an SNR per image in, equalised symbols out, differentiable in symbols.

    The channel's gain has unit mean power: over its distribution for random fading, in each realisation for a link of
    stored channels. In evaluation mode the power of what is sent is checked, in training it is not (that would wait for
    the device).

    Args:
        convention: How power, noise and channel uses are counted: see `find_convention`.
    """

    symbols_per_use: int = 1
    """Symbols that one channel use carries."""
    packs: bool = False
    """Whether sent symbols are put side by side, so that unsent ones between them take no place on air."""

    def __init__(self, convention: Convention | str = STANDARD) -> None:
        super().__init__()
        self.convention = find_convention(convention)

    def forward(self, sent: Transmission | Tensor, snr_db: Tensor | float, generator: Randomness = None) -> Received:
        """Send symbols.

        Args:
            sent: A transmission, or symbols, complex `[batch, k]`, all of them sent.
            snr_db: Nominal SNR of each image [dB], `[batch]`, or one for all.
            generator: A generator, or a key per image: see `chanlab.jscc.draws.Randomness`.

        Returns:
            What the receiver hands to the decoder.

        Raises:
            UsageError: If shapes don't fit, or (in evaluation) an image is sent with more power than allowed.
        """
        symbols = sent if isinstance(sent, Tensor) else sent.symbols
        with torch.autocast(symbols.device.type, enabled=False):
            return self._forward(sent, snr_db, generator)

    def _forward(self, sent: Transmission | Tensor, snr_db: Tensor | float, generator: Randomness) -> Received:
        if isinstance(sent, Tensor):
            sent = Transmission.of(sent)
            order = None
        else:
            # Stable: sent symbols keep their order.
            order = torch.argsort(~sent.used, dim=1, stable=True) if self.packs else None
        if not self.training:
            self._check_power(sent)
        snr = per_image(snr_db, sent.symbols)
        noise_variance = self.convention.noise_variance(snr)
        if (boost := sent.boost) is not None:  # as much less noise at symbols that aren't scaled
            if not isinstance(self, AWGN):
                raise UsageError("bases that have a power of their own are sent over AWGN alone.")
            noise_variance = noise_variance / boost.clamp(min=LEAST_BOOST)
        draws = Draws(generator, len(snr), snr.device)
        # Side information goes in the same frame: it takes its place on the grid, and its share of pilots.
        count = sent.uses(snr + self.convention.offset_db)
        x = sent.symbols.to(torch.complex64)
        if order is None:
            out = self.receive(x, count, noise_variance, draws)
        else:
            out = Equalised(
                *(_unpack(t, order) for t in self.receive(x.gather(1, order), count, noise_variance, draws))
            )
        return Received(
            symbols=torch.where(sent.used, out.symbols, 0.0),
            used=sent.used,
            snr_db=snr,
            noise_variance=out.noise_variance.expand(x.shape),
            gain=out.gain.expand(x.shape),
            data_uses=-(-count // self.symbols_per_use),
            pilot_uses=self.pilot_uses(count),
            power=self.convention.power,
            side=sent.side,
            base_lost=_lost(sent, draws),
        )

    @abstractmethod
    def receive(self, symbols: Tensor, count: Tensor, noise_variance: Tensor, draws: Draws) -> Equalised:
        """Fade, add noise, equalise.

        Args:
            symbols: Complex64 `[batch, k]`.
            count: Symbols on air of each image, side information included: the sent ones come first if `packs`, int64
                `[batch]`.
            noise_variance: N0 at a receive port, `[batch]`.
            draws: Random numbers.
        """

    def pilot_uses(self, symbols: Tensor) -> Tensor:
        """Channel uses of the pilots that numbers of sent symbols need, int64, same shape."""
        return torch.zeros_like(symbols)

    def uses(self, symbols: int) -> int:
        """Channel uses of a number of sent symbols, pilots included."""
        return -(-symbols // self.symbols_per_use) + int(self.pilot_uses(torch.tensor(symbols)))

    def symbols_within(self, uses: int) -> int:
        """The most symbols that can be sent, with their pilots, in a number of channel uses.

        Raises:
            UsageError: If not even one fits.
        """
        low, high = 0, uses * self.symbols_per_use
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.uses(middle) <= uses else (low, middle - 1)
        if low == 0:
            raise UsageError(f"{uses} channel uses leave no symbol beside the pilots: take more, or fewer pilots.")
        return low

    def encoder_ratio(self, image_shape: tuple[int, int, int], ratio: float | Fraction) -> Fraction:
        """The ratio to ask a codec for, so that its symbols and their pilots keep to a bandwidth ratio on this channel.

        Args:
            image_shape: (channels, height, width).
            ratio: Channel uses allowed per source value, pilots included.

        Returns:
            Symbols, side information included, per source value: above `ratio` where a use carries several symbols.
        """
        symbols = self.symbols_within(channel_uses(image_shape, ratio, self.convention))
        return Fraction(symbols, source_values(image_shape))

    def _check_power(self, sent: Transmission) -> None:
        power = sent.power.detach()
        if self.convention.power_over == "batch":
            count = sent.used.sum(1)
            power = (power * count).sum(0, keepdim=True) / count.sum().clamp(min=1)
        most = float(power.max())
        if most > self.convention.power * (1 + _EXCESS):
            raise UsageError(
                f"an image is sent with mean power {most:.4g} per symbol, {self.convention.power:g} is allowed: "
                "normalise_power it."
            )
        boost, of_base, uses = sent.boost, sent.base_power, sent.base_uses
        if boost is not None and of_base is not None and uses is not None:
            alone = ~sent.used.any(1) & (uses > 0) & (of_base > 1 + _EXCESS)
            if bool(((boost < LEAST_BOOST) | alone).any()):
                raise UsageError("a base is sent with all the power of its image, or more: lower its power.")


class AWGN(SymbolChannel):
    """Additive white Gaussian noise: y = x + n."""

    def receive(self, symbols: Tensor, count: Tensor, noise_variance: Tensor, draws: Draws) -> Equalised:
        """See `SymbolChannel.receive`."""
        variance = noise_variance[:, None]
        noise = draws.complex_normal("noise", symbols.shape[1])
        return Equalised(symbols + variance.sqrt() * noise, variance, torch.ones_like(variance))


def _lost(sent: Transmission, draws: Draws) -> Tensor | None:
    """Which images lose their base; see `Received`. What isn't sent isn't lost."""
    if sent.base_loss is None:
        return None
    lost = draws.uniform("base") < sent.base_loss
    return lost if sent.base_uses is None else lost & (sent.base_uses > 0)


def equalise(received: Tensor, gain: Tensor, noise_variance: Tensor, power: float) -> Equalised:
    """Linear MMSE with maximum ratio combining: y_r = h_r x + noise, independent over the receive ports r.

    Args:
        received: Complex `[batch, rx_ant, k]`.
        gain: h as the receiver knows it, complex `[batch, rx_ant, k]` or broadcast.
        noise_variance: Of noise and of what the estimate of h leaves, broadcast to `[batch, rx_ant, k]`.
        power: E|x|².

    Returns:
        See `Received`.
    """
    ratio = (gain.real.square() + gain.imag.square()) / noise_variance
    snr = power * ratio.sum(1)
    combined = (gain.conj() * received / noise_variance).sum(1)
    bias = snr / (1 + snr)
    return Equalised(power * combined / (1 + snr), power / snr.clamp(min=1e-9), bias.clamp(min=1e-9))


def _unpack(packed: Tensor, order: Tensor) -> Tensor:
    packed = packed.expand(order.shape)
    return torch.empty_like(packed).scatter(1, order, packed)
