"""Latency is a median over calls, and modes that don't fit are refused."""

import time

import pytest
import torch
from torch import nn

from chanlab.csi.latency import median_latency
from chanlab.errors import ChanlabError, UsageError

HISTORY = torch.zeros(1, 1, 2, 4, 8, dtype=torch.complex64)


class Slow(nn.Module):
    """Takes a known time, but for an outlier."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, history, noise_variance=None):
        self.calls += 1
        time.sleep(0.2 if self.calls == 8 else 0.01)
        return history


def test_median_of_the_calls_that_are_timed():
    slow = Slow()
    found = median_latency(slow, HISTORY, runs=5, warm_up=3)
    assert slow.calls == 1 + 3 + 5
    assert 10 <= found < 50


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="CUDA"):
        median_latency(Slow(), HISTORY, mode="cuda graph")
    with pytest.raises(UsageError, match="runs"):
        median_latency(Slow(), HISTORY, runs=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_replays_with_the_new_history_and_refuses_what_waits():
    class Waits(nn.Module):
        def forward(self, history, noise_variance=None):
            return history * float(history.abs().sum() + 1)

    history = torch.randn(1, 1, 2, 4, 8, dtype=torch.complex64, device="cuda")
    network = nn.Linear(8, 8, dtype=torch.complex64, device="cuda")
    network.forward = lambda history, noise_variance=None: nn.functional.linear(history, network.weight)
    assert median_latency(network, history, mode="cuda graph", runs=10) > 0
    with pytest.raises(ChanlabError, match="Waits"):
        median_latency(Waits(), history, mode="cuda graph")
    assert median_latency(Waits(), history, runs=10) > 0
