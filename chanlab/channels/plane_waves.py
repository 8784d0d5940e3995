"""Sources of plane waves: Clarke's rich scattering and given lists of paths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chanlab.channels.arrays import direction
from chanlab.channels.closed_form import ORIGIN, ClosedForm
from chanlab.channels.paths import SPEED_OF_LIGHT, Paths
from chanlab.channels.source import Motion, sample_generator
from chanlab.errors import UsageError


class _PlaneWaves(ClosedForm):
    """Plane waves that never change, exact at any time: users are small beside the distance of what scatters.

    Positions are nominal: users stand 1 km by 1 km apart at random, so that splits have something to hold on to.
    """

    def __init__(self, carrier: float, speed: list[float], duration: float, group: int) -> None:
        super().__init__(carrier, ORIGIN, ORIGIN, group)
        if len(speed) != 2 or not 0 <= speed[0] <= speed[1] or duration < 0:
            raise UsageError(f"speed must be [lowest, highest] >= 0 and duration >= 0, not {speed} and {duration}.")
        self.speed = speed
        self.duration = float(duration)

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Nominal trajectories: one anchor, or two at the ends of `duration`."""
        drawn = torch.stack([torch.rand(4, generator=sample_generator(seed, i), dtype=torch.float64) for i in ids])
        times = torch.tensor([0.0, self.duration] if self.duration > 0 else [0.0], dtype=torch.float64)
        times = times.expand(len(drawn), -1)
        heading = (2 * math.pi * drawn[:, 2:3]).expand_as(times)
        still = torch.zeros_like(heading)
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * drawn[:, 3]
        velocities = speed[:, None, None] * torch.stack([heading.cos(), heading.sin(), still], -1)
        start = torch.cat([1000 * drawn[:, :2], torch.zeros(len(drawn), 1)], -1)
        return Motion(
            times=times,
            positions=start[:, None] + velocities * times[..., None],
            velocities=velocities,
            orientations=torch.stack([heading, still, still], -1),
        )

    def _waves(
        self, motion: Motion, transfer: Tensor, delay: Tensor, departure: Tensor, arrival: Tensor, doppler: Tensor
    ) -> Paths:
        """Turn waves at time 0, `[user, path]` and so on, on to every anchor."""
        anchors = motion.times.shape[1]
        turned = 2 * math.pi * doppler[:, None] * motion.times[..., None]
        phase = torch.polar(torch.ones_like(turned), turned)[..., None, None, :]
        # Delays drift with the Doppler shift, as the extrapolation from one anchor to the next has it.
        delays = delay[:, None] - doppler[:, None] * motion.times[..., None] / self.carrier
        shape = (*motion.times.shape, delay.shape[-1])
        return Paths(
            transfer=transfer[:, None] * phase,
            delay=delays,
            departure=departure[:, None].expand(-1, anchors, -1, -1),
            arrival=arrival[:, None].expand(-1, anchors, -1, -1),
            doppler=doppler[:, None].expand(shape),
            interactions=torch.ones(*shape[:2], 1, shape[2], dtype=torch.int8),
            vertices=torch.zeros(*shape[:2], 2, 3, shape[2], dtype=torch.float64),
            mask=torch.ones(shape, dtype=torch.bool),
            carrier=self.carrier,
        )


