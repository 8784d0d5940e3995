import contextlib
import math

import pytest
import torch
from coherent_mutants import FOLDER, MUTANTS, ROOT
from torch.utils._python_dispatch import TorchDispatchMode

from chanlab.channels.arrays import PlanarArray, field, rotation_matrix
from chanlab.channels.geometric import two_ray_paths
from chanlab.channels.paths import SPEED_OF_LIGHT
from chanlab.channels.response import cfr, subcarrier_frequencies
from chanlab.errors import UsageError
from chanlab.rf import coherent_gemm, coherent_sum

CARRIER = 28e9
WAVELENGTH = SPEED_OF_LIGHT / CARRIER


def draw(batch=(2,), paths=7, tx=2, rx=3, tones=5, carrier=CARRIER, dtype=torch.complex128, seed=0):
    """Inputs of a coherent sum: delays to 1 µs, antennas within a few wavelengths."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    gain = torch.complex(normal(*batch, paths), normal(*batch, paths)).to(dtype)
    delay = 1e-6 * torch.rand(*batch, paths, generator=gen, dtype=torch.float64)
    ends = [torch.nn.functional.normalize(normal(*batch, 3, paths), dim=-2) for _ in range(2)]
    arrays = [WAVELENGTH * normal(*batch, n, 3) for n in (tx, rx)]
    return [gain, delay, *ends, *arrays, carrier + subcarrier_frequencies(tones, 120e3)]


def test_reference_is_the_sum_path_by_path():
    gain, delay, departure, arrival, tx, rx, frequencies = draw(batch=(1,), paths=3, tx=2, rx=2, tones=2)
    want = torch.zeros(1, 2, 2, 2, dtype=torch.complex128)
    k = 2 * math.pi / WAVELENGTH
    for n in range(3):
        for m in range(2):
            for a in range(2):
                for f in range(2):
                    turn = k * (arrival[0, :, n] @ rx[0, m] + departure[0, :, n] @ tx[0, a])
                    turn = turn - 2 * math.pi * frequencies[f] * delay[0, n]
                    want[0, m, a, f] += gain[0, n] * torch.exp(1j * turn)
    got = coherent_sum(gain, delay, departure, arrival, tx, rx, frequencies, WAVELENGTH, backend="reference")
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.complex128, 1e-10), (torch.complex64, 2e-6)])
@pytest.mark.parametrize("shape", [((2,), 7), ((), 1000), ((2, 3), 65), ((300,), 3), ((2,), 1), ((0,), 4)])
@pytest.mark.parametrize("budget", [2**19, 2**12])
def test_gemm_is_the_reference(dtype, tolerance, shape, budget, monkeypatch):
    monkeypatch.setitem(coherent_gemm.BLOCK_ELEMENTS, "cpu", budget)
    inputs = draw(*shape, dtype=dtype)
    want = coherent_sum(*inputs, WAVELENGTH, backend="reference")
    got = coherent_sum(*inputs, WAVELENGTH, backend="gemm")
    assert got.dtype == dtype
    assert got.shape == (*shape[0], 3, 2, 5)
    assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.complex128, 1e-9), (torch.complex64, 1e-5)])
def test_gradients_of_gemm_are_those_of_the_reference(dtype, tolerance, monkeypatch):
    monkeypatch.setitem(coherent_gemm.BLOCK_ELEMENTS, "cpu", 2**12)
    inputs = draw(batch=(2,), paths=300, dtype=dtype)
    target = torch.randn(2, 3, 2, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))
    transmittance = torch.rand(2, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    grads = {}
    for backend in ("reference", "gemm"):
        leaves = [x.clone().requires_grad_() for x in (*inputs[:6], transmittance)]
        h = coherent_sum(*leaves[:6], inputs[6], WAVELENGTH, leaves[6], backend)
        (h - target).abs().square().sum().backward()
        grads[backend] = [x.grad for x in leaves]
    for got, want in zip(grads["gemm"], grads["reference"], strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("backend", ["reference", "gemm"])
def test_gradcheck(backend):
    *inputs, frequencies = draw(batch=(2,), paths=3, tx=2, rx=2, tones=3, carrier=2.0)
    inputs[1] = 1e6 * inputs[1] / 3  # a carrier of 2 Hz and delays of a third of a second: finite differences bite
    frequencies = 2.0 + frequencies.sub(2.0) / 120e3
    transmittance = torch.rand(2, 3, dtype=torch.float64)
    inputs[4:6] = [x / WAVELENGTH for x in inputs[4:6]]
    leaves = [x.requires_grad_() for x in (*inputs, transmittance)]

    def total(*x):
        return coherent_sum(*x[:6], frequencies, 1.3, x[6], backend)

    assert torch.autograd.gradcheck(total, leaves)


def test_opcheck():
    *inputs, frequencies = draw(batch=(2,), paths=3, tx=2, rx=2, tones=3)
    leaves = [x.requires_grad_() for x in inputs]
    torch.library.opcheck(torch.ops.chanlab.coherent_sum.default, (*leaves, frequencies, WAVELENGTH, "gemm"))
    grad = torch.randn(2, 2, 2, 3, dtype=torch.complex128)
    plain = [x.detach() for x in inputs]
    torch.library.opcheck(
        torch.ops.chanlab.coherent_sum_backward.default, (grad, *plain, frequencies, WAVELENGTH, "gemm")
    )


def test_compiles_whole():
    inputs = draw(paths=9)

    def power(gain):
        return coherent_sum(gain, *inputs[1:], WAVELENGTH).abs().square().sum()

    compiled = torch.compile(power, backend="aot_eager", fullgraph=True)
    leaves = [inputs[0].clone().requires_grad_() for _ in range(2)]
    compiled(leaves[0]).backward()
    power(leaves[1]).backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.parametrize("carrier_in_gain", [True, False])
@pytest.mark.parametrize(("tx_polarization", "rx_polarization"), [("V", "V"), ("cross", "VH")])
def test_is_the_cfr_of_channels(carrier_in_gain, tx_polarization, rx_polarization):
    """Two rays between turned arrays of two polarisations: CFR of chanlab.channels to float64 precision."""
    tx_array = PlanarArray(2, 3, pattern="tr38901", polarization=tx_polarization)
    rx_array = PlanarArray(2, 2, polarization=rx_polarization)
    tx = torch.tensor([[0.0, 0.0, 10.0], [1.0, -2.0, 7.0]], dtype=torch.float64)
    rx = torch.tensor([[40.0, 9.0, 1.5], [25.0, -30.0, 2.0]], dtype=torch.float64)
    paths = two_ray_paths(tx, rx, torch.zeros_like(rx), CARRIER)
    turns = [torch.tensor(x, dtype=torch.float64) for x in ([0.3, -0.2, 0.1], [2.0, 0.1, -0.3])]
    offsets = subcarrier_frequencies(64, 120e3)
    want = cfr(paths, tx_array, rx_array, offsets, tx_orientation=turns[0], rx_orientation=turns[1])[..., 0, :]

    rotations = [rotation_matrix(x) for x in turns]
    tx_field = field(tx_array, paths.departure, rotations[0])[:, None, :, None]
    rx_field = field(rx_array, paths.arrival, rotations[1])[:, :, None, :, None]
    gain = (rx_field * paths.transfer[:, None, None] * tx_field).sum((-3, -2))  # [user, rx_pol, tx_pol, path]
    if not carrier_in_gain:
        gain = gain * torch.exp(2j * math.pi * CARRIER * paths.delay)[:, None, None]
    places = [a.positions(WAVELENGTH) @ r.mT for a, r in zip((tx_array, rx_array), rotations, strict=True)]
    got = coherent_sum(
        gain,
        *(x[:, None, None] for x in (paths.delay, paths.departure, paths.arrival)),
        *places,
        offsets if carrier_in_gain else CARRIER + offsets,
        WAVELENGTH,
    )  # [user, rx_pol, tx_pol, rx_element, tx_element, subcarrier]: ports count polarisation first
    got = got.transpose(2, 3).flatten(1, 2).flatten(2, 3)
    assert (got - want).norm() <= 1e-9 * want.norm()


@pytest.mark.parametrize("backend", ["reference", "gemm"])
def test_impulse_response_peaks_at_the_delay(backend):
    spacing, tones = 1e6, 64
    frequencies = torch.arange(tones, dtype=torch.float64) * spacing
    for tap in (0, 5, 63):
        inputs = draw(batch=(), paths=1)
        inputs[1] = torch.tensor([tap / (tones * spacing)], dtype=torch.float64)
        taps = torch.fft.ifft(coherent_sum(*inputs[:6], frequencies, WAVELENGTH, backend=backend)).abs()
        assert (taps.argmax(-1) == tap).all()
        torch.testing.assert_close(taps[..., tap], inputs[0].abs().expand_as(taps[..., tap]))


def test_ends_swapped_transpose_the_channel():
    gain, delay, departure, arrival, tx, rx, frequencies = draw()
    there = coherent_sum(gain, delay, departure, arrival, tx, rx, frequencies, WAVELENGTH)
    back = coherent_sum(gain, delay, arrival, departure, rx, tx, frequencies, WAVELENGTH)
    torch.testing.assert_close(back, there.transpose(-3, -2))


def test_order_of_paths_does_not_count():
    inputs = draw(paths=2000)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(3))
    shuffled = [x[..., order] if i < 4 else x for i, x in enumerate(inputs)]
    got, want = (coherent_sum(*x, WAVELENGTH) for x in (shuffled, inputs))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["reference", "gemm"])
def test_no_paths_no_channel(backend):
    inputs = [x.requires_grad_() if i < 6 else x for i, x in enumerate(draw(paths=0))]
    h = coherent_sum(*inputs, WAVELENGTH, backend=backend)
    assert h.shape == (2, 3, 2, 5)
    assert not h.any()
    h.abs().square().sum().backward()
    assert inputs[0].grad.shape == (2, 0)
    assert not inputs[4].grad.any()


def test_zero_transmittance_blocks_a_path():
    inputs = draw(paths=3)
    blocked = coherent_sum(*inputs, WAVELENGTH, torch.tensor([1.0, 0.0, 1.0]))
    kept = [x[..., [0, 2]] if i < 4 else x for i, x in enumerate(inputs)]
    torch.testing.assert_close(blocked, coherent_sum(*kept, WAVELENGTH))


def test_batch_axes_broadcast():
    gain, delay, departure, arrival, tx, rx, frequencies = draw(batch=(2, 3))
    got = coherent_sum(gain, delay[0], departure[:, :1], arrival, tx[0, 0], rx, frequencies, WAVELENGTH)
    for i in range(2):
        for j in range(3):
            one = (gain[i, j], delay[0, j], departure[i, 0], arrival[i, j], tx[0, 0], rx[i, j])
            torch.testing.assert_close(got[i, j], coherent_sum(*one, frequencies, WAVELENGTH))


def test_single_precision_keeps_the_phase_of_a_carrier():
    """At 28 GHz and 10 µs the phase counts 280,000 cycles: single precision phases would be off by percents."""
    inputs = draw(batch=(), paths=200)
    inputs[1] = inputs[1] * 10
    want = coherent_sum(*inputs, WAVELENGTH, backend="reference")
    got = coherent_sum(inputs[0].to(torch.complex64), *inputs[1:], WAVELENGTH)
    assert (got - want).norm() <= 2e-6 * want.norm()
    inputs[1] = inputs[1].float().double()
    rounded = coherent_sum(*inputs, WAVELENGTH)
    assert (rounded - want).norm() > 1e-2 * want.norm()


@pytest.mark.parametrize("paths", [512, 1024, 1500])
def test_products_in_parts_are_the_whole_product(paths):
    gen = torch.Generator().manual_seed(4)
    left, right = (torch.randn(2, n, paths, dtype=torch.float64, generator=gen) for n in (6, 10))
    torch.testing.assert_close(coherent_gemm._split_product(left, right), left @ right.mT)


@pytest.mark.parametrize("loss", [lambda h: h.abs().square().sum(), lambda h: h.real.sum()], ids=["square", "linear"])
def test_second_gradients_are_an_error_not_zero(loss):
    inputs = draw(paths=3)
    inputs[1].requires_grad_()

    def dispatched(*given):
        return torch.ops.chanlab.coherent_sum(*given, WAVELENGTH, "gemm")

    for sum_of in (lambda *given: coherent_sum(*given, WAVELENGTH), dispatched):
        (first,) = torch.autograd.grad(loss(sum_of(*inputs)), inputs[1], create_graph=True)
        torch.testing.assert_close(first, torch.autograd.grad(loss(sum_of(*inputs)), inputs[1])[0])
        with pytest.raises(UsageError, match="second derivatives"):
            (first.sum() + inputs[1].sum()).backward()


class Largest(TorchDispatchMode):
    """The largest tensor that any operation yields [elements]."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_memory_of_gemm_is_bounded(monkeypatch):
    monkeypatch.setitem(coherent_gemm.BLOCK_ELEMENTS, "cpu", 2**16)
    inputs = draw(batch=(), paths=5000, tx=4, rx=4, tones=64, dtype=torch.complex64)
    inputs = [x[None] for x in inputs[:6]] + inputs[6:]
    grad = torch.ones(1, 4, 4, 64, dtype=torch.complex64)
    with Largest() as forward:
        coherent_gemm.coherent_sum_forward(*inputs, WAVELENGTH)
    with Largest() as backward:
        coherent_gemm.coherent_sum_backward(grad, *inputs, WAVELENGTH)
    assert forward.elements <= 2**16
    assert backward.elements <= 2**16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: lambda x: x.real}, "gain must be complex"),
        ({1: lambda x: x.float()}, "delay in float64"),
        ({6: lambda x: x.float()}, "frequencies in float64"),
        ({1: lambda x: x[..., :1]}, "delay has shape"),
        ({2: lambda x: x.mT}, "departure has shape"),
        ({4: lambda x: x[..., :2]}, "tx_positions has shape"),
        ({0: lambda x: x.expand(3, 2, 7), 1: lambda x: x.expand(5, 2, 7)}, "don't broadcast"),
        ({6: lambda x: x[None]}, "frequencies must be"),
    ],
)
def test_errors_name_what_is_wrong(change, message):
    inputs = [change.get(i, lambda x: x)(x) for i, x in enumerate(draw())]
    with pytest.raises(UsageError, match=message):
        coherent_sum(*inputs, WAVELENGTH)


