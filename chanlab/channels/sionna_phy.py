"""Sionna PHY under control: imported when needed, its random state given and put back, arrays in its terms."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from chanlab.channels.arrays import PlanarArray
from chanlab.errors import UsageError

_PATTERNS = {"iso": "omni", "tr38901": "38.901"}


def phy(name: str = "") -> ModuleType:
    """`sionna.phy`, or a module below it (`mimo`, `channel.tr38901`), imported on first use.

    Importing `sionna.phy` seeds PyTorch's default generators afresh (Sionna 2.2): here they are as they were before.
    """
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        return importlib.import_module(f"sionna.phy.{name}" if name else "sionna.phy")
    finally:
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def tr38901() -> ModuleType:
    """`sionna.phy.channel.tr38901`; see `phy`."""
    return phy("channel.tr38901")


def device_name(device: torch.device | str) -> str:
    """A device as Sionna names it: `cpu`, `cuda:0`, ...

    Raises:
        UsageError: If Sionna has no such device.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    tr38901()
    from sionna.phy import config

    if str(device) not in config.available_devices:
        raise UsageError(f"Sionna computes on {', '.join(config.available_devices)} here, not on {device}.")
    return str(device)


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Let Sionna draw from a given seed on one device; afterwards its generator is where it was before.

    Args:
        seed: 0 to 2**63 - 1.
        device: As `device_name` gives it.
    """
    tr38901()
    from sionna.phy import config

    generator = config.torch_rng(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def rand(size: Sequence[int], device: str) -> Tensor:
    """Uniform in [0, 1), float32, from Sionna's generator of the device."""
    tr38901()
    from sionna.phy import config

    return torch.rand(size, dtype=torch.float32, device=device, generator=config.torch_rng(device))


def panel_array(array: PlanarArray, carrier: float, device: str) -> Any:
    """A `PlanarArray` as Sionna's `PanelArray` of one panel, whose ports come in the same order.

    Raises:
        UsageError: If Sionna PHY doesn't have the pattern.
    """
    if array.pattern not in _PATTERNS:
        raise UsageError(
            f"the 3GPP models have no antenna pattern {array.pattern!r}; take one of {', '.join(_PATTERNS)}."
        )
    return tr38901().PanelArray(
        num_rows_per_panel=array.num_rows,
        num_cols_per_panel=array.num_cols,
        polarization="dual" if array.num_polarizations == 2 else "single",
        polarization_type=array.polarization,
        antenna_pattern=_PATTERNS[array.pattern],
        carrier_frequency=carrier,
        element_vertical_spacing=array.vertical_spacing,
        element_horizontal_spacing=array.horizontal_spacing,
        precision="single",
        device=device,
    )
