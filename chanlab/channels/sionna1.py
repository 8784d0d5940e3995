"""The uplink of Sionna before version 2, for data that were drawn with it."""

from __future__ import annotations

from typing import Any

from chanlab.channels.delay_lines import CDL


class UplinkOfSionna1(CDL):
    """CDL channels with the Doppler shifts that Sionna before version 2 gave to its uplink.

    There a ray's Doppler shift was the velocity's projection on its direction of arrival, whichever end moved: in the
    uplink on the direction at the base station, where angles spread less. It is as if the base station moved and the
    user stood still. Versions from 2 on take the direction at the moving end, as TR 38.901, equation 7.5-22, has it:
    Doppler spreads are then wider in profiles without line of sight, and prediction is harder. In every other respect
    these are the channels of `CDL`.

    Published data sets drawn with the older versions (CSI-4CAST's is one) have these channels.
    """

    @property
    def name(self) -> str:
        """Model, delay spread and speeds."""
        return f"{super().name} Doppler at the base station"

    def _build(self, device: str) -> Any:
        model = super()._build(device)
        create = model._create_topology

        def moving_base_station(*args: Any) -> Any:
            topology = create(*args)
            topology.moving_end = "rx"
            return topology

        model._create_topology = moving_base_station
        return model
