"""Windows of few rays: plane waves in space, time and frequency, with the power and noise of those they replace."""

import pytest
import torch

from chanlab.csi import LearnedWiener
from chanlab.csi.few_rays import MOST_RAYS, few_ray_windows, with_few_rays
from chanlab.csi.ray_pursuit import RayPursuit
from chanlab.errors import UsageError

SHAPE = (2, 4, 4)


def windows(batch=6, bands=(0.0,), rx_ant=1):
    torch.manual_seed(3)
    return few_ray_windows(batch, rx_ant, SHAPE, 16, 4, 48, bands)


def test_every_axis_has_the_rank_of_the_rays():
    history, target = windows(batch=40)
    assert history.shape == (40, 1, 32, 16, 48)
    assert target.shape == (40, 1, 32, 4, 48)
    assert history.dtype == torch.complex64
    whole = torch.cat([history, target], 3)[:, 0]
    over_frequency = torch.linalg.matrix_rank(whole.flatten(1, 2).to(torch.complex128), rtol=1e-4)
    assert over_frequency.max() <= MOST_RAYS
    assert over_frequency.min() < MOST_RAYS  # counts differ
    over_time = torch.linalg.matrix_rank(whole.movedim(2, 1).flatten(2).to(torch.complex128), rtol=1e-4)
    assert over_time.max() <= MOST_RAYS
    assert over_time.min() == 1


def test_power_is_one_in_each_window():
    history, target = windows(batch=50)
    torch.testing.assert_close(history.abs().square().mean((1, 2, 3, 4)), torch.ones(50))
    assert 0.5 < target.abs().square().mean() < 2


def test_a_single_ray_goes_on_as_it_came():
    torch.manual_seed(5)
    history, target = few_ray_windows(200, 1, SHAPE, 16, 4, 48, (0.0,))
    step = history[..., 1:, :] * history[..., :-1, :].conj()
    step = step / step.abs()
    lone = (step - step[..., :1, :1]).abs().amax((1, 2, 3, 4)) < 1e-5
    assert 2 < lone.sum() < 60  # one of twelve
    turned = history[lone][..., -1:, :] * step[lone][..., -1:, :] ** torch.arange(1, 5)[:, None]
    torch.testing.assert_close(target[lone], turned, rtol=1e-3, atol=1e-3)


def test_rays_are_found_in_both_bands():
    history, target = windows(batch=8, bands=(0.0, 1.5))
    predictor = RayPursuit(horizons=4, tx_shape=list(SHAPE), duplex="both", fdd_offset=1.5)
    error = (predictor(history, torch.full((8,), 1e-4)) - target).abs().square()
    near, far = error.split(48, -1)
    assert near.mean((1, 2, 3, 4)).median() < 0.01
    assert far.mean((1, 2, 3, 4)).median() < 0.3


def test_replaced_windows_keep_power_and_noise():
    torch.manual_seed(7)
    clean = torch.randn(300, 1, 32, 16, 24, dtype=torch.complex64)
    variance = torch.full((300,), 0.5)
    noisy = 2 * clean + 0.5**0.5 * torch.randn_like(clean)
    target = torch.randn(300, 1, 32, 4, 24, dtype=torch.complex64)
    history, following = with_few_rays(noisy, target, variance, SHAPE, (0.0,), 0.5)
    taken = (history != noisy).flatten(1).any(1)
    assert 0.4 < taken.float().mean() < 0.6
    assert torch.equal(following[~taken], target[~taken])
    torch.testing.assert_close(history[taken].abs().square().mean(), torch.tensor(4.5), rtol=0.02, atol=0.0)
    alone, nothing = with_few_rays(0.5**0.5 * clean, target, variance, SHAPE, (0.0,), 1.0)
    torch.testing.assert_close(alone.abs().square().mean(), torch.tensor(0.5), rtol=0.05, atol=0.0)
    assert nothing.abs().square().mean() < 0.02


def test_training_meets_them_if_asked(monkeypatch):
    torch.manual_seed(0)
    history, target = windows(batch=2)
    met = []
    module = "chanlab.csi.learned_wiener.with_few_rays"
    monkeypatch.setattr(module, lambda *given: met.append(given[4:]) or (history, target))
    LearnedWiener(dim=16, layers=1, few_rays=0.25).training_loss(history, target, torch.full((2,), 0.1))
    assert met == [((0.0,), 0.25)]
    LearnedWiener(dim=16, layers=1).training_loss(history, target, torch.full((2,), 0.1))
    LearnedWiener(dim=16, layers=1, few_rays=0.25).training_loss(history, target, None)
    assert len(met) == 1
    with pytest.raises(UsageError, match="probability"):
        LearnedWiener(few_rays=1.5)
