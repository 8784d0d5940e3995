"""RayPursuit on sums of complex exponentials, whose continuation is known."""

import pytest
import torch

from chanlab.csi import PAD, Predictor
from chanlab.csi.ray_pursuit import RayPursuit
from chanlab.errors import UsageError
from chanlab.metrics import nmse, to_db

STEPS, AHEAD = 16, 4


def channels(batch=3, rays=4, rx=1, shape=(2, 4, 4), subcarriers=24, decay=0.0, seed=0):
    """Sums of rays off every grid, complex64 `[batch, rx_ant, tx_ant, time, subcarrier]`, 16 snapshots and 4 more."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    polarizations, columns, rows = shape
    frequency = draw(4, batch, rays, 1) - 0.5
    size = [columns, rows, STEPS + AHEAD, subcarriers]
    axes = [torch.exp(2j * torch.pi * f * torch.arange(n)) for f, n in zip(frequency, size, strict=True)]
    axes[2] = axes[2] * torch.exp(-decay * torch.arange(STEPS + AHEAD))
    phase = torch.exp(2j * torch.pi * draw(batch, rx, polarizations, rays))
    gain = phase * 10 ** (-0.5 * torch.arange(rays) / max(1, rays - 1))
    whole = torch.einsum("bapk,bkc,bkr,bkt,bkf->bapcrtf", gain, *axes)
    return whole.flatten(2, 4).to(torch.complex64)


def noisy(channel, variance, seed=1):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*channel.shape, 2, generator=generator)
    return channel + torch.view_as_complex(noise) * (variance / 2) ** 0.5


def split(channel):
    return channel[..., :STEPS, :], channel[..., STEPS:, :]


def test_rays_without_noise_are_continued_exactly():
    history, target = split(channels())
    predictor = RayPursuit(tx_shape=(2, 4, 4), refinements=8)
    assert isinstance(predictor, Predictor)
    assert nmse(predictor(history, torch.full((3,), 1e-7)), target) < 1e-5


def test_it_is_far_ahead_of_pad_on_specular_rays():
    history, target = split(channels(rays=6, seed=3))
    history = noisy(history, 0.1)
    variance = torch.full((3,), 0.1)
    reached = to_db(nmse(RayPursuit(tx_shape=(2, 4, 4))(history, variance), target))
    assert reached < to_db(nmse(PAD(tx_shape=(8, 4))(history, variance), target)) - 5
    assert reached < -25


def test_noise_need_not_be_told():
    history, target = split(channels(seed=5))
    history = noisy(history, 0.1)
    predictor = RayPursuit(tx_shape=(2, 4, 4))
    told, untold = (nmse(predictor(history, n), target) for n in (torch.full((3,), 0.1), None))
    assert abs(to_db(told) - to_db(untold)) < 0.5


def test_a_ray_that_decays():
    history, target = split(channels(rays=1, decay=0.08, seed=7))
    history = noisy(history, 1e-3)
    variance = torch.full((3,), 1e-3)
    with_decay, without = (
        to_db(nmse(RayPursuit(tx_shape=(2, 4, 4), decay=decay)(history, variance), target)) for decay in (True, False)
    )
    assert with_decay < -25
    assert with_decay < without - 10


def test_it_tells_where_a_ray_is():
    places = [torch.arange(n, dtype=torch.float64) - (n - 1) / 2 for n in (4, 4, STEPS, 24)]
    truth = torch.tensor([0.11, -0.23, 0.317, -0.072], dtype=torch.float64)
    axes = [torch.exp(2j * torch.pi * f * x) for f, x in zip(truth, places, strict=True)]
    gain = torch.tensor([1.0, -0.5j], dtype=torch.complex128)
    seen = torch.einsum("s,c,r,t,f->scrtf", gain, *axes)[None]
    rays = RayPursuit(refinements=8).find(seen, torch.tensor([1e-6], dtype=torch.float64))
    strongest = int(rays.gain.abs().sum(1).argmax())
    assert rays.found[0, strongest]
    torch.testing.assert_close(rays.shift[0, strongest, :4], truth, atol=1e-3, rtol=0)
    torch.testing.assert_close(rays.gain[0, :, strongest], gain, atol=1e-2, rtol=0)
    assert (rays.shift[..., 4] >= 0).all()


def test_in_noise_alone_there_are_no_rays():
    history = noisy(torch.zeros(20, 1, 32, STEPS, 24, dtype=torch.complex64), 2.0)
    predicted = RayPursuit(tx_shape=(2, 4, 4), false_alarms=0.01)(history, torch.full((20,), 2.0))
    silent = (predicted == 0).flatten(1).all(1)
    assert silent.sum() >= 19


def test_windows_do_not_see_each_other_and_scale_does_not_matter():
    few, many = channels(rays=1, seed=9), channels(rays=6, seed=10)
    history = noisy(split(torch.cat([few, many]))[0], 0.05)
    variance = torch.full((6,), 0.05)
    predictor = RayPursuit(tx_shape=(2, 4, 4))
    together = predictor(history, variance)
    alone = torch.cat([predictor(h[None], v[None]) for h, v in zip(history, variance, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)
    turned = predictor(history * (1e-4j), variance * 1e-8)
    torch.testing.assert_close(turned, together * 1e-4j, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize(("rx", "shape", "subcarriers"), [(2, (1, 8, 1), 7), (1, (2, 2, 3), 12)])
def test_any_array_and_band(rx, shape, subcarriers):
    history, target = split(channels(rays=2, rx=rx, shape=shape, subcarriers=subcarriers, seed=11))
    predictor = RayPursuit(tx_shape=None if shape[0] == 1 else shape)
    assert to_db(nmse(predictor(noisy(history, 0.01), torch.full((3,), 0.01)), target)) < -20


def test_any_instant():
    slow = torch.exp(0.2j * torch.pi * torch.arange(STEPS + AHEAD))  # below half a cycle of every second snapshot
    channel = slow[:, None] * channels(rays=2, seed=12)[..., :1, :]
    every_second, expected = channel[..., 1:STEPS:2, :], channel[..., [STEPS, STEPS + 2], :]
    found = RayPursuit(tx_shape=(2, 4, 4))(every_second, torch.full((3,), 1e-5), torch.tensor([0.5, 1.5]))
    assert to_db(nmse(found, expected)) < -40


def test_the_other_band_follows_from_delays():
    whole = channels(rays=3, subcarriers=60, seed=13)
    history = noisy(whole[..., :STEPS, :24], 1e-3)
    target = torch.cat([whole[..., STEPS:, :24], whole[..., STEPS:, 36:]], -1)
    both = RayPursuit(tx_shape=(2, 4, 4), duplex="both")(history, torch.full((3,), 1e-3))
    assert to_db(nmse(both, target)) < -25
    other = RayPursuit(tx_shape=(2, 4, 4), duplex="fdd")(history, torch.full((3,), 1e-3))
    torch.testing.assert_close(other, both[..., 24:])


@pytest.mark.parametrize(("offset", "nearest"), [(1.5, "1.52"), (-0.5, "-0.48"), (0.03, "0.04")])
def test_the_other_band_is_whole_subcarriers_away(offset, nearest):
    """Delays are known up to turns of a subcarrier spacing: between subcarriers they say nothing."""
    history = split(channels(rays=1, subcarriers=25))[0]
    for duplex in ("fdd", "both"):
        with pytest.raises(UsageError, match=rf"fdd_offset to {nearest}\b"):
            RayPursuit(tx_shape=(2, 4, 4), duplex=duplex, fdd_offset=offset)(history)
    same_band = RayPursuit(tx_shape=(2, 4, 4), fdd_offset=offset)(history)
    assert same_band.isfinite().all()


def test_an_offset_with_few_digits_is_whole_subcarriers():
    whole = channels(rays=2, subcarriers=60, seed=13)
    predictor = RayPursuit(tx_shape=(2, 4, 4), duplex="fdd", fdd_offset=1.333333)
    other = predictor(whole[..., :STEPS, :24], torch.full((3,), 1e-5))
    assert to_db(nmse(other, whole[..., STEPS:, 32:56])) < -40


def test_what_rays_leave_is_noise():
    history, target = split(channels(seed=14))
    observed = noisy(history, 0.1)
    prediction, remainder = RayPursuit(tx_shape=(2, 4, 4)).separate(observed, torch.full((3,), 0.1))
    assert to_db(nmse(prediction, target)) < -25
    assert remainder.abs().square().mean() == pytest.approx(0.1, rel=0.05)
    assert to_db(nmse(observed - remainder, history)) < -25


def test_arguments_are_checked():
    with pytest.raises(UsageError, match="rays must be at least 1"):
        RayPursuit(rays=0)
    with pytest.raises(UsageError, match="false_alarms"):
        RayPursuit(false_alarms=0.0)
    with pytest.raises(UsageError, match="duplex"):
        RayPursuit(duplex="both bands")
    with pytest.raises(UsageError, match="polarizations, columns, rows"):
        RayPursuit(tx_shape=[4, 4])
    with pytest.raises(UsageError, match="set tx_shape"):
        RayPursuit(tx_shape=(2, 4, 4))(torch.zeros(1, 1, 8, STEPS, 4, dtype=torch.complex64))
