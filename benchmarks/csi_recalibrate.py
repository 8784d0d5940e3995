"""Fits LearnedWiener's correction of stated errors (`chanlab.csi.Recalibration`) and writes weights that hold it.

Windows are drawn as training draws them, from the cells of CSI-4CAST's regular set, and from the same channel models
changed beyond them: other delay spreads and speeds, clusters' delays jittered and exchanged, their powers changed, some
left out, and what `augment_windows` does. Neither other models nor other sets take part. Kinds are pairs of model and
delay spread of the regular cells. Predictions stay as they are: all other weights are written as they were read.

The loss is the mean pinball loss of the logarithm of |error|² over six quantiles; a tenth of the windows is held out,
and what it says before and after is printed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from chanlab.channels import CDL, CIR, subcarrier_frequencies
from chanlab.cli.common import run_script, script_parser, time_text
from chanlab.cli.demo import models
from chanlab.csi import LearnedWiener, load_weights
from chanlab.csi.beam_taps import square
from chanlab.csi.recalibration import Circumstances, Recalibration, Signatures
from chanlab.csi.window_augmentation import augment_windows
from chanlab.data.protocol import CSI4CAST, Cell, add_noise
from chanlab.data.streamed import cell_channels
from chanlab.errors import UsageError
from chanlab.weights import save_part

MODELS = Path(__file__).resolve().parents[1] / "models" / "csi"
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
ENTRIES = 256
"""Of each window, band and step, drawn at random."""
SPEEDS = ((0.3, 6.0), (6.0, 25.0), (25.0, 60.0))
"""Ranges of changed windows' speeds [m/s]."""
SPREADS = (20e-9, 500e-9)
"""Range of their delay spreads [s]; their logarithm is uniform."""
LONGEST = 5.2e-6
"""Delays are cut there [s]: what the predictor's taps hold."""
FAMILIAR = 3.0
"""Weight of windows of the regular cells: some changed ones look just like them, but are predicted far worse."""
EXAMPLES = """examples:
  python benchmarks/csi_recalibrate.py --device cuda --windows 20000 --out out/csi/recalibrated.safetensors
  python benchmarks/csi_coverage.py --device cuda --weights out/csi/recalibrated.safetensors --samples 10 --every 5
"""


