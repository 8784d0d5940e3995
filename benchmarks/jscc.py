"""Times encoding and decoding of photographs: ours beside DeepJSCC of kaira and of this library; writes records.

Pairs of equal parameters, both at k/n = 1/6, measured in turns in one run:
- `kaira`: its `Bourtsoulatze2019DeepJSCC` encoder and decoder (0.16 M parameters), as they are, in float32, eagerly;
  beside `AdaptiveJSCC` with fewer and narrower blocks. Of the package `pykaira` that class alone is imported (all of it
  needs torchvision and compressai): install it with `pip install --no-deps pykaira==0.2.1`, or give its folder by
  --kaira.
- `plain`: `DeepJSCC` of this library with GDN and as many filters as it takes, in float32, eagerly; beside
  `AdaptiveJSCC` as shipped.

Ours in bfloat16, compiled (`CompiledCodec`), a CUDA graph for the whole: from image to symbols of unit power, and from
received symbols to image; the peers' networks alone, without power and pairing of symbols. Times are medians over
rounds, by CUDA events, per image; the ratio is that of medians. --weights adds what that costs in PSNR.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from cuda_clock import captured
from jscc_arms import WIDE_KERNELS, matching_filters, parameters
from torch import Tensor, nn

from chanlab.cli.common import table
from chanlab.errors import ChanlabError, UsageError
from chanlab.jscc import AdaptiveJSCC, CompiledCodec, DeepJSCC, JSCCModule
from chanlab.jscc.codec import Codec
from chanlab.jscc.contract import Received, Transmission
from chanlab.metrics import psnr
from chanlab.records import Record, record, save_records

ROOT = Path(__file__).resolve().parents[1]
RATIO = Fraction(1, 6)
SMALL = {"widths": (16, 32), "depths": (1, 3), "conditioning": 12}
"""Ours with as many parameters as kaira's class."""
EXAMPLES = """examples:
  python benchmarks/jscc.py --device cpu --rounds 2 --size 96 96                    (whether it runs)
  python benchmarks/jscc.py --device cuda --batch 1 8
  python benchmarks/jscc.py --device cuda --weights out/jscc_train/weights/adaptive.safetensors --images photos
"""


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", nargs=2, type=int, default=[512, 768], help="height and width (default: 512 768)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8], help="images at once (default: 1 8)")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each (default: 30)")
    parser.add_argument("--repeats", type=int, default=10, help="runs of a turn (default: 10)")
    parser.add_argument("--kaira", type=Path, help="folder that holds kaira/, where it isn't installed")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True, help="CUDA graph")
    parser.add_argument("--weights", type=Path, help="of AdaptiveJSCC as shipped, to measure PSNR in bfloat16")
    parser.add_argument("--images", type=Path, help="photographs for --weights")
    parser.add_argument("--results", type=Path, default=ROOT / "models" / "jscc" / "results.json")
    args = parser.parse_args(given)
    if (args.weights is None) != (args.images is None):
        raise UsageError("--weights and --images go together.")
    cuda = args.device.startswith("cuda")
    args.compile = cuda if args.compile is None else args.compile
    if cuda:
        torch.backends.cudnn.benchmark = True
        torch._dynamo.config.cache_size_limit = 64
    torch.manual_seed(0)
    records: list[Record] = []
    for peer, ours, name in pairs(args):
        for batch in args.batch:
            records += compare(peer, ours, name, batch, args)
            save_records(args.results, records)
            print(f"{name}, {batch} at once: {records[-1]['ratio']:.2f} times as fast", flush=True)
    rows = [
        [
            f"{r['condition']['peer']}, {r['condition']['batch']} at once",
            f"{r['parameters'] / 1e6:.3f} / {r['peer_parameters'] / 1e6:.3f}",
            f"{1e3 / r['value']:.3f}",
            f"{1e3 / r['peer_value']:.3f}",
            f"{r['ratio']:.2f}",
        ]
        for r in records
    ]
    print(table(["peer", "M parameters, ours / peer", "ours ms/image", "peer ms/image", "ratio"], rows))
    if args.weights is not None:
        save_records(args.results, precision(args))


def pairs(args: argparse.Namespace) -> list[tuple[nn.Module, Codec, str]]:
    """Peers, ours of equal parameters, and names."""
    found: list[tuple[nn.Module, Codec, str]] = []
    kaira = load_kaira(args.kaira)
    if kaira is None:
        print("kaira isn't here: compared with our plain DeepJSCC alone (see --help)", file=sys.stderr)
    else:
        found.append((kaira, AdaptiveJSCC(RATIO, **SMALL), "kaira Bourtsoulatze2019DeepJSCC"))  # type: ignore[arg-type]
    shipped = AdaptiveJSCC(RATIO)
    filters = matching_filters(DeepJSCC, RATIO, parameters(AdaptiveJSCC, RATIO))
    found.append((Chain(DeepJSCC(RATIO, filters, WIDE_KERNELS)), shipped, "plain DeepJSCC"))
    return found


class Chain(nn.Module):
    """Encoder, then decoder, with nothing between them.

    Args:
        codec: Of which the networks alone are run.
    """

    def __init__(self, codec: DeepJSCC) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, images: Tensor) -> Tensor:
        """Images `[batch, 3, height, width]`."""
        conditions = images.new_full((len(images),), 10.0)
        return self.codec.synthesis(self.codec.analysis(images, conditions), conditions)