def test_autocast_keeps_the_precision_of_the_gain():
    inputs = draw(paths=300, dtype=torch.complex64)
    leaf = inputs[0].clone().requires_grad_()
    want = coherent_sum(leaf, *inputs[1:], WAVELENGTH, backend="gemm")
    (by_want,) = torch.autograd.grad(want.abs().square().sum(), leaf)
    with torch.autocast("cpu"):
        found = coherent_sum(leaf, *inputs[1:], WAVELENGTH, backend="gemm")
        (by_found,) = torch.autograd.grad(found.abs().square().sum(), leaf)
    assert torch.equal(found, want)
    assert torch.equal(by_found, by_want)


def test_forward_mode_is_refused():
    inputs = draw()
    tangent = torch.ones_like(inputs[0])
    for backend in ("reference", "gemm"):
        with contextlib.ExitStack() as stack:
            if backend == "gemm":
                stack.enter_context(pytest.raises(UsageError, match="forward-mode"))
            _, moved = torch.func.jvp(
                lambda g, backend=backend: coherent_sum(g, *inputs[1:], WAVELENGTH, backend=backend),
                (inputs[0],),
                (tangent,),
            )
            torch.testing.assert_close(moved, coherent_sum(tangent, *inputs[1:], WAVELENGTH, backend="reference"))


