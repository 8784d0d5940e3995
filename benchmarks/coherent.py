"""How fast the coherent sum over primitives, antennas and subcarriers is, its back ends side by side.

    python benchmarks/coherent.py                  # CPU: dense float64 reference and blocked matrix products
    python benchmarks/coherent.py --device cuda    # matrix products and the fused kernel, without and with a CUDA graph

From paths (complex gains, delays, directions) to the channel of every antenna pair and subcarrier, and with the
gradients of all six inputs. Back ends take turns and the median counts; on CUDA times are those of events. `error` is
relative to the float64 reference. Memory is what a call takes on top of its inputs: on the CPU the growth of the
resident set in a process of its own, on CUDA what the allocator held at most.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import cuda_clock
import torch
from torch import Tensor
from tqdm import tqdm

from chanlab.channels.paths import SPEED_OF_LIGHT
from chanlab.channels.response import subcarrier_frequencies
from chanlab.records import Record, record, save_records
from chanlab.rf import coherent_sum

ROOT = Path(__file__).resolve().parents[1]
CARRIER = 28e9
WAVELENGTH = SPEED_OF_LIGHT / CARRIER
NAMES = {"reference": "dense reference, float64", "gemm": "matrix products", "cuda": "fused kernel"}


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description="Milliseconds of the coherent sum, forward and with gradients.")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--primitives", type=int, default=50_000)
    parser.add_argument("--tx-antennas", type=int, default=4)
    parser.add_argument("--rx-antennas", type=int, default=4)
    parser.add_argument("--subcarriers", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="links, each with primitives of its own")
    parser.add_argument("--rounds", type=int, help="default: 7 on the CPU, 100 on CUDA")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--results", type=Path, default=ROOT / "models" / "rf" / "results.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sizes = (args.batch, args.primitives, args.tx_antennas, args.rx_antennas, args.subcarriers)
    rounds = args.rounds or (7 if args.device == "cpu" else 100)
    backends = ["reference", "gemm"] if args.device == "cpu" else ["reference", "gemm", "cuda"]

    inputs = [x.to(args.device) for x in draw(*sizes)]
    want = coherent_sum(*inputs, WAVELENGTH, backend="reference")
    errors = {}
    for backend in backends:
        got = coherent_sum(*inputs, WAVELENGTH, backend=backend)
        errors[backend] = float((got - want).norm() / want.norm())
    del want, got
    times = measure(inputs, backends, rounds)
    memory = {backend: extra_memory(backend, sizes, args.device) for backend in backends}

    condition = {
        "device": args.device,
        "primitives": args.primitives,
        "antennas": f"{args.rx_antennas}x{args.tx_antennas}",
        "subcarriers": args.subcarriers,
        "batch": args.batch,
        **({"threads": args.threads} if args.device == "cpu" else {}),
    }
    records: list[Record] = []
    print(f"{'':<34} {'forward':>12} {'+ backward':>12} {'error':>9} {'memory':>10}")
    for (backend, graph), (forward, both) in times.items():
        name = NAMES[backend] + (", graph" if graph else "")
        row = [statistics.median(forward), statistics.median(both)]
        print(
            f"{name:<34} {row[0]:9.3f} ms {row[1]:9.3f} ms {errors[backend]:9.1e} {memory[backend] / 2**20:6.0f} MiB",
        )
        peers = [statistics.median(x) for x in times["reference", False]]
        metrics = ("forward ms", "forward+backward ms")
        for metric, values, value, peer in zip(metrics, (forward, both), row, peers, strict=True):
            against = {} if backend == "reference" else {"peer": peer, "ratio": peer / value}
            records.append(
                record(
                    system=name,
                    data="coherent sum",
                    condition=condition,
                    metric=metric,
                    value=value,
                    deviation=statistics.stdev(values) if len(values) > 1 else None,
                    n=len(values),
                    unit="ms",
                    error=errors[backend],
                    memory_bytes=memory[backend],
                    **against,
                )
            )
    if args.device == "cuda":
        print(f"{'floor of single-precision FMA':<34} {floor(sizes):9.3f} ms")
    save_records(args.results, records)


def draw(batch: int, paths: int, tx: int, rx: int, tones: int) -> list[Tensor]:
    """Inputs of `coherent_sum`: delays to 1 µs, half-wavelength arrays, 120 kHz of spacing at 28 GHz."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    gain = torch.complex(normal(batch, paths), normal(batch, paths)).to(torch.complex64)
    delay = 1e-6 * torch.rand(batch, paths, generator=generator, dtype=torch.float64)
    ends = [torch.nn.functional.normalize(normal(batch, 3, paths), dim=-2) for _ in range(2)]
    axis = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    arrays = [(torch.arange(n)[:, None] * axis * WAVELENGTH / 2).repeat(batch, 1, 1) for n in (tx, rx)]
    return [gain, delay, *ends, *arrays, CARRIER + subcarrier_frequencies(tones, 120e3)]


