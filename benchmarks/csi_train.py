"""Trains predictors by their recipes on CSI-4CAST's protocol, each on the same budget, and evaluates what was kept.

A grid of system, duplex and seed. Every run has the same budget of minutes (or windows) of training on fresh channels,
the recipe's learning rate with a linear warm-up and a cosine to zero over that budget, and the loss that CSI-4CAST
trains on: error over power per antenna and step, with 1 % of the window's mean power added to powers (--floor), as
LearnedWiener has it; WiFo brings its own. Systems for which each antenna is a series of its own (LLM4CP, RNN, LSTM,
GRU, CNN, Transformer) may see a few antennas of more windows (--antennas), drawn anew each step; they are evaluated on
all of them.

Below --out: weights/*.safetensors, which are loaded again for the evaluation; runs/*.json with learning curves, cost
and records of each run; results.json with means and deviations over seeds; learning_curves.png. Finished runs are
skipped when the command is given again.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chanlab.cli.common import table
from chanlab.cli.demo import models
from chanlab.csi import (
    CNN,
    GRU,
    LLM4CP,
    RNN,
    CSIPredictionModule,
    Transformer,
    evaluate_protocol,
    few_cells,
    load_weights,
    protocol_records,
    save_weights,
)
from chanlab.csi.module import warmup_cosine
from chanlab.data import CSIBatch, SampleRequest, StreamedCSI
from chanlab.data.streamed_datamodule import TrainingOrder
from chanlab.errors import ChanlabError, UsageError
from chanlab.metrics import nmse, nmse_terms
from chanlab.records import Record, over_seeds, record, save_records

SYSTEMS = {
    "llm4cp": "llm4cp",
    "llm4cp_random": "llm4cp_random",
    "llm4cp_nollm": "llm4cp_nollm",
    **{name: f"csi4cast_{name}" for name in ("rnn", "lstm", "gru", "cnn", "softs", "wifo", "transformer")},
}
"""Recipe of each system."""

FDD: dict[str, dict[str, Any]] = {
    "chanlab.csi.SOFTS": {"instance_norm": False},
    "chanlab.csi.Transformer": {"residual": False},
    "chanlab.csi.WiFo": {"frequency_offset": 450},
}
"""Arguments of predictors that differ with targets on another band, as their recipes say; see `for_band`."""

PER_ANTENNA = (LLM4CP, RNN, GRU, CNN, Transformer)
"""Predictors to which each antenna is a series of its own."""

CHECK_STEPS = 20
EVAL_WINDOWS = 64
EXAMPLES = """examples:
  python benchmarks/csi_train.py --check --systems rnn --duplex tdd --antennas 1 --batch 2     (on a CPU)
  python benchmarks/csi_train.py --check --antennas 8 --device cuda
  python benchmarks/csi_train.py --systems llm4cp llm4cp_random llm4cp_nollm --seeds 1 2 3 --minutes 0.4 --antennas 8 \\
    --device cuda
  python benchmarks/csi_train.py --plot
