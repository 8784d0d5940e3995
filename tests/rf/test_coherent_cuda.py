"""The CUDA kernels of the coherent sum, run on the CPU: results, gradients, and the order of threads."""

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from chanlab.channels.paths import SPEED_OF_LIGHT
from chanlab.channels.response import subcarrier_frequencies
from chanlab.errors import UsageError
from chanlab.rf import coherent_cuda, coherent_gemm, coherent_sum
from chanlab.rf.coherent_reference import coherent_sum_reference

KERNELS = Path(coherent_cuda.__file__).with_name("kernels")
WAVELENGTH = SPEED_OF_LIGHT / 28e9


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """`coherent.cu` for the CPU, the threads of a block as fibres (cuda_on_host/cuda_runtime.h)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ (Debian and Ubuntu: apt-get install g++)")
    made = tmp_path_factory.mktemp("kernels") / "coherent.so"
    include = Path(__file__).with_name("cuda_on_host")
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-x", "c++", f"-I{include}"]
    subprocess.run([compiler, *options, str(KERNELS / "coherent.cu"), "-o", str(made)], check=True)
    return coherent_cuda.declare(ctypes.CDLL(str(made)))


@pytest.fixture(params=[1, 3])
def on_host(request, library, monkeypatch):
    """Let the binding of the CUDA back end call that library, with the splits of so many multiprocessors."""

    @contextlib.contextmanager
    def no_stream(device):
        yield 0

    monkeypatch.setattr(coherent_cuda, "_library", lambda: library)
    monkeypatch.setattr(coherent_cuda, "_check", lambda gain: None)
    monkeypatch.setattr(coherent_cuda, "_multiprocessors", lambda device: request.param)
    monkeypatch.setattr(coherent_cuda, "_stream", no_stream)


def draw(batch, paths, tx, rx, tones):
    gen = torch.Generator().manual_seed(batch + paths)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    gain = torch.complex(normal(batch, paths), normal(batch, paths)).to(torch.complex64)
    delay = 1e-6 * torch.rand(batch, paths, generator=gen, dtype=torch.float64)
    ends = [torch.nn.functional.normalize(normal(batch, 3, paths), dim=-2) for _ in range(2)]
    arrays = [WAVELENGTH * normal(batch, n, 3) for n in (tx, rx)]
    return [gain, delay, *ends, *arrays, 28e9 + subcarrier_frequencies(max(tones, 1), 120e3)[:tones]]


SHAPES = [(1, 1, 1, 1, 1), (2, 33, 2, 3, 5), (1, 200, 4, 4, 64), (1, 70, 5, 4, 70), (3, 64, 1, 17, 65)]


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_the_reference(shape):
    inputs = draw(*shape)
    want = coherent_sum_reference(*inputs, WAVELENGTH)
    got = coherent_cuda.coherent_sum_forward(*inputs, WAVELENGTH)
    assert got.dtype == torch.complex64
    assert (got - want).norm() <= 2e-6 * want.norm()

    grad = torch.randn(want.shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
    doubles = [inputs[0].to(torch.complex128), *inputs[1:]]
    wanted = coherent_gemm.coherent_sum_backward(grad, *doubles, WAVELENGTH)
    found = coherent_cuda.coherent_sum_backward(grad.to(torch.complex64), *inputs, WAVELENGTH)
    for x, got, want in zip(inputs, found, wanted, strict=False):
        assert got.dtype == x.dtype
        assert got.shape == x.shape
        assert (got - want).norm() <= 2e-5 * want.norm()


@pytest.mark.usefixtures("on_host")
def test_lazy_conjugates_and_signs_are_carried_out():
    gain, delay, *rest = draw(1, 40, 2, 3, 5)
    grad = torch.randn(1, 3, 2, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    negative = torch.complex(torch.zeros_like(delay), -delay).conj().imag
    assert negative.is_neg()
    runs = []
    for lazy in (True, False):
        inputs = [gain.conj(), negative, *rest] if lazy else [gain.conj().resolve_conj(), delay, *rest]
        down = grad.conj() if lazy else grad.conj().resolve_conj()
        forward = coherent_cuda.coherent_sum_forward(*inputs, WAVELENGTH)
        runs.append([forward, *coherent_cuda.coherent_sum_backward(down, *inputs, WAVELENGTH)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.usefixtures("on_host")
def test_order_of_threads_does_not_count(monkeypatch):
    inputs = draw(2, 100, 3, 7, 70)
    grad = torch.ones(2, 7, 3, 70, dtype=torch.complex64)
    runs = []
    for backwards in (False, True):
        if backwards:
            monkeypatch.setenv("CUDA_ON_HOST_BACKWARDS", "1")
        forward = coherent_cuda.coherent_sum_forward(*inputs, WAVELENGTH)
        runs.append([forward, *coherent_cuda.coherent_sum_backward(grad, *inputs, WAVELENGTH)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("shape", [(0, 3, 1, 1, 1), (2, 0, 2, 3, 5), (1, 3, 1, 1, 0)])
def test_nothing_is_zero(shape):
    inputs = draw(*shape)
    h = coherent_cuda.coherent_sum_forward(*inputs, WAVELENGTH)
    assert h.shape == (shape[0], shape[3], shape[2], shape[4])
    assert not h.any()
    for x, grad in zip(inputs, coherent_cuda.coherent_sum_backward(h, *inputs, WAVELENGTH), strict=False):
        assert grad.shape == x.shape
        assert not grad.any()


@pytest.mark.usefixtures("on_host")
def test_operator_differentiates_through_the_kernels():
    inputs = draw(2, 40, 2, 3, 5)
    grads = []
    for backend in ("cuda", "reference"):
        leaves = [x.clone().requires_grad_() for x in inputs[:6]]
        coherent_sum(*leaves, inputs[6], WAVELENGTH, backend=backend).abs().square().sum().backward()
        grads.append([x.grad for x in leaves])
    for got, want in zip(*grads, strict=True):
        assert (got - want).norm() <= 2e-5 * want.norm()


def test_host_tensors_are_an_error():
    with pytest.raises(UsageError, match=r"CUDA device.*gemm"):
        coherent_sum(*draw(1, 3, 1, 1, 2), WAVELENGTH, backend="cuda")


def test_compiles_with_nvcc(tmp_path):
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("needs nvcc of the CUDA toolkit")
    options = ["-std=c++17", "-arch=sm_90", "-cubin", "-Werror", "all-warnings"]
    subprocess.run(
        [compiler, *options, str(KERNELS / "coherent.cu"), "-o", str(tmp_path / "coherent.cubin")], check=True
    )
