"""Where symbols go, and base layers that they refine."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from contract_checks import check_codec, smooth_images

from chanlab.errors import UsageError
from chanlab.jscc import AdaptiveJSCC, CompiledCodec, JSCCModule
from chanlab.jscc.adaptive import told
from chanlab.jscc.allocation import HIGHEST_DB, LEVELS, STEP_DB, ActivityMap
from chanlab.jscc.base_layer import BaseLayer
from chanlab.jscc.bases import Base
from chanlab.jscc.channels import AWGN
from chanlab.jscc.evaluation import digest
from chanlab.jscc.fading import Rayleigh
from chanlab.jscc.separation.payload import payload_uses

SNR = torch.tensor([0.0, 8.0, 20.0])


def small(**options):
    torch.manual_seed(0)
    return AdaptiveJSCC(widths=(8, 12), depths=(1, 1), conditioning=8, **options).eval()


def half_busy(batch=3, size=64):
    """Smooth images whose right half is noise."""
    images = smooth_images(batch, (3, size, size)).clone()
    noise = torch.rand(images[..., size // 2 :].shape, generator=torch.Generator().manual_seed(3))
    images[..., size // 2 :] = noise
    return images


def error(codec, images, base, snr=SNR):
    with torch.no_grad():
        received = AWGN().eval()(codec.encode(images, snr, None, base), snr, torch.arange(len(images)))
        return (codec.decode(received, tuple(images.shape[1:])) - images).square().mean((1, 2, 3))


# the map


def test_levels_of_activity():
    """Six decibels a level, of what the means of 8 x 8 pixels leave; the mean of a block doesn't count."""
    pixels = (torch.arange(16) % 2 * 2.0 - 1).expand(1, 3, 16, 16)
    blocks = [pixels * 10 ** ((HIGHEST_DB - STEP_DB * step) / 20) + 5 * step for step in (0, 1, 2.4, 20)]
    levels = ActivityMap(16).levels(torch.cat(blocks, 3))
    assert levels.tolist() == [[[LEVELS - 1, LEVELS - 2, LEVELS - 3, 0]]]
    assert ActivityMap(16).levels(torch.cat(blocks, 3)[..., :40, :56]).shape == (1, 1, 4)  # blocks needn't be whole


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 4), (4, 1)])
def test_bits_are_the_length_of_a_code(shape):
    chart = ActivityMap()
    torch.testing.assert_close((2**-chart.cost).sum(1), torch.ones(len(chart.cost)))  # Kraft: a code can have them
    levels = torch.randint(0, LEVELS, (2, *shape), generator=torch.Generator().manual_seed(0))
    for image, bits in zip(levels.tolist(), chart.bits(levels).tolist(), strict=True):
        length = 0.0
        for i, row in enumerate(image):
            for j, level in enumerate(row):
                left, above = row[j - 1] if j else None, image[i - 1][j] if i else None
                known = [x for x in (left, above) if x is not None] or [LEVELS / 2]
                predicted = sum(known) / len(known)
                weights = [2 ** (-1.5 * abs(x - predicted)) for x in range(LEVELS)]
                length -= math.log2(weights[level] / sum(weights))
        assert bits == pytest.approx(length, rel=1e-5)


