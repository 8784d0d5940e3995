"""Codecs: the papers' architectures, and the contract on each of them."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from contract_checks import check_codec, smooth_images

from chanlab.errors import UsageError
from chanlab.jscc import ADJSCC, AdaptiveJSCC, DeepJSCC
from chanlab.jscc.adaptive import HIGHEST_SCALE_DB, LOWEST_CONTRAST_DB, LOWEST_SCALE_DB, SCALE_BITS
from chanlab.jscc.adjscc import AttentionFeature
from chanlab.jscc.channels import AWGN
from chanlab.jscc.contract import side_information_uses
from chanlab.jscc.fading import Rayleigh
from chanlab.jscc.gdn import GDN
from chanlab.jscc.latents import LatentTransform, linear_start


def small(name, ratio=Fraction(1, 6)):
    torch.manual_seed(0)
    if name == "deepjscc":
        return DeepJSCC(ratio, filters=16).eval()
    if name == "adjscc":
        return ADJSCC(ratio, filters=16).eval()
    codec = AdaptiveJSCC(ratio, widths=(8, 12), depths=(1, 1), conditioning=8).eval()
    for layer in (codec.encoder.trunk.modulate, codec.decoder.trunk.modulate, codec.encoder.gain):
        torch.nn.init.normal_(layer.weight, std=0.5)  # as if it had learnt its conditions
    for head in (codec.encoder.head, codec.decoder.head):
        torch.nn.init.normal_(head.weight, std=0.1)
    return codec


def through(sent, snr_db, noise_variance=None):
    """Received without noise, the receiver told a noise variance."""
    received = AWGN()(sent, snr_db)
    variance = received.noise_variance if noise_variance is None else noise_variance
    return replace(received, symbols=sent.symbols, noise_variance=variance)


CODECS = ("deepjscc", "adjscc", "adaptive")
codecs = pytest.mark.parametrize("name", CODECS)


@pytest.mark.parametrize("inverse", [False, True])
def test_gdn_is_its_formula(inverse):
    torch.manual_seed(0)
    layer = GDN(3, inverse).double()
    torch.nn.init.uniform_(layer.root_gamma, 0.1, 0.5)
    torch.nn.init.uniform_(layer.root_beta, 0.5, 1.5)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    y = layer(x)
    for i in range(3):
        root = sum(layer.gamma[i, j] * x[:, j] ** 2 for j in range(3)) + layer.beta[i]
        torch.testing.assert_close(y[:, i], x[:, i] * root**0.5 if inverse else x[:, i] / root**0.5)
    x.requires_grad_()
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradcheck(
        lambda g, b: torch.func.functional_call(layer, {"root_gamma": g, "root_beta": b}, x),
        (layer.root_gamma, layer.root_beta),
    )


def test_deepjscc_of_2019():
    """5x5 kernels of 16, 32, 32, 32 and c filters, strides 2, 2, 1, 1, 1; the decoder mirrors it."""
    codec = DeepJSCC(1 / 6, gdn=False)
    shapes = [tuple(stage.convolution.weight.shape) for stage in codec.encoder]
    assert shapes == [(16, 3, 5, 5), (32, 16, 5, 5), (32, 32, 5, 5), (32, 32, 5, 5), (16, 32, 5, 5)]
    assert [stage.convolution.stride[0] for stage in codec.encoder] == [2, 2, 1, 1, 1]
    shapes = [tuple(stage.convolution.weight.shape) for stage in codec.decoder]
    assert shapes == [(16, 32, 5, 5), (32, 32, 5, 5), (32, 32, 5, 5), (32, 16, 5, 5), (16, 3, 5, 5)]
    assert [stage.convolution.stride[0] for stage in codec.decoder] == [1, 1, 1, 2, 2]
    convolutions = 1216 + 12832 + 25632 + 25632 + 12816 + 12832 + 25632 + 25632 + 12816 + 1203
    slopes = 2 * (16 + 3 * 32) + 16  # a slope per channel, of the latent too
    assert sum(p.numel() for p in codec.parameters()) == convolutions + slopes
    assert isinstance(codec.encoder[-1].activation, torch.nn.PReLU)
    assert isinstance(codec.decoder[-1].activation, torch.nn.Sigmoid)
    assert DeepJSCC(1 / 12, gdn=False).encoder[-1].convolution.out_channels == 8


def test_adjscc_of_the_paper():
    """256 filters, 9x9 kernels outside, attention after four stages at either side, C/16 hidden features."""
    with torch.device("meta"):
        codec = ADJSCC()
    kernels = [stage.convolution.kernel_size[0] for stage in codec.encoder]
    assert kernels == [9, 5, 5, 5, 5]
    assert [stage.convolution.kernel_size[0] for stage in codec.decoder] == kernels[::-1]
    assert [stage.convolution.out_channels for stage in codec.encoder] == [256] * 4 + [16]
    assert all(isinstance(stage.normalisation, GDN) for stage in [*codec.encoder, *codec.decoder])
    assert [stage.normalisation.inverse for stage in codec.decoder] == [True] * 5
    assert isinstance(codec.encoder[-1].activation, torch.nn.Identity)
    modules = [m for m in codec.modules() if isinstance(m, AttentionFeature)]
    assert len(modules) == 8
    assert sum(p.numel() for p in modules[0].parameters()) == 257 * 16 + 16 + 16 * 256 + 256
    without = sum(p.numel() for p in codec.parameters()) - 8 * 8480
    with torch.device("meta"):
        assert without == sum(p.numel() for p in DeepJSCC(filters=256, kernels=(9, 5, 5, 5, 5)).parameters())


def test_attention_feature_module():
    torch.manual_seed(0)
    module = AttentionFeature(32)
    x, snr = torch.randn(2, 32, 5, 4), torch.tensor([0.0, 20.0])
    context = torch.cat([x.flatten(2).mean(2), snr[:, None]], 1)
    hidden = (context @ module.squeeze.weight.T + module.squeeze.bias).clamp(min=0)
    assert hidden.shape[1] == 2
    weight = 1 / (1 + torch.exp(-(hidden @ module.excite.weight.T + module.excite.bias)))
    torch.testing.assert_close(module(x, snr), x * weight[:, :, None, None])


@codecs
@pytest.mark.parametrize("shape", [(96, 96), (33, 50), (16, 16), (97, 16)])
@pytest.mark.parametrize("ratio", [Fraction(1, 6), Fraction(1, 12)])
def test_any_image_size_at_exactly_k_symbols(name, shape, ratio):
    codec = small(name, ratio)
    images, snr = torch.rand(2, 3, *shape), torch.tensor([3.0, 12.0])
    sent = codec.encode(images, snr)
    k = math.floor(ratio * 3 * shape[0] * shape[1])
    assert sent.symbols.shape == (2, k)
    side = side_information_uses(sent.side_bits, snr)
    assert (name == "adaptive") == (side.sum() > 0)
    assert sent.used.sum(1).tolist() == (k - side).tolist()
    assert sent.uses(snr).tolist() == [k, k]
    received = codec.decode(through(sent, snr), (3, *shape))
    assert received.shape == images.shape
    assert received.min() >= 0
    assert received.max() <= 1


@codecs
def test_power_and_symbols_of_an_image_are_its_own(name):
    """Unit power for each image, whatever its neighbours in the batch, and no I/Q pair from two images."""
    codec = small(name)
    images = torch.rand(3, 3, 24, 32) * torch.tensor([1.0, 0.3, 0.05])[:, None, None, None]
    snr = torch.tensor([0.0, 10.0, 20.0])
    sent = codec.encode(images, snr)
    torch.testing.assert_close(sent.power, torch.ones(3))
    for i in range(3):
        alone = codec.encode(images[i : i + 1], snr[i : i + 1])
        torch.testing.assert_close(alone.symbols[0], sent.symbols[i], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adjscc", "adaptive"])
def test_adaptive_codecs_are_told_the_snr_per_image(name):
    codec = small(name)
    image = torch.rand(1, 3, 32, 32).expand(2, -1, -1, -1)
    same, other = (codec.encode(image, torch.tensor(snr)) for snr in ([5.0, 5.0], [5.0, 15.0]))
    torch.testing.assert_close(same.symbols[0], same.symbols[1])
    torch.testing.assert_close(same.symbols[0], other.symbols[0], rtol=1e-4, atol=1e-5)
    assert (other.symbols[0] - other.symbols[1]).abs().max() > 1e-3
    received = codec.decode(through(same, torch.tensor([5.0, 15.0])), (3, 32, 32))
    assert (received[0] - received[1]).abs().max() > 1e-4


def test_a_lower_rate_is_a_prefix():
    codec = small("adaptive")
    for layer in (codec.encoder.trunk.modulate, codec.encoder.gain):
        torch.nn.init.zeros_(layer.weight)  # of one latent, whatever the conditions
    images, snr = torch.rand(2, 3, 40, 48), torch.tensor([5.0, 10.0])
    full = codec.encode(images, snr, Fraction(1, 6))
    for ratio in (Fraction(1, 12), Fraction(1, 24), 0.11):
        part = codec.encode(images, snr, ratio)
        k = math.floor(Fraction(ratio).limit_denominator(1000) * 3 * 40 * 48)
        assert part.symbols.shape == (2, k)
        prefix = torch.where(part.used, full.symbols[:, :k], 0.0)
        scale = (part.used.sum(1) / prefix.abs().square().sum(1)).sqrt()
        torch.testing.assert_close(part.symbols, prefix * scale[:, None], rtol=1e-4, atol=1e-5)


def test_a_rate_per_image_is_told_and_counted():
    """A rate chosen per image costs side information, out of the image's own channel uses."""
    codec = small("adaptive")
    images, snr = torch.rand(3, 3, 48, 40), torch.tensor([0.0, 10.0, 20.0])
    ratio = torch.tensor([1 / 24, 1 / 12, 1 / 6], dtype=torch.float64)
    sent = codec.encode(images, snr, ratio)
    n = 3 * 48 * 40
    agreed = codec.encode(images, snr, Fraction(1, 12))
    assert (agreed.side_bits > codec.side_bits).all()
    torch.testing.assert_close(sent.side_bits, agreed.side_bits + math.ceil(math.log2(n // 6)))
    assert sent.uses(snr).tolist() == [n // 24, n // 12, n // 6]
    assert (sent.used.sum(1) < torch.tensor([n // 24, n // 12, n // 6])).all()
    assert (sent.symbols[~sent.used] == 0).all()
    torch.testing.assert_close(sent.power, torch.ones(3))
    first = sent.used.long().argmin(1)  # each a prefix
    assert (sent.used.sum(1)[:2] == first[:2]).all()
    with pytest.raises(UsageError, match="float64"):
        codec.encode(images, snr, ratio.float())


@pytest.mark.parametrize("convention", ["nominal+3dB", "real"])
@pytest.mark.parametrize("ratio", [None, torch.full((3,), 1 / 12, dtype=torch.float64)])
def test_side_information_is_counted_at_the_snr_of_the_convention(convention, ratio):
    channel, codec = AWGN(convention).eval(), small("adaptive")
    codec.convention = channel.convention
    images, snr = torch.rand(3, 3, 48, 40), torch.tensor([0.0, 10.0, 20.0])
    received = channel(codec.encode(images, snr, ratio), snr)
    assert received.uses.tolist() == [3 * 48 * 40 // (6 if ratio is None else 12)] * 3


def test_the_decoder_weighs_symbols_by_their_noise():
    codec = small("adaptive")
    snr = torch.tensor([10.0])
    sent = codec.encode(torch.rand(1, 3, 32, 32), snr, Fraction(1, 12))
    flat = torch.full(sent.symbols.shape, 0.1)
    whole = codec.decode(through(sent, snr, flat), (3, 32, 32))
    faded = flat.clone()
    faded[:, ::2] *= 100
    assert (codec.decode(through(sent, snr, faded), (3, 32, 32)) - whole).abs().max() > 1e-3
    # The bias of an MMSE equaliser changes nothing that the noise doesn't.
    received = through(sent, snr, flat)
    biased = replace(received, symbols=0.7 * received.symbols, gain=0.7 * received.gain)
    torch.testing.assert_close(codec.decode(biased, (3, 32, 32)), whole, rtol=1e-4, atol=1e-5)


def test_the_decoder_is_told_the_mean_snr_after_equalisation():
    """Not the nominal one, which says nothing of a fade: the conditions are those of what arrived."""
    codec = small("adaptive")
    snr = torch.tensor([10.0])
    sent = codec.encode(torch.rand(1, 3, 32, 32), snr)
    received = through(sent, snr, torch.where(torch.arange(sent.symbols.shape[1]) % 2 == 0, 1.0, 0.1)[None])
    seen = []
    codec.decoder.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    picture = codec.decode(received, (3, 32, 32))
    scale, contrast, refines = sent.side[:, :3].unbind(1)
    uses = sent.used.sum(1)
    mean_db = 10 * (uses // 2) / uses  # every other one at 0 dB, the others at 10 dB
    expected = codec.conditions(mean_db, uses, (3, 32, 32), contrast, refines)
    torch.testing.assert_close(seen[0][:, :4], expected)
    torch.testing.assert_close(seen[0][:, 4], 2 * scale.log10() - 1)
    torch.testing.assert_close(codec.decode(replace(received, snr_db=snr + 10), (3, 32, 32)), picture)


@pytest.mark.parametrize("grid", [(12, 8), (9, 14), (3, 20)])
def test_latents_of_neighbours_are_transformed_and_back(grid):
    there, back = LatentTransform(64), LatentTransform(64, inverse=True)
    latent = torch.randn(2, 64, *grid, requires_grad=True)
    coefficients = there(latent)
    torch.testing.assert_close(back(coefficients), latent)
    assert coefficients.requires_grad
    # Blocks of 4 x 4 alone: what lies beyond is as it was, and a smooth block is its mean.
    height, width = grid[0] // 4 * 4, grid[1] // 4 * 4
    torch.testing.assert_close(coefficients[:, :, height:], latent[:, :, height:])
    even = there(torch.ones(1, 64, *grid))[:, :, :height, :width]
    assert height == 0 or (even.abs() > 1e-5).float().mean() == pytest.approx(1 / 16)
    # At the start the mean of a block of means, whose variance is the largest, is sent at a lower gain.
    assert (there.gain[:, 0, 0] < 0).sum() == 3
    torch.testing.assert_close(there.gain, -back.gain)


def test_mean_colour_and_scale_are_told():
    """Images that differ in colour and contrast alone are the same symbols; side information parts them."""
    codec = small("adaptive")
    for layer in (codec.encoder.head, codec.decoder.head):
        torch.nn.init.zeros_(layer.weight), torch.nn.init.zeros_(layer.bias)
    image, snr = 0.3 + 0.4 * smooth_images(1, (3, 32, 48)), torch.tensor([60.0, 60.0])
    colour = torch.tensor([0.2, -0.1, 0.0])[:, None, None]
    images = torch.cat([image, image.mean((2, 3), keepdim=True) + colour + 0.4 * (image - image.mean((2, 3), True))])
    sent = codec.encode(images, snr)
    assert (sent.symbols[0].conj() * sent.symbols[1]).real.sum() / sent.used[0].sum() > 0.999  # but for rounded means
    base = sent.side[:, 3 + 2 * 3 :].view(2, 3, 32, 48)
    torch.testing.assert_close(base[..., 0, 0], images.mean((2, 3)), rtol=0.0, atol=0.5001 / 255)
    assert (base == base[..., :1, :1]).all()
    step, scale_step = -LOWEST_CONTRAST_DB / 127, (HIGHEST_SCALE_DB - LOWEST_SCALE_DB) / (2**SCALE_BITS - 1)
    assert abs(20 * (sent.side[1, 1] / sent.side[0, 1]).log10() - 20 * math.log10(0.4)) <= step + 0.1
    assert abs(20 * (sent.side[1, 0] / sent.side[0, 0]).log10()) <= step + scale_step
    received = codec.decode(through(sent, snr), (3, 32, 48))
    torch.testing.assert_close(received.mean((2, 3)), images.mean((2, 3)), rtol=0.0, atol=0.01)
    spread = received.std((2, 3)).mean(1)
    assert 0.35 < spread[1] / spread[0] < 0.45
    # Told in steps, exact in training, where gradients go through it.
    exact = codec.train().encode(images, snr).side
    assert 0 < (20 * (exact[:, 0] / sent.side[:, 0]).log10()).abs().max() <= scale_step / 2 + 1e-4
    assert exact.requires_grad


def test_an_even_image_is_its_colour():
    codec = small("adaptive")
    codec.encoder.gain.weight.data.zero_()
    images = torch.tensor([0.2, 0.5, 0.9])[None, :, None, None].expand(1, 3, 24, 24)
    for snr in (torch.tensor([0.0]), torch.tensor([20.0])):
        sent = codec.encode(images, snr)
        assert sent.symbols.isfinite().all()
        assert codec.decode(AWGN()(sent, snr), (3, 24, 24)).isfinite().all()
    for head in (codec.encoder.head, codec.decoder.head, codec.decoder.weight):  # as in a new codec
        head.weight.data.zero_()
        head.bias.data.zero_()
    snr = torch.tensor([20.0])
    assert (codec.decode(AWGN()(codec.encode(images, snr), snr), (3, 24, 24)) - images).abs().max() < 0.01


def test_what_was_not_sent_is_not_read():
    codec = small("adaptive")
    snr = torch.tensor([10.0, 10.0])
    ratio = torch.tensor([1 / 12, 1 / 6], dtype=torch.float64)
    sent = codec.encode(torch.rand(2, 3, 32, 32), snr, ratio)
    clean = through(sent, snr)
    noise = torch.where(sent.used, 0.0, torch.randn(sent.symbols.shape)).to(torch.complex64)
    dirty = replace(clean, symbols=clean.symbols + noise)
    torch.testing.assert_close(codec.decode(dirty, (3, 32, 32)), codec.decode(clean, (3, 32, 32)))


@codecs
def test_training_reaches_every_parameter(name):
    codec = small(name).train()
    snr = torch.tensor([0.0, 20.0])
    images = torch.rand(2, 3, 36, 44)
    received = codec.decode(through(codec.encode(images, snr), snr), (3, 36, 44))
    (received - images).square().mean().backward()
    assert not [n for n, p in codec.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


def test_mistakes_are_told():
    codec = small("adaptive")
    images, snr = torch.rand(1, 3, 32, 32), torch.tensor([0.0])
    with pytest.raises(UsageError, match="up to 1/6"):
        codec.encode(images, snr, 1 / 3)
    with pytest.raises(UsageError, match="no symbol"):
        codec.encode(images, snr, 1e-4)
    with pytest.raises(UsageError, match="3, height, width"):
        codec.encode(images[:, :1], snr)
    with pytest.raises(UsageError, match="floats"):
        codec.encode((255 * images).byte(), snr)
    for name in CODECS:
        with pytest.raises(UsageError, match="one per image"):
            small(name).encode(images, torch.zeros(3))
    with pytest.raises(UsageError, match="not one per image"):
        small("deepjscc").encode(images, snr, torch.tensor([1 / 6], dtype=torch.float64))
    with pytest.raises(UsageError, match="alone"):
        small("deepjscc").encode(images, snr, 1 / 12)
    with pytest.raises(UsageError, match="bandwidth ratio"):
        AdaptiveJSCC(0)
    with pytest.raises(UsageError, match="odd"):
        DeepJSCC(kernels=(4, 5, 5, 5, 5))
    with pytest.raises(UsageError, match="filters"):
        DeepJSCC(filters=0)


@codecs
def test_one_snr_for_all_images(name):
    codec, images = small(name), torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(codec.encode(images, 7.0).symbols, codec.encode(images, torch.full((2,), 7.0)).symbols)


def test_rates_per_image_that_cannot_be_sent_are_told():
    """No rate is cut in silence, and none is eaten up by its side information."""
    codec, images = small("adaptive"), torch.rand(2, 3, 16, 16)
    with pytest.raises(UsageError, match=r"up to 1/6, not 0\.5"):
        codec.encode(images, torch.zeros(2), torch.tensor([0.1, 0.5], dtype=torch.float64))
    with pytest.raises(UsageError, match="beside the side information"):
        codec.encode(images, torch.tensor([10.0, -10.0]), torch.tensor([0.1, 0.01], dtype=torch.float64))


@codecs
@pytest.mark.parametrize("channel", [AWGN(), Rayleigh(), Rayleigh(coherence=1)], ids=["awgn", "slow", "fast"])
def test_the_contract(name, channel):
    check_codec(small(name), channel)


def test_the_linear_path_starts_as_analogue_transmission():
    """An orthogonal transform with gains, inverted by the decoder; the strongest coefficients first, at unit power."""
    encoder, decoder = linear_start(64)
    torch.testing.assert_close(encoder @ decoder, torch.eye(64), rtol=0, atol=1e-4)
    rows = encoder / encoder.norm(dim=1, keepdim=True)
    torch.testing.assert_close(rows @ rows.T, torch.eye(64), rtol=0, atol=1e-5)
    flat = torch.full((192,), 0.5)
    latent = encoder @ flat
    assert latent.abs().argmax() == 0  # mean luminance is the first in-phase value
    assert latent[1:].abs().max() < 1e-5
    gains = encoder.norm(dim=1)
    assert gains[0] == gains.min()  # gains fall with variance, power rises with it
    images = smooth_images(8, (3, 64, 64))
    codec = AdaptiveJSCC(widths=(8, 12), depths=(1, 1)).eval()
    snr = torch.full((8,), 40.0)
    received = codec.decode(through(codec.encode(images, snr), snr), (3, 64, 64))
    assert (-10 * (received - images).square().mean((1, 2, 3)).log10() > 20).all()
    x, y = (images - 0.5).flatten(1), (received - 0.5).flatten(1)
    scale = (x * y).sum(1, keepdim=True) / y.square().sum(1, keepdim=True)
    assert (-10 * (scale * y - x).square().mean(1).log10() > 20).all()
    assert not linear_start(400)[0][192:200].any()


def test_gains_of_the_linear_path_are_those_of_least_distortion():
    """σ^(-1/2): least mean square error of linear receivers at a given power, against gains a little off."""
    encoder, _ = linear_start(192)
    gain = encoder.norm(dim=1)
    deviation = gain**-2 / (gain**-2 * gain).square().mean().sqrt()

    def distortion(g):
        g = g / (g * deviation).square().mean().sqrt()
        return (deviation**2 / (1 + (g * deviation) ** 2 * 1e4)).sum()

    best = distortion(gain)
    for power in (-0.2, 0.2):
        assert distortion(gain * deviation**power) > best
