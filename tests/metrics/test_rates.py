import math

import pytest
import torch

from chanlab.errors import UsageError
from chanlab.metrics import (
    BeamGainLoss,
    SpectralEfficiency,
    beam_gain_loss_db,
    beam_gains,
    mrt_precoder,
    multiuser_sinr,
    spectral_efficiency,
    sum_rate,
)


def link(matrix):
    """A channel [1, rx, tx, 1, 1] from a nested list."""
    return torch.tensor(matrix, dtype=torch.complex64)[None, :, :, None, None]


def test_mrt_reaches_the_full_array_gain():
    h = link([[3, 4j]])
    w = mrt_precoder(h)
    assert w.shape == (1, 2, 1, 1, 1)
    torch.testing.assert_close(w.squeeze(), torch.tensor([0.6, -0.8j], dtype=torch.complex64))
    rate = spectral_efficiency(h, w, 5.0)
    assert rate.shape == (1, 1, 1)
    assert rate.item() == pytest.approx(math.log2(1 + 25 / 5))


def test_mrt_with_several_receive_antennas_is_the_dominant_singular_vector():
    h = link([[2, 0], [0, 1]])
    assert spectral_efficiency(h, mrt_precoder(h), 1.0).item() == pytest.approx(math.log2(5), rel=1e-5)


def test_two_streams_are_log_det():
    h, w = link([[2, 0], [0, 1]]), link([[math.sqrt(0.5), 0], [0, math.sqrt(0.5)]])
    assert spectral_efficiency(h, w, 0.5).item() == pytest.approx(math.log2(1 + 4) + math.log2(1 + 1), rel=1e-5)
    # more streams than receive antennas: the same determinant from the other side
    assert spectral_efficiency(link([[2, 1]]), w, 0.5).item() == pytest.approx(math.log2(1 + (4 + 1)), rel=1e-5)


def test_multiuser_sinr_by_hand():
    h = link([[1, 0], [1, 1]])  # user 1 hears the beam of user 0
    w = link([[1, 0], [0, 2]])
    sinr = multiuser_sinr(h, w, 0.5)
    assert sinr.shape == (1, 2, 1, 1)
    assert sinr.flatten().tolist() == pytest.approx([1 / 0.5, 4 / 1.5])
    assert sum_rate(sinr).item() == pytest.approx(math.log2(3) + math.log2(1 + 4 / 1.5))


def test_noise_variance_per_sample():
    h = torch.cat([link([[1, 0]]), link([[1, 0]])])
    rate = spectral_efficiency(h, mrt_precoder(h), torch.tensor([1.0, 1 / 3]))
    assert rate.flatten().tolist() == pytest.approx([1, 2])


def test_spectral_efficiency_class():
    # a wrong prediction keeps half of the gain; SNR 0 dB per receive antenna of E|h|² = 1/2: N0 = 1/2
    target, prediction = link([[1, 0]]), link([[1, 1]])
    metric = SpectralEfficiency(snr_db=0.0)
    metric.update(prediction, target)
    assert metric.compute().item() == pytest.approx(math.log2(1 + 0.5 / 0.5), rel=1e-5)
    relative = SpectralEfficiency(snr_db=0.0, relative=True)
    relative.update(prediction, target)
    assert relative.compute().item() == pytest.approx(1 / math.log2(3), rel=1e-5)


def test_beam_gain_loss_by_hand():
    codebook = torch.tensor([[1, 0], [0, 1], [math.sqrt(0.5), math.sqrt(0.5)]])
    h = torch.cat([link([[1, 1]]), link([[2, 0]])])
    torch.testing.assert_close(beam_gains(h, codebook), torch.tensor([[1.0, 1.0, 2.0], [4.0, 0.0, 2.0]]))
    chosen = torch.tensor([0, 2])
    own = beam_gain_loss_db(h, codebook, chosen, reduction="none")
    torch.testing.assert_close(own, torch.full((2,), 10 * math.log10(2)))
    assert beam_gain_loss_db(h, codebook, torch.tensor([2, 2])).item() == pytest.approx(
        -10 * math.log10(0.75), rel=1e-5
    )
    metric = BeamGainLoss(codebook)
    metric.update(h[:1], torch.tensor([2]))
    metric.update(h[1:], torch.tensor([2]))
    assert metric.compute().item() == pytest.approx(-10 * math.log10(0.75), rel=1e-5)


def test_errors_name_what_is_wrong():
    h = link([[1, 0]])
    with pytest.raises(UsageError, match="tx_ant, stream"):
        spectral_efficiency(h, torch.ones(1, 3, 1, 1, 1), 1.0)
    with pytest.raises(UsageError, match="positive"):
        spectral_efficiency(h, mrt_precoder(h), 0.0)
    with pytest.raises(UsageError, match="2 users"):
        multiuser_sinr(link([[1, 0], [0, 1]]), link([[1], [0]]), 1.0)
    with pytest.raises(UsageError, match=r"0\.\.1"):
        beam_gain_loss_db(h, torch.eye(2), torch.tensor([2]))
    with pytest.raises(UsageError, match="codebook"):
        beam_gains(h, torch.eye(3))
    with pytest.raises(UsageError, match="NaN"):
        SpectralEfficiency().update(h * torch.nan, h)
