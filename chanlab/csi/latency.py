"""Latency of predictors: one call, from a history on the device to its prediction there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from chanlab.errors import ChanlabError, UsageError

Mode = Literal["eager", "cuda graph", "compiled"]
"""How a predictor is called: as it is; replayed from a CUDA graph; by `torch.compile(mode="reduce-overhead")`."""

_Call = Callable[[Tensor, Tensor | None], Tensor]


@torch.inference_mode()
def median_latency(
    predictor: nn.Module,
    history: Tensor,
    noise_variance: Tensor | None = None,
    mode: Mode = "eager",
    runs: int = 100,
    warm_up: int = 10,
) -> float:
    """Median time of a call [ms].

    Each call is waited for before the next begins, so that launching its kernels counts. On CUDA times are those of
    CUDA events. With a CUDA graph, copying the new history into the graph's own counts too.

    Args:
        predictor: In evaluation mode, on the history's device.
        history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
        noise_variance: `[batch]`, or None.
        mode: How the predictor is called.
        runs: Calls that are timed.
        warm_up: Calls before them.

    Raises:
        UsageError: A CUDA graph is asked for elsewhere, or `runs` is below 1.
        ChanlabError: The mode doesn't work with this predictor: it waits for the device within a call, can't be
            compiled, or gives other predictions than called as it is.
    """
    if runs < 1 or warm_up < 1:
        raise UsageError(f"runs and warm_up must be at least 1, not {runs} and {warm_up}.")
    if mode == "cuda graph" and not history.is_cuda:
        raise UsageError(f"A CUDA graph needs a CUDA device, not {history.device}.")

    call: _Call = predictor
    if mode != "eager":
        name = type(predictor).__name__
        # A second window: with the first alone, a graph that never reads its input would pass.
        second = (1j * history.flip(3), None if noise_variance is None else 2 * noise_variance)
        windows = [(history, noise_variance), second]
        expected = [predictor(*window) for window in windows]
        try:
            call = (_graph if mode == "cuda graph" else _compiled)(predictor, history, noise_variance, warm_up)
            found = [call(*window).clone() for window in windows]
        except Exception as error:  # whatever capture or compiler raise; not our code to foresee
            first = (str(error).strip().splitlines() or [""])[0]
            raise ChanlabError(f"no {mode} of {name}: {type(error).__name__}: {first}") from error
        ratios = [(f - e).abs().square().sum() / e.abs().square().sum() for f, e in zip(found, expected, strict=True)]
        off = float(torch.stack(ratios).amax())
        if not off < 1e-4:
            raise ChanlabError(
                f"{mode} of {name} predicts something else than it does as it is: relative error {off:.2g}; "
                "time it with mode='eager'"
            )
    for _ in range(warm_up):
        call(history, noise_variance)
    return statistics.median(_times(lambda: call(history, noise_variance), history.device, runs))


def _graph(predictor: nn.Module, history: Tensor, noise_variance: Tensor | None, warm_up: int) -> _Call:
    """The predictor captured once, replayed with each new history."""
    static = history.clone()
    static_noise = None if noise_variance is None else noise_variance.clone()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            predictor(static, static_noise)
        torch.cuda.synchronize()
        with _no_waiting():  # a capture that fails halfway may leave the process unusable: ask first
            predictor(static, static_noise)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out: Tensor = predictor(static, static_noise)

    def call(history: Tensor, noise_variance: Tensor | None) -> Tensor:
        static.copy_(history)
        if static_noise is not None and noise_variance is not None:
            static_noise.copy_(noise_variance)
        graph.replay()
        return out

    return call


def _compiled(predictor: nn.Module, history: Tensor, noise_variance: Tensor | None, warm_up: int) -> _Call:
    compiled = torch.compile(predictor, mode="reduce-overhead")

    def call(history: Tensor, noise_variance: Tensor | None) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        found: Tensor = compiled(history, noise_variance)
        return found

    for _ in range(warm_up):
        call(history, noise_variance)
    return call


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Makes operations fail that wait for the device: none of them can be captured.

    transformers leaves its own such operations out where it sees a capture: it is told of one.
    """
    before, asked = torch.cuda.get_sync_debug_mode(), torch.cuda.is_current_stream_capturing
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
        torch.cuda.set_sync_debug_mode(before)


def _times(call: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Time of each call [ms]."""
    times = []
    for _ in range(runs):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e3)
    return times
