"""Sources in closed form, whose channels can be checked by hand: no ray tracer is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chanlab.channels.arrays import direction
from chanlab.channels.geometric import free_space_paths, two_ray_paths
from chanlab.channels.paths import SPEED_OF_LIGHT, Paths
from chanlab.channels.source import Links, Motion, sample_generator
from chanlab.channels.trajectories import Trajectories
from chanlab.errors import UsageError

_ORIGIN = [0.0, 0.0, 0.0]


class Ring(Trajectories):
    """Users at random distances around a point, that go straight on in any direction or stay where they are.

    Args:
        distance: Smallest and largest distance on the ground [m]; uniform between them, as is the azimuth.
        center: The point (x, y) [m].
        height: Height z of the users' antennas [m].
        speed: Lowest and highest speed [m/s]; uniform between them.
        length: Length of the way [m]; 0 for users that stay (their speed still gives a Doppler shift).
        anchor_spacing: Largest distance between neighbouring anchors [m].

    Raises:
        UsageError: If an interval is not positive and ascending.
    """

    def __init__(
        self,
        distance: list[float] = [20.0, 500.0],  # noqa: B006 - read only; jsonargparse shows it as the default
        center: list[float] = [0.0, 0.0],  # noqa: B006
        height: float = 1.5,
        speed: list[float] = [1.0, 15.0],  # noqa: B006
        length: float = 2.0,
        anchor_spacing: float = 0.1,
    ) -> None:
        for name, interval in (("distance", distance), ("speed", speed)):
            if len(interval) != 2 or not 0 <= interval[0] <= interval[1]:
                raise UsageError(f"{name} must be [lowest, highest], not negative, not {list(interval)}.")
        if length > 0 and speed[0] <= 0:
            raise UsageError(f"users that move {length} m need a lowest speed > 0, not {speed[0]} m/s.")
        if distance[1] <= 0:
            raise UsageError("the largest distance must be > 0.")
        reach = distance[1]
        super().__init__([[c - reach, c + reach] for c in center], height, length, anchor_spacing)
        self.center, self.distance, self.speed = center, distance, speed

    def draw(self, generator: torch.Generator) -> tuple[Tensor, float] | None:
        """Draw a place, a heading and a speed (see `Trajectories.draw`)."""
        u = torch.rand(4, generator=generator, dtype=torch.float64)
        radius = self.distance[0] + (self.distance[1] - self.distance[0]) * u[0]
        azimuth, heading = 2 * math.pi * u[1], 2 * math.pi * u[2]
        start = torch.tensor(self.center, dtype=torch.float64) + radius * torch.stack([azimuth.cos(), azimuth.sin()])
        places = start + self.distances[:, None] * torch.stack([heading.cos(), heading.sin()])
        speed = self.speed[0] + (self.speed[1] - self.speed[0]) * float(u[3])
        return torch.cat([places, heading.expand(self.num_anchors, 1)], -1), speed


class _ClosedForm:
    """What closed forms share: one transmitter, users solved one by one, float64 inside and float32 paths outside."""

    def __init__(self, carrier: float, tx_position: list[float], tx_orientation: list[float], group: int = 1) -> None:
        if carrier <= 0 or group < 1:
            raise UsageError(f"carrier must be > 0 Hz and group >= 1, not {carrier} and {group}.")
        if len(tx_position) != 3 or len(tx_orientation) != 3:
            raise UsageError("tx_position is [x, y, z] in metres and tx_orientation [alpha, beta, gamma] in radians.")
        self.carrier = float(carrier)
        self.group = group
        self.tx_position = torch.tensor(tx_position, dtype=torch.float64)
        self.tx_orientation = torch.tensor(tx_orientation, dtype=torch.float64)

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Trajectories of the users with these sample ids."""
        raise NotImplementedError

    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        """Paths `[user, anchor, path]` in float64."""
        raise NotImplementedError

    def links(self, ids: Sequence[int], seed: int) -> Links:
        """Paths of the users with these sample ids, in canonical order, complex64."""
        motion = self.motion(ids, seed)
        return Links(
            paths=self._paths(motion, ids, seed).sort().to(dtype=torch.float32),
            times=motion.times,
            positions=motion.positions,
            velocities=motion.velocities,
            orientations=motion.orientations,
            tx_position=self.tx_position,
            tx_orientation=self.tx_orientation,
            sample_ids=torch.tensor(list(ids), dtype=torch.int64),
        )

    def versions(self) -> dict[str, str]:
        """Versions of what the result depends on."""
        return {"torch": str(torch.__version__)}


class FreeSpace(_ClosedForm):
    """Line of sight alone (Friis).

    Args:
        carrier: Carrier frequency [Hz].
        users: Where users are and how they move; None is `Ring()`.
        tx_position: Transmitter (x, y, z) [m].
        tx_orientation: Transmitter orientation (α, β, γ) [rad].
        group: Users asked for together.

    Raises:
        UsageError: If an argument is out of range.
    """

    def __init__(
        self,
        carrier: float = 3.5e9,
        users: Trajectories | None = None,
        tx_position: list[float] = [0.0, 0.0, 10.0],  # noqa: B006
        tx_orientation: list[float] = _ORIGIN,
        group: int = 1,
    ) -> None:
        super().__init__(carrier, tx_position, tx_orientation, group)
        self.users = users or Ring()

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        """Trajectories of the users with these sample ids."""
        return self.users.motion(ids, seed)

    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        return free_space_paths(self.tx_position, motion.positions, motion.velocities, self.carrier)


class TwoRay(FreeSpace):
    """Line of sight and a reflection from flat ground at z = 0, exact in geometry and Fresnel coefficients.

    Args:
        carrier: Carrier frequency [Hz].
        users: Where users are and how they move, above ground; None is `Ring()`.
        tx_position: Transmitter (x, y, z) [m], z > 0.
        tx_orientation: Transmitter orientation (α, β, γ) [rad].
        relative_permittivity: ε_r of the ground (default: concrete, ITU-R P.2040-3).
        conductivity: σ of the ground [S/m] (default: concrete at 3.5 GHz).
        group: Users asked for together.

    Raises:
        UsageError: If an argument is out of range.
    """

    def __init__(
        self,
        carrier: float = 3.5e9,
        users: Trajectories | None = None,
        tx_position: list[float] = [0.0, 0.0, 10.0],  # noqa: B006
        tx_orientation: list[float] = _ORIGIN,
        relative_permittivity: float = 5.24,
        conductivity: float = 0.123,
        group: int = 1,
    ) -> None:
        super().__init__(carrier, users, tx_position, tx_orientation, group)
        if relative_permittivity < 1 or conductivity < 0:
            raise UsageError("the ground needs relative_permittivity >= 1 and conductivity >= 0 S/m.")
        self.relative_permittivity = relative_permittivity
        self.conductivity = conductivity

    def _paths(self, motion: Motion, ids: Sequence[int], seed: int) -> Paths:
        ground = (self.relative_permittivity, self.conductivity)
        return two_ray_paths(self.tx_position, motion.positions, motion.velocities, self.carrier, *ground)


class _PlaneWaves(_ClosedForm):
    """Plane waves that never change, exact at any time: users are small beside the distance of what scatters.

    Positions are nominal: users stand 1 km by 1 km apart at random, so that splits have something to hold on to.
    """

    def __init__(self, carrier: float, speed: list[float], duration: float, group: int) -> None:
        super().__init__(carrier, _ORIGIN, _ORIGIN, group)
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
