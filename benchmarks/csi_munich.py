"""CSI predictors on ray-traced users in Munich, in areas that were held out: what is left to gain, and who gains it.

The task: 16 noisy snapshots 2.5 ms apart in, the next four asked for, without noise; 32 ports x 48 subcarriers. Users
move at 1 to 15 m/s: at 3.5 GHz their Doppler shifts reach 175 Hz, and snapshots at 400 Hz resolve 200 Hz. Every
classical predictor's order is chosen on split `val`, for each SNR, by the mean NMSE per antenna 5 ms ahead. Ours comes
in three: with the shipped weights, which have never seen a ray-traced channel; fine-tuned on split `train`; and trained
there from random weights for as many steps. With --limits, LMMSE predictions that know the rays' delays, directions,
Doppler shifts and powers, but not their phases: what a beam and delay tap alone can give, and all of them together.

NMSE [dB] over windows, with 95 % intervals from a bootstrap over trajectories. Writes records to
models/csi/results.json; then `make cards`.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from chanlab.channels import Paths
from chanlab.channels.coefficients import port_coefficients
from chanlab.cli.common import run_script, script_parser, table
from chanlab.cli.demo import models
from chanlab.csi import (
    AR,
    ESPRIT,
    PAD,
    CSIPredictionModule,
    MatrixPencil,
    NoPrediction,
    VectorKalman,
    load_weights,
    save_weights,
)
from chanlab.csi.localised_taps import localised_taps
from chanlab.csi.ray_pursuit import RayPursuit
from chanlab.data import CSIBatch, CSIDataModule, CSIWindows
from chanlab.data.views import CSIView, PathWindows
from chanlab.errors import UsageError
from chanlab.metrics import Interval, bootstrap_interval, nmse_terms, to_db
from chanlab.records import Record, record, save_records
from chanlab.schedule import warmup_cosine

MODELS = Path(__file__).resolve().parents[1] / "models" / "csi"
EXAMPLES = """examples:
  chanlab generate munich_mobility --samples 1200 --workers 2 --out data/munich_mobility
  python benchmarks/csi_munich.py --limits                                  (baselines, shipped weights, limits)
  python benchmarks/csi_munich.py --train-only --finetune-minutes 1 --device cuda --workers 12
  python benchmarks/csi_munich.py --systems fine-tuned scratch              (what was trained, judged)
