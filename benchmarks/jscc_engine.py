"""How jscc_train.py trains and evaluates a codec: crops held on the device, one launch a step, PSNR image by image."""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jscc_arms import Arm, build
from torch import Tensor, nn

from chanlab.errors import ChanlabError
from chanlab.jscc import JSCCModule
from chanlab.jscc.base_batches import training_bases
from chanlab.jscc.bases import Base, BasePool
from chanlab.jscc.depthwise import use_kernel
from chanlab.jscc.draws import training_snr
from chanlab.jscc.image_crops import Request
from chanlab.jscc.images import ImageDataModule
from chanlab.jscc.module import parameter_groups, reconstruction_loss
from chanlab.jscc.separation.payload import PayloadRate
from chanlab.metrics import psnr
from chanlab.schedule import warmup_cosine

WARM_UP_STEPS = 4
TIMED_STEPS = 40
DRAWN = 8
"""Steps whose images are cut at once."""
AVERAGED = 0.01
"""Horizon of the moving average of weights, of all steps."""
SAVED_EVERY = 60.0
"""Seconds between two states of a run that are kept."""


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


class Way(NamedTuple):
    """How a step is made.

    Attributes:
        compiled: Whether blocks that can be are compiled.
        kernel: Whether depthwise convolutions take this library's kernel, where it runs.
    """

    compiled: bool
    kernel: bool

    def __str__(self) -> str:
        return f"{'compiled' if self.compiled else 'plain'}, depthwise by {'chanlab' if self.kernel else 'cuDNN'}"


class Drawn(NamedTuple):
    """What a step takes.

    Attributes:
        images: `[batch, 3, height, width]`.
        snr: `[batch]` [dB].
        ratio: `[batch]`, or None.
        base: As `images`, or None.
        base_uses: Channel uses of each base, 0 for none, int64 `[batch]`, or None.
    """

    images: Tensor
    snr: Tensor
    ratio: Tensor | None
    base: Tensor | None
    base_uses: Tensor | None


