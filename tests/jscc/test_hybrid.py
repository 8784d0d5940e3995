"""Where symbols go, and base layers that they refine."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from contract_checks import check_codec, smooth_images

from chanlab.data import counter
from chanlab.errors import UsageError
from chanlab.jscc import AdaptiveJSCC, CompiledCodec, JSCCModule
from chanlab.jscc.adaptive import told
from chanlab.jscc.allocation import HIGHEST_DB, LEVELS, STEP_DB, ActivityMap
from chanlab.jscc.base_layer import MOST_POWER_DB, BaseLayer
from chanlab.jscc.bases import Base
from chanlab.jscc.channels import AWGN
from chanlab.jscc.contract import find_convention, side_information_uses
from chanlab.jscc.evaluation import Link, digest
from chanlab.jscc.fading import Rayleigh
from chanlab.jscc.separation.payload import ERROR, payload_uses

SNR = torch.tensor([0.0, 8.0, 20.0])


def small(**options):
    torch.manual_seed(0)
    return AdaptiveJSCC(widths=(8, 12), depths=(1, 1), conditioning=8, **options).eval()


def drawn(**options):
    """Whose networks do something, as they don't where training begins."""
    codec = small(**options)
    with torch.no_grad():
        for parameter in codec.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return codec


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
    layer, images = BaseLayer("jpeg", shares=(0.4, 0.8, 1)), half_busy()
    index = side_information_uses(torch.full((3,), float(layer.code.side_bits)), SNR).tolist()
    candidates = layer.candidates(images, SNR, [2048] * 3)
    assert [base.power is None for base in candidates] == [False, False, False, False, True]
    for share, base in zip((0.4, 0.4, 0.8, 0.8, 1), candidates, strict=True):
        with_base = base.num_bytes > 0
        assert with_base[2]
        assert base.uses.tolist() == [int(share * 2048) if held else 0 for held in with_base]
        for i in with_base.nonzero()[:, 0].tolist():
            snr, loss = float(SNR[i]), float(base.loss[i])
            assert loss == pytest.approx(ERROR) if share < 1 else loss <= layer.error
            symbols, power_db = int(share * 2048), 0.0
            if share < 1:  # what tells the scheme has the power of all
                power_db = 10 * math.log10((float(base.power[i]) * symbols - index[i]) / (symbols - index[i]))
            offers = layer.code.offers(symbols - index[i], np.array([[snr + power_db]]))
            (offer,) = [o for o in offers if o.error == pytest.approx(loss, rel=1e-2)]  # what the link does with it
            # More could not have been sent: the next better file is larger than the room.
            picture = np.ascontiguousarray((255 * images[i]).round().byte().permute(1, 2, 0).numpy())
            found = layer.codec.within(picture, offer.num_bytes)
            assert base.num_bytes[i] == len(found.data)
            assert torch.equal(
                (255 * base.image[i]).round().byte().permute(1, 2, 0), torch.from_numpy(found.image.copy())
            )
    for less, more in (candidates[:2], candidates[2:4]):
        both = (less.num_bytes > 0) & (more.num_bytes > 0)
        assert both.any()
        assert (less.power <= 1).all()
        assert ((more.power > 1) & (more.power <= 10 ** (MOST_POWER_DB / 10)))[both].all()
        assert (more.num_bytes >= less.num_bytes)[both].all()
    assert layer._powers(0, 10.0) == ((None, 1.0), (None, 1.0))