class Windows(NamedTuple):
    """What is kept of windows: circumstances, errors and what was stated of them.

    Attributes:
        signatures: See `Signatures`.
        window: See `Circumstances`.
        steps: Of both bands, `[window, band, horizon, 4]`.
        error: |error|² of some entries, `[window, band, horizon, entry]`.
        variance: Stated, likewise.
        shape: Stated, likewise.
        kind: Number of the kind, int64 `[window]`; -1: a changed window.
    """

    signatures: Signatures
    window: Tensor
    steps: Tensor
    error: Tensor
    variance: Tensor
    shape: Tensor
    kind: Tensor

    def at(self, index: Tensor) -> Windows:
        """Some of them."""
        return Windows(Signatures(*(x[index] for x in self.signatures)), *(x[index] for x in self[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Draw windows, fit, write."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--model", default="learned_wiener", metavar="NAME", help="recipe (default: learned_wiener)")
    p.add_argument("--weights", type=Path, help="its weights (default: those beside the recipe)")
    p.add_argument("--windows", type=int, default=5000, help="to fit on (default: 5000)")
    p.add_argument("--batch-size", type=int, default=20)
    p.add_argument("--steps", type=int, default=1500, help="of the fit (default: 1500)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cpu")
    p.add_argument("--out", type=Path, default=Path("out/csi/recalibrated.safetensors"))
    return run_script(run, p.parse_args(argv), "csi_recalibrate")


def run(args: argparse.Namespace) -> None:
    """All of it."""
    predictor = models.predictor(args.model)
    if not isinstance(predictor, LearnedWiener) or predictor.duplex != "both":
        raise UsageError(f"{args.model} is no LearnedWiener for both bands: take a recipe with `duplex: both`.")
    source = args.weights or MODELS / f"{args.model}.safetensors"
    load_weights(predictor, source)
    predictor = predictor.to(args.device).eval()
    clear(predictor.recalibration)
    start = time.monotonic()
    found = collect(predictor, args.windows, args.batch_size, args.seed, args.device)
    before, after = fit(predictor.recalibration, found, args.steps, args.seed)
    save_part(predictor, "recalibration.", source, args.out)
    print(f"pinball loss of {len(found.kind) // 10} windows held out: {before:.4f} before, {after:.4f} after")
    print(f"done in {time_text(time.monotonic() - start)}; weights in {args.out}")


def clear(recalibration: Recalibration) -> None:
    """No correction."""
    for buffer in recalibration.buffers():
        buffer.zero_()


@torch.no_grad()
def collect(predictor: LearnedWiener, count: int, batch_size: int, seed: int, device: torch.device | str) -> Windows:
    """What the predictor states of windows and how it errs; a third or so are of the regular cells."""
    seen: list[Circumstances] = []
    hook = predictor.recalibration.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    predictor.recalibration.observing = True
    generator = torch.Generator().manual_seed(seed)
    parts = []
    try:
        progress = tqdm(total=count, unit="window", leave=False)
        for history, target, noise_variance, kind in windows(batch_size, generator, device):
            seen.clear()
            found = predictor.distribution(history, noise_variance)
            rows = [square(target - found.mean), found.variance, found.shape]
            entries = [x.unflatten(-1, (2, -1)).permute(0, 4, 3, 1, 2, 5).flatten(3) for x in rows]  # type: ignore[no-untyped-call]
            chosen = torch.randint(0, entries[0].shape[-1], (ENTRIES,), generator=generator).to(device)
            steps = torch.stack([band.steps for band in seen], 1)
            kinds = torch.full((len(history),), kind, device=device)
            error, variance, shape = (x[..., chosen] for x in entries)
            parts.append(Windows(seen[0].signatures, seen[0].window, steps, error, variance, shape, kinds))
            progress.update(len(history))
            if progress.n >= count:
                break
    finally:
        predictor.recalibration.observing = False
        hook.remove()
    signatures = Signatures(*(torch.cat(x) for x in zip(*(p.signatures for p in parts), strict=True)))
    return Windows(signatures, *(torch.cat(x) for x in zip(*(p[1:] for p in parts), strict=True)))


def windows(
    batch_size: int, generator: torch.Generator, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Without end: history, targets on both bands, noise variance, and the number of the batch's kind.

    Per round a batch of each kind, its speeds taking turns, and two of changed channels of each model and range of
    speeds.
    """
    cells = CSI4CAST.cells["regular"]
    kinds = list(dict.fromkeys((c.model, c.delay_spread) for c in cells))
    speeds = list(dict.fromkeys(c.speed for c in cells))
    names = list(dict.fromkeys(model for model, _ in kinds))
    sources: dict[tuple[str, float, float | tuple[float, float]], CDL] = {}

    def drawn(model: str, spread: float, speed: float | tuple[float, float]) -> CIR:
        name = (model, spread, speed)
        if name not in sources:
            sources[name] = cell_channels(CSI4CAST, Cell(model, spread, speed))  # type: ignore[arg-type]
        steps = CSI4CAST.history + CSI4CAST.horizons
        chosen = int(torch.randint(0, 2**31, (), generator=generator))
        return sources[name].draw(batch_size, chosen, steps, CSI4CAST.interval, torch.device(device))

    turn = 0
    while True:
        for kind, (model, spread) in enumerate(kinds):
            cir = drawn(model, spread, speeds[(turn + kind) % len(speeds)])
            yield *window(cir, generator), kind
        for model in names:
            for speed in SPEEDS:
                for _ in range(2):
                    history, target, noise = window(changed(drawn(model, 100e-9, speed), generator), generator)
                    with torch.random.fork_rng():
                        torch.manual_seed(int(torch.randint(0, 2**31, (), generator=generator)))
                        array = (2, CSI4CAST.columns, CSI4CAST.rows)
                        changes = augment_windows(history, target, noise, array, 1.5, 0.15)
                    assert changes[2] is not None
                    yield changes[0], changes[1], changes[2], -1
        turn += 1


def window(cir: CIR, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy history, targets and noise variance; the SNR is uniform over the protocol's range."""
    p = CSI4CAST
    grid = subcarrier_frequencies(p.fft_size, p.subcarrier_spacing).to(cir.delay.device)
    lower, upper = grid[: p.num_subcarriers], grid[p.band_distance :]
    cir = cir.normalized(grid)
    low, high = p.snr_db
    snr = low + (high - low) * torch.rand(len(cir), generator=generator)
    key = torch.randint(0, 2**62, (len(cir),), generator=generator)
    history = cir.at(slice(p.history)).cfr(lower)
    noisy, variance = add_noise(history, snr.to(history.device), key.to(history.device))
    return noisy, cir.at(slice(p.history, None)).cfr(torch.cat([lower, upper])), variance


def changed(cir: CIR, generator: torch.Generator) -> CIR:
    """Channels of a delay spread of 100 ns with other delays and powers: a third scaled alone, others jittered too."""
    batch, taps = cir.delay.shape

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator)

    def normal() -> Tensor:
        return torch.randn(batch, taps, generator=generator)

    low, high = (math.log(x / 100e-9) for x in SPREADS)
    scale = torch.exp(low + (high - low) * uniform(batch, 1))
    strength = torch.where(uniform(batch, 1) < 0.35, 0.0, uniform(batch, 1))
    exchanged = (uniform(batch, 1) < 0.4) & (strength > 0)
    order = torch.where(exchanged, uniform(batch, taps).argsort(1), torch.arange(taps))
    factor = scale * torch.exp(strength * normal())
    amplitude = 10 ** (strength * 6 * normal() / 20) * (uniform(batch, taps) > 0.4 * strength)
    amplitude[:, 0].clamp_(min=0.3)
    device = cir.delay.device
    delay = (cir.delay * factor.to(device)).gather(1, order.to(device)).clamp_max(LONGEST)
    return CIR(cir.coefficients * amplitude.to(device)[:, None, None, None], delay, cir.carrier)


def fit(recalibration: Recalibration, found: Windows, steps: int, seed: int) -> tuple[float, float]:
    """Sets the correction from windows; returns the loss of the tenth held out, before and after."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(found.kind), generator=generator).to(found.kind.device)
    held, used = found.at(shuffled[: len(shuffled) // 10]), found.at(shuffled[len(shuffled) // 10 :])
    before = float(loss(held, torch.zeros_like(held.error[..., :2])))
    known = used.kind >= 0
    for part, signature in zip(recalibration.familiarity, used.signatures, strict=True):
        part.estimate(signature[known], used.kind[known])  # type: ignore[operator]
    inputs = _inputs(recalibration, used)
    deviation, mean = torch.std_mean(inputs, (0, 2))
    recalibration.centre.copy_(mean)
    recalibration.gain.copy_((deviation + 1e-3).reciprocal())
    for weight in (recalibration.first, recalibration.first_bias):
        bound = recalibration.first.shape[-1] ** -0.5
        weight.copy_((2 * torch.rand(weight.shape, generator=generator) - 1) * bound)
    trained = [recalibration.first, recalibration.first_bias, recalibration.second, recalibration.second_bias]
    share = torch.where(known, FAMILIAR, 1.0).cpu()
    optimizer = torch.optim.AdamW([x.requires_grad_() for x in trained], 3e-3, weight_decay=0.02)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 30) * (1 - step / steps)
        rows = torch.multinomial(share, 128, replacement=True, generator=generator).to(known.device)
        first = int(torch.randint(0, ENTRIES - 15, (), generator=generator))
        some = used.at(rows)
        some = some._replace(**{n: getattr(some, n)[..., first : first + 16] for n in ("error", "variance", "shape")})
        surprise = loss(some, _corrections(recalibration, some))
        optimizer.zero_grad()
        surprise.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for buffer in trained:
        buffer.requires_grad_(False)
        buffer.grad = None
    return before, float(loss(held, _corrections(recalibration, held)))


def loss(found: Windows, correction: Tensor) -> Tensor:
    """Mean pinball loss of log |error|² under corrections `[window, band, horizon, 2]`."""
    variance = found.variance * torch.exp(correction[..., :1])
    above = found.shape - 1.1
    shape = 1.1 + functional.softplus(above + torch.log(-torch.expm1(-above.clamp_min(1e-6))) + correction[..., 1:])
    error, total = torch.log(found.error + 1e-12), torch.zeros((), device=variance.device)
    for probability in QUANTILES:
        square_bound = variance * (shape - 1) * torch.expm1(-math.log1p(-probability) / shape)
        beyond = error - torch.log(square_bound + 1e-12)
        total = total + torch.maximum(probability * beyond, (probability - 1) * beyond).mean()
    return total / len(QUANTILES)


def _corrections(recalibration: Recalibration, found: Windows) -> Tensor:
    bands = [Circumstances(*found[:2], found.steps[:, band]) for band in range(2)]
    return torch.stack([recalibration(seen, band) for band, seen in enumerate(bands)], 1)


def _inputs(recalibration: Recalibration, found: Windows) -> Tensor:
    bands = [Circumstances(*found[:2], found.steps[:, band]) for band in range(2)]
    return torch.stack([recalibration.inputs(seen) for seen in bands], 1)


if __name__ == "__main__":
    raise SystemExit(main())
