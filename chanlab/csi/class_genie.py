"""The class genie: linear prediction by one who knows the statistics of a channel's class. A reference, not a limit.

The class is a profile of 3GPP's clustered delay lines with its delay spread, the user's velocity (as a vector), and the
SNR. Given these, a channel is a sum over taps at known delays, h(port, t, f) = Σ_m x_m(port, t) exp(-j 2π f τ_m), whose
covariance is known: the mean over rays. The linear minimum mean square error (LMMSE) estimate of the future
follows from it. The channels of a class are not Gaussian (20 rays a cluster), so that a nonlinear predictor may be
better; and LMMSE minimises the pooled error, not a mean of ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chanlab.channels import CDL, SPEED_OF_LIGHT, array_response, direction
from chanlab.channels.sionna1 import UplinkOfSionna1
from chanlab.channels.sionna_phy import tr38901
from chanlab.csi.predictor import check_history
from chanlab.errors import UsageError

RAY_OFFSETS = (0.0447, 0.1413, 0.2492, 0.3715, 0.5129, 0.6797, 0.8844, 1.1481, 1.5195, 2.1551)
"""Offset angles of a cluster's rays, each with both signs, for a spread of one (TR 38.901, table 7.5-3)."""

NEGLIGIBLE = 1e-2
"""Modes whose power in the history lies below this fraction of the noise's are left out."""


class Modes(NamedTuple):
    """Uncorrelated components of the taps: x_m(port, t) = Σ over a tap's modes of √power · vector · unit variable.

    Attributes:
        tap: Which tap it belongs to, int64 `[mode]`, ascending.
        power: Float64 `[mode]`.
        vector: Of unit norm, complex128 `[port, time, mode]`.
    """

    tap: Tensor
    power: Tensor
    vector: Tensor


class RayClass(NamedTuple):
    """Second-order statistics of a class of channels, up to the user's velocity; see `ray_class`.

    Attributes:
        delay: [s], float64 `[tap]`.
        response: The ports' response to each ray of each polarization, with the square root of its power, complex128
            `[tap, port, component, ray]`; summed |·|², averaged over all ports of the array, it is one.
        heading: Directions whose projection on the velocity gives the rays' Doppler shifts, float64 `[tap, ray, 3]`.
        coupled: The Doppler shifts belong to the very rays of `response` (angles at the base station); else to the
            user's angles, which are coupled to the base station's at random.
        wavelength: [m].
    """

    delay: Tensor
    response: Tensor
    heading: Tensor
    coupled: bool
    wavelength: float

    def through(self, weights: Tensor) -> RayClass:
        """The same class seen through combinations of ports, complex `[out, port]` (applied as they are)."""
        response = torch.einsum("op,mpcr->mocr", weights.to(self.response), self.response)
        return self._replace(response=response)

    def modes(self, velocity: Tensor, times: Tensor, tolerance: float = 1e-9) -> Modes:
        """Modes of all taps for a velocity.

        Args:
            velocity: Of the user [m/s], `[3]`.
            times: [s], `[time]`.
            tolerance: Share of the total power that may be missing.
        """
        heading = self.heading
        turns = (2 * math.pi / self.wavelength) * (heading @ velocity.to(heading))[:, None] * times.to(heading)[:, None]
        doppler = torch.polar(torch.ones_like(turns), turns)  # [tap, time, ray]
        taps, ports, steps = len(self.delay), self.response.shape[1], len(times)
        if self.coupled:
            factor = (self.response[:, :, None] * doppler[:, None, :, None]).flatten(3).flatten(1, 2)
            power, vector = _dominant(factor, tolerance)
        else:
            space = _dominant(self.response.flatten(2), tolerance)
            time = _dominant(doppler / math.sqrt(doppler.shape[-1]), tolerance)
            power = (space[0][:, :, None] * time[0][:, None]).flatten(1)
            vector = torch.einsum("mpi,mtj->mptij", space[1], time[1]).reshape(taps, ports * steps, -1)
        tap = torch.arange(taps, device=power.device)[:, None].expand_as(power)
        kept = power > 1e-3 * tolerance * power.sum()
        found: Tensor = vector.mT[kept].mT.reshape(ports, steps, -1)
        return Modes(tap[kept], power[kept], found)