@pytest.mark.parametrize("convention", ["standard", "nominal+3dB"])
def test_symbols_get_the_power_that_their_base_leaves(monkeypatch, convention):
    monkeypatch.setattr(torch, "compile", lambda program, **_: program)
    codec, images, channel = drawn(), half_busy(), AWGN(convention).eval()
    codec.convention = channel.convention
    blurred = torch.nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
    taken, power = torch.tensor([900, 0, 400]), torch.tensor([0.6, 0.6, 1.5])
    base = Base(blurred, torch.tensor([90, 0, 50]), taken, torch.zeros(3), power)
    plain = codec.encode(images, SNR, None, replace(base, power=None))
    assert plain.boost is None
    for ratio in (None, torch.tensor([1 / 6, 1 / 12, 1 / 8], dtype=torch.float64)):
        for kind in (codec, CompiledCodec(codec)):
            sent = kind.encode(images, SNR, ratio, base)
            used = sent.used.sum(1)
            torch.testing.assert_close(used * sent.boost + taken * power, (used + taken).float())
            torch.testing.assert_close(sent.power, torch.full((3,), channel.convention.power), rtol=1e-4, atol=1e-4)
    sent = codec.encode(images, SNR, None, base)
    received = channel(sent, SNR, torch.arange(3))
    noise = channel.convention.noise_variance(SNR)[:, None].expand_as(received.noise_variance)
    torch.testing.assert_close(received.noise_variance, noise / sent.boost[:, None])
    error = (received.symbols - sent.symbols).abs().square()
    measured = (error * sent.used).sum(1) / sent.used.sum(1)
    torch.testing.assert_close(measured, noise[:, 0] / sent.boost, rtol=0.2, atol=0)
    # The network sees the SNR that its symbols meet, without a base the channel's.
    assert torch.equal(sent.symbols[1], plain.symbols[1])
    assert not torch.equal(sent.symbols[0], plain.symbols[0])
    louder = codec.encode(images, SNR + 10 * sent.boost.log10(), None, replace(base, power=None))
    most = torch.minimum(sent.used.sum(1), louder.used.sum(1))
    for i in (0, 2):
        a, b = (x.symbols[i, : most[i]] for x in (sent, louder))
        assert (a - b).norm() < 0.2 * a.norm()
    with pytest.raises(UsageError, match="lower its power"):
        channel(codec.encode(images, SNR, None, replace(base, power=torch.tensor([9.0, 1, 1]))), SNR)
    with pytest.raises(UsageError, match="over AWGN alone"):
        Rayleigh(convention=convention)(sent, SNR)
    alone = replace(sent, symbols=0 * sent.symbols, used=torch.zeros_like(sent.used))
    with pytest.raises(UsageError, match="lower its power"):
        channel(alone, SNR)
    channel(replace(alone, base_power=torch.ones(3)), SNR)
    with pytest.raises(UsageError, match=r"must be \[batch\]"):
        replace(sent, base_power=torch.ones(1))
    assert codec.train().encode(images, SNR, None, base).boost is None


def test_images_that_share_power_have_bases_of_the_same():
    codec, images = drawn(base="jpeg", shares=(0.5,)), half_busy()
    codec.convention = find_convention("batch-power")
    sent = codec.encode(images, SNR)
    assert (sent.base_uses > 0).any()
    assert sent.boost is None
    AWGN("batch-power").eval()(sent, SNR)
    layer, codec.base_layer = codec.base_layer, None
    with pytest.raises(UsageError, match="no power of their own"):
        codec.encode(images, SNR, None, layer.candidates(images, SNR, [1900] * 3)[0])


def test_a_base_that_takes_all_the_power_is_not_taken():
    codec, images = drawn(), half_busy(1)
    layer = BaseLayer("jpeg")
    exact = Base(images, torch.tensor([90]), torch.tensor([1000]), torch.zeros(1), torch.tensor([1.3]))
    for power, taken in ((1.3, True), (9.0, False)):
        layer.candidates = lambda *_, power=power: [replace(exact, power=torch.tensor([power]))]
        best = layer.best(codec, images, torch.tensor([10.0]), None)
        assert bool(best.taken > 0) == taken
        assert float(best.power) == pytest.approx(power if taken else 1.0)


