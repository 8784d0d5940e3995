"""Schedules of the learning rate that learners share."""

from __future__ import annotations

import math


def warmup_cosine(step: int, steps: float, warmup: float) -> float:
    """Factor of the learning rate: a linear rise over the first part of the steps, then half a cosine down to zero.

    Args:
        step: Steps done.
        steps: Steps of the whole run; infinite for a run without an end, whose factor is 1.
        warmup: Part of the steps that rise.
    """
    if math.isinf(steps):
        return 1.0
    rising = max(1.0, warmup * steps)
    if step < rising:
        return min(1.0, (step + 1) / rising)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (step - rising) / max(1.0, steps - rising))))
