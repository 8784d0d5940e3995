"""Release 18's Doppler codebook: what a report holds, and what it loses."""

import math

import pytest
import torch
from exponentials import exponentials, nmse_db

from chanlab.csi import DopplerCodebook, NoPrediction, is_trainable
from chanlab.csi.doppler_codebook import COMBINATIONS
from chanlab.errors import UsageError

N4 = 4


def path(column=0.0, row=0.0, doppler=0.0, delay=0.0, polarization=(1.0, 0.5j), subcarriers=48):
    """One plane wave at a 4 x 4 cross-polarised array; angles, Doppler and delay in cycles per step."""

    def wave(cycles, count):
        return torch.exp(2j * math.pi * cycles * torch.arange(count).double())

    waves = (torch.tensor(polarization, dtype=torch.complex128), wave(column, 4), wave(row, 4))
    ports = torch.einsum("p,c,r->pcr", *waves).flatten()
    return torch.einsum("a,t,f->atf", ports, wave(doppler, N4), wave(-delay, subcarriers))[None, None].cfloat()


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_one_path_on_the_grid_is_reported_whatever_its_doppler_and_delay(combination):
    """Its phase over time and frequency is that of the strongest beam, which a precoder doesn't have."""
    channel = path(column=0.25, row=0.5, doppler=0.37, delay=0.13)
    codebook = DopplerCodebook(N4, combination=combination, subcarriers_per_unit=1)
    assert nmse_db(codebook.report(channel), channel) < -100


def test_beams_are_oversampled():
    codebook = DopplerCodebook(N4, subcarriers_per_unit=1, combination=2)
    between = path(column=1 / 4 + 3 / 16, row=1 / 16)
    assert nmse_db(codebook.report(between), between) < -100
    bases = codebook._bases
    assert bases.shape == (16, 16, 16)
    assert torch.allclose(bases.mH @ bases, torch.eye(16, dtype=bases.dtype).expand(16, 16, 16), atol=1e-5)
    missed = path(column=1 / 32, row=1 / 32)
    assert -30 < nmse_db(codebook.report(missed), missed) < -6


def test_one_doppler_beside_the_constant():
    """Two of the N4 vectors: a second path fits where it turns on the grid against the first, a third one doesn't."""
    codebook = DopplerCodebook(N4, subcarriers_per_unit=1)
    two = path(row=0.25, doppler=0.11) + 0.5 * path(column=0.25, doppler=0.11 + 1 / N4)
    assert nmse_db(codebook.report(two), two) < -100
    three = two + 0.3 * path(column=0.5, doppler=0.11 + 2 / N4)
    power = 0.3**2 / (1 + 0.5**2 + 0.3**2)
    assert nmse_db(codebook.report(three), three) == pytest.approx(10 * math.log10(power), abs=0.01)


def test_a_unit_is_reported_as_one():
    """The mean over a unit stands for all of its subcarriers: what varies within is lost."""
    flat, selective = path(delay=0.0), path(delay=1 / 24)
    codebook = DopplerCodebook(N4, subcarriers_per_unit=24)
    assert nmse_db(codebook.report(flat), flat) < -100
    assert nmse_db(codebook.report(selective), selective) == pytest.approx(0.0, abs=1e-3)  # the mean is zero
    uneven = path(delay=0.0, subcarriers=50)
    assert codebook.report(uneven).shape == uneven.shape
    assert nmse_db(codebook.report(uneven), uneven) < -100


def rich(batch=3, num_rx=1):
    return exponentials(batch, 32, N4, 48, num_paths=40, max_doppler=0.4, num_rx=num_rx)


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("num_rx", [1, 3])
def test_no_more_coefficients_than_the_report_holds(combination, num_rx):
    beams, taps, share = COMBINATIONS[combination]
    codebook = DopplerCodebook(N4, combination=combination, subcarriers_per_unit=4)
    held = []
    strongest = codebook._strongest
    codebook._strongest = lambda x: held.append(strongest(x)) or held[-1]
    codebook.report(rich(num_rx=num_rx))
    x = torch.fft.fft(torch.fft.ifft(held[0], dim=-1), dim=-2)
    there = x.abs() > 1e-4 * x.abs().max()
    num_taps = math.ceil(12 * taps)
    limit = math.ceil(2 * share * beams * num_taps * 2)
    counts = there.flatten(2).sum(-1)
    assert counts.max() <= limit
    assert counts.sum(1).max() <= 2 * limit
    assert counts.max() == limit or num_rx > 2
    assert there.any(dim=(2, 3, 4)).sum(-1).max() <= num_taps
    assert there.any(dim=(2, 3, 5)).sum(-1).max() <= 2
    assert there.shape[3] == beams


def test_a_report_is_a_projection():
    channel = rich()
    arrived = DopplerCodebook(N4, subcarriers_per_unit=1).report(channel)
    error = channel - arrived
    inner = (error.conj() * arrived).sum((1, 2, 3, 4)).abs()
    assert (inner < 1e-4 * channel.abs().square().sum((1, 2, 3, 4))).all()


def test_a_larger_report_loses_less():
    losses = [
        nmse_db(DopplerCodebook(N4, combination=c, subcarriers_per_unit=1).report(rich(8)), rich(8))
        for c in (1, 2, 5, 6, 9)
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < -1.5 < losses[0]


def test_prediction_and_report_add_their_errors():
    """With the true future the report's loss is all; a user who doesn't predict reports what is past."""
    channels = exponentials(4, 32, 16 + N4, 48, num_paths=2, max_doppler=0.1)
    history, future = channels[:, :, :, :16], channels[:, :, :, 16:]
    codebook = DopplerCodebook(N4, subcarriers_per_unit=1)
    loss = nmse_db(codebook.report(future), future)
    assert nmse_db(codebook(history, torch.zeros(4)), future) == pytest.approx(loss, abs=0.1)
    outdated = DopplerCodebook(N4, NoPrediction(N4), subcarriers_per_unit=1)
    assert nmse_db(outdated(history), future) > loss + 3


def test_one_interval_has_no_doppler():
    channel = rich()[:, :, :, :1]
    codebook = DopplerCodebook(1, NoPrediction(1), subcarriers_per_unit=1)
    assert codebook(channel).shape == channel.shape
    assert nmse_db(codebook(channel), channel) < -2


def test_each_sample_by_itself_and_to_scale():
    codebook = DopplerCodebook(N4, NoPrediction(N4))
    assert not is_trainable(codebook)
    channels = rich()
    whole = codebook.report(channels)
    assert torch.allclose(codebook.report(2j * channels[1:2]), 2j * whole[1:2], rtol=1e-4, atol=1e-4)
    assert not codebook.report(torch.zeros_like(channels)).any()


def test_mistakes_are_named():
    for make in (
        lambda: DopplerCodebook(3),
        lambda: DopplerCodebook(combination=10),
        lambda: DopplerCodebook(subcarriers_per_unit=0),
        lambda: DopplerCodebook(tx_shape=(1, 4, 4)),
        lambda: DopplerCodebook(tx_shape=(2, 2, 2)),
        lambda: DopplerCodebook(4, NoPrediction(2)),
    ):
        with pytest.raises(UsageError):
            make()
    with pytest.raises(UsageError, match="reports"):
        DopplerCodebook().report(rich()[:, :, :8])