def test_the_best_base_is_taken():
    codec = small(base="jpeg", shares=(0.3, 0.6))
    images = torch.cat([half_busy(1, 48), smooth_images(2, (3, 48, 48), 5)])
    layer, codec.base_layer = codec.base_layer, None
    best = layer.best(codec, images, SNR, None)
    again = layer.best(codec, images[1:2], SNR[1:2], None)
    assert torch.equal(again.image[0], best.image[1])  # whoever else is in the batch
    left = 1152 - side_information_uses(torch.full((3,), 41.0), SNR)
    candidates = layer.candidates(images, SNR, left.tolist())
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

    def candidates(self, images, snr_db, uses, unequal=True):
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
    codec.base_layer.candidates = lambda images, snr_db, uses, _: asked.append(uses) or []
    codec.encode(images, SNR, torch.tensor([1 / 12, 1 / 6, 1 / 3], dtype=torch.float64))
    side = side_information_uses(torch.full((3,), 41.0 + 11), SNR)  # the rate is told
    assert asked == [(torch.tensor([1024, 2048, 2048]) - side).tolist()]


@pytest.mark.parametrize("shares", [(0.5,), (1,), (0.5, 0.95, 1)])
def test_the_contract_with_base_layers(shares):
    check_codec(drawn(base="jpeg", shares=shares), AWGN())


# bases that take everything


def whole_and_others(codec, snr=SNR, ratio=None):
    """Images, and bases: one that takes all that the side information leaves, one that is refined, none."""
    images = half_busy()
    ratios = ratio if isinstance(ratio, torch.Tensor) else torch.full((3,), float(ratio or 1 / 6), dtype=torch.float64)
    limit = (ratios * 3 * 64 * 64 + 1e-6).long()
    bits = torch.full((3,), 41.0 + (11 if isinstance(ratio, torch.Tensor) else 0))
    taken = limit - side_information_uses(bits, snr + codec.convention.offset_db)
    taken[1] -= 400
    taken[2] = 0
    blurred = torch.nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
    return images, Base((255 * blurred).round() / 255, torch.tensor([90, 50, 0]), taken), bits, limit


@pytest.mark.parametrize("convention", ["standard", "nominal+3dB", "batch-power"])
@pytest.mark.parametrize("ratio", [None, Fraction(1, 8), torch.tensor([1 / 12, 1 / 6, 1 / 7], dtype=torch.float64)])
def test_a_base_may_take_all_channel_uses(ratio, convention):
    codec, channel = drawn(), AWGN(convention).eval()
    codec.convention = channel.convention
    images, base, bits, limit = whole_and_others(codec, SNR, ratio)
    sent = codec.encode(images, SNR, ratio, base)
    assert torch.equal(sent.uses(SNR + codec.convention.offset_db), limit)
    assert sent.used.any(1).tolist() == [False, True, True]
    assert sent.side_bits[0] == bits[0]  # no map
    assert (sent.side_bits[1:] > bits[1:]).all()
    for values in (torch.view_as_real(sent.symbols), sent.side, sent.power):
        assert values.isfinite().all()
    received = channel(sent, SNR, torch.arange(3))
    assert torch.equal(received.uses, limit)
    found = codec.decode(received, (3, 64, 64))
    assert found.isfinite().all()
    assert torch.equal(found[0], base.image[0])
    assert not torch.equal(found[1], base.image[1])
    # What the side information doesn't tell of it isn't read.
    told_less = sent.side.clone()
    told_less[0, 3 : 3 + 16] = 0
    assert torch.equal(codec.decode(replace(received, side=told_less), (3, 64, 64)), found)
    for i in range(3 if convention != "batch-power" else 1):  # each as alone
        one = slice(i, i + 1)
        alone = Base(base.image[one], base.num_bytes[one], base.uses[one])
        mine = codec.encode(images[one], SNR[one], ratio[one] if isinstance(ratio, torch.Tensor) else ratio, alone)
        assert torch.equal(mine.used, sent.used[one])
        assert torch.equal(mine.side_bits, sent.side_bits[one])
        decoded = codec.decode(channel(mine, SNR[one], torch.tensor([i])), (3, 64, 64))
        torch.testing.assert_close(decoded, found[one], rtol=1e-4, atol=1e-4)


