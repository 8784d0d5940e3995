"""How jscc_train.py trains and evaluates a codec: crops held on the device, one launch a step, PSNR image by image."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from jscc_arms import Arm, build
from torch import Tensor, nn

from chanlab.jscc import JSCCModule
from chanlab.jscc.images import ImageDataModule, Request
from chanlab.jscc.module import parameter_groups, reconstruction_loss
from chanlab.metrics import psnr
from chanlab.schedule import warmup_cosine

WARM_UP_STEPS = 4
TIMED_STEPS = 20


@dataclass
class Trained:
    """How a run went.

    Attributes:
        parameters: Parameters of the codec.
        steps: Steps of the optimiser.
        images: Images seen.
        seconds: Time of training.
        curve: Points of steps, loss (mean since the last point) and seconds.
    """

    parameters: int
    steps: int = 0
    images: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


class Engine:
    """Trains codecs of one architecture, one after the other, with one compiled network and one CUDA graph.

    Weights and the optimiser's state are reset in place between runs. On a CPU, and where compiling or capturing fails,
    steps are launched as usual; that is said.

    Args:
        arm: The first run; others must have its `architecture`.
        data: Training photographs.
        args: The command line.
        train: Make ready to train; otherwise only to evaluate.
    """

    def __init__(self, arm: Arm, data: ImageDataModule, args: argparse.Namespace, train: bool = True) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.data = data
        self.module = JSCCModule(build(arm, args), loss=args.loss).to(self.device)
        self.codec = self.module.codec
        if self.cuda:
            self.codec.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weights = list(self.codec.parameters())
        self.lr = torch.zeros((), device=self.device)
        options: dict[str, Any] = {"fused": True, "capturable": True} if self.cuda else {}
        groups = parameter_groups(self.codec, args.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr if self.cuda else 0.0, **options)
        self.images = torch.zeros(args.batch, 3, args.crop, args.crop, device=self.device)
        if self.cuda:
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.snr = torch.zeros(args.batch, device=self.device)
        self.ratio = None if arm.fixed_rate else torch.zeros(args.batch, device=self.device, dtype=torch.float64)
        self.total = torch.zeros((), device=self.device)
        self.parts = [part for part in self.codec.modules() if args.compile and getattr(part, "compilable", False)]
        self.compiled = [torch.compile(part.forward, dynamic=False) for part in self.parts]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tables: dict[tuple[Fraction, ...], Tensor] = {}
        self.drawn = 0
        self.warm_up = self.seconds_per_step = 0.0
        if train:
            self.prepare(arm)

    def prepare(self, arm: Arm) -> None:
        """Compiles and captures a step, then measures how long it takes (`seconds_per_step`)."""
        begin = time.perf_counter()
        self.reset(arm)
        self.draw(arm)
        try:
            self.switch(True)
            self.body()
            self.synchronise()
        except Exception as error:
            if not self.parts:
                raise
            print(f"{arm.name}: torch.compile failed, going on without: {_first(error)}", file=sys.stderr)
            self.switch(False)
            self.parts, self.compiled = [], []
        if self.cuda and self.args.graph:
            try:
                self.capture()
            except Exception as error:
                print(f"{arm.name}: no CUDA graph, going on without: {_first(error)}", file=sys.stderr)
                self.graph = None
                torch.cuda.synchronize()
        for _ in range(WARM_UP_STEPS):
            self.step(arm)
        self.warm_up = self.synchronise() - begin
        begin = time.perf_counter()
        for _ in range(TIMED_STEPS if self.cuda else 2):
            self.step(arm)
        self.seconds_per_step = (self.synchronise() - begin) / (TIMED_STEPS if self.cuda else 2)

    def capture(self) -> None:
        """One CUDA graph of a whole step: forward, backward, clipping, optimiser."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self.body()
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.body(clear=False)
        self.graph = graph

    def body(self, clear: bool = True) -> None:
        """A step on the images, SNRs and ratios that lie ready."""
        if clear:
            self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.precision == "bf16"):
            received, _ = self.module(self.images, self.snr, self.ratio)
        loss = reconstruction_loss(received, self.images, self.module.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.weights, self.args.clip, foreach=self.cuda)
        self.optimizer.step()
        self.total += loss.detach()

    def draw(self, arm: Arm) -> None:
        """Crops, SNRs and ratios of the next step, where the step expects them."""
        crops = self.data.crops("train")
        ids = torch.randint(len(crops), (self.args.batch,), device=self.device)
        self.images.copy_(self.data.to_batch(Request("train", self.drawn, ids))["image"])
        low, high = (arm.snr_db, arm.snr_db) if arm.snr_db is not None else self.args.snr_range
        self.snr.uniform_(low, high) if high > low else self.snr.fill_(low)
        if self.ratio is not None:
            choices = [arm.ratio] if arm.ratio is not None else self.args.train_ratios
            self.ratio.copy_(
                self.table(tuple(choices))[torch.randint(len(choices), (self.args.batch,), device=self.device)]
            )
        self.drawn += 1

    def table(self, choices: tuple[Fraction, ...]) -> Tensor:
        """Ratios on the device, brought there once."""
        if choices not in self.tables:
            self.tables[choices] = torch.tensor([float(r) for r in choices], dtype=torch.float64, device=self.device)
        return self.tables[choices]

    def step(self, arm: Arm) -> None:
        """One step on fresh images."""
        self.draw(arm)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()

    def switch(self, compiled: bool) -> None:
        """Compiled parts for training, plain ones for evaluation, whose images have other sizes."""
        for part, forward in zip(self.parts, self.compiled, strict=True):
            if compiled:
                part.forward = forward  # type: ignore[method-assign]
            else:
                vars(part).pop("forward", None)

    def reset(self, arm: Arm) -> None:
        """Fresh weights (or those of --init) of the run's seed, an optimiser that has seen nothing."""
        torch.manual_seed(self.args.seed)
        fresh = build(arm, self.args)
        if self.args.init is not None and (start := self.args.init / f"{arm.name}.safetensors").is_file():
            from chanlab.weights import load_weights

            load_weights(fresh, start)
            print(f"{arm.name}: starts from {start}", flush=True)
        self.codec.load_state_dict(fresh.state_dict())
        with torch.no_grad():
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        value.zero_()
        self.total.zero_()

    def train(self, arm: Arm, steps: int) -> Trained:
        """Trains a run from the start; on return the codec is plain and in evaluation mode."""
        self.reset(arm)
        self.module.train()
        self.switch(True)
        done = Trained(sum(p.numel() for p in self.weights))
        highest = self.args.lr[arm.system]
        every = max(1, steps // self.args.points)
        self.drawn = 0
        last = 0
        begin = self.synchronise()
        for step in range(steps):
            rate = highest * warmup_cosine(step, steps, self.args.warmup)
            if self.cuda:
                self.lr.fill_(rate)
            else:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
            self.step(arm)
            if (step + 1) % every == 0 or step + 1 == steps:
                loss = float(self.total) / (step + 1 - last)
                self.total.zero_()
                last = step + 1
                done.seconds = self.synchronise() - begin
                done.curve.append({"steps": step + 1, "loss": loss, "seconds": round(done.seconds, 3)})
                print(f"{arm.name}: {step + 1} steps, {done.seconds:.0f} s, loss {loss:.3f}", flush=True)
        done.steps, done.images = steps, steps * self.args.batch
        self.switch(False)
        self.module.eval()
        return done

    @torch.no_grad()
    def evaluate(self, arm: Arm, data: ImageDataModule) -> dict[tuple[Fraction, float], Tensor]:
        """PSNR of each image of --split [dB] in the order of ids, by bandwidth ratio and SNR; a specialist has one."""
        self.module.eval()
        self.switch(False)
        ratios = [arm.ratio] if arm.ratio is not None else self.args.ratios
        snrs = [arm.snr_db] if arm.snr_db is not None else self.args.snrs
        found = {(r, s): torch.zeros(len(data.crops(self.args.split))) for r in ratios for s in snrs}
        for batch in data.batches(self.args.split, self.device):
            for (ratio, snr), values in found.items():
                asked = None if arm.fixed_rate else ratio
                received, uses = self.module.transmit(batch["image"], batch["id"], snr, asked)
                if (uses > float(ratio) * batch["image"][0].numel()).any():
                    raise RuntimeError(f"{arm.name} took more channel uses than k/n = {ratio} allows")
                values[batch["id"].cpu()] = psnr(received, batch["image"], "none").float().cpu()
        return found

    def synchronise(self) -> float:
        """The time, once the device has done its work."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