"""
RECIPE = "learned_wiener_munich"
"""How ours is fine-tuned."""

AHEAD = 5e-3
"""Time ahead at which systems are compared and orders chosen [s]."""

OURS = {
    "ours": MODELS / "learned_wiener.safetensors",
    "fine-tuned": Path("ours_fine_tuned.safetensors"),
    "scratch": Path("ours_from_scratch.safetensors"),
}
"""Weights of each kind of ours, those of the last two in the folder of `--out`."""

ROWS = {"ours": "ours, zero-shot", "fine-tuned": "ours, fine-tuned", "scratch": "ours, from scratch"}
LIMITS = {False: "rays known, each beam and tap alone", True: "rays known"}

Predict = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Candidate:
    """A classical predictor with certain arguments."""

    kind: Callable[..., nn.Module]
    arguments: dict[str, Any]

    def build(self, view: CSIView) -> nn.Module:
        """The predictor for a view's steps and array."""
        array = view.tx_array
        shapes: dict[Any, tuple[int, ...]] = {
            PAD: (array.num_ports // array.num_rows, array.num_rows),
            **dict.fromkeys(
                (VectorKalman, ESPRIT, MatrixPencil, RayPursuit),
                (array.num_polarizations, array.num_cols, array.num_rows),
            ),
        }
        shape = {"tx_shape": shapes[self.kind]} if self.kind in shapes else {}
        return self.kind(horizons=view.horizon, **shape, **self.arguments)


def grid(kind: Callable[..., nn.Module], **values: Sequence[Any]) -> list[Candidate]:
    """Candidates with every combination of arguments."""
    found: list[dict[str, Any]] = [{}]
    for name, options in values.items():
        found = [{**one, name: option} for one in found for option in options]
    return [Candidate(kind, one) for one in found]


CANDIDATES = {
    "no prediction": [Candidate(NoPrediction, {})],
    "ar": grid(AR, order=(4, 6, 8, 10, 12, 15)),
    "pad": grid(PAD, order=(2, 4, 6, 8), margin=(2.0, 4.0)),
    "kalman": grid(VectorKalman, order=(2, 4, 6, 8), margin=(2.0, 4.0)),
    "esprit": grid(ESPRIT, share=("tap", "bin"), order=("noise", "mdl"), window=(10, 12, 14)),
    "matrix pencil": grid(MatrixPencil, share=("tap", "bin"), order=("noise", "mdl"), pencil=(9, 11, 13)),
    "ray pursuit": grid(RayPursuit, decay=(True, False)),
}


@dataclass(frozen=True)
class Scores:
    """What a predictor reached on each window and step, float64 `[window, step]` on the CPU.

    Attributes:
        antenna_ratio: Σ|e|² / Σ|h|² over subcarriers, averaged over antenna pairs.
        error: Σ|e|² over antennas and subcarriers.
        power: Σ|h|².
        sample_id: Trajectory of each window, `[window]`.
    """

    antenna_ratio: Tensor
    error: Tensor
    power: Tensor
    sample_id: Tensor

    def interval(self, metric: str, step: int) -> Interval:
        """One figure at one step (from 0), linear, with its interval over trajectories."""
        ratio = (self.error / self.power)[:, step]
        if metric == "nmse_pooled":
            return bootstrap_interval(self.error[:, step], self.power[:, step], groups=self.sample_id)
        if metric == "nmse_median":
            return bootstrap_interval(ratio, groups=self.sample_id, statistic="median", resamples=200)
        values = {"nmse_per_antenna": self.antenna_ratio[:, step], "nmse_per_sample": ratio}
        return bootstrap_interval(values[metric], groups=self.sample_id)


def batches(windows: CSIWindows, size: int, device: str) -> Iterator[tuple[PathWindows, CSIBatch]]:
    """Windows in their order, as paths and as channels."""
    for first in range(0, len(windows), size):
        fetched = windows.__getitems__(range(first, min(first + size, len(windows))))
        if not isinstance(fetched, PathWindows):
            raise UsageError("this benchmark needs a store of paths: chanlab generate munich_mobility")
        fetched = PathWindows(*(x.to(device) for x in fetched))
        yield fetched, windows.to_batch(fetched)


@torch.inference_mode()
def evaluate(
    systems: dict[str, Predict], windows: CSIWindows, size: int, device: str, limits: bool = False
) -> dict[str, Scores]:
    """Run predictors over windows.

    Args:
        systems: By name.
        windows: At one SNR.
        size: Windows per call.
        device: Where everything is computed.
        limits: Add what knowing the rays would give.
    """
    parts: dict[str, list[Tensor]] = {}
    ids: list[Tensor] = []
    total = -(-len(windows) // size)
    for fetched, batch in tqdm(batches(windows, size, device), total=total, unit="batch", leave=False):
        found = {name: predict(batch.history, batch.noise_variance) for name, predict in systems.items()}
        if limits:
            found |= {LIMITS[joint]: known_rays(fetched, batch, windows, joint) for joint in LIMITS}
        for name, prediction in found.items():
            error, power = nmse_terms(prediction, batch.target, dim=-1)
            terms = [(error / power).mean((1, 2)), error.sum((1, 2)), power.sum((1, 2))]
            parts.setdefault(name, []).append(torch.stack(terms).double().cpu())
        ids.append(batch.sample_id.cpu())
    sample_id = torch.cat(ids)
    return {name: Scores(*torch.cat(some, 1), sample_id) for name, some in parts.items()}


def known_rays(fetched: PathWindows, batch: CSIBatch, windows: CSIWindows, joint: bool) -> Tensor:
    """LMMSE prediction by one who knows the rays around the history's last snapshot, but not their phases.

    The rays are those of the two anchors that the snapshot lies between, each with its delay, its Doppler shift and its
    amplitude at every port, times an unknown complex gain of zero mean and unit variance (weighted by nearness of the
    anchor). Births and deaths of rays are not known: this is a reference, not a bound.

    Args:
        fetched: The windows as paths.
        batch: The same as channels.
        windows: Where they come from.
        joint: From all of the history; False: each beam and delay tap from its own, from the Doppler spectrum that the
            rays have there.

    Returns:
        Complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.
    """
    view = windows.view
    lead, count = fetched.delay.shape[:-1], fetched.delay.shape[-1]
    paths = Paths(
        *(fetched.transfer, fetched.delay, fetched.departure, fetched.arrival, fetched.doppler),
        interactions=torch.zeros(*lead, 0, count, dtype=torch.int8, device=fetched.delay.device),
        vertices=fetched.delay.new_zeros(*lead, 2, 3, count),
        mask=fetched.mask,
        carrier=windows.carrier,
    )
    ports = port_coefficients(
        paths,
        view.tx_array,
        view.rx_array,
        tx_orientation=windows.tx_orientation.to(fetched.delay),
        rx_orientation=fetched.rx_orientations,
    )
    times, frequencies = (x.to(fetched.anchor_times) for x in (view.times(), view.frequencies()))
    now = times[view.history - 1]
    predict = _from_all if joint else _from_each_token
    made = []
    for b in range(len(batch.history)):
        at = fetched.anchor_times[b]
        left = int((at <= now).sum().clamp(1, len(at) - 1)) - 1
        share = float(((now - at[left]) / (at[left + 1] - at[left])).clamp(0.0, 1.0))
        shapes, delays, turns = [], [], []
        for anchor, weight in ((left, 1 - share), (left + 1, share)):
            seen = fetched.mask[b, anchor]
            shapes.append(math.sqrt(weight) * ports[b, anchor].flatten(0, 1)[:, seen].to(torch.complex128))
            delays.append(fetched.delay[b, anchor, seen].double())
            turns.append((times - at[anchor])[:, None] * fetched.doppler[b, anchor, seen].double())
        band = torch.exp(-2j * torch.pi * frequencies[:, None] * torch.cat(delays))
        course = torch.exp(2j * torch.pi * torch.cat(turns, 1))
        history = batch.history[b].flatten(0, 1).to(torch.complex128)
        noise = batch.noise_variance[b].double()
        made.append(predict(torch.cat(shapes, 1), band, course, history, noise, view))
    return torch.stack(made).reshape(batch.target.shape).to(batch.target)


def _from_all(shape: Tensor, band: Tensor, course: Tensor, history: Tensor, noise: Tensor, view: CSIView) -> Tensor:
    """Each ray's gain from all ports, snapshots and subcarriers.

    Args:
        shape: Of each ray over ports, `[port, ray]`.
        band: Over subcarriers, `[subcarrier, ray]`.
        course: Over history and horizon, `[time, ray]`.
        history: `[port, time, subcarrier]`.
        noise: Variance.
        view: Of the window.

    Returns:
        `[port, horizon, subcarrier]`.
    """
    past = course[: view.history]
    gram = (shape.mH @ shape) * (band.mH @ band) * (past.mH @ past)
    matched = torch.einsum("atr,ar->tr", torch.einsum("atf,fr->atr", history, band.conj()), shape.conj())
    matched = (matched * past.conj()).sum(0)
    gain = torch.linalg.solve(gram + noise * torch.eye(len(gram)).to(gram), matched)
    return torch.einsum("ar,hr,fr->ahf", shape * gain, course[view.history :], band)


def _from_each_token(
    shape: Tensor, band: Tensor, course: Tensor, history: Tensor, noise: Tensor, view: CSIView
) -> Tensor:
    """As `_from_all`, but each beam and delay tap from its own snapshots; polarizations share spectra."""
    array = view.tx_array
    grid_shape = (-1, array.num_cols, array.num_rows)
    taps = localised_taps(view.num_subcarriers).to(history)
    seen = (history @ taps.conj()).mT.unflatten(0, grid_shape)  # [series, column, row, tap, time]
    seen = torch.fft.fft2(seen, dim=(1, 2), norm="ortho")
    beams = torch.fft.fft2(shape.unflatten(0, grid_shape), dim=(1, 2), norm="ortho").abs().square().mean(0)
    power = beams[..., None, :] * (taps.mH @ band).abs().square()  # [column, row, tap, ray]
    covariance = torch.einsum("xykr,tr,sr->xykts", power.to(course), course, course.conj())
    past = slice(view.history)
    floor = noise * taps.abs().square().sum(0)
    loaded = covariance[..., past, past] + floor[:, None, None] * torch.eye(view.history).to(covariance)
    found = covariance[..., view.history :, past] @ torch.linalg.solve(loaded, seen[..., None])
    back = torch.fft.ifft2(found[..., 0], dim=(1, 2), norm="ortho").flatten(0, 2)  # [port, tap, horizon]
    return back.mT @ taps.mT


def choose(names: Iterable[str], windows: CSIWindows, size: int, device: str) -> dict[str, Candidate]:
    """The candidate of each classical predictor with the least mean NMSE per antenna 5 ms ahead."""
    step = step_of(windows.view)
    chosen = {}
    for name in names:
        some = CANDIDATES[name]
        if len(some) == 1:
            chosen[name] = some[0]
            continue
        systems = {str(i): c.build(windows.view) for i, c in enumerate(some)}
        scores = evaluate(systems, windows, size, device)
        reached = {i: float(s.antenna_ratio[:, step].mean()) for i, s in scores.items()}
        chosen[name] = some[int(min(reached, key=reached.__getitem__))]
    return chosen


def step_of(view: CSIView) -> int:
    """Which step lies 5 ms ahead."""
    for i, step in enumerate(view.horizons):
        if math.isclose(step * view.interval, AHEAD):
            return i
    raise UsageError(
        f"no step of the view lies {AHEAD * 1e3:g} ms ahead: take an interval of which 5 ms is a multiple."
    )


def ours(view: CSIView) -> nn.Module:
    """The predictor of the recipe learned_wiener_munich, untrained."""
    node = copy.deepcopy(models.read(RECIPE)["model"]["init_args"]["predictor"])
    array = view.tx_array
    node["init_args"] |= {
        "horizons": view.horizon,
        "tx_shape": [array.num_polarizations, array.num_cols, array.num_rows],
    }
    built: nn.Module = models.instantiate(node, nn.Module)
    return built


def train(
    module: CSIPredictionModule,
    data: CSIDataModule,
    device: str,
    minutes: float = 0.0,
    steps: int = 0,
    clip: float = float("inf"),
) -> dict[str, Any]:
    """Train on split `train`, in place, as the module says; the trunk in bfloat16 on a GPU.

    Windows are drawn anew each epoch.

    Args:
        module: What is trained, and its optimizer and rate.
        data: Where windows come from.
        device: Where it is trained.
        minutes: How long; 0: by `steps`.
        steps: How many steps; 0: by `minutes`.
        clip: Largest norm of the gradient.

    Returns:
        Steps, seconds, and the loss every 20th step.
    """
    kind = torch.device(device).type
    module.to(device).train()
    model, optimizer = module.predictor, module.configure_optimizers()
    loader = data.train_dataloader()
    done, skipped, losses, start = 0, 0, [], time.monotonic()
    bar = tqdm(total=steps or None, unit="step", mininterval=5.0)
    while True:
        loader.sampler.set_epoch(loader.sampler.epoch + 1)  # type: ignore[attr-defined]
        for fetched in loader:
            passed = (time.monotonic() - start) / 60
            part = done / steps if steps else passed / minutes
            if part >= 1.0:
                bar.close()
                return {"steps": done, "seconds": passed * 60, "skipped": skipped, "losses": losses}
            for group in optimizer.param_groups:
                group["lr"] = module.lr * warmup_cosine(int(1e4 * part), 1e4, module.warmup)
            batch = data.on_after_batch_transfer(type(fetched)(*(x.to(device) for x in fetched)), 0)
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                loss = model.training_loss(*batch[:3])  # type: ignore[operator]
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            if norm.isfinite():
                optimizer.step()
            else:
                skipped += 1
            if done % 20 == 0:
                losses.append(float(loss.detach()))
                bar.set_postfix(loss=f"{losses[-1]:.4f}")
            done += 1
            bar.update()


def to_records(scores: Scores, view: CSIView, snr_db: float, system: str, store: Any, **extra: Any) -> list[Record]:
    """Records of one system: per antenna and pooled at every step, all metrics 5 ms ahead."""
    made = []
    for i, ahead in enumerate(view.horizons):
        metrics = ["nmse_per_antenna", "nmse_pooled"]
        metrics += ["nmse_per_sample", "nmse_median"] if i == step_of(view) else []
        for metric in metrics:
            found = scores.interval(metric, i)
            value, low, high = (float(to_db(max(x, 1e-30))) for x in found[:3])
            made.append(
                record(
                    system=system,
                    data=store.recipe.name,
                    split="test",
                    condition={"snr_db": snr_db, "horizon": i + 1, "ahead_ms": round(ahead * view.interval * 1e3, 6)},
                    metric=metric,
                    value=value,
                    unit="dB",
                    n=len(scores.sample_id),
                    low=low,
                    high=high,
                    users=len(scores.sample_id.unique()),
                    **extra,
                )
            )
    return made


def shown(records: list[Record]) -> str:
    """A table of what was reached 5 ms ahead."""
    metrics = ("nmse_per_antenna", "nmse_pooled", "nmse_per_sample", "nmse_median")
    some = [r for r in records if r["condition"]["ahead_ms"] == AHEAD * 1e3]
    rows = []
    for snr, system in dict.fromkeys((r["condition"]["snr_db"], r["system"]) for r in some):
        mine = [r for r in some if (r["condition"]["snr_db"], r["system"]) == (snr, system)]
        value = {r["metric"]: r["value"] for r in mine}
        gap = next(r for r in mine if r["metric"] == "nmse_per_antenna")
        interval = f"{gap['low']:.2f} ... {gap['high']:.2f}"
        rows.append(
            [f"{snr:g} dB", system, f"{value[metrics[0]]:.2f}", interval, *(f"{value[m]:.2f}" for m in metrics[1:])]
        )
    return table(["SNR", "system", "per antenna", "95 %", "pooled", "per sample", "median"], rows)


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    p = script_parser(__doc__, EXAMPLES)
    p.add_argument("--store", type=Path, default=Path("data/munich_mobility"), help="store of munich_mobility")
    p.add_argument("--systems", nargs="+", choices=[*CANDIDATES, *OURS], help="default: all that are trained")
    p.add_argument("--snr-db", nargs="+", type=float, default=[5.0, 15.0, 25.0], help="of the histories [dB]")
    p.add_argument("--windows", type=int, default=2, help="windows of each trajectory that are judged (default: 2)")
    p.add_argument("--limits", action="store_true", help="add what knowing the rays would give")
    p.add_argument("--finetune-minutes", type=float, default=0.0, help="train ours first, for so long each")
    p.add_argument("--finetune-steps", type=int, default=0, help="the same by number of steps")
    p.add_argument("--train-only", action="store_true", help="judge nothing")
    batch_size = models.read(RECIPE)["data"]["init_args"]["batch_size"]
    p.add_argument("--batch-size", type=int, default=batch_size, help="windows per step of training")
    p.add_argument("--eval-batch-size", type=int, default=32, help="windows per call of a predictor")
    p.add_argument("--workers", type=int, default=2, help="processes that read windows in training")
    p.add_argument("--device", default="cpu")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--out", type=Path, default=Path("out/csi_munich"), help="folder of trained weights")
    p.add_argument("--results", type=Path, default=MODELS / "results.json", help="where the records go")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is asked, evaluate, print a table, write records."""
    return run_script(run, parser().parse_args(argv), "csi_munich")


def run(args: argparse.Namespace) -> None:
    """Everything."""
    if args.finetune_minutes or args.finetune_steps:
        train_ours(args)
    if args.train_only:
        return
    records: list[Record] = []
    for snr in args.snr_db:
        records += judge(args, snr)
        save_records(args.results, records)
    print(shown(records))


def train_ours(args: argparse.Namespace) -> None:
    """Fine-tune as the recipe says from the shipped weights, then train for as many steps from random ones; write both.

    From random weights the rate is that of the recipe learned_wiener.
    """
    recipe = models.read(RECIPE)
    fit = {k: v for k, v in recipe["model"]["init_args"].items() if k != "predictor"}
    new = models.read("learned_wiener")["model"]["init_args"]["lr"]
    minutes, steps = args.finetune_minutes, args.finetune_steps
    for name, rate in (("fine-tuned", fit["lr"]), ("scratch", new)):
        data = CSIDataModule(
            args.store, batch_size=args.batch_size, num_workers=args.workers, seed=args.seed, history=16, horizons=4
        )
        torch.manual_seed(args.seed)
        model = ours(data.view)
        if name == "fine-tuned":
            load_weights(model, OURS["ours"])
        module = CSIPredictionModule(model, **{**fit, "lr": rate})
        clip = recipe["trainer"]["gradient_clip_val"]
        told = train(module, data, args.device, 0.0 if steps else minutes, steps, clip)
        steps = told["steps"]
        told |= {
            "users": len(set(data.windows("train").sample_ids.tolist())),
            "batch_size": args.batch_size,
            "lr": rate,
        }
        path = args.out / OURS[name]
        save_weights(model, path, 8)
        path.with_suffix(".json").write_text(json.dumps(told), encoding="utf-8")
        print(f"{path}: {told['steps']} steps, {told['seconds']:.0f} s, {told['skipped']} skipped", file=sys.stderr)


def judge(args: argparse.Namespace, snr_db: float) -> list[Record]:
    """Records of all systems at one SNR."""

    def windows(split: str) -> CSIWindows:
        return CSIWindows(
            args.store,
            split,
            windows_per_sample=args.windows,
            snr_db=snr_db,
            seed=args.seed,
            history=16,
            horizons=4,
        )

    test = windows("test")
    asked = args.systems or [*CANDIDATES, *(n for n in OURS if (args.out / OURS[n]).is_file())]
    systems: dict[str, Predict] = {}
    extra: dict[str, dict[str, Any]] = {}
    classical = [name for name in CANDIDATES if name in asked]
    if classical:
        for name, candidate in choose(classical, windows("val"), args.eval_batch_size, args.device).items():
            systems[name] = candidate.build(test.view)
            extra[name] = {"arguments": candidate.arguments}
    for name in (name for name in OURS if name in asked):
        path = args.out / OURS[name]
        model = ours(test.view)
        load_weights(model, path)
        systems[ROWS[name]] = model.to(args.device).eval()
        if path.with_suffix(".json").is_file():
            told = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
            extra[ROWS[name]] = {"training": {k: v for k, v in told.items() if k != "losses"}}
    scores = evaluate(systems, test, args.eval_batch_size, args.device, args.limits)
    made = []
    for name, found in scores.items():
        made += to_records(found, test.view, snr_db, name, test.store, seeds=[args.seed], **extra.get(name, {}))
    return made


if __name__ == "__main__":
    sys.exit(main())
