"""How csi_train.py trains and evaluates a run: fresh batches, compiled parts, a budget of time or windows."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from csi_train_grid import Run, Trained, budget, recipe
from torch import Tensor, nn

from chanlab.csi import (
    CNN,
    GRU,
    LLM4CP,
    RNN,
    CSIPredictionModule,
    Transformer,
    evaluate_protocol,
    few_cells,
    protocol_records,
)
from chanlab.data import CSIBatch, SampleRequest, StreamedCSI
from chanlab.data.streamed_datamodule import TrainingOrder
from chanlab.errors import UsageError
from chanlab.metrics import nmse, nmse_terms
from chanlab.records import Record
from chanlab.schedule import warmup_cosine

PER_ANTENNA = (LLM4CP, RNN, GRU, CNN, Transformer)
"""Predictors to which each antenna is a series of its own."""
EVAL_WINDOWS = 64


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
        """Mean NMSE per antenna and step; of both bands, where both are predicted."""
        predictor.eval()
        width = held.history.shape[-1]
        parts = []
        for part in range(0, len(held.history), EVAL_WINDOWS):
            rows = slice(part, part + EVAL_WINDOWS)
            with fast(self.device, self.args.precision):
                prediction = predictor(held.history[rows], held.noise_variance[rows])
            bands = zip(prediction.split(width, -1), held.target[rows].split(width, -1), strict=True)
            ratios = [nmse(told, true, "per_antenna_step", validate=False) for told, true in bands]
            parts.append(sum(ratios) / len(ratios) * len(prediction))
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