"""


@dataclass(frozen=True)
class Run:
    """A cell of the grid."""

    system: str
    duplex: str
    seed: int

    @property
    def label(self) -> str:
        """The system's name in records: a recipe's without folder."""
        return Path(self.system).stem

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"{self.label}_{self.duplex}_{self.seed}"


@dataclass
class Trained:
    """What a run cost and how it went.

    Attributes:
        complete: Whether the budget was used up.
        minutes: Time of training, without compiling and validation.
        windows: Windows seen.
        steps: Steps tried.
        skipped: Steps left out, their gradients not being finite.
        batch: Windows per step.
        antennas: Antennas seen of each.
        warm_up: Time of the first, compiling passes [s].
        compiled: Whether parts were compiled.
        validation: Windows per second in validation.
        memory: Largest memory on the GPU [byte].
        parameters: Trained parameters.
        weights: Size of the file of weights [byte].
        curve: Points of the learning curve: minutes, windows, steps, mean training loss since the last point, NMSE of
            the validation set.
    """

    complete: bool = False
    minutes: float = 0.0
    windows: int = 0
    steps: int = 0
    skipped: int = 0
    batch: int = 0
    antennas: int = 0
    warm_up: float = 0.0
    compiled: bool = False
    validation: float = 0.0
    memory: int = 0
    parameters: int = 0
    weights: int = 0
    curve: list[dict[str, float | None]] = field(default_factory=list)


def recipe(system: str) -> dict[str, Any]:
    """A system's recipe as plain values; other names than those of `SYSTEMS` are recipes' own."""
    return models.read(SYSTEMS.get(system, system))


def for_band(node: dict[str, Any], duplex: str) -> dict[str, Any]:
    """The node of a recipe's predictor, whatever the recipe's name, with the arguments that a band asks for."""
    changes = FDD.get(node["class_path"], {}) if duplex == "fdd" else {}
    return {**node, "init_args": {**(node.get("init_args") or {}), **changes}}


def build(run: Run) -> CSIPredictionModule:
    """A run's predictor as its recipe has it, from its seed, in the module that knows how it is trained."""
    config = copy.deepcopy(recipe(run.system)["model"]["init_args"])
    node = for_band(config.pop("predictor"), run.duplex)
    if "duplex" in node["init_args"]:
        node["init_args"]["duplex"] = run.duplex
    torch.manual_seed(run.seed)
    return CSIPredictionModule(models.instantiate(node, nn.Module), **config)


def objective(module: CSIPredictionModule, batch: CSIBatch, floor: float) -> Tensor:
    """What is minimised: see this file's head; a predictor's own `training_loss` goes first."""
    if hasattr(module.predictor, "training_loss"):
        loss: Tensor = module.predictor.training_loss(batch.history, batch.target, batch.noise_variance)  # type: ignore[operator]
        return loss
    error, power = nmse_terms(module(batch.history, batch.noise_variance), batch.target, dim=-1, validate=False)
    return (error / (power + floor * power.mean((1, 2, 3), keepdim=True))).mean()


class Batches:
    """Fresh batches of training, from a generator of antennas and a stream of channels.

    Args:
        run: Whose band and seed.
        windows: Windows per batch.
        antennas: Antennas of each that are kept, drawn anew each step; None: all.
        block_size: See `StreamedCSI`.
        device: Where channels are drawn.
    """

    def __init__(self, run: Run, windows: int, antennas: int | None, block_size: int, device: torch.device) -> None:
        self.stream = StreamedCSI("csi4cast", "train", duplex=run.duplex, seed=run.seed, block_size=block_size)  # type: ignore[arg-type]
        self.stream.max_blocks = len(self.stream.cells)
        self.order = TrainingOrder(self.stream, windows, 1)
        self.antennas = antennas
        self.device = device
        self.generator = torch.Generator().manual_seed(run.seed)
        self.step = 0

    def __next__(self) -> CSIBatch:
        batch = self.stream.batch(self.order.request(self.step), self.device)
        self.step += 1
        ports = batch.history.shape[2]
        if self.antennas is None or self.antennas >= ports:
            return batch
        kept = torch.randperm(ports, generator=self.generator)[: self.antennas].sort().values.to(self.device)
        return batch._replace(history=batch.history.index_select(2, kept), target=batch.target.index_select(2, kept))

    def __iter__(self) -> Iterator[CSIBatch]:
        return self


@contextmanager
def fast(device: torch.device, precision: str) -> Iterator[None]:
    """Networks in bfloat16 and TF32 where asked for; outside, where channels are drawn, precision is whole."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "bf16" else before)
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class Compiled:
    """Parts of a predictor that are compiled in training, and not in evaluation, which has other shapes.

    Args:
        predictor: The predictor; parts that torch.compile makes faster are marked `compilable`.
        wanted: False: no part.
    """

    failed = False
    """Whether compiling has failed in this process: it isn't tried again."""

    def __init__(self, predictor: nn.Module, wanted: bool) -> None:
        modules = predictor.modules() if wanted and not Compiled.failed else ()
        self.parts = [part for part in modules if getattr(part, "compilable", False)]
        self.forwards: list[Callable[..., Any]] = [torch.compile(part.forward, dynamic=False) for part in self.parts]

    def on(self) -> None:
        """Compiled from now on."""
        for part, forward in zip(self.parts, self.forwards, strict=True):
            part.forward = forward  # type: ignore[method-assign]

    def off(self) -> None:
        """As they were."""
        for part in self.parts:
            vars(part).pop("forward", None)

    def give_up(self, error: Exception) -> None:
        """Without compiling, in this run and those after it."""
        self.off()
        self.parts, self.forwards, Compiled.failed = [], [], True
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"torch.compile failed, going on without: {type(error).__name__}: {first}", file=sys.stderr)


