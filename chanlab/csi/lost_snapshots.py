"""Snapshots that never arrived, filled from those that did."""

from __future__ import annotations

import torch
from torch import Tensor

from chanlab.csi.beam_taps import LOST, NUM_LINES, noise_level, spectral_features
from chanlab.csi.doppler_wiener import doppler_posterior

ROUNDS = 2


@torch.no_grad()
def fill_lost(taps: Tensor, noise: Tensor) -> Tensor:
    """Beams and taps with their lost snapshots interpolated; others stay as they are.

    A gap in a series spreads its periodogram over all Doppler shifts, and with it everything that a network reads off
    it. So each beam and tap is interpolated by a Wiener filter whose spectrum is its own periodogram, gap and all, and
    once more with the periodogram of what came out.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
        noise: Noise variance of each snapshot `[batch, time]`, as `snapshot_noise` tells it: `LOST` marks lost ones.
    """
    lost = noise >= LOST
    if not taps.is_cuda and not lost.any():  # on a GPU asking would mean waiting for it
        return taps
    level = noise_level(noise)
    floor = level[:, None, None, None, None]
    instants = torch.arange(1 - taps.shape[-1], 1, device=taps.device)
    filled = taps
    for _ in range(ROUNDS):
        _, periodogram = spectral_features(filled, level)
        spectrum = (torch.maximum(periodogram - floor, 0.02 * periodogram) + 1e-9) / NUM_LINES
        loading = noise[:, None, None, None] + 1e-3 * spectrum.sum(-1, keepdim=True) + 1e-5
        posterior = doppler_posterior(spectrum[..., None, :], loading, taps.movedim(1, -2), instants)
        filled = torch.where(lost[:, None, None, None, None], posterior.mean[..., 0, :, :].movedim(-2, 1), taps)
    return filled


@torch.no_grad()
def unreached(noise: Tensor) -> Tensor:
    """What to take as white, in shares of the power, when the last snapshots are lost, `[batch]`.

    A prediction then reaches farther than any that training asked for, and lines that are a little wrong grow with the
    distance: errors of several times the channel's power, without this. A thousandth for one lost snapshot, ten
    times as much for each more, is of the order of what does best at 30 m/s; three to ten times as much is as good.

    Args:
        noise: See `fill_lost`.
    """
    gap = (noise >= LOST).flip(-1).long().cumprod(-1).sum(-1)
    return torch.where(gap > 0, 1e-4 * 10.0 ** gap.clamp(max=3), 0.0)
