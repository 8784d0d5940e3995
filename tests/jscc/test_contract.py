"""Definitions of the contract, and the checks of a codec against planted defects."""

import math
from fractions import Fraction

import pytest
import torch
from contract_checks import check_codec, check_transmission, random_symbols, smooth_images
from torch import nn

from chanlab.errors import UsageError
from chanlab.jscc import (
    AWGN,
    Convention,
    Rayleigh,
    Transmission,
    bandwidth_ratio,
    channel_uses,
    find_convention,
    normalise_power,
    pair_iq,
    side_information_uses,
    split_iq,
)
from chanlab.jscc.codec import as_ratio


@pytest.mark.parametrize(
    ("shape", "ratio", "k"),
    [
        ((3, 96, 96), 1 / 6, 4608),  # 9216 reals
        ((3, 32, 32), 1 / 12, 256),
        ((3, 512, 768), Fraction(1, 6), 196608),
        ((3, 512, 768), 1 / 48, 24576),
        ((3, 97, 101), 1 / 6, 4898),  # 4898.5: never more than allowed
        ((1, 10, 10), 0.29, 29),  # 0.29 * 100 = 28.999999999999996 in floats
    ],
)
def test_channel_uses_are_exact(shape, ratio, k):
    assert channel_uses(shape, ratio) == k


def test_ratio_counts_what_the_convention_counts():
    reals = Convention("counts reals", power=2.0, noise_per="real", uses_per_symbol=2)
    assert channel_uses((3, 96, 96), 1 / 6, reals) == 2304
    assert bandwidth_ratio(torch.tensor([2304]), (3, 96, 96), reals).item() == 1 / 6
    assert bandwidth_ratio(torch.tensor([4608]), (3, 96, 96)).item() == 1 / 6


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), "half"])
def test_a_ratio_is_a_number(ratio):
    for read in (as_ratio, lambda r: channel_uses((3, 8, 8), r)):
        with pytest.raises(UsageError, match="a number or a fraction such as 1/6"):
            read(ratio)


def test_no_symbol_left_is_an_error():
    with pytest.raises(UsageError, match="no symbol"):
        channel_uses((1, 2, 2), 0.1)
    with pytest.raises(UsageError, match="height, width"):
        channel_uses((96, 96), 0.1)


def test_power_is_each_images_own():
    """Power averaged over the batch is the defect: a weak image then goes out weaker than its neighbours."""
    x = torch.randn(3, 200, dtype=torch.complex64) * torch.tensor([[0.1], [1.0], [10.0]])
    torch.testing.assert_close(normalise_power(x).abs().square().mean(1), torch.ones(3))
    legacy = normalise_power(x, convention="batch-power").abs().square().mean(1)
    assert math.isclose(legacy.mean(), 1.0, rel_tol=1e-4)
    assert legacy[2] > 100 * legacy[1] / 2 > 100 * legacy[0]


def test_power_counts_used_symbols_only():
    x = torch.randn(2, 100, dtype=torch.complex64)
    used = torch.zeros(2, 100, dtype=torch.bool)
    used[0, :25], used[1, ::2] = True, True
    y = normalise_power(x, used)
    assert (y[~used] == 0).all()
    torch.testing.assert_close(y.abs().square().sum(1), torch.tensor([25.0, 50.0]))
    torch.testing.assert_close(Transmission.of(y, used).power, torch.ones(2))


@pytest.mark.parametrize("convention", ["nominal+3dB", "real"])
def test_legacy_power_is_per_real_dimension(convention):
    y = normalise_power(torch.randn(2, 500, dtype=torch.complex64), convention=convention)
    torch.testing.assert_close(split_iq(y).square().mean(1), torch.ones(2))


def test_power_of_a_blank_image_and_its_gradient_are_finite():
    x = torch.zeros(2, 10, dtype=torch.complex64)
    x[1] = 1
    x.requires_grad_()
    y = normalise_power(x)
    assert (y[0] == 0).all()
    y.real.sum().backward()
    assert x.grad.isfinite().all()


def test_power_gradient():
    """Scaling an image changes nothing, so the gradient is orthogonal to it; what is not sent has none."""
    x = torch.randn(2, 50, dtype=torch.complex64, requires_grad=True)
    used = torch.ones(2, 50, dtype=torch.bool)
    used[0, 20:] = False
    loss = (normalise_power(x, used) * torch.randn(2, 50, dtype=torch.complex64)).real.sum()
    (gradient,) = torch.autograd.grad(loss, x)
    radial = (gradient * x.detach().conj()).real.sum(1)
    torch.testing.assert_close(radial, torch.zeros(2), atol=1e-4, rtol=0.0)
    assert (gradient[0, 20:] == 0).all()
    assert (gradient[used] != 0).all()


def test_iq_are_paired_within_an_image():
    """I and Q of two images in one symbol is the defect: an image alone has the symbols it has in a batch."""
    latent = torch.randn(3, 4, 5, 6)
    symbols = pair_iq(latent)
    assert symbols.shape == (3, 60)
    for i in range(3):
        assert torch.equal(pair_iq(latent[i : i + 1])[0], symbols[i])
    assert torch.equal(split_iq(symbols).view_as(latent), latent)
    # Channel c and channel c + 2 of one place make a symbol.
    assert symbols[1, 7].real == latent[1, 0, 1, 1]
    assert symbols[1, 7].imag == latent[1, 2, 1, 1]
    with pytest.raises(UsageError, match="even"):
        pair_iq(torch.randn(2, 3, 3))