def test_a_base_of_another_length_must_leave_symbols():
    codec = drawn()
    images, base, _, _ = whole_and_others(codec)
    for more in (-1, 1):
        with pytest.raises(UsageError, match="leaves no symbol"):
            codec.encode(images, SNR, None, replace(base, uses=base.uses + torch.tensor([more, 0, 0])))
    codec.train()  # there it gives way, as others do that are too long
    sent = codec.encode(images, SNR, None, base)
    assert sent.base_uses.tolist() == [0, int(base.uses[1]), 0]
    assert sent.used.any(1).all()


def test_compiled_codecs_send_bases_that_take_everything(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda program, **_: program)
    codec = drawn()
    images, base, _, limit = whole_and_others(codec)
    compiled, sent = CompiledCodec(codec), codec.encode(images, SNR, None, base)
    found = compiled.encode(images, SNR, None, base)
    assert torch.equal(found.used, sent.used)
    assert torch.equal(found.side_bits, sent.side_bits)
    assert torch.equal(found.uses(SNR), limit)
    decoded = compiled.decode(AWGN().eval()(found, SNR, torch.arange(3)), (3, 64, 64))
    assert torch.equal(decoded[0], base.image[0])
    assert decoded.isfinite().all()
    codec.base_layer = BaseLayer("jpeg", (1,))
    for kind in (codec, CompiledCodec(codec)):
        assert torch.equal(kind.encode(images, SNR).uses(SNR), limit)
    assert not kind.encode(images, SNR).used[2].any()


def test_a_hybrid_is_not_worse_than_its_file_alone():
    """By the trial: a codec that spoils what it refines sends the file alone, in all that 41 bits leave."""
    layer, codec = BaseLayer("jpeg", shares=(0.5, 1)), drawn()
    images, snr = torch.cat([half_busy(2, 64), smooth_images(2, (3, 64, 64), 5)]), torch.tensor([3.0, 20.0, 3.0, 20.0])
    left = 2048 - side_information_uses(torch.full((4,), 41.0), snr)
    alone = layer.candidates(images, snr, left.tolist())[2]
    fits = alone.num_bytes > 0
    assert fits.sum() >= 3
    for size, at, room, loss in zip(*(x.tolist() for x in (alone.num_bytes, snr, left, alone.loss)), strict=True):
        assert not size or payload_uses(size, at, 1.001 * loss + 1e-9)[0] <= room
    file = (alone.image - images).square().mean((1, 2, 3))
    best = layer.best(codec, images, snr, None)
    with torch.no_grad():
        sent = codec.encode(images, snr, None, best)
        noise = counter.keys(torch.zeros(4, dtype=torch.int64), 0, "base")
        received = codec.decode(AWGN().eval()(sent, snr, noise), (3, 64, 64))
    hybrid = (received - images).square().mean((1, 2, 3))
    assert (hybrid[fits] <= file[fits] * (1 + 1e-6)).all()
    whole = ~sent.used.any(1)
    assert whole[[1, 3]].all()
    assert torch.equal(best.uses[whole], left[whole])
    assert torch.equal(received[whole], alone.image[whole])
    codec.base_layer = layer  # as links send
    for convention, offset in (("standard", 0.0), ("nominal+3dB", 10 * math.log10(2))):
        shown, measured = Link(codec, AWGN(convention)).send(images[[1, 3]], torch.arange(2), 20.0 - offset)
        assert measured.uses.tolist() == [2048] * 2
        assert torch.equal(shown, alone.image[[1, 3]])


