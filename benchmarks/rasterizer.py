"""Times `rasterize_sphere`: the CPU back end beside the dense reference, CUDA beside gsplat; writes records.

Scenes are random: Gaussians uniform over the image, distances 1 to 10 m, widths of 0.5 to 2.5 pixels. gsplat draws the
same count at the same pixels, depths and widths through a pinhole camera (it has no sphere), in the same run. Times are
medians, from parameters to image (and on to the gradients of all of them, the receiver's pose included); on CUDA by
events, with and without a CUDA graph, and without one also where a backward pass runs on the caller's thread
(`torch.autograd.set_multithreading_enabled(False)`) instead of being handed to autograd's. `floor` is the least time of
the memory traffic and arithmetic that no method avoids on the card.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_clock
import torch
from torch import Tensor

from chanlab.errors import ChanlabError, UsageError
from chanlab.records import Record, record, save_records
from chanlab.rf import Panorama, rasterize_sphere, sphere

ROOT = Path(__file__).resolve().parents[1]
HEIGHT, WIDTH, CHANNELS = 90, 360, 2
CALLER = "forward+backward, caller's thread"
EXAMPLES = """examples:
  OMP_NUM_THREADS=2 python benchmarks/rasterizer.py cpu                 (minutes, for the dense reference)
  python benchmarks/rasterizer.py cuda                                  (beside gsplat, where it is installed)
  python benchmarks/rasterizer.py cuda --gaussians 50000 --batch 64
"""


def main() -> int:
    """Measure what was asked for, print and record it."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument(
        "--gaussians", type=int, nargs="+", help="counts; default: 5000 (cpu), 17424 50000 200000 (cuda)"
    )
    parser.add_argument("--channels", type=int, default=CHANNELS, help="signal channels")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=None, help="receivers at once; default: 1, and 64 on cuda"
    )
    parser.add_argument("--repeats", type=int, default=100, help="times each measurement is repeated")
    parser.add_argument("--dense-repeats", type=int, default=3, help="the same for the dense reference")
    parser.add_argument("--no-peer", action="store_true", help="leave out the dense reference or gsplat")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "models" / "rf" / "results.json", help="where records go"
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device; `cpu` works anywhere")
    counts = args.gaussians or ([5000] if args.device == "cpu" else [17424, 50000, 200000])
    batches = args.batch or ([1] if args.device == "cpu" else [1, 64])
    records: list[Record] = []
    for count in counts:
        for batch in batches:
            measure = on_cpu if args.device == "cpu" else on_cuda
            records += measure(count, batch, args)
    save_records(args.results, records)
    return 0


def pixels(count: int, channels: int, device: str, seed: int = 1) -> dict[str, Tensor]:
    """A scene in terms of the image: place [pixels], distance [m], widths [pixels], opacity, signal."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, 8, generator=generator)
    scene = {
        "column": uniform[:, 0] * WIDTH,
        "row": uniform[:, 1] * HEIGHT,
        "distance": 1 + 9 * uniform[:, 2],
        "widths": 0.5 * 5 ** uniform[:, 3:6],
        "opacity": 0.02 + 0.9 * uniform[:, 6],
        "quaternion": torch.randn(count, 4, generator=generator),
        "signal": torch.randn(count, channels, generator=generator),
    }
    return {name: value.to(device) for name, value in scene.items()}


def on_the_sphere(scene: dict[str, Tensor], batch: int) -> list[Tensor]:
    """Inputs of `rasterize_sphere`; receivers stand within a decimetre of the first."""
    panorama = Panorama.hemisphere(HEIGHT, WIDTH)
    azimuth, elevation = scene["column"] * panorama.column_step, scene["row"] * panorama.row_step
    level = elevation.cos()
    direction = torch.stack([level * azimuth.cos(), level * azimuth.sin(), elevation.sin()], -1)
    distance = scene["distance"][:, None]
    receivers = 0.1 * torch.rand(batch, 3, generator=torch.Generator().manual_seed(2))
    receivers[0] = 0
    return [
        direction * distance,
        scene["quaternion"],
        scene["widths"] * panorama.row_step * distance,
        scene["opacity"],
        scene["signal"],
        receivers.to(distance.device),
        torch.eye(3, device=distance.device).repeat(batch, 1, 1),
    ]


def in_the_camera(scene: dict[str, Tensor], batch: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """The same for gsplat: means, quaternions, scales, opacities and colours; view matrices and intrinsics."""
    focal = float(WIDTH)
    distance = scene["distance"]
    x, y = (scene["column"] - WIDTH / 2) / focal * distance, (scene["row"] - HEIGHT / 2) / focal * distance
    scales = scene["widths"] / focal * distance[:, None]
    inputs = [torch.stack([x, y, distance], -1), scene["quaternion"], scales, scene["opacity"], scene["signal"]]
    view = torch.eye(4, device=distance.device).repeat(batch, 1, 1)
    intrinsics = torch.tensor([[focal, 0, WIDTH / 2], [0, focal, HEIGHT / 2], [0, 0, 1]], device=distance.device)
    return inputs, view, intrinsics.repeat(batch, 1, 1)


def both_ways(draw: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    """What is timed: the image, and the image with the gradients of all inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    fixed = [x.clone() for x in inputs]
    with torch.no_grad():
        gradient = torch.randn_like(draw(*fixed))

    def forward() -> None:
        with torch.no_grad():
            draw(*fixed)

    def backward() -> None:
        torch.autograd.grad(draw(*leaves), leaves, gradient, allow_unused=True)

    return {"forward": forward, "forward+backward": backward}