def ray_class(channels: CDL) -> RayClass:
    """The statistics of clustered delay lines, from the tables that Sionna draws them with.

    Azimuths and zeniths of a cluster's rays are paired at random (TR 38.901, section 7.7.1, step 8 of 7.5), so that the
    mean goes over all pairs; phases are random and independent, and so is, here, the phase of a line of sight.

    Raises:
        UsageError: The user's array isn't one upright isotropic port, of which the derivation makes use.
    """
    ut = channels.ut_array
    upright = channels.ut_orientation[1:] == (0.0, 0.0)
    if (ut.num_ports, ut.pattern, ut.polarization) != (1, "iso", "V") or not upright:
        raise UsageError("the class genie is made for users with one upright isotropic port: PlanarArray().")
    table = _profile(channels.model)
    line_of_sight = bool(table["los"])

    def column(name: str) -> Tensor:
        return torch.tensor(table[name], dtype=torch.float64)

    def rays(azimuth: str, zenith: str, azimuth_spread: str, zenith_spread: str) -> Tensor:
        offsets = torch.tensor([s * x for x in RAY_OFFSETS for s in (1.0, -1.0)], dtype=torch.float64)
        spread = torch.ones(len(table["delays"]), 1, dtype=torch.float64)
        if line_of_sight:
            spread[0] = 0.0
        a = torch.deg2rad(column(azimuth)[:, None] + spread * table[azimuth_spread] * offsets)
        z = torch.deg2rad(column(zenith)[:, None] + spread * table[zenith_spread] * offsets)
        num = len(offsets)
        return direction(z[:, :, None].expand(-1, -1, num), a[:, None].expand(-1, num, -1)).flatten(1, 2)

    wavelength = SPEED_OF_LIGHT / channels.carrier
    at_base = rays("aod", "zod", "cASD", "cZSD")
    orientation = torch.tensor(channels.bs_orientation, dtype=torch.float64)
    response = array_response(channels.bs_array, at_base.mT, wavelength, orientation)
    # What leaves the user as θ̂ arrives as θ̂, and weaker by the cross-polarization ratio as φ̂ (none in a line of sight).
    crossed = torch.full((len(at_base),), 10 ** (-table["xpr"] / 10), dtype=torch.float64)
    if line_of_sight:
        crossed[0] = 0.0
    power = (10 ** (column("powers") / 10))[:, None] * torch.stack([torch.ones_like(crossed), crossed], -1)
    response = response * power.sqrt()[:, None, :, None]
    response = response / (response.abs().square().sum() / response.shape[1]).sqrt()
    coupled = isinstance(channels, UplinkOfSionna1)
    heading = at_base if coupled else rays("aoa", "zoa", "cASA", "cZSA")
    return RayClass(column("delays") * channels.delay_spread, response, heading, coupled, wavelength)