class Trainer:
    """Trains and evaluates the runs of a grid.

    Args:
        args: The command line.
        start: When the command began, by `time.perf_counter`.
    """

    def __init__(self, args: argparse.Namespace, start: float) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.deadline = start + 60 * args.total_minutes
        self.block_size = args.block_size or (512 if self.device.type == "cuda" else 8)
        self.overhead = 0.0
        self.streams: dict[tuple[str, str], StreamedCSI] = {}

    def left(self) -> float:
        """Seconds until the limit of the whole command."""
        return self.deadline - time.perf_counter()

    def synchronise(self) -> float:
        """The time, once the device has done its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @functools.cache  # noqa: B019, one trainer per process
    def validation(self, duplex: str) -> CSIBatch:
        """Windows of the validation set, the same for all runs, SNR drawn as in training."""
        samples = self.args.val_samples
        stream = StreamedCSI("csi4cast", "val", duplex=duplex, seed=self.args.test_seed, block_size=samples)  # type: ignore[arg-type]
        stream.cells = few_cells(stream.cells, self.args.every)
        return stream.batch(SampleRequest(stream.ids(samples), split="val"), self.device)

    def train(self, run: Run, module: CSIPredictionModule, steps: int | None = None) -> Trained:
        """Trains on the budget of the command line, or for a number of steps.

        On return the module is in evaluation mode. `complete` is False if the limit of the command came first.
        """
        args, predictor = self.args, module.predictor
        antennas = args.antennas if isinstance(predictor, PER_ANTENNA) else None
        predictor.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        weights = [p for p in predictor.parameters() if p.requires_grad]
        optimizer = module.configure_optimizers()
        largest = recipe(run.system)["trainer"].get("gradient_clip_val") or float("inf")
        compiled = Compiled(predictor, args.compile)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        done = Trained(parameters=sum(p.numel() for p in weights))
        begin = time.perf_counter()
        batches, batch = self.warm_up(run, module, compiled, antennas)
        done.warm_up = self.synchronise() - begin
        done.batch, done.antennas, done.compiled = len(batch.history), batch.history.shape[2], bool(compiled.parts)
        losses: list[float] = []
        spent, next_point = 0.0, 0.0
        while True:
            progress = self.progress(spent, done, steps)
            stopped = self.left() < 0
            if progress >= next_point or progress >= 1 or stopped:
                compiled.off()
                done.minutes = spent / 60
                self.point(run, module, done, losses)
                next_point += 1 / (1 if steps else args.points)
                losses = []
                compiled.on()
            if progress >= 1 or stopped:
                break
            tick = time.perf_counter()
            factor = warmup_cosine(int(progress * 10_000), 10_000, module.warmup)
            for group in optimizer.param_groups:
                group["lr"] = (args.lr or module.lr) * factor
            loss = self.backward(module, batch)
            done.steps += 1
            done.windows += len(batch.history)
            batch = next(batches)  # while the device is busy
            norm = nn.utils.clip_grad_norm_(weights, largest)
            if norm.isfinite():
                optimizer.step()
                losses.append(float(loss))
            else:
                done.skipped += 1
            optimizer.zero_grad(set_to_none=True)
            spent += time.perf_counter() - tick
        compiled.off()
        predictor.eval()
        done.complete = progress >= 1
        if self.device.type == "cuda":
            done.memory = torch.cuda.max_memory_allocated(self.device)
        return done

    def progress(self, spent: float, done: Trained, steps: int | None) -> float:
        """Part of the budget that is used up."""
        if steps:
            return done.steps / steps
        if self.args.windows:
            return done.windows / float(self.args.windows)
        return spent / (60 * float(self.args.minutes))

    def backward(self, module: CSIPredictionModule, batch: CSIBatch) -> Tensor:
        """Loss of a batch, its gradients added to the parameters'."""
        with fast(self.device, self.args.precision):
            loss = objective(module, batch, self.args.floor)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def warm_up(
        self, run: Run, module: CSIPredictionModule, compiled: Compiled, antennas: int | None
    ) -> tuple[Batches, CSIBatch]:
        """Batches that fit into memory, the first of them drawn, and everything compiled for them."""
        args, predictor = self.args, module.predictor
        ports = 32
        like_recipe = int(recipe(run.system)["data"]["init_args"]["batch_size"]) * ports
        windows = args.batch or max(1, like_recipe // min(antennas or ports, ports))
        compiled.on()
        while True:
            batches = Batches(run, windows, antennas, self.block_size, self.device)
            batch = next(batches)
            try:
                predictor.train()
                for _ in range(2):
                    self.backward(module, batch)
                    self.synchronise()
                    module.zero_grad(set_to_none=True)
                return batches, batch
            except torch.OutOfMemoryError:
                if windows == 1:
                    raise
                windows //= 2
                print(f"{run.name}: out of memory, {windows} windows per step instead", file=sys.stderr)
            except Exception as error:
                if not compiled.parts:
                    raise
                compiled.give_up(error)
            module.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def point(self, run: Run, module: CSIPredictionModule, done: Trained, losses: list[float]) -> None:
        """Adds a point to the learning curve and says so."""
        held = self.validation(run.duplex)
        begin = self.synchronise()
        figure = self.nmse(module.predictor, held)
        done.validation = len(held.history) / (self.synchronise() - begin)
        loss = sum(losses) / len(losses) if losses else None
        done.curve.append(
            {"minutes": done.minutes, "windows": done.windows, "steps": done.steps, "loss": loss, "nmse": figure}
        )
        said = "" if loss is None else f", training loss {loss:.4f}"
        print(
            f"{run.name}: {done.minutes:.2f} min, {done.steps} steps, {done.windows} windows{said}, "
            f"validation NMSE {figure:.4f}",
            flush=True,
        )

    def profile(self, run: Run, module: CSIPredictionModule, done: Trained) -> str:
        """Where the time of a step goes: a table of what takes longest on the device."""
        from torch.profiler import ProfilerActivity, profile

        batch = next(Batches(run, done.batch, done.antennas, self.block_size, self.device))
        compiled = Compiled(module.predictor, done.compiled)
        compiled.on()
        module.predictor.train()
        self.backward(module, batch)
        cuda = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            self.backward(module, batch)
            self.synchronise()
        compiled.off()
        module.zero_grad(set_to_none=True)
        by = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        found: str = seen.key_averages().table(sort_by=by, row_limit=15, max_name_column_width=70)
        return found

    @torch.no_grad()
    def nmse(self, predictor: nn.Module, held: CSIBatch) -> float:
        """Mean NMSE per antenna and step."""
        predictor.eval()
        parts = []
        for part in range(0, len(held.history), EVAL_WINDOWS):
            rows = slice(part, part + EVAL_WINDOWS)
            with fast(self.device, self.args.precision):
                prediction = predictor(held.history[rows], held.noise_variance[rows])
            ratio = nmse(prediction, held.target[rows], "per_antenna_step", validate=False)
            parts.append(ratio * len(prediction))
        predictor.train()
        return float(sum(parts)) / len(held.history)

    def evaluate(self, run: Run, predictor: nn.Module) -> list[Record]:
        """Records of the test sets."""
        args = self.args
        predictor.eval()

        class Inference:
            horizons = int(predictor.horizons)  # type: ignore[arg-type]

            def __call__(_, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
                with fast(self.device, args.precision):
                    return predictor(history, noise_variance)  # type: ignore[no-any-return]

        records: list[Record] = []
        for cells, samples in zip(args.sets, args.samples, strict=True):
            stream = self.test_stream(cells, run.duplex, samples)
            results = evaluate_protocol({run.label: Inference()}, stream, samples, EVAL_WINDOWS, self.device)
            noted = {"cells": len(stream.cells), "samples_per_cell": samples}
            found = protocol_records(results, "csi4cast", cells, [run.seed], args.resamples, **noted, **budget(args))
            if samples == 1:  # no interval from a single realisation a cell
                found = [{k: v for k, v in r.items() if k not in ("low", "high")} for r in found]
            records += found
        return records

    def test_stream(self, cells: str, duplex: str, samples: int) -> StreamedCSI:
        """A test set, whose channels stay for the next run."""
        if (cells, duplex) not in self.streams:
            args = self.args
            stream = StreamedCSI(
                "csi4cast",
                "test",
                cells=cells,
                duplex=duplex,
                seed=args.test_seed,
                block_size=samples,  # type: ignore[arg-type]
            )
            stream.cells = few_cells(stream.cells, args.every)
            stream.max_blocks = len(stream.cells)
            speeds = [cell.speed for cell in stream.cells]
            lone = sorted(v for v in set(speeds) if speeds.count(v) * samples < 2)
            if lone:
                raise UsageError(f"{cells} has one realisation at {lone[0]:g} m/s, no interval: raise --samples.")
            self.streams[cells, duplex] = stream
        return self.streams[cells, duplex]


class Shelf:
    """The folder of results: what each run left there.

    Args:
        args: The command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.out: Path = args.out
        self.args = args

    def weights(self, run: Run) -> Path:
        """A run's file of weights."""
        return self.out / "weights" / f"{run.name}.safetensors"

    def file(self, run: Run) -> Path:
        """A run's curve, cost and records."""
        return self.out / "runs" / f"{run.name}.json"

    def read(self, run: Run) -> dict[str, Any]:
        """What is known of a run, nothing if it wasn't begun.

        Raises:
            UsageError: It was trained or evaluated otherwise.
        """
        if not self.file(run).is_file():
            return {}
        known: dict[str, Any] = json.loads(self.file(run).read_text(encoding="utf-8"))
        if known["settings"] != settings(self.args):
            other = [k for k, v in settings(self.args).items() if known["settings"].get(k) != v]
            raise UsageError(
                f"{self.file(run)} was made with another {', '.join(other)}: give the same, or another --out."
            )
        return known

    def write(self, run: Run, done: Trained, records: list[Record]) -> None:
        """Keeps a run, in one go, and renews the figures over seeds."""
        target = self.file(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        known = {"run": asdict(run), "settings": settings(self.args), "trained": asdict(done), "records": records}
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        os.replace(scratch, target)
        save_records(self.out / "results.json", self.records(), replace=True)

    def all(self) -> list[dict[str, Any]]:
        """Every run that is here."""
        return [json.loads(f.read_text(encoding="utf-8")) for f in sorted((self.out / "runs").glob("*.json"))]

    def records(self) -> list[Record]:
        """Records of all finished runs, joined over their seeds.

        Raises:
            UsageError: They weren't all trained and evaluated alike.
        """
        for known in self.all()[1:]:
            other = [k for k, v in known["settings"].items() if self.all()[0]["settings"].get(k) != v]
            if other:
                raise UsageError(f"runs in {self.out} differ in {', '.join(other)}: keep them in folders of their own.")
        return over_seeds([r for known in self.all() for r in known["records"]])

    def curves(self) -> list[dict[str, Any]]:
        """Every run that has a curve to draw."""
        return [known for known in self.all() if len(known["trained"]["curve"]) > 1]

    def plot(self) -> Path:
        """Draws learning curves: training loss thin, NMSE of the validation set thick; a colour for each system."""
        from matplotlib import colormaps
        from matplotlib.ticker import ScalarFormatter

        from chanlab.cli.figures import new_figure, tidy

        runs = self.curves()
        if not runs:
            raise UsageError(f"there is no learning curve in {self.out}: train first.")
        systems = list(dict.fromkeys(known["run"]["system"] for known in runs))
        bands = [b for b in ("tdd", "fdd") if any(known["run"]["duplex"] == b for known in runs)]
        figure = new_figure(4.6 * len(bands) + 0.8, 3.8)
        panels = figure.subplots(1, len(bands), squeeze=False)[0]
        by = "windows" if self.args.windows else "minutes"
        for panel, band in zip(panels, bands, strict=True):
            named = set()
            for known in (k for k in runs if k["run"]["duplex"] == band):
                system, curve = known["run"]["system"], known["trained"]["curve"]
                color = colormaps["tab10"](systems.index(system) % 10)
                label = None if system in named else Path(system).stem
                named.add(system)
                panel.plot(
                    [p[by] for p in curve], [p["nmse"] for p in curve], "o-", color=color, lw=1.8, ms=3, label=label
                )
                panel.plot([p[by] for p in curve[1:]], [p["loss"] for p in curve[1:]], ":", color=color, lw=1)
            panel.set_yscale("log")
            panel.yaxis.set_minor_formatter(ScalarFormatter())
            panel.yaxis.set_major_formatter(ScalarFormatter())
            tidy(panel, band.upper(), f"training [{by}]", "mean NMSE per antenna and step")
            panel.legend(fontsize=8, frameon=False)
        path = self.out / "learning_curves.png"
        figure.savefig(path)
        return path


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What figures depend on, besides the run."""
    names = "minutes windows antennas batch lr floor precision bits sets samples every val_samples test_seed block_size"
    return {name: getattr(args, name) for name in names.split()}


def budget(args: argparse.Namespace) -> dict[str, Any]:
    """The budget as records hold it."""
    size = {"training_windows": args.windows} if args.windows else {"training_minutes": args.minutes}
    return {**size, "bits": args.bits}


def costs(run: Run, done: Trained, args: argparse.Namespace) -> list[Record]:
    """Records of what training took."""
    figures = {
        "training_windows": (done.windows, ""),
        "training_antennas": (done.antennas, ""),
        "training_steps": (done.steps, ""),
        "skipped_steps": (done.skipped, ""),
        "training_time": (60 * done.minutes, "s"),
        "parameters": (done.parameters, ""),
        "weights": (done.weights / 1e6, "MB"),
    }
    common: dict[str, Any] = {"data": "csi4cast", "split": "train", "condition": {"duplex": run.duplex}}
    return [
        record(system=run.label, metric=m, value=v, unit=u, seeds=[run.seed], **common, **budget(args))
        for m, (v, u) in figures.items()
    ]


def perform(trainer: Trainer, shelf: Shelf, run: Run) -> bool:
    """Trains a run, keeps its weights, evaluates what was kept; False if there was no time to finish."""
    args = trainer.args
    known = shelf.read(run)
    if known.get("records"):
        print(f"{run.name}: done before", flush=True)
        return True
    module, weights = build(run), shelf.weights(run)
    if known and known["trained"]["complete"] and weights.is_file():
        done = Trained(**known["trained"])
        module.predictor.to(trainer.device)
    else:
        if args.minutes and trainer.left() < 60 * args.minutes + trainer.overhead:
            return False
        begin = time.perf_counter()
        done = trainer.train(run, module)
        save_weights(module.predictor, weights, args.bits)
        done.weights = weights.stat().st_size
        trainer.overhead = time.perf_counter() - begin - 60 * done.minutes
        shelf.write(run, done, [])
        if not done.complete:
            return False
    begin = time.perf_counter()
    load_weights(module.predictor, weights)
    shelf.write(run, done, trainer.evaluate(run, module.predictor) + costs(run, done, args))
    if done.weights > args.max_weights * 1e6:
        print(f"{run.name}: weights of {done.weights / 1e6:.1f} MB are not kept (--max-weights)", flush=True)
        weights.unlink()
    trainer.overhead += time.perf_counter() - begin
    return True


def check(trainer: Trainer, runs: list[Run]) -> None:
    """Some steps of every system and band: throughput, and whether losses are finite."""
    args = trainer.args
    rows, minutes = [], 0.0
    for run in runs:
        module = build(run)
        work = gflop(module, args.floor)
        done = trainer.train(run, module, CHECK_STEPS)
        scratch = args.out / f".{run.name}.safetensors"
        save_weights(module.predictor, scratch, args.bits)
        size = scratch.stat().st_size
        scratch.unlink()
        rate = done.windows / (60 * done.minutes)
        share = done.antennas / 32
        test = sum(
            len(s.cells) * len(s.conditions) * n
            for s, n in (
                (trainer.test_stream(c, run.duplex, n), n) for c, n in zip(args.sets, args.samples, strict=True)
            )
        )
        evaluation = test / done.validation
        validation = (args.points + 1) * len(trainer.validation(run.duplex).history) / done.validation
        budget_minutes = args.minutes or args.windows / rate / 60
        minutes += done.warm_up / 60 + len(args.seeds) * (budget_minutes + (evaluation + validation) / 60)
        if args.profile:
            print(trainer.profile(run, module, done))
        loss = done.curve[-1]["loss"]
        rows.append(
            [
                run.name,
                f"{done.batch} x {done.antennas}",
                f"{60e3 * done.minutes / done.steps:.0f}",
                f"{rate:.0f}",
                f"{work * share:.1f}",
                f"{work * share * rate / 1e3:.1f}",
                f"{done.memory / 1e9:.1f}",
                f"{done.warm_up:.0f}",
                "yes" if done.compiled else "no",
                f"{done.validation:.0f}",
                f"{evaluation:.0f}",
                f"{done.parameters / 1e6:.2f}",
                f"{size / 1e6:.2f}",
                "none finite" if loss is None else f"{loss:.3f}",
                done.skipped,
            ]
        )
        del module
    head = "run|batch|ms/step|windows/s|GFLOP/window|TFLOP/s|GB|warm-up s|compiled|eval. windows/s|eval. s"
    print(table([*head.split("|"), "M trained", "MB kept", "loss", "skipped"], rows))
    print(f"the grid takes about {minutes:.1f} minutes")


def gflop(module: CSIPredictionModule, floor: float) -> float:
    """Floating-point operations of training on one window of 32 antennas, forward and backward [10⁹]."""
    from torch.utils.flop_counter import FlopCounterMode

    antennas = 1 if isinstance(module.predictor, PER_ANTENNA) else 32
    batch = CSIBatch(
        torch.randn(1, 1, antennas, 16, 300, dtype=torch.complex64),
        torch.randn(1, 1, antennas, 4, 300, dtype=torch.complex64),
        *(torch.full((1,), 0.1) for _ in range(5)),
    )
    counter = FlopCounterMode(display=False)
    mkldnn = torch.backends.mkldnn.flags(enabled=False)  # whose LSTM isn't counted
    with warnings.catch_warnings(action="ignore"), mkldnn, counter:
        objective(module, batch, floor).backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)
    return counter.get_total_flops() * 32 / antennas / 1e9


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: Arguments contradict each other.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ", ".join(SYSTEMS)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME", help=f"{known}, or recipes")
    parser.add_argument("--duplex", nargs="+", choices=["tdd", "fdd"], default=["tdd", "fdd"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--minutes", type=float, help="of training for each run (default: 0.4)")
    parser.add_argument("--windows", type=int, help="of training for each run, in place of --minutes")
    parser.add_argument("--total-minutes", type=float, default=float("inf"), help="of the whole command")
    parser.add_argument("--antennas", type=int, help="of each window, where antennas are series of their own")
    parser.add_argument("--batch", type=int, help="windows per step (default: as many antennas as in the recipe's)")
    parser.add_argument("--lr", type=float, help="highest learning rate (default: the recipe's)")
    parser.add_argument(
        "--floor", type=float, default=0.01, help="added to powers in the loss (default: 0.01; published: 0)"
    )
    parser.add_argument("--points", type=int, default=8, help="of learning curves (default: 8)")
    parser.add_argument("--val-samples", type=int, default=8, help="of each cell, in validation (default: 8)")
    parser.add_argument(
        "--sets", nargs="+", default=["regular"], metavar="SET", help="regular, generalization, robustness"
    )
    parser.add_argument("--samples", nargs="+", type=int, default=[20], help="of each cell, for all sets or each")
    parser.add_argument("--every", type=int, default=1, help="one cell of so many, spread evenly (default: 1, all)")
    parser.add_argument("--test-seed", type=int, default=1, help="of validation and test sets (default: 1)")
    parser.add_argument("--resamples", type=int, default=100, help="of the bootstrap (default: 100)")
    parser.add_argument("--bits", type=int, choices=[6, 8, 16, 32], default=8, help="of kept weights (default: 8)")
    parser.add_argument("--max-weights", type=float, default=16.0, help="larger files are not kept [MB] (default: 16)")
    parser.add_argument("--precision", choices=["bf16", "32"], help="of networks (default: bf16 on a GPU)")
    parser.add_argument("--block-size", type=int, help="samples drawn at once (default: 512 on a GPU, else 8)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without torch.compile")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("out/csi_train"))
    parser.add_argument("--check", action="store_true", help=f"{CHECK_STEPS} steps of everything: how fast is it?")
    parser.add_argument("--profile", action="store_true", help="with --check: where the time of a step goes")
    parser.add_argument("--plot", action="store_true", help="only draw curves and join records of what is in --out")
    args = parser.parse_args(given)
    if args.minutes and args.windows:
        raise UsageError("--minutes and --windows are two budgets: give one.")
    if not args.windows:
        args.minutes = 0.4 if args.minutes is None else args.minutes
    positive = ("minutes", "windows", "antennas", "batch", "lr", "points", "val_samples", "every", "block_size")
    for name in positive:
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0.")
    if len(args.samples) == 1:
        args.samples *= len(args.sets)
    if len(args.samples) != len(args.sets) or min(args.samples) < 1:
        raise UsageError("--samples is one number, or one for each of --sets, at least 1.")
    args.precision = args.precision or ("bf16" if args.device.startswith("cuda") else "32")
    return args


def main(given: list[str] | None = None) -> None:
    """Trains what isn't yet trained, evaluates it, writes records, draws learning curves."""
    start = time.perf_counter()
    args = arguments(given)
    shelf = Shelf(args)
    if args.plot:
        save_records(args.out / "results.json", shelf.records(), replace=True)
        print(shelf.plot())
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.device.startswith("cuda"):
        torch.backends.cudnn.benchmark = True
    trainer = Trainer(args, start)
    for duplex in args.duplex:
        for cells, samples in zip(args.sets, args.samples, strict=True):
            trainer.test_stream(cells, duplex, samples)
    if args.check:
        check(trainer, [Run(s, d, args.seeds[0]) for d in args.duplex for s in args.systems])
        return
    # Seeds change slowest: if time runs out, as many systems as possible have been trained.
    runs = [Run(s, d, n) for n in args.seeds for d in args.duplex for s in args.systems]
    for i, run in enumerate(runs):
        if not perform(trainer, shelf, run):
            print(f"--total-minutes is over: {len(runs) - i} of {len(runs)} runs are left; give the command again.")
            break
    if shelf.curves():
        shelf.plot()
    rows = [
        [
            r["system"],
            r["condition"]["duplex"],
            r["split"],
            f"{r['value']:.4f}",
            f"{r['deviation'] or 0:.4f}",
            r["seeds"],
        ]
        for r in shelf.records()
        if r["metric"] == "nmse" and set(r["condition"]) == {"duplex"}
    ]
    print(table(["system", "duplex", "set", "mean per-antenna NMSE", "deviation", "seeds"], rows))


if __name__ == "__main__":
    try:
        main()
    except ChanlabError as error:
        sys.exit(f"{type(error).__name__}: {error}")