class Engine:
    """Trains codecs of one architecture, one after the other, with one compiled network and one CUDA graph.

    Weights and the optimiser's state are reset in place between runs. On a GPU a step is timed as one graph of plain
    kernels and as one of compiled ones (`torch.compile`), and the faster is kept. What fails is said, and left out;
    without a graph steps are launched as usual.

    What is kept of a run is a moving average of its weights over the last `AVERAGED` of the steps.

    Args:
        arm: The first run; others must have its `architecture`.
        data: Training photographs.
        args: The command line.
        train: Make ready to train; otherwise only to evaluate.
        pool: Crops with base layers, for codecs that refine them; None: without.
    """

    def __init__(
        self,
        arm: Arm,
        data: ImageDataModule,
        args: argparse.Namespace,
        train: bool = True,
        pool: BasePool | None = None,
    ) -> None:
        self.args = args
        self.device = torch.device(args.device)
        self.cuda = self.device.type == "cuda"
        self.data = data
        self.module = JSCCModule(build(arm, args), loss=args.loss).to(self.device)
        self.codec = self.module.codec
        if self.cuda:
            self.codec.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.weights = list(self.codec.parameters())
        self.average = [torch.zeros_like(p) for p in self.weights]
        self.lr, self.follow, self.total = (torch.zeros((), device=self.device) for _ in range(3))
        options: dict[str, Any] = {"fused": True, "capturable": True} if self.cuda else {}
        groups = parameter_groups(self.codec, args.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.lr if self.cuda else 0.0, **options)
        self.images = torch.zeros(args.batch, 3, args.crop, args.crop, device=self.device)
        if self.cuda:
            self.images = self.images.contiguous(memory_format=torch.channels_last)
        self.snr = torch.zeros(args.batch, device=self.device)
        self.pool = pool.to(self.device) if pool is not None and self.codec.tells_bases else None
        self.base: Base | None = None
        self.rate = PayloadRate().to(self.device)
        if self.pool is not None:
            none = torch.zeros(args.batch, device=self.device, dtype=torch.int64)
            self.base = Base(torch.zeros_like(self.images), none, none.clone())
        self.ratio = None if arm.fixed_rate else torch.zeros(args.batch, device=self.device, dtype=torch.float64)
        self.parts = [part for part in self.codec.modules() if args.compile and getattr(part, "compilable", False)]
        self.compiled = [torch.compile(part.forward, dynamic=False) for part in self.parts]
        self.way = Way(False, True)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tables: dict[tuple[float, ...], Tensor] = {}
        self.drawn = 0
        self.ready: list[Drawn] = []
        self.warm_up = self.seconds_per_step = 0.0
        if train:
            self.prepare(arm)

    def prepare(self, arm: Arm) -> None:
        """Takes the fastest way to make a step, and measures how long it takes (`seconds_per_step`)."""
        begin = time.perf_counter()
        self.reset(arm)
        ways = [Way(False, True), Way(True, True)] if self.parts and self.cuda else [Way(bool(self.parts), True)]
        ways += [Way(False, False)] if self.args.check and len(ways) > 1 else []
        found = {way: done for way in ways if (done := self.attempt(arm, way, len(ways) > 1)) is not None}
        if not found:
            last = [Way(True, False), Way(False, False)] if self.parts else [Way(False, False)]
            found = {way: done for way in last if (done := self.attempt(arm, way, True)) is not None}
        if not found:
            raise ChanlabError(f"{arm.name} can't be trained on {self.device}: what failed is told above.")
        self.way = min(found, key=lambda way: found[way][0])
        use_kernel(self.way.kernel)
        self.seconds_per_step, self.graph = found[self.way]
        self.warm_up = self.synchronise() - begin

    def attempt(self, arm: Arm, way: Way, tell: bool) -> tuple[float, torch.cuda.CUDAGraph | None] | None:
        """Seconds of a step, and its graph; None, and a word, where it fails."""
        try:
            seconds, graph = self.timed(arm, way)
        except Exception as error:
            print(f"{arm.name}: {way}: {_first(error)}", file=sys.stderr, flush=True)
            return None
        if tell:
            print(f"{arm.name}: {way}: {1e3 * seconds:.2f} ms a step", flush=True)
        return seconds, graph

    def timed(self, arm: Arm, way: Way) -> tuple[float, torch.cuda.CUDAGraph | None]:
        """Seconds of a step, and its graph."""
        self.graph, self.way = None, way
        use_kernel(way.kernel)
        self.draw(arm)
        self.switch(True)
        self.body()
        self.synchronise()
        if self.cuda and self.args.graph:
            try:
                self.capture()
            except Exception as error:
                print(f"{arm.name}: no CUDA graph, going on without: {_first(error)}", file=sys.stderr)
                self.graph = None
                torch.cuda.synchronize()
        for _ in range(WARM_UP_STEPS if self.cuda else 0):
            self.step(arm)
        begin = self.synchronise()
        count = TIMED_STEPS if self.cuda else 2
        for _ in range(count):
            self.step(arm)
        return (self.synchronise() - begin) / count, self.graph

    def capture(self) -> None:
        """One CUDA graph of a whole step: forward, backward, clipping, optimiser, average."""
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
            received, _ = self.module(self.images, self.snr, self.ratio, None, self.base)
        loss = reconstruction_loss(received, self.images, self.module.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.weights, self.args.clip, foreach=self.cuda)
        self.optimizer.step()
        with torch.no_grad():
            self.total += loss.detach()
            change = torch._foreach_sub(self.weights, self.average)
            torch._foreach_mul_(change, self.follow)
            torch._foreach_add_(self.average, change)

    def draw(self, arm: Arm) -> None:
        """Crops, SNRs and ratios of the next step, where the step expects them."""
        if not self.ready:
            self.ready = self.block(arm)
        drawn = self.ready.pop()
        self.images.copy_(drawn.images)
        self.snr.copy_(drawn.snr)
        if self.ratio is not None and drawn.ratio is not None:
            self.ratio.copy_(drawn.ratio)
        if self.base is not None and self.base.uses is not None and drawn.base is not None:
            self.base.image.copy_(drawn.base)
            self.base.uses.copy_(drawn.base_uses)

    def block(self, arm: Arm) -> list[Drawn]:
        """What `DRAWN` steps need, drawn at once: fewer launches."""
        count = DRAWN * self.args.batch
        ends = (arm.snr_db, arm.snr_db) if arm.snr_db is not None else tuple(self.args.snr_range)
        snr = training_snr(count, ends, self.args.high_snr_share, self.device)
        bases: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * DRAWN
        if self.pool is None:
            ids = torch.randint(len(self.data.crops("train")), (count,), device=self.device)
            images = self.data.to_batch(Request("train", self.drawn, ids))["image"]
        else:
            which = torch.randint(len(self.pool), (count,), device=self.device)
            images, base = self.pool.take(which, torch.rand(count, device=self.device) < 0.5)
            base = training_bases(base, snr, self.rate, self.args.refining)
            assert base.uses is not None
            bases = list(zip(base.image.chunk(DRAWN), base.uses.chunk(DRAWN), strict=True))
        self.drawn += 1
        ratios: list[Tensor] | list[None] = [None] * DRAWN
        if self.ratio is not None:
            choices = [float(r) for r in ([arm.ratio] if arm.ratio is not None else self.args.train_ratios)]
            which = torch.randint(len(choices), (count,), device=self.device)
            ratios = list(self.table(tuple(choices))[which].chunk(DRAWN))
        parts = zip(images.chunk(DRAWN), snr.chunk(DRAWN), ratios, bases, strict=True)
        return [Drawn(image, at, ratio, *base) for image, at, ratio, base in parts]

    def table(self, choices: tuple[float, ...]) -> Tensor:
        """Ratios on the device, brought there once."""
        if choices not in self.tables:
            self.tables[choices] = torch.tensor(choices, dtype=torch.float64, device=self.device)
        return self.tables[choices]

    def step(self, arm: Arm) -> None:
        """One step on fresh images."""
        self.draw(arm)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()

    def switch(self, training: bool) -> None:
        """Compiled parts for training, plain ones for evaluation, whose images have other sizes."""
        for part, forward in zip(self.parts, self.compiled, strict=True):
            if training and self.way.compiled:
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
            torch._foreach_copy_(self.average, self.weights)
        self.total.zero_()
        self.drawn, self.ready = 0, []

    def train(self, arm: Arm, steps: int, partial: Path | None = None) -> Trained:
        """Trains a run from the start; on return the codec is plain, averaged, and in evaluation mode.

        Args:
            arm: The run.
            steps: Its steps.
            partial: File that keeps the state every minute, from which an interrupted run goes on.
        """
        self.reset(arm)
        self.module.train()
        self.switch(True)
        done = Trained(sum(p.numel() for p in self.weights))
        highest = self.args.lr[arm.system]
        every = max(1, steps // self.args.points)
        first = last = self.resume(arm, steps, partial, done) if partial is not None else 0
        before, saved = done.seconds, time.perf_counter()
        begin = self.synchronise()
        for step in range(first, steps):
            rate = highest * warmup_cosine(step, steps, self.args.warmup)
            if self.cuda:
                self.lr.fill_(rate)
            else:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
            self.follow.fill_(1 / min(step + 1, max(1, round(AVERAGED * steps))))
            self.step(arm)
            if (step + 1) % every == 0 or step + 1 == steps:
                loss = float(self.total) / (step + 1 - last)
                self.total.zero_()
                last = step + 1
                done.seconds = before + self.synchronise() - begin
                done.curve.append({"steps": step + 1, "loss": loss, "seconds": round(done.seconds, 3)})
                print(f"{arm.name}: {step + 1} steps, {done.seconds:.0f} s, loss {loss:.3f}", flush=True)
                if not math.isfinite(loss):
                    raise ChanlabError(f"{arm.name} diverged: lower its --lr.")
                if partial is not None and step + 1 < steps and time.perf_counter() - saved > SAVED_EVERY:
                    self.save(arm, steps, partial, done)
                    saved = time.perf_counter()
        done.steps, done.images = steps, steps * self.args.batch
        self.switch(False)
        self.module.eval()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.average)
        return done

    def save(self, arm: Arm, steps: int, partial: Path, done: Trained) -> None:
        """The state of a run between two points of its curve."""
        partial.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "arm": arm.name,
            "of": steps,
            "codec": self.codec.state_dict(),
            "average": self.average,
            "optimizer": [self.optimizer.state[p] for p in self.weights],
            "done": asdict(done),
        }
        scratch = partial.with_suffix(".part")
        torch.save(state, scratch)
        scratch.replace(partial)

    def resume(self, arm: Arm, steps: int, partial: Path, done: Trained) -> int:
        """Takes up a saved state, if there is one of this run; the steps that it has had."""
        if not partial.is_file():
            return 0
        state = torch.load(partial, map_location=self.device, weights_only=True)
        if (state["arm"], state["of"]) != (arm.name, steps):
            return 0
        self.codec.load_state_dict(state["codec"])
        with torch.no_grad():
            torch._foreach_copy_(self.average, state["average"])
            for parameter, values in zip(self.weights, state["optimizer"], strict=True):
                for name, value in values.items():
                    self.optimizer.state[parameter][name].copy_(value)
        done.seconds, done.curve = state["done"]["seconds"], state["done"]["curve"]
        had = int(done.curve[-1]["steps"])
        torch.manual_seed(self.args.seed + had)
        self.drawn, self.ready = had, []
        self.total.zero_()
        print(f"{arm.name}: goes on at {had} steps", flush=True)
        return had

    @torch.no_grad()
    def evaluate(self, arm: Arm, data: ImageDataModule) -> dict[tuple[Fraction, float], Tensor]:
        """PSNR of each image of --split [dB] in the order of ids, by bandwidth ratio and SNR; a specialist has one."""
        self.module.eval()
        self.switch(False)
        torch.backends.cudnn.benchmark = False  # images have other sizes, and come once
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
        torch.backends.cudnn.benchmark = self.cuda
        return found

    def synchronise(self) -> float:
        """The time, once the device has done its work."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