def test_busy_blocks_get_more_symbols_and_the_map_is_paid_for():
    codec, images = small(), half_busy()
    sent = codec.encode(images, SNR, Fraction(1, 12))
    assert sent.uses(SNR).tolist() == [3 * 64 * 64 // 12] * 3
    blocks = codec.map.shape(64, 64)
    levels = sent.side[:, 3 : 3 + math.prod(blocks)].long().view(3, *blocks)
    torch.testing.assert_close(sent.side_bits, codec.side_bits + codec.map.bits(levels))
    places = codec.places(levels, images.shape[1:]).view(3, codec.pairs, 8, 8)
    busy = (places < sent.used.sum(1)[:, None, None, None]).sum(1)
    assert (busy[..., 4:].float().mean((1, 2)) > 3 * busy[..., :4].float().mean((1, 2))).all()
    assert busy.sum((1, 2)).tolist() == sent.used.sum(1).tolist()


def test_values_are_told_in_steps():
    values = torch.tensor([1e-9, 0.01, 0.011, 1.0, 50.0])
    found = told(values, 5, -40.0, 0.0)
    step = 40 / 31
    assert found[0] == pytest.approx(0.01, rel=1e-4)
    assert (found[3:] == 1).all()
    assert (20 * (found[1:4] / values[1:4]).log10()).abs().max() <= step / 2 + 1e-4


# bases


def test_a_base_is_refined_and_its_channel_uses_are_the_images_own():
    codec, images = small(), half_busy()
    blurred = torch.nn.functional.avg_pool2d(images, 5, 1, 2, count_include_pad=False)
    base = Base(blurred, torch.tensor([90, 0, 50]), torch.tensor([700, 0, 400]))
    sent = codec.encode(images, SNR, None, base)
    assert sent.uses(SNR).tolist() == [2048] * 3
    assert sent.base_uses.tolist() == [700, 0, 400]
    plain = codec.encode(images, SNR)
    torch.testing.assert_close(sent.symbols[1], plain.symbols[1])  # no base: as ever
    assert (sent.used.sum(1)[[0, 2]] < plain.used.sum(1)[[0, 2]] - 390).all()
    # A new codec adds what its symbols tell; with a base that is the image, nothing is left to tell.
    exact = Base(images, base.num_bytes, torch.tensor([700, 700, 400]))
    assert (error(codec, images, exact) < 1e-5).all()
    found, none = error(codec, images, base), error(codec, images, None)
    assert (found[[0, 2]] < (blurred - images).square().mean((1, 2, 3))[[0, 2]]).all()
    assert found[1] == none[1]


def test_bases_that_do_not_fit():
    codec, images = small(), half_busy()
    large = Base(images, torch.full((3,), 900), torch.tensor([2040, 700, 5000]))
    with pytest.raises(UsageError, match="leaves no symbol"):
        codec.encode(images, SNR, None, large)
    codec.train()  # there mean colours take their place
    ratio = torch.tensor([1 / 6, 1 / 6, 1 / 24], dtype=torch.float64)
    sent = codec.encode(images, SNR, ratio, large)
    assert sent.base_uses.tolist() == [0, 700, 0]
    assert (sent.used.sum(1) > 0).all()
    received = codec.decode(AWGN()(sent, SNR), (3, 64, 64))
    received.square().mean().backward()
    assert not [n for n, p in codec.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    with pytest.raises(UsageError, match="shape of its images"):
        codec.encode(images, SNR, None, replace(large, image=images[..., :32]))
    with pytest.raises(UsageError, match="how many channel uses"):
        codec.encode(images, SNR, None, replace(large, uses=None))


def test_an_image_that_sends_nothing_spoils_no_training():
    codec, images = small().train(), half_busy()
    snr = torch.tensor([-12.0, 5.0, 10.0])  # of the first, side information takes more than there is
    sent = codec.encode(images, snr, torch.full((3,), 1 / 24, dtype=torch.float64))
    assert (sent.used.sum(1) > 0).tolist() == [False, True, True]
    received = codec.decode(AWGN()(sent, snr), (3, 64, 64))
    assert received.isfinite().all()
    received.square().mean().backward()
    assert not [n for n, p in codec.named_parameters() if p.grad is None or not p.grad.isfinite().all()]


def test_candidates_keep_to_their_share_at_their_error_rate():
    layer, images = BaseLayer("jpeg", shares=(0.4, 0.8)), half_busy()
    for share, base in zip(layer.shares, layer.candidates(images, SNR, [2048] * 3), strict=True):
        with_base = base.num_bytes > 0
        assert with_base[1:].all()
        assert base.uses.tolist() == [int(share * 2048) if held else 0 for held in with_base]
        for size, snr in zip(base.num_bytes.tolist(), SNR.tolist(), strict=True):
            assert not size or payload_uses(size, snr)[0] <= int(share * 2048)
        # More could not have been sent: the next better file is larger than the room.
        picture = np.ascontiguousarray((255 * images[2]).round().byte().permute(1, 2, 0).numpy())
        found = layer.codec.within(picture, int(base.num_bytes[2]))
        assert torch.equal((255 * base.image[2]).round().byte().permute(1, 2, 0), torch.from_numpy(found.image.copy()))


def test_the_best_base_is_taken():
    codec = small(base="jpeg", shares=(0.3, 0.6))
    images = torch.cat([half_busy(1, 48), smooth_images(2, (3, 48, 48), 5)])
    layer, codec.base_layer = codec.base_layer, None
    best = layer.best(codec, images, SNR, None)
    again = layer.best(codec, images[1:2], SNR[1:2], None)
    assert torch.equal(again.image[0], best.image[1])  # whoever else is in the batch
    candidates = layer.candidates(images, SNR, [1152] * 3)
    for i in range(3):
        options = [(int(b.uses[i]), b.image[i]) for b in candidates] + [(0, best.image[i])]
        assert any(uses == int(best.uses[i]) and torch.equal(image, best.image[i]) for uses, image in options)
    assert (best.uses > 0).any()
    assert error(codec, images, best).mean() < error(codec, images, None).mean()
    codec.base_layer = layer
    with torch.inference_mode():  # as links send
        sent = codec.encode(images, SNR)
    assert torch.equal(sent.symbols, codec.encode(images, SNR, None, best).symbols)
    ratios = torch.full((3,), 1 / 12, dtype=torch.float64)
    assert codec.encode(images, SNR, ratios).uses(SNR).tolist() == [576] * 3


class Drawn(BaseLayer):
    """Bases with the map of no base, much closer to the image, of so many channel uses."""

    taken = 0

    def candidates(self, images, snr_db, uses):
        taken = torch.full((len(images),), self.taken)
        colour = images.mean((2, 3), keepdim=True)
        return [Base(images + (colour - images) / 10, torch.ones_like(taken), taken)]


def test_bases_that_leave_no_symbol_are_not_taken():
    codec, images, snr = small(), half_busy(), torch.tensor([-2.0, 8.0, 20.0])
    codec.base_layer, plain = Drawn("jpeg"), codec.encode(images, snr)
    side = plain.uses(snr) - plain.used.sum(1)
    assert side[0] > 100 > side[1]
    codec.base_layer.taken = 2048 - 100  # the first image has no room for it
    sent, compiled = codec.encode(images, snr), CompiledCodec(codec)
    compiled._run = lambda program, inputs, _: program(*inputs)
    for found in (sent, compiled.encode(images, snr)):
        assert found.base_uses.tolist() == [0, 1948, 1948]
        assert found.uses(snr).tolist() == [2048] * 3
    assert codec.checks_budget
    # More than the codec can send at is cut to what it can, where budgets aren't checked.
    ratios = torch.tensor([1 / 6, 1 / 6, 1 / 3], dtype=torch.float64)
    assert compiled.encode(images, snr, ratios).uses(snr).tolist() == [2048] * 3


def test_shares_are_of_what_the_codec_can_send():
    codec, images, asked = small(), half_busy(), []
    codec.base_layer, codec.checks_budget = Drawn("jpeg"), False
    codec.base_layer.candidates = lambda images, snr_db, uses: asked.append(uses) or []
    codec.encode(images, SNR, torch.tensor([1 / 12, 1 / 6, 1 / 3], dtype=torch.float64))
    assert asked == [[1024, 2048, 2048]]


def test_the_contract_with_base_layers():
    check_codec(small(base="jpeg", shares=(0.5,)), AWGN())


def test_base_layers_are_for_awgn():
    codec = small(base="jpeg")
    with pytest.raises(UsageError, match="AWGN alone, not over Rayleigh"):
        JSCCModule(codec, Rayleigh())
    with pytest.raises(UsageError, match="AWGN alone, not over Rayleigh"):
        JSCCModule(codec, eval_channel=Rayleigh())
    JSCCModule(codec)
    with pytest.raises(UsageError, match="between 0 and 1"):
        BaseLayer(shares=(0.5, 1.0))
    with pytest.raises(UsageError, match="multiple of 8"):
        small(block=12)


def test_what_was_measured_with_a_base_is_not_what_was_measured_without():
    kinds = [small(), small(base="jpeg"), small(base="webp"), small(base="jpeg", shares=(0.4,))]
    assert len({digest(codec) for codec in kinds}) == 4
