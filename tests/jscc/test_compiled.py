"""Codecs compiled as a whole, and gated blocks in two kernels: the same as what they stand for."""

import functools
from fractions import Fraction

import pytest
import torch

from chanlab.jscc import ADJSCC, AWGN, AdaptiveJSCC, CompiledCodec, DeepJSCC, gated
from chanlab.jscc.adaptive_networks import GatedBlock
from chanlab.jscc.compiled import _Linear

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def codec_of(kind=AdaptiveJSCC, **arguments):
    """A codec whose networks do something, as they don't where training begins."""
    torch.manual_seed(0)
    codec = kind(Fraction(1, 6), **arguments).eval()
    with torch.no_grad():
        for parameter in codec.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    return codec


def small(**arguments):
    return codec_of(widths=(8, 16), depths=(1, 2), conditioning=8, **arguments)


def through(codec, images, snr_db, ratio=None, low=True):
    """What is sent and what comes back, over a channel that is the same at each call."""
    with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=low):
        sent = codec.encode(images, snr_db, ratio)
        received = AWGN()(sent, snr_db, torch.Generator().manual_seed(1))
        return sent, codec.decode(received, tuple(images.shape[1:]))


def assert_same(found, wanted, limit=3e-2):
    (sent, images), (want, wanted_images) = found, wanted
    assert torch.equal(sent.used, want.used)
    assert torch.equal(sent.side_bits, want.side_bits)
    torch.testing.assert_close(sent.power, want.power, rtol=1e-4, atol=1e-4)
    assert (sent.symbols - want.symbols).norm() <= limit * want.symbols.norm()
    assert (images - wanted_images).norm() <= limit * wanted_images.norm()


@pytest.fixture
def recorded(monkeypatch):
    """Programs as they are recorded, not compiled, which takes long on a CPU."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda program, **_: made.append(program) or program)
    return made


@pytest.mark.parametrize("size", [(32, 64), (45, 51)])
@pytest.mark.parametrize("ratio", [None, Fraction(1, 12), 1 / 12, torch.tensor([1 / 6, 0.1], dtype=torch.float64)])
def test_programs_do_what_the_codec_does(recorded, size, ratio):
    codec, images = small(), torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(2))
    snr_db = torch.tensor([3.0, 12.0])
    compiled = CompiledCodec(codec)
    assert_same(through(compiled, images, snr_db, ratio), through(codec, images, snr_db, ratio))
    # A program is made once, and reads its inputs at each call.
    other = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(3))
    assert_same(through(compiled, other, snr_db + 5, ratio), through(codec, other, snr_db + 5, ratio))
    assert len(recorded) == 2


@pytest.mark.parametrize("kind", [ADJSCC, DeepJSCC])
def test_other_codecs_compile_as_well(recorded, kind):
    codec, images = codec_of(kind, filters=8), torch.rand(2, 3, 24, 32)
    assert_same(through(CompiledCodec(codec), images, 7.0), through(codec, images, 7.0))


def test_programs_hold_no_complex_arithmetic(recorded):
    through(CompiledCodec(small()), torch.rand(1, 3, 32, 32), 10.0)
    for program in recorded:
        values = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        assert values
        assert not any(value.is_complex() for value in values)


def test_autocast_around_a_program_changes_nothing(recorded):
    compiled, images = CompiledCodec(small()), torch.rand(1, 3, 32, 32)
    found = [through(compiled, images, 10.0, low=low) for low in (True, False)]
    assert torch.equal(found[0][1], found[1][1])


def test_programs_hold_the_weights_as_they_were(recorded):
    codec, images = small(), torch.rand(1, 3, 32, 32)
    for block in codec.encoder.trunk.blocks:  # as training compiles them
        block.forward = functools.partial(GatedBlock.forward, block)
    compiled = CompiledCodec(codec)
    before = through(compiled, images, 10.0)[1]
    assert all(parameter.dtype == torch.float32 for parameter in codec.parameters())
    with torch.no_grad():
        codec.encoder.trunk.blocks[0].mixer_out.bias += 1
        codec.decoder.linear.bias += 1
    assert torch.equal(through(compiled, images, 10.0)[1], before)


def test_a_compiler_takes_programs_whole(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    codec, images = small(), torch.rand(1, 3, 32, 32)
    assert_same(through(CompiledCodec(codec), images, 10.0), through(codec, images, 10.0))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_of_vectors(bias):
    layer = torch.nn.Linear(5, 7, bias)
    x = torch.randn(3, 5)
    want = layer(x)
    layer.__class__ = _Linear
    torch.testing.assert_close(layer(x), want)
    torch.testing.assert_close(layer(x.expand(2, 4, 3, 5)), want.expand(2, 4, 3, 7))


def test_blocks_without_a_device_or_with_gradients_keep_to_their_layers():
    assert not gated.fits(torch.zeros(1, 4, 4, 8, dtype=torch.bfloat16))
    block, x = GatedBlock(8, 5), torch.randn(1, 4, 4, 8, requires_grad=True)
    block(x, torch.zeros(1, 1, 1, 32)).sum().backward()
    assert x.grad.isfinite().all()


def drawn_block(width, kernel):
    torch.manual_seed(0)
    block = GatedBlock(width, kernel)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return block


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((2, 7, 9, 24), 5), ((3, 16, 12, 40), 3), ((1, 33, 20, 64), 5), ((2, 5, 6, 96), 5), ((8, 96, 96, 24), 7)],
)
@pytest.mark.parametrize("low", [False, True])
def test_gated_kernels(shape, kernel, low):
    block = drawn_block(shape[-1], kernel)
    x = torch.randn(shape).bfloat16()
    modulation = 0.5 * torch.randn(len(x), 1, 1, 4 * shape[-1] + 9)[..., 5:-4]
    with torch.no_grad():
        want = block.double()(x.double(), modulation.double())
        block = block.cuda().to(torch.bfloat16 if low else torch.float32)
        on_device = x.cuda(), modulation.cuda()
        assert gated.fits(on_device[0])
        found = block(*on_device)
    assert found.dtype == torch.bfloat16
    assert (found.double().cpu() - want).norm() <= 2e-2 * (want - x.double()).norm()
    with torch.enable_grad():
        assert not gated.fits(on_device[0])


@pytest.mark.gpu
@needs_cuda
def test_compiled_on_the_device_as_a_graph():
    codec, images = small().cuda(), torch.rand(2, 3, 64, 96, device="cuda")
    wanted, compiled = through(codec, images, 10.0, low=False), CompiledCodec(codec)
    assert_same(through(compiled, images, 10.0), wanted)
    snr_db = torch.full((2,), 10.0, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent = compiled.encode(images, snr_db)
    images.copy_(images.flip(0))
    graph.replay()
    torch.testing.assert_close(sent.symbols, compiled.encode(images, snr_db).symbols, rtol=1e-3, atol=1e-3)