def test_unknown_back_end_is_an_error():
    with pytest.raises(UsageError, match="known are reference, gemm, cuda"):
        coherent_sum(*draw(), WAVELENGTH, backend="magic")
    with pytest.raises(UsageError, match="wavelength"):
        coherent_sum(*draw(), 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["gemm", "cuda"])
class TestOnCUDA:
    @pytest.mark.parametrize("shape", [((2,), 7, 2, 3, 5), ((), 5000, 4, 4, 64), ((3,), 1500, 5, 7, 70), ((), 0)])
    def test_is_the_reference(self, backend, shape):
        inputs = draw(*shape, dtype=torch.complex64)
        leaves = {name: [x.clone().requires_grad_() for x in inputs[:6]] for name in ("cpu", "cuda")}
        grads = {}
        for device, name in (("cpu", "reference"), ("cuda", backend)):
            h = coherent_sum(*(x.to(device) for x in (*leaves[device], inputs[6])), WAVELENGTH, backend=name)
            h.abs().square().sum().backward()
            grads[device] = [h.detach().cpu(), *(x.grad for x in leaves[device])]
        for got, want in zip(grads["cuda"], grads["cpu"], strict=True):
            assert (got - want).norm() <= 1e-4 * want.norm()

    def test_graph_replays_with_new_inputs(self, backend):
        inputs = [x.cuda() for x in draw(paths=5000, dtype=torch.complex64)]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            coherent_sum(*inputs, WAVELENGTH, backend=backend)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            h = coherent_sum(*inputs, WAVELENGTH, backend=backend)
        inputs[0].mul_(2)
        graph.replay()
        want = coherent_sum(*inputs, WAVELENGTH, backend="reference")
        assert (h - want).norm() <= 1e-5 * want.norm()

    def test_on_a_stream_of_its_own(self, backend):
        inputs = [x.cuda() for x in draw(paths=5000, dtype=torch.complex64)]
        want = coherent_sum(*inputs, WAVELENGTH, backend="reference")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            h = coherent_sum(*inputs, WAVELENGTH, backend=backend)
        stream.synchronize()
        assert (h - want).norm() <= 1e-5 * want.norm()


def test_mutants_still_fit_the_code():
    """Each error of coherent_mutants.py can be planted: what it replaces is there, once, and every barrier is taken."""
    for mutant in MUTANTS:
        found = (ROOT / FOLDER / mutant.file).read_text(encoding="utf-8").count(mutant.right)
        assert found == (1 if mutant.count is None else sum(m.count is not None for m in MUTANTS)), mutant