class ClassGenie(nn.Module):
    """LMMSE prediction with known modes: one matrix, whatever the sample; the class's SNR is the sample's own.

    Args:
        modes: Of history and horizon together, at the interval of the history; unit power per entry in all.
        delay: Of the taps [s], `[tap]`.
        frequencies: Of the history's subcarriers [Hz], `[subcarrier]`.
        target_frequencies: Of those predicted [Hz].
        history: Snapshots of the history; the rest of the modes' times are predicted.
        noise_variance: Over the class's mean power per entry: 10^(-SNR/10).
    """

    horizons: int
    _filter: Tensor
    _taps: Tensor
    _seen: Tensor
    _future: Tensor
    _steering: Tensor
    _target: Tensor

    def __init__(
        self,
        modes: Modes,
        delay: Tensor,
        frequencies: Tensor,
        target_frequencies: Tensor,
        history: int,
        noise_variance: float,
    ) -> None:
        super().__init__()
        if not 0 < history < modes.vector.shape[1] or noise_variance <= 0:
            raise UsageError("the class genie needs modes that outlast the history, and noise.")
        self.horizons = modes.vector.shape[1] - history
        seen, gain = modes.vector[:, :history], len(frequencies) * modes.power / noise_variance
        kept = gain * seen.abs().square().sum((0, 1)) > NEGLIGIBLE
        tap, deviation = modes.tap[kept], modes.power[kept].sqrt()
        seen = (seen[..., kept] * deviation).flatten(0, 1)
        steering, target = _steering(delay, frequencies), _steering(delay, target_frequencies)
        gram = (steering.mH @ steering)[tap][:, tap] * (seen.mH @ seen)
        gram.diagonal().add_(noise_variance)
        self.register_buffer("_filter", torch.linalg.cholesky(gram), persistent=False)
        self.register_buffer("_taps", tap, persistent=False)
        self.register_buffer("_seen", seen, persistent=False)
        self.register_buffer("_future", modes.vector[:, history:, kept] * deviation, persistent=False)
        self.register_buffer("_steering", steering, persistent=False)
        self.register_buffer("_target", target, persistent=False)

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Raises:
            UsageError: The history has another shape than the genie was made for.
        """
        check_history(history)
        batch, num_rx, num_tx, num_steps, num_subcarriers = history.shape
        if (num_rx, num_tx * num_steps, num_subcarriers) != (1, len(self._seen), len(self._steering)):
            raise UsageError(f"this class genie was made for other channels than {list(history.shape)}")
        y = history.to(self._seen.dtype)
        taps = (y @ self._steering.conj()).reshape(batch, num_tx * num_steps, -1)  # sufficient: [batch, port·time, tap]
        counts = torch.bincount(self._taps, minlength=taps.shape[-1]).tolist()
        parts = zip(taps.unbind(-1), self._seen.split(counts, dim=1), strict=True)  # type: ignore[no-untyped-call]
        matched = torch.cat([tap @ seen.conj() for tap, seen in parts], 1)
        amplitude = torch.cholesky_solve(matched.mT.contiguous(), self._filter).mT
        pairs = zip(amplitude.split(counts, dim=1), self._future.split(counts, dim=2), strict=True)  # type: ignore[no-untyped-call]
        future = torch.stack([torch.einsum("bm,ptm->bpt", a, f) for a, f in pairs], -1)
        return (future @ self._target.mT)[:, None].to(history.dtype)


class PortwiseGenie(nn.Module):
    """A class genie for each combination of ports by itself: what remains when their correlation isn't used.

    Args:
        transform: Unitary, complex `[port, port]`: the identity for the ports themselves, DFTs for beams.
        modes: Of each row of `transform`, as `rays.through(row[None]).modes(velocity, times)` gives them.
        delay: As for `ClassGenie`.
        frequencies: As for `ClassGenie`.
        target_frequencies: As for `ClassGenie`.
        history: As for `ClassGenie`.
        noise_variance: As for `ClassGenie`.
    """

    _transform: Tensor

    def __init__(
        self,
        transform: Tensor,
        modes: Sequence[Modes],
        delay: Tensor,
        frequencies: Tensor,
        target_frequencies: Tensor,
        history: int,
        noise_variance: float,
    ) -> None:
        super().__init__()
        if len(modes) != len(transform):
            raise UsageError(f"{len(modes)} sets of modes for {len(transform)} combinations of ports.")
        self.horizons = modes[0].vector.shape[1] - history
        self.register_buffer("_transform", transform.to(torch.complex128), persistent=False)
        self.genies = nn.ModuleList(
            ClassGenie(each, delay, frequencies, target_frequencies, history, noise_variance) for each in modes
        )

    def forward(self, history: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`."""
        check_history(history)
        seen = torch.einsum("op,brptk->brotk", self._transform, history.to(self._transform))
        future = [genie(seen[:, :, i : i + 1], noise_variance) for i, genie in enumerate(self.genies)]
        back = torch.einsum("op,brotk->brptk", self._transform.conj(), torch.cat(future, 2))
        return back.to(history.dtype)


def _steering(delay: Tensor, frequencies: Tensor) -> Tensor:
    turns = -2 * math.pi * frequencies.to(delay)[:, None] * delay
    return torch.polar(torch.ones_like(turns), turns)


def _dominant(factor: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of factor factorᴴ, `[batch, rank]` and `[batch, row, rank]`.

    By subspace iteration (Halko, Martinsson and Tropp, SIAM Review 2011): rays of a cluster are close, the rank small.
    """
    rows, columns = factor.shape[-2:]
    total = factor.abs().square().sum((1, 2))
    rank = 120
    while rank < min(rows, columns) // 2:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(columns, rank, dtype=factor.dtype, generator=generator).to(factor.device)
        basis, _ = torch.linalg.qr(factor @ (factor.mH @ (factor @ start)))
        small = basis.mH @ factor
        values, vectors = torch.linalg.eigh(small @ small.mH)
        if float((total - values.sum(-1)).max() / total.sum()) < tolerance:
            return values, basis @ vectors
        rank *= 2
    values, vectors = torch.linalg.eigh(factor @ factor.mH)
    return values, vectors


def _profile(model: str) -> dict[str, Any]:
    """Table of a profile (TR 38.901, tables 7.7.1-1 to 7.7.1-5) as Sionna has it, angles for the downlink [deg]."""
    tables = tr38901().models
    found: dict[str, Any] = tables.load_json(tables.parameter_file(f"CDL-{model}.json"))
    return found
