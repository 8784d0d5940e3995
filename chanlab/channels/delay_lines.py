"""Link-level channels of 3GPP: clustered and tapped delay lines."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray, direction
from chanlab.channels.sionna_phy import panel_array, rand, tr38901
from chanlab.channels.source import Motion
from chanlab.channels.threegpp import Speed, ThreeGPP, speed_range
from chanlab.errors import UsageError

CDLModel = Literal["A", "B", "C", "D", "E"]
"""Profiles of TR 38.901, tables 7.7.1-1 to 7.7.1-5; D and E have a line of sight."""

TDLModel = Literal["A", "B", "C", "D", "E", "A10", "A30", "B100", "C60", "C300", "D10", "D30"]
"""Profiles of TR 38.901, tables 7.7.2-1 to -5, and of TS 38.101-4, annex B.2.1, whose names tell the delay spread."""


class CDL(ThreeGPP):
    """Clustered delay lines (TR 38.901, section 7.7.1): fixed clusters, random ray couplings, phases and velocities.

    Args:
        model: Profile.
        delay_spread: RMS delay spread [s].
        speed: Of the user, in a direction that is random per sample [m/s]; azimuth and zenith angle are uniform, as
            Sionna draws them.
        carrier: [Hz].
        bs_array: The base station's array, boresight along x at orientation 0.
        ut_array: The user's array.
        bs_orientation: (α, β, γ) [rad].
        ut_orientation: (α, β, γ) [rad].
        block: See `ThreeGPP`.

    Raises:
        UsageError: If a name is unknown or a number out of range.
    """

    def __init__(
        self,
        model: CDLModel,
        delay_spread: float,
        speed: Speed,
        carrier: float,
        bs_array: PlanarArray,
        ut_array: PlanarArray,
        bs_orientation: tuple[float, float, float] = (0.0, 0.0, 0.0),
        ut_orientation: tuple[float, float, float] = (torch.pi, 0.0, 0.0),
        block: int = 512,
    ) -> None:
        super().__init__(carrier, bs_array, ut_array, block)
        self._models: dict[str, Any] = {}
        if model not in get_args(CDLModel):
            raise UsageError(f"unknown CDL model {model!r}; models are {', '.join(get_args(CDLModel))}.")
        if delay_spread <= 0:
            raise UsageError(f"delay_spread must be > 0 s, not {delay_spread}.")
        self.model = model
        self.delay_spread = float(delay_spread)
        self.speed = speed_range(speed)
        self.bs_orientation = bs_orientation
        self.ut_orientation = ut_orientation

    @property
    def name(self) -> str:
        """Model, delay spread and speeds."""
        return f"CDL-{self.model} {self.delay_spread!r} {self.speed!r}"

    def base_station(self) -> tuple[Tensor, Tensor]:
        """Position 0 and the orientation, each `[3]`."""
        return torch.zeros(3), torch.tensor(self.bs_orientation)

    def _users(self, num: int, device: str) -> tuple[Motion, Any]:
        low, high = self.speed
        # The order and the distribution of Sionna's own draws.
        speed = low + (high - low) * rand((num, 1), device)
        azimuth, zenith = 2 * torch.pi * rand((num, 1), device), torch.pi * rand((num, 1), device)
        return _placeless(speed * direction(zenith[:, 0], azimuth[:, 0]), self.ut_orientation), None

    def _channels(
        self, users: tuple[Motion, Any], num_steps: int, interval: float, device: str
    ) -> tuple[Tensor, Tensor]:
        if device not in self._models:
            self._models[device] = self._build(device)
        model = self._models[device]
        model._ut_velocity = users[0].velocities[:, 0]
        return model(len(model._ut_velocity), num_steps, 1 / interval)  # type: ignore[no-any-return]

    def _build(self, device: str) -> Any:
        return tr38901().CDL(
            model=self.model,
            delay_spread=self.delay_spread,
            carrier_frequency=self.carrier,
            ut_array=panel_array(self.ut_array, self.carrier, device),
            bs_array=panel_array(self.bs_array, self.carrier, device),
            direction="uplink",
            ut_orientation=torch.tensor(self.ut_orientation),
            bs_orientation=torch.tensor(self.bs_orientation),
            precision="single",
            device=device,
        )


class TDL(ThreeGPP):
    """Tapped delay lines (TR 38.901, section 7.7.2): Rayleigh taps by a sum of sinusoids, no angles.

    Of the arrays only the numbers of ports count: ports fade independently of one another. A line of sight (D, E) has
    its Doppler shift at 0.7 of the largest.

    Args:
        model: Profile.
        delay_spread: RMS delay spread [s]; None for the profiles that carry it in their name.
        speed: It decides the largest Doppler shift [m/s].
        carrier: [Hz].
        bs_array: The base station's ports.
        ut_array: The user's ports.
        num_sinusoids: Sinusoids per tap.
        block: See `ThreeGPP`.

    Raises:
        UsageError: If a name is unknown or a number out of range.
    """

    def __init__(
        self,
        model: TDLModel,
        delay_spread: float | None,
        speed: Speed,
        carrier: float,
        bs_array: PlanarArray,
        ut_array: PlanarArray,
        num_sinusoids: int = 20,
        block: int = 512,
    ) -> None:
        super().__init__(carrier, bs_array, ut_array, block)
        self._models: dict[str, Any] = {}
        if model not in get_args(TDLModel):
            raise UsageError(f"unknown TDL model {model!r}; models are {', '.join(get_args(TDLModel))}.")
        if (len(model) == 1) != (delay_spread is not None and delay_spread > 0):
            raise UsageError(f"TDL-{model} takes {'a delay_spread > 0 s' if len(model) == 1 else 'no delay_spread'}.")
        if num_sinusoids < 1:
            raise UsageError(f"num_sinusoids must be >= 1, not {num_sinusoids}.")
        self.model = model
        self.delay_spread = delay_spread
        self.speed = speed_range(speed)
        self.num_sinusoids = num_sinusoids

    @property
    def name(self) -> str:
        """Model, delay spread and speeds."""
        return f"TDL-{self.model} {self.delay_spread!r} {self.speed!r}"

    def _users(self, num: int, device: str) -> tuple[Motion, Any]:
        low, high = self.speed
        speed = low + (high - low) * rand((num,), device)
        still = torch.zeros_like(speed)
        return _placeless(torch.stack([speed, still, still], -1), (0.0, 0.0, 0.0)), None

    def _channels(
        self, users: tuple[Motion, Any], num_steps: int, interval: float, device: str
    ) -> tuple[Tensor, Tensor]:
        if device not in self._models:
            self._models[device] = tr38901().TDL(
                model=self.model,
                delay_spread=self.delay_spread,
                carrier_frequency=self.carrier,
                num_sinusoids=self.num_sinusoids,
                num_rx_ant=self.bs_array.num_ports,
                num_tx_ant=self.ut_array.num_ports,
                precision="single",
                device=device,
            )
        model = self._models[device]
        speed = users[0].velocities[:, 0, 0]
        # In place of a range of speeds that Sionna draws from, each sample's own.
        model._min_doppler = model._max_doppler = model._compute_doppler(speed).view(-1, *[1] * 7)
        return model(len(speed), num_steps, 1 / interval)  # type: ignore[no-any-return]


def _placeless(velocity: Tensor, orientation: tuple[float, float, float]) -> Motion:
    """Users of a model without places, of velocities `[num, 3]`."""
    num = len(velocity)
    return Motion(
        times=torch.zeros(num, 1, dtype=torch.float64, device=velocity.device),
        positions=torch.full_like(velocity, torch.nan)[:, None],
        velocities=velocity[:, None],
        orientations=velocity.new_tensor(orientation).expand(num, 1, 3),
    )
