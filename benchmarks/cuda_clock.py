"""Times on a CUDA device, by events, and calls captured into graphs: what several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def warm_up(call: Callable[[], Any], times: int = 3) -> None:
    """Calls it on a stream of its own, as a capture asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(side)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """What replays the call, once warm, as a CUDA graph.

    It keeps the call: a graph reads the memory of tensors, and doesn't keep those that only the call holds.
    """
    warm_up(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()

    def replay() -> Any:
        graph.replay()
        return call, made

    return replay


def milliseconds(call: Callable[[], Any]) -> float:
    """Time between two events around a call, the device idle before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