def load_kaira(folder: Path | None) -> nn.Module | None:
    """Encoder and decoder of kaira's DeepJSCC for k/n = 1/6; None if the package isn't here."""
    if folder is None:
        spec = find_spec("kaira")
        if spec is None or not spec.submodule_search_locations:
            return None
        package = Path(next(iter(spec.submodule_search_locations)))
    else:
        package = folder / "kaira"
        if not package.is_dir():
            raise UsageError(f"there is no {package}: --kaira is the folder that holds it.")
    for name in ("kaira", "kaira.models", "kaira.models.image"):  # without what their __init__ would import
        module = ModuleType(name)
        module.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    peer: Any = importlib.import_module("kaira.models.image.bourtsoulatze2019_deepjscc")
    filters = 16  # 16 real values for 4 x 4 x 3: k/n = 1/6
    return nn.Sequential(peer.Bourtsoulatze2019DeepJSCCEncoder(filters), peer.Bourtsoulatze2019DeepJSCCDecoder(filters))


def compare(peer: nn.Module, ours: Codec, name: str, batch: int, args: argparse.Namespace) -> list[Record]:
    """Times of both, in turns."""
    device = torch.device(args.device)
    images = torch.rand(batch, 3, *args.size, device=device)
    peer, ours = peer.to(device).eval(), ours.to(device).eval()
    contenders = {"peer": eager(peer, images), "ours": fast(ours, images, args)}
    times: dict[str, list[float]] = {key: [] for key in contenders}
    for run in contenders.values():
        for _ in range(3):
            run()
    for _ in range(args.rounds):
        for key, run in contenders.items():
            times[key].append(clock(run, args.repeats, device) / batch)
    medians = {key: statistics.median(values) for key, values in times.items()}
    condition = {"peer": name, "batch": batch, "size": "x".join(map(str, args.size)), "ratio": str(RATIO)}
    return [
        record(
            system="adaptive",
            metric="images_per_second",
            value=1 / medians["ours"],
            deviation=None,
            condition=condition,
            n=args.rounds * args.repeats * batch,
            unit="1/s",
            peer_value=1 / medians["peer"],
            ratio=medians["peer"] / medians["ours"],
            parameters=sum(p.numel() for p in ours.parameters()),
            peer_parameters=sum(p.numel() for p in peer.parameters()),
        )
    ]


def eager(network: nn.Module, images: Tensor) -> Callable[[], Any]:
    """The peer as its users run it."""

    def run() -> None:
        with torch.inference_mode():
            network(images)

    return run


def fast(codec: Codec, images: Tensor, args: argparse.Namespace) -> Callable[[], Any]:
    """Ours: bfloat16, compiled, one CUDA graph from image to symbols and from symbols to image."""
    device = images.device.type
    if args.compile:
        codec = cast(Codec, CompiledCodec(codec))
    snr = torch.full((len(images),), 10.0, device=images.device)
    shape = (3, *args.size)
    uses = torch.zeros_like(snr, dtype=torch.int64)

    def encode() -> Transmission:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return codec.encode(images, snr)

    noise = torch.full_like(encode().symbols.real, 0.1)
    gain = torch.ones_like(noise)

    def run() -> Tensor:
        sent = encode()
        received = Received(sent.symbols, sent.used, snr, noise, gain, uses, uses, side=sent.side)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            return codec.decode(received, shape)

    if device != "cuda" or not args.graph:
        return run
    return captured(run)


def clock(run: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Seconds of a run, mean of some in a row."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - begin) / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def precision(args: argparse.Namespace) -> list[Record]:
    """PSNR of the shipped weights in float32 and in bfloat16, on test photographs."""
    from chanlab.jscc.images import ImageDataModule
    from chanlab.weights import load_weights

    codec = AdaptiveJSCC(RATIO)
    load_weights(codec, args.weights)
    module = JSCCModule(codec).to(args.device).eval()
    data = ImageDataModule(args.images, eval_size=tuple(args.size), batch_size=8)
    made, rows = [], []
    for snr in (0.0, 10.0, 20.0):
        found: dict[bool, list[Tensor]] = {False: [], True: []}
        for batch in data.batches("test", args.device):
            for low, values in found.items():
                with torch.no_grad(), torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=low):
                    received, _ = module.transmit(batch["image"], batch["id"], snr, RATIO)
                values.append(psnr(received, batch["image"], "none").float().cpu())
        whole, low = (torch.cat(found[key]) for key in (False, True))
        condition = {"snr_db": snr, "ratio": str(RATIO), "size": "x".join(map(str, args.size)), "precision": "bf16"}
        made.append(
            record(
                system="adaptive",
                metric="psnr_over_float32",
                value=float((low - whole).mean()),
                data="photographs",
                split="test",
                condition=condition,
                n=len(low),
                unit="dB",
            )
        )
        rows.append([f"{snr:g} dB", f"{float(whole.mean()):.3f}", f"{float(low.mean()):.3f}"])
    print(table(["SNR", "PSNR in float32", "in bfloat16"], rows))
    return made


if __name__ == "__main__":
    try:
        main()
    except ChanlabError as error:
        sys.exit(f"{type(error).__name__}: {error}")