def test_side_information_costs_whole_uses_of_each_image():
    """Masks that are not counted, or headers shared out over a batch, are the defects."""
    bits, snr = torch.tensor([0.0, 1.0, 100.0, 100.0]), torch.tensor([10.0, 10.0, 10.0, 0.0])
    at_ten = math.log2(1 + 10**0.7)
    at_zero = math.log2(1 + 10**-0.3)
    expected = [0, 1, math.ceil(100 / at_ten), math.ceil(100 / at_zero)]
    assert side_information_uses(bits, snr).tolist() == expected
    used = torch.ones(4, 50, dtype=torch.bool)
    used[3, 40:] = False
    x = normalise_power(random_symbols(4, 50), used)
    assert Transmission.of(x, used, bits).uses(snr).tolist() == [50 + e - 10 * (i == 3) for i, e in enumerate(expected)]
    assert side_information_uses(bits[2:3], snr[2:3], gap_db=0.0).item() == math.ceil(100 / math.log2(11))


def test_unknown_convention_lists_the_known():
    with pytest.raises(UsageError, match=r"standard, nominal\+3dB, real, batch-power"):
        find_convention("theirs")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ((torch.randn(2, 4), torch.ones(2, 4) > 0, torch.zeros(2)), "pair_iq"),
        ((random_symbols(2, 4), torch.ones(2, 3) > 0, torch.zeros(2)), "used must be bool"),
        ((random_symbols(2, 4), torch.ones(2, 4), torch.zeros(2)), "used must be bool"),
        ((random_symbols(2, 4), torch.ones(2, 4) > 0, torch.zeros(1)), "side_bits"),
    ],
)
def test_a_malformed_transmission_is_an_error(fields, match):
    with pytest.raises(UsageError, match=match):
        Transmission(*fields)


class AnalogCodec(nn.Module):
    """The strongest DCT coefficients of an image, sent as they are and scaled back by the receiver's MMSE gain."""

    def __init__(self, defect=None):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.defect = defect
        self.kept = None

    def coefficients(self, shape):
        """Low frequencies first: the receiver knows this order."""
        channels, height, width = shape
        fy, fx = torch.arange(height)[:, None] / height, torch.arange(width) / width
        return (fy.square() + fx.square()).expand(channels, -1, -1).flatten().argsort(stable=True)

    def encode(self, images, snr_db, ratio=None):
        shape = tuple(images.shape[1:])
        k = channel_uses(shape, ratio)
        spectrum = dct(images - 0.5).flatten(1)[:, self.coefficients(shape)[: 2 * k]]
        symbols = pair_iq(self.scale * spectrum)
        used, bits = torch.ones(symbols.shape, dtype=torch.bool), torch.zeros(len(images))
        if self.defect in ("mask", "free rate"):
            used = symbols.abs() > symbols.abs().median(1, keepdim=True).values
        if self.defect == "too many":
            symbols, used = symbols.repeat(1, 2), used.repeat(1, 2)
        if self.defect == "mask":
            bits = bits + k  # a bit for each symbol: more than what it saves at 0 dB
        if self.defect == "scale":
            self.kept = spectrum.square().mean(1)
        if self.defect == "iq":
            flat = spectrum.flatten()
            symbols = torch.complex(flat[: len(flat) // 2], flat[len(flat) // 2 :]).view_as(symbols)
        symbols = normalise_power(
            symbols, used, "batch-power" if self.defect == "power" else "real" if self.defect == "real" else "standard"
        )
        return Transmission(symbols, used, bits)

    def decode(self, received, image_shape):
        order = self.coefficients(image_shape)
        values = split_iq(received.symbols)
        if self.defect == "scale":  # WITT: the root of the power is handed to the receiver beside the channel
            values = values * self.kept.sqrt()[: len(values), None]
        spectrum = values.new_zeros(len(values), order.numel())
        spectrum[:, order[: values.shape[1]]] = values[:, : order.numel()] * self.scale
        return (dct(spectrum.view(-1, *image_shape), inverse=True) + 0.5).clamp(0, 1)


def dct(images, inverse=False):
    for dim in (-2, -1):
        n = images.shape[dim]
        i, j = torch.arange(n)[:, None], torch.arange(n)
        basis = torch.cos(math.pi * i * (2 * j + 1) / (2 * n)) * math.sqrt(2 / n)
        basis[0] /= math.sqrt(2)
        images = torch.movedim(torch.movedim(images, dim, -1) @ (basis if inverse else basis.T), -1, dim)
    return images


@pytest.mark.parametrize("channel", [AWGN(), Rayleigh(20, "lmmse")], ids=["awgn", "rayleigh"])
@pytest.mark.parametrize("shape", [(3, 32, 48), (3, 17, 22)])
def test_codec_checks_pass_a_sound_codec(channel, shape):
    check_codec(AnalogCodec(), channel, shape)


@pytest.mark.parametrize("defect", ["power", "real", "iq", "scale", "mask", "free rate", "too many"])
def test_codec_checks_find_planted_defects(defect):
    with pytest.raises(AssertionError):
        check_codec(AnalogCodec(defect), AWGN())


def test_masks_are_paid_for():
    """A mask as a bit map costs more symbols than it frees at 0 dB; half of it is bought at 20 dB."""
    images = smooth_images(3, (3, 32, 48))
    sent = AnalogCodec("mask").encode(images, torch.zeros(3), 1 / 6)
    with pytest.raises(AssertionError, match="channel uses"):
        check_transmission(sent, (3, 32, 48), 1 / 6, torch.zeros(3))
    check_transmission(sent, (3, 32, 48), 1 / 6, torch.full((3,), 20.0))