def forward_pass(inputs: list[Tensor], backend: str) -> None:
    """The sum alone."""
    with torch.no_grad():
        coherent_sum(*inputs, WAVELENGTH, backend=backend)  # type: ignore[arg-type]


def both_passes(inputs: list[Tensor], backend: str) -> None:
    """The sum and the gradients of its power."""
    leaves = [x.detach().requires_grad_() for x in inputs[:6]]
    h = coherent_sum(*leaves, inputs[6], WAVELENGTH, backend=backend)  # type: ignore[arg-type]
    torch.autograd.grad(h, leaves, torch.ones_like(h))


def measure(
    inputs: list[Tensor], backends: list[str], rounds: int
) -> dict[tuple[str, bool], tuple[list[float], list[float]]]:
    """Milliseconds of forward and of forward and backward passes, by back end and whether replayed from a graph."""
    cuda = inputs[0].is_cuda
    calls: dict[tuple[str, bool], list[Callable[[], None]]] = {}
    for backend in backends:
        passes: list[Callable[[], None]] = [
            lambda b=backend, f=function: f(inputs, b)  # type: ignore[misc]
            for function in (forward_pass, both_passes)
        ]
        calls[backend, False] = passes
        if cuda and backend != "reference":
            calls[backend, True] = [cuda_clock.captured(call) for call in passes]
    clock = cuda_clock.milliseconds if cuda else milliseconds
    times: dict[tuple[str, bool], tuple[list[float], list[float]]] = {key: ([], []) for key in calls}
    for round_ in tqdm(range(rounds + 1), desc="rounds", unit="round"):
        for key, passes in calls.items():
            if key[0] == "reference" and round_ > 7:
                continue  # slow, and no contender
            for kept, call in zip(times[key], passes, strict=True):
                elapsed = clock(call)
                if round_:  # the first warms up
                    kept.append(elapsed)
    return times


def milliseconds(call: Callable[[], None]) -> float:
    """Wall clock."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def extra_memory(backend: str, sizes: tuple[int, ...], device: str) -> int:
    """Memory of a forward and backward pass on top of its inputs [byte]."""
    if device == "cpu":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_resident_growth, (backend, sizes))
    inputs = [x.cuda() for x in draw(*sizes)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both_passes(inputs, backend)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _resident_growth(backend: str, sizes: tuple[int, ...]) -> int:
    torch.set_num_threads(1)
    both_passes(draw(1, 8, 1, 1, 2), backend)  # loads what a first call loads
    inputs = draw(*sizes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _resident("VmRSS")
    both_passes(inputs, backend)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    """Resident memory of this process or its peak [byte], as Linux tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def floor(sizes: tuple[int, ...]) -> float:
    """Milliseconds of the multiplications alone at the device's peak: four real ones a path, antenna pair and tone."""
    properties = torch.cuda.get_device_properties(0)
    a_second = properties.multi_processor_count * 128 * 1e3 * getattr(properties, "clock_rate", math.nan)
    return 1e3 * 4 * math.prod(sizes) / a_second


if __name__ == "__main__":
    main()