def on_cpu(count: int, batch: int, args: argparse.Namespace) -> list[Record]:
    """The tiled back end in float32 and, as its peer, the dense reference in float64."""
    panorama = Panorama.hemisphere(HEIGHT, WIDTH)
    inputs = on_the_sphere(pixels(count, args.channels, "cpu"), batch)

    def draw(backend: str) -> Callable[..., Tensor]:
        return lambda *given: rasterize_sphere(*given, panorama=panorama, backend=backend).image

    def seconds(call: Callable[[], Any], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    ours, dense = both_ways(draw("cpu"), inputs), None
    if not args.no_peer:
        doubled = [x.double() for x in inputs]
        dense = {"forward": both_ways(draw("reference"), doubled)["forward"]}  # its gradients take minutes and memory
        error = (draw("cpu")(*inputs) - draw("reference")(*doubled)).abs()
        print(f"{count} Gaussians: median difference of the images {error.median():.1e}, largest {error.max():.1e}")
    records = []
    for what, call in ours.items():
        call()
        mine = 1e3 * seconds(call, args.repeats)
        peer = 1e3 * seconds(dense[what], args.dense_repeats) if dense and what in dense else None
        condition = {"threads": torch.get_num_threads(), "dtype": "float32", "peer": "dense reference, float64"}
        records.append(one_record("cpu", what, mine, peer, count, batch, args, condition))
    return records


def on_cuda(count: int, batch: int, args: argparse.Namespace) -> list[Record]:
    """CUDA, without and with a graph, the floor, and gsplat."""
    panorama = Panorama.hemisphere(HEIGHT, WIDTH)
    scene = pixels(count, args.channels, "cuda")
    inputs = on_the_sphere(scene, batch)
    for _ in range(2):  # the first call may learn that it had too little room
        rasterize_sphere(*inputs, panorama=panorama)
        with contextlib.suppress(ChanlabError):
            sphere.check()

    def draw(*given: Tensor) -> Tensor:
        return rasterize_sphere(*given, panorama=panorama).image

    records = []
    peers = {} if args.no_peer else gsplat_times(scene, batch, args.repeats)
    common = {"dtype": "float32", "peer": "gsplat, pinhole"}
    for what, call in both_ways(draw, inputs).items():
        for graph in (False, True):
            mine, more = cuda_milliseconds(call, args.repeats, graph), {}
            condition = {"graph": graph, **common}
            if what == "forward":
                more = {"images_per_second": 1e3 * batch / mine, "floor": floor(inputs, batch, panorama)}
            records.append(one_record("cuda", what, mine, peers.get(what), count, batch, args, condition, **more))
        if what != "forward":
            mine, peer = cuda_milliseconds(on_the_callers_thread(call), args.repeats), peers.get(CALLER)
            condition = {"graph": False, "thread": "caller", **common}
            records.append(one_record("cuda", what, mine, peer, count, batch, args, condition))
    sphere.check()
    return records


def on_the_callers_thread(call: Callable[[], Any]) -> Callable[[], None]:
    """The same, its backward pass on the thread that asks for it: two changes of threads less."""

    def alone() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            call()

    return alone


def cuda_milliseconds(call: Callable[[], Any], repeats: int, graph: bool = False) -> float:
    """Median time by CUDA events after a warm-up; with `graph` that of a replay."""
    cuda_clock.warm_up(call, 20)
    if graph:
        call = cuda_clock.captured(call)
    return statistics.median(cuda_clock.milliseconds(call) for _ in range(repeats))


def gsplat_times(scene: dict[str, Tensor], batch: int, repeats: int) -> dict[str, float]:
    """Medians of gsplat [ms], each the better of its packed and unpacked modes; none if it is not installed.

    `CALLER` is forward and backward on the caller's thread.
    """
    try:
        import gsplat
    except ImportError:
        print("gsplat is not installed: no peer (pip install gsplat)")
        return {}
    inputs, view, intrinsics = in_the_camera(scene, batch)
    times: dict[str, float] = {}
    for packed in (False, True):

        def draw(*given: Tensor, packed: bool = packed) -> Tensor:
            image: Tensor = gsplat.rasterization(*given, view, intrinsics, WIDTH, HEIGHT, packed=packed)[0]
            return image

        for what, call in both_ways(draw, inputs).items():
            found = {what: cuda_milliseconds(call, repeats)}
            if what != "forward":
                found[CALLER] = cuda_milliseconds(on_the_callers_thread(call), repeats)
            times |= {key: min(value, times.get(key, math.inf)) for key, value in found.items()}
    return times


def floor(inputs: list[Tensor], batch: int, panorama: Panorama) -> float:
    """Least time of a forward pass [ms], by memory traffic or arithmetic, whichever is more.

    Parameters are read once, 32-bit keys with their numbers sorted in four passes of a radix sort, images written once;
    every footprint is evaluated once at every pixel of its disc, with 60 operations.
    """
    properties = torch.cuda.get_device_properties(inputs[0].device)
    clock = getattr(properties, "clock_rate", 1_700_000) * 1e3
    width = getattr(properties, "memory_bus_width", 6144) / 8
    bandwidth = 2 * getattr(properties, "memory_clock_rate", 3_200_000) * 1e3 * width
    operations = 2 * 128 * properties.multi_processor_count * clock
    n = inputs[0].shape[0]
    seen = rasterize_sphere(*inputs, panorama=panorama, statistics=True).visibility
    covered = (math.pi * (seen.radius / panorama.row_step).square()).sum().item()
    count = n * batch
    traffic = (
        4 * sum(x.numel() for x in inputs[:5]) + 4 * 16 * count + 4 * batch * HEIGHT * WIDTH * (inputs[4].shape[1] + 2)
    )
    return 1e3 * max(traffic / bandwidth, 60 * covered / operations)


def one_record(
    backend: str,
    what: str,
    mine: float,
    peer: float | None,
    count: int,
    batch: int,
    args: argparse.Namespace,
    condition: dict[str, Any],
    **more: float,
) -> Record:
    """A record, printed."""
    if not math.isfinite(mine):
        raise UsageError(f"No time was measured for {what}: --repeats must be 1 or more.")
    beside = {} if peer is None else {"peer": peer, "ratio": peer / mine}
    told = "".join(f", {name} {value:.4g}" for name, value in (beside | more).items())
    print(f"{backend} {count} Gaussians, batch {batch}, {condition}: {what} {mine:.3f} ms{told}", flush=True)
    if peer is None:
        condition = {name: value for name, value in condition.items() if name != "peer"}
    size = {"gaussians": count, "receivers": batch, "channels": args.channels, "pixels": f"{WIDTH}x{HEIGHT}"}
    return record(
        system=f"rasterize_sphere, {backend}",
        data="random Gaussians",
        condition={**size, **condition},
        metric=f"{what} ms",
        value=mine,
        n=args.repeats,
        seeds=[1],
        unit="ms",
        **beside,
        **more,
    )


if __name__ == "__main__":
    raise SystemExit(main())
