"""Symbols found by gradient descent: better, within the contract, and the same whoever else is sent."""

import math
from fractions import Fraction

import pytest
import torch
from contract_checks import check_codec, smooth_images

from chanlab.errors import UsageError
from chanlab.jscc import ADJSCC, AdaptiveJSCC, CompiledCodec, JSCCModule
from chanlab.jscc.base_layer import SHORTER, BaseLayer
from chanlab.jscc.channels import AWGN
from chanlab.jscc.contract import find_convention
from chanlab.jscc.evaluation import Link, digest
from chanlab.jscc.symbol_search import search_symbols

SNR = torch.tensor([0.0, 8.0, 20.0])


def small(**options):
    """A codec whose networks do something, as they don't where training begins."""
    torch.manual_seed(0)
    codec = AdaptiveJSCC(widths=(8, 12), depths=(1, 1), conditioning=8, **options).eval()
    with torch.no_grad():
        for parameter in codec.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return codec


def busy(batch=3, size=32):
    noise = torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(3))
    return smooth_images(batch, (3, size, size)).lerp(noise, 0.3)


def psnr_db(codec, images, sent, snr=SNR):
    """Of each image, over noise that no search has seen."""
    received = AWGN(codec.convention).eval()(sent, snr, torch.Generator().manual_seed(1))
    return -10 * (codec.decode(received, tuple(images.shape[1:])) - images).square().mean((1, 2, 3)).log10()


@pytest.mark.parametrize("convention", ["standard", "nominal+3dB", "batch-power"])
def test_symbols_become_better_and_nothing_else_changes(convention):
    codec, images = small(), busy()
    codec.convention = find_convention(convention)
    with torch.inference_mode():  # as links send
        check_better(codec, images)


def check_better(codec, images):
    plain = codec.encode(images, SNR, Fraction(1, 8))
    codec.search = 12
    sent = codec.encode(images, SNR, Fraction(1, 8))
    for name in ("used", "side_bits", "side", "base_uses"):
        assert torch.equal(getattr(sent, name), getattr(plain, name))
    torch.testing.assert_close(sent.power, plain.power, rtol=1e-5, atol=1e-5)
    assert not sent.symbols.requires_grad
    gained = psnr_db(codec, images, sent) - psnr_db(codec, images, plain)
    assert (gained > 0.05).all()
    more = search_symbols(codec, images, plain, SNR, 48)
    assert (psnr_db(codec, images, more) - psnr_db(codec, images, plain) > gained).all()
    assert all(p.grad is None for p in codec.parameters())


@pytest.mark.parametrize("convention", ["standard", "batch-power"])
def test_an_image_is_searched_for_alike_in_any_company(monkeypatch, convention):
    codec, images = small(search=5), busy()
    codec.convention = find_convention(convention)
    sent = codec.encode(images, SNR)
    for at_once in (1, 2 * 32 * 32):
        monkeypatch.setattr("chanlab.jscc.symbol_search._AT_ONCE", at_once)
        torch.testing.assert_close(codec.encode(images, SNR).symbols, sent.symbols, rtol=1e-3, atol=1e-3)
    if convention == "standard":
        alone = codec.encode(images[1:2], SNR[1:2])
        torch.testing.assert_close(alone.symbols[0], sent.symbols[1], rtol=1e-3, atol=1e-3)


def test_a_search_that_ends_worse_changes_nothing():
    codec, images = small(), busy()
    plain = codec.encode(images, SNR)
    assert torch.equal(search_symbols(codec, images, plain, SNR, 3, rate=100.0).symbols, plain.symbols)


@pytest.mark.parametrize("more", [{}, {"base": "jpeg", "shares": (0.5, 1)}])
def test_the_contract_of_a_codec_that_searches(more):
    check_codec(small(search=2, **more), AWGN())


def test_bases_are_tried_with_a_shorter_search(monkeypatch):
    codec, images, steps = small(base="jpeg", shares=(0.5,), search=2 * SHORTER - 1), busy(3, 64), []
    search = search_symbols

    def counted(codec, images, sent, snr_db, count):
        steps.append(count)
        return search(codec, images, sent, snr_db, 1)

    monkeypatch.setattr("chanlab.jscc.adaptive.search_symbols", counted)
    images_shown, _ = Link(codec, AWGN()).send(images, torch.arange(3), 10.0)
    assert images_shown.isfinite().all()
    assert steps == [2, 2, 2, 2 * SHORTER - 1]  # without a base, with two, then what is sent
    codec.base_layer = BaseLayer("jpeg", (1,))
    sent = codec.encode(images, torch.full((3,), 20.0))
    assert torch.view_as_real(sent.symbols).isfinite().all()
    assert not sent.used.any(1).all()


def test_no_search_in_training_and_where_it_cannot_be():
    module = JSCCModule(small(search=3)).train()
    images = busy()
    loss = module.training_step({"image": images}, 0)
    loss.backward()
    assert math.isfinite(loss.item())
    with pytest.raises(UsageError, match="search=0"):
        CompiledCodec(small(search=3))
    CompiledCodec(ADJSCC(Fraction(1, 6), filters=8))
    with torch.inference_mode(), pytest.raises(UsageError, match=r"outside of torch.inference_mode"):
        small(search=1).encode(images, SNR)
    with pytest.raises(UsageError, match="search is a number of steps"):
        small(search=-1)
    assert digest(small()) == digest(small(search=0)) != digest(small(search=3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_search_on_the_device():
    codec, images = small(base="jpeg", shares=(0.5,), search=12).cuda(), busy(3, 64).cuda()
    with torch.inference_mode():
        sent = codec.encode(images, SNR.cuda())
        assert sent.uses(SNR.cuda()).tolist() == [2048] * 3
        base = codec.base_layer.best(codec, images, SNR.cuda(), None)
        codec.search = 0
        plain = codec.encode(images, SNR.cuda(), None, base)
        found, was = (
            (codec.decode(AWGN().eval()(s, SNR.cuda(), torch.arange(3)), (3, 64, 64)) - images).square().mean((1, 2, 3))
            for s in (sent, plain)
        )
    refined = (base.taken < 2000) & ~torch.isclose(found, was)
    assert refined.any()
    assert (found[refined] < was[refined]).all()