def lost(codec, images, base):
    """Whether images are lost, of 400 with a base each, and what is shown of the first of either kind."""
    many = Base(*(x.expand(400, *x.shape[1:]) for x in (base.image, base.num_bytes, base.uses, base.loss)))
    sent = codec.encode(images.expand(400, -1, -1, -1), 10.0, None, many)
    received = AWGN().eval()(sent, 10.0, torch.arange(400))
    assert torch.equal(received.base_lost, AWGN().eval()(sent, 3.0, torch.arange(400)).base_lost)
    return received.base_lost, codec.decode(received, tuple(images.shape[1:]))


def test_a_base_is_lost_as_often_as_its_link_says(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda program, **_: program)
    codec, images = drawn(), half_busy(1, 16)
    base = Base(images.clone(), torch.tensor([5]), torch.tensor([40]), torch.tensor([0.25]))
    with torch.no_grad():
        for kind in (codec, CompiledCodec(codec)):
            gone, shown = lost(kind, images, base)
            assert float(gone.float().mean()) == pytest.approx(0.25, abs=0.07)
            assert (shown[gone] == 0.5).all()
            assert ((shown[~gone] - images).square().mean((1, 2, 3)) < 0.05).all()
        for nothing in (replace(base, loss=torch.zeros(1)), replace(base, uses=torch.zeros(1, dtype=torch.int64))):
            assert not lost(codec, images, nothing)[0].any()
        for one in (base, replace(base, loss=None)):
            sent = codec.train(one is base).encode(images, 10.0, None, one)
            assert sent.base_loss is None  # neither in training nor where nothing is lost
            assert AWGN()(sent, 10.0).base_lost is None


def test_links_tell_which_bases_were_lost():
    codec, images = drawn(), half_busy(1)

    class Risky(BaseLayer):
        def best(self, codec, images, snr_db, ratio):
            loss = torch.full((len(images),), 0.5)
            return Base(images, torch.full((len(images),), 90), torch.full((len(images),), 400), loss)

    assert not Link(codec, AWGN()).send(images, torch.arange(1), 10.0)[1].outage.any()
    codec.base_layer = Risky("jpeg")
    shown, measured = Link(codec, AWGN()).send(images.expand(40, -1, -1, -1), torch.arange(40), 10.0)
    gone = (shown == 0.5).flatten(1).all(1)
    assert 8 < gone.sum() < 32
    assert torch.equal(measured.outage, gone.double())


def test_losses_are_counted_in_the_choice():
    codec, images = drawn(), half_busy(1)
    blurred = torch.nn.functional.avg_pool2d(images, 3, 1, 1, count_include_pad=False)
    sharp = Base(images.lerp(blurred, 0.05), torch.tensor([90]), torch.tensor([400]), torch.zeros(1))
    safe = replace(sharp, image=images.lerp(blurred, 0.2))
    layer = BaseLayer("jpeg", error=0.5)
    for loss in (0.0, 0.5):
        layer.candidates = lambda *_, loss=loss: [replace(sharp, loss=torch.tensor([loss])), safe]
        best = layer.best(codec, images, torch.tensor([20.0]), None)
        assert torch.equal(best.image, (safe if loss else sharp).image)
        assert best.loss.tolist() == [0]
    with pytest.raises(UsageError, match="below 1"):
        BaseLayer(error=1.0)


def test_base_layers_are_for_awgn():
    codec = small(base="jpeg")
    with pytest.raises(UsageError, match="AWGN alone, not over Rayleigh"):
        JSCCModule(codec, Rayleigh())
    with pytest.raises(UsageError, match="AWGN alone, not over Rayleigh"):
        JSCCModule(codec, eval_channel=Rayleigh())
    JSCCModule(codec)
    for share in (0.0, 1.01):
        with pytest.raises(UsageError, match="above 0 and not above 1"):
            BaseLayer(shares=(0.5, share))
    with pytest.raises(UsageError, match="multiple of 8"):
        small(block=12)


def test_what_was_measured_with_a_base_is_not_what_was_measured_without():
    kinds = [small(), small(base="jpeg"), small(base="webp"), small(base="jpeg", shares=(0.4,))]
    assert len({digest(codec) for codec in kinds}) == 4
