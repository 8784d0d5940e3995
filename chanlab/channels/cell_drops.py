"""System-level channels of 3GPP: users dropped into a sector of an urban or rural cell."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.channels.sionna_phy import panel_array, seeded, tr38901
from chanlab.channels.source import Motion
from chanlab.channels.threegpp import Speed, ThreeGPP, speed_range
from chanlab.errors import UsageError

Scenario = Literal["UMi", "UMa", "RMa"]
"""Street canyon, macrocell above roofs, rural macrocell."""


class CellDrops(ThreeGPP):
    """Users dropped uniformly into a sector of a UMi, UMa or RMa cell (TR 38.901, section 7.5).

    The base station stands at x = y = 0, turned and tilted to the middle of its sector (azimuth 60°), users are between
    the scenario's least distance and the cell's edge. Path loss and shadow fading are applied. Delays count from each
    user's first path. A user's place, cluster angles and delays stay for the snapshots of a sample, only phases move:
    keep them to a metre or so (section 7.6.3.2, which follows moving users for longer, is not in Sionna).

    Args:
        scenario: Which cell.
        speed: Of outdoor and indoor users alike, horizontal, in a random direction [m/s].
        carrier: [Hz].
        bs_array: The base station's array.
        ut_array: The user's array; each user is turned at random.
        indoor: Probability that a user is indoors; None is the scenario's.
        spatial_consistency: A block is one drop of `block` users whose line of sight, large-scale parameters and
            clusters vary smoothly over the cell (section 7.6.3.1); else each user has a drop of its own.
        o2i: Loss into buildings, `low` or `high` (for UMi and UMa below 6 GHz the same).
        block: See `ThreeGPP`.

    Raises:
        UsageError: If a name is unknown or a number out of range.
    """

    def __init__(
        self,
        scenario: Scenario,
        speed: Speed,
        carrier: float,
        bs_array: PlanarArray,
        ut_array: PlanarArray,
        indoor: float | None = None,
        spatial_consistency: bool = False,
        o2i: Literal["low", "high"] = "low",
        block: int = 128,
    ) -> None:
        super().__init__(carrier, bs_array, ut_array, block)
        if scenario not in get_args(Scenario):
            raise UsageError(f"unknown scenario {scenario!r}; scenarios are {', '.join(get_args(Scenario))}.")
        if indoor is not None and not 0 <= indoor <= 1:
            raise UsageError(f"indoor is a probability, not {indoor!r}.")
        if o2i not in ("low", "high"):
            raise UsageError(f"o2i must be low or high, not {o2i!r}.")
        self.scenario = scenario
        self.speed = speed_range(speed)
        self.indoor = indoor
        self.spatial_consistency = spatial_consistency
        self.o2i = o2i

    @property
    def together(self) -> int:
        """The users of a drop that is spatially consistent."""
        return self.block if self.spatial_consistency else 1

    @property
    def name(self) -> str:
        """Scenario, speeds and options."""
        return f"{self.scenario} {self.speed!r} {self.indoor!r} {self.spatial_consistency} {self.o2i}"

    def _users(self, num: int, device: str) -> tuple[Motion, Any]:
        from sionna.phy.channel import gen_single_sector_topology

        drops, users = (1, num) if self.spatial_consistency else (num, 1)
        topology = gen_single_sector_topology(
            batch_size=drops,
            num_ut=users,
            scenario=self.scenario.lower(),
            indoor_probability=self.indoor,
            min_ut_velocity=self.speed[0],
            max_ut_velocity=self.speed[1],
            precision="single",
            device=device,
        )
        place, _, orientation, _, velocity, _ = (x.flatten(0, 1) for x in topology)
        times = torch.zeros(num, 1, dtype=torch.float64, device=place.device)
        return Motion(times, place[:, None], velocity[:, None], orientation[:, None]), topology

    def _channels(
        self, users: tuple[Motion, Any], num_steps: int, interval: float, device: str
    ) -> tuple[Tensor, Tensor]:
        # A new one each time: what Sionna keeps from one topology to the next must not reach a sample.
        model = getattr(tr38901(), self.scenario)(
            carrier_frequency=self.carrier,
            **({} if self.scenario == "RMa" else {"o2i_model": self.o2i}),
            ut_array=panel_array(self.ut_array, self.carrier, device),
            bs_array=panel_array(self.bs_array, self.carrier, device),
            direction="uplink",
            enable_spatial_consistency=self.spatial_consistency,
            precision="single",
            device=device,
        )
        model.set_topology(*users[1])
        return model(num_steps, 1 / interval)  # type: ignore[no-any-return]

    def base_station(self) -> tuple[Tensor, Tensor]:
        """Position [m] and orientation (α, β, γ) [rad] of the base station, each `[3]`."""
        with seeded(0, "cpu"):
            _, (_, place, _, orientation, _, _) = self._users(1, "cpu")
        return place[0, 0], orientation[0, 0]
