"""Latency is a median over calls, and modes that don't fit are refused."""

import time

import pytest
import torch
from torch import nn

from chanlab.csi.latency import _graph, median_latency
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
    assert slow.calls == 3 + 5
    assert 10 <= found < 50


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="CUDA"):
        median_latency(Slow(), HISTORY, mode="cuda graph")
    with pytest.raises(UsageError, match="runs"):
        median_latency(Slow(), HISTORY, runs=0)


class Whitened(nn.Module):
    """Knows history and noise."""

    def forward(self, history, noise_variance=None):
        return history / noise_variance[:, None, None, None, None]


@pytest.mark.parametrize("ignored", ["nothing", "history", "noise"])
def test_a_mode_must_know_each_history_and_noise(ignored, monkeypatch):
    history, noise = torch.randn(1, 1, 2, 4, 8, dtype=torch.complex64), torch.ones(1)

    def compile_(predictor, **options):
        first = []

        def call(history, noise_variance):
            first.append((history, noise_variance))
            seen = first[0][0] if ignored == "history" else history
            return predictor(seen, first[0][1] if ignored == "noise" else noise_variance)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    if ignored == "nothing":
        assert median_latency(Whitened(), history, noise, mode="compiled", runs=2) > 0
    else:
        with pytest.raises(ChanlabError, match=r"compiled of Whitened predicts something else.*mode=.eager"):
            median_latency(Whitened(), history, noise, mode="compiled", runs=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_replays_with_the_new_history_and_noise():
    history, other = torch.randn(2, 1, 1, 2, 4, 8, dtype=torch.complex64, device="cuda")
    noise = torch.ones(1, device="cuda")
    call = _graph(Whitened(), history, noise, 3)
    for seen, level in ((history, noise), (other, noise), (other, 3 * noise), (history, noise)):
        torch.testing.assert_close(call(seen, level), Whitened()(seen, level))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_is_timed_and_refuses_what_waits():
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