class Clarke(_PlaneWaves):
    """Rich scattering: plane waves from all azimuths with random phases (Clarke 1968), Jakes' Doppler spectrum.

    Every entry of a channel of vertical isotropic antennas has unit mean power and the autocorrelation J_0(2π v t/λ);
    both polarisations fade independently, without leakage. Waves leave at random azimuths as well.

    Args:
        carrier: Carrier frequency [Hz].
        num_paths: Number of waves.
        speed: Lowest and highest speed [m/s].
        rms_delay_spread: Delays are exponential with this mean and spread [s]; 0 is flat fading.
        duration: Time from the first to the last anchor [s]; 0 for one anchor. Windows are cut from it.
        group: Users asked for together.

    Raises:
        UsageError: If an argument is out of range.
    """

    def __init__(
        self,
        carrier: float = 3.5e9,
        num_paths: int = 64,
        speed: list[float] = [10.0, 10.0],  # noqa: B006
        rms_delay_spread: float = 0.0,
        duration: float = 0.1,
        group: int = 1,
    ) -> None:
        super().__init__(carrier, speed, duration, group)
        if num_paths < 1 or rms_delay_spread < 0:
            raise UsageError("Clarke needs num_paths >= 1 and rms_delay_spread >= 0 s.")
        self.num_paths = num_paths
        self.rms_delay_spread = float(rms_delay_spread)

    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        draws = [
            torch.rand(5, self.num_paths, generator=sample_generator(seed, i, 3), dtype=torch.float64) for i in ids
        ]
        u = torch.stack(draws, 1)  # [5, user, path]
        level = torch.full_like(u[0], math.pi / 2)
        arrival, departure = (direction(level, 2 * math.pi * x).mT for x in u[:2])
        co_polar = torch.polar(torch.full_like(u[2:4], self.num_paths**-0.5), 2 * math.pi * u[2:4])
        transfer = torch.diag_embed(co_polar.movedim(0, -1)).movedim(1, -1)
        doppler = (motion.velocities[:, :1] @ arrival)[:, 0] * (self.carrier / SPEED_OF_LIGHT)
        delay = -self.rms_delay_spread * torch.log1p(-u[4])
        # Delays that drift with the Doppler shift must stay positive.
        delay = delay + (doppler.abs() * self.duration / self.carrier).amax(1, keepdim=True)
        return self._waves(motion, transfer, delay, departure, arrival, doppler)


@dataclass
class PathSpec:
    """One path of a `PathList`.

    Attributes:
        delay: Delay [s].
        gain_db: Power |a|² of both polarisations [dB].
        phase: Phase of the amplitude [rad]; None is the carrier's, -2π f_c τ.
        departure: (zenith, azimuth) at the transmitter [rad].
        arrival: (zenith, azimuth) at the receiver, towards where the path comes from [rad].
        doppler: Doppler shift [Hz].
        xpr_db: Cross-polarisation ratio [dB]; None is no leakage.
    """

    delay: float
    gain_db: float = 0.0
    phase: float | None = None
    departure: list[float] = field(default_factory=lambda: [math.pi / 2, 0.0])
    arrival: list[float] = field(default_factory=lambda: [math.pi / 2, math.pi])
    doppler: float = 0.0
    xpr_db: float | None = None


class PathList(_PlaneWaves):
    """The same given paths for every user: tapped delay lines, or a case to compute by hand.

    Args:
        paths: The paths.
        carrier: Carrier frequency [Hz].
        random_phase: Turn every path of every user by a phase of its own, so that users fade independently.
        duration: Time from the first to the last anchor [s]; 0 for one anchor.
        group: Users asked for together.

    Raises:
        UsageError: If there is no path or one is malformed.
    """

    def __init__(
        self,
        paths: list[PathSpec],
        carrier: float = 3.5e9,
        random_phase: bool = False,
        duration: float = 0.0,
        group: int = 1,
    ) -> None:
        super().__init__(carrier, [0.0, 0.0], duration, group)
        if not paths:
            raise UsageError("PathList needs at least one path.")
        for path in paths:
            if path.delay < 0 or len(path.departure) != 2 or len(path.arrival) != 2:
                raise UsageError(f"a path needs delay >= 0 and angles [zenith, azimuth], not {path}.")
        self.paths = paths
        self.random_phase = random_phase

    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)

        delay = column([p.delay for p in self.paths])
        carrier_phase = (-2 * math.pi * torch.remainder(self.carrier * delay, 1)).tolist()
        phase = column([c if p.phase is None else p.phase for p, c in zip(self.paths, carrier_phase, strict=True)])
        if self.random_phase:
            n = len(self.paths)
            draws = [torch.rand(n, generator=sample_generator(seed, i, 3), dtype=torch.float64) for i in ids]
            phase = phase + 2 * math.pi * torch.stack(draws)
        phase = phase.expand(len(ids), -1)
        amplitude = torch.polar(column([10 ** (p.gain_db / 20) for p in self.paths]).expand_as(phase), phase)
        leak = column([0.0 if p.xpr_db is None else 10 ** (-p.xpr_db / 20) for p in self.paths])
        matrix = torch.stack([torch.stack([torch.ones_like(leak), leak]), torch.stack([leak, torch.ones_like(leak)])])
        ends = [direction(*column([getattr(p, end) for p in self.paths]).T).T for end in ("departure", "arrival")]
        departure, arrival = (x.expand(len(ids), -1, -1) for x in ends)
        doppler = column([p.doppler for p in self.paths]).expand_as(phase)
        return self._waves(
            motion, matrix * amplitude[:, None, None], delay.expand_as(phase), departure, arrival, doppler
        )
