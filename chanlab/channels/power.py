"""Power over paths and links: path gain, received power, delay spread, K factor."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.coefficients import Geometry, port_coefficients
from chanlab.channels.paths import Paths
from chanlab.errors import UsageError

Combine = Literal["port", "sum", "mean"]


def path_powers(paths: Paths) -> Tensor:
    """Power gain of each path between isotropic antennas, `[..., path]`, linear.

    Summed over both received polarisations and averaged over both transmitted ones: |T|²_F / 2. In free space this is
    (λ/(4π d))².
    """
    return paths.transfer.abs().square().sum((-3, -2)) / 2


def path_gain(paths: Paths) -> Tensor:
    """Power gain of a link without antennas, summed over its paths, `[...]`, linear (small-scale fading averaged)."""
    return path_powers(paths).sum(-1)


def mean_delay(paths: Paths) -> Tensor:
    """Power-weighted mean of the absolute delays [s], `[...]`; 0 where there is no path."""
    power = path_powers(paths)
    return (power * paths.delay).sum(-1) / _nonzero(power.sum(-1))


def rms_delay_spread(paths: Paths) -> Tensor:
    """Power-weighted standard deviation of the delays [s], `[...]`; 0 where there is no path."""
    power = path_powers(paths)
    around = paths.delay - mean_delay(paths)[..., None]
    return ((power * around.square()).sum(-1) / _nonzero(power.sum(-1))).sqrt()


def k_factor(paths: Paths, of: Literal["strongest", "los"] = "strongest") -> Tensor:
    """Ratio of one path's power to that of all others, `[...]`, linear.

    Args:
        paths: `[..., path]`.
        of: The strongest path, or the line of sight (no interactions).

    Returns:
        K; infinite for a single path, 0 where the path asked for (or any) is missing.

    Raises:
        UsageError: If `of` is unknown.
    """
    power = path_powers(paths)
    if of == "strongest":
        chosen = power == power.amax(-1, keepdim=True)
        chosen = chosen & (chosen.cumsum(-1) == 1)
    elif of == "los":
        chosen = paths.mask & (paths.interactions == 0).all(-2)
    else:
        raise UsageError(f"k_factor(of=...) takes 'strongest' or 'los', not {of!r}.")
    one = torch.where(chosen, power, 0.0).sum(-1)
    others = torch.where(chosen, 0.0, power).sum(-1)
    ratio = torch.where(others > 0, one / _nonzero(others), torch.inf)
    return torch.where(one > 0, ratio, 0.0)


def rssi(
    paths: Paths,
    tx_array: PlanarArray,
    rx_array: PlanarArray,
    transmit_power_dbm: float = 0.0,
    combine: Combine = "port",
    **geometry: Unpack[Geometry],
) -> Tensor:
    """Received power from paths, whose powers add up (averaged over small-scale fading and band).

    For the power at one instant in one band see `rssi_from_cfr`.

    Args:
        paths: `[..., path]`.
        tx_array: Transmit array; its ports send independent signals of equal power.
        rx_array: Receive array.
        transmit_power_dbm: Total transmit power [dBm].
        combine: `port`: power of each receive port; `sum` or `mean` over ports.
        **geometry: Orientations and more: see `Geometry`.

    Returns:
        [dBm], `[..., rx_ant]`, or `[...]` if combined; -inf where there is no path.

    Raises:
        UsageError: If shapes don't fit or `combine` is unknown.
    """
    power = port_coefficients(paths, tx_array, rx_array, **geometry).abs().square().sum(-1).mean(-1)
    return _dbm(power, transmit_power_dbm, combine)


def rssi_from_cfr(channel: Tensor, transmit_power_dbm: float = 0.0, combine: Combine = "port") -> Tensor:
    """Received power of a channel over its times and subcarriers.

    Args:
        channel: CFR, complex `[..., rx_ant, tx_ant, time, subcarrier]`; the transmit power is spread evenly over ports
            and subcarriers.
        transmit_power_dbm: Total transmit power [dBm].
        combine: `port`: power of each receive port; `sum` or `mean` over ports.

    Returns:
        [dBm], `[..., rx_ant]`, or `[...]` if combined; -inf for a channel of zeros.

    Raises:
        UsageError: If the shape doesn't fit or `combine` is unknown.
    """
    if channel.ndim < 4:
        raise UsageError(f"a CFR is [..., rx_ant, tx_ant, time, subcarrier], not {list(channel.shape)}.")
    return _dbm(channel.abs().square().mean((-3, -2, -1)), transmit_power_dbm, combine)


def _dbm(power: Tensor, transmit_power_dbm: float, combine: Combine) -> Tensor:
    if combine == "sum":
        power = power.sum(-1)
    elif combine == "mean":
        power = power.mean(-1)
    elif combine != "port":
        raise UsageError(f"combine must be 'port', 'sum' or 'mean', not {combine!r}.")
    return transmit_power_dbm + 10 * power.log10()


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)
