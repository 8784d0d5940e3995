"""Windows of stored impulse responses: at the stored snapshots, on any subcarriers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chanlab.channels import CIR
from chanlab.data.store import Store
from chanlab.data.views import CSIView
from chanlab.errors import UsageError


class TapWindows(NamedTuple):
    """A batch of windows before their frequency responses are computed.

    Attributes:
        coefficients: At the times of history and target, `[batch, rx_ant, tx_ant, time, tap]`.
        delay: `[batch, tap]` [s].
        noise: As in `PathWindows`; likewise the next four.
        snr_db: `[batch]` [dB].
        sample_id: int64 `[batch]`.
        window: int64 `[batch]`.
        speed: `[batch]` [m/s].
        key: What random impairments depend on, int64 `[batch]`.
    """

    coefficients: Tensor
    delay: Tensor
    noise: Tensor
    snr_db: Tensor
    sample_id: Tensor
    window: Tensor
    speed: Tensor
    key: Tensor


class Snapshots:
    """How a view lies on the snapshots of a store of impulse responses.

    Args:
        store: The store.
        view: What is seen; its times must be stored ones, its arrays have as many ports.

    Raises:
        UsageError: If the view asks for times or ports that are not stored.
    """

    def __init__(self, store: Store, view: CSIView) -> None:
        first = store.cir_links(store.sample_ids[:1])
        self.count = first.snapshots.shape[1]
        self.spacing = stored_interval(store) or view.interval
        steps = view.times().numpy() / self.spacing
        self.steps: npt.NDArray[np.int64] = steps.round().astype(np.int64)
        if np.abs(steps - self.steps).max() > 1e-3:
            raise UsageError(
                f"{store.path} holds snapshots every {self.spacing:.6g} s: interval {view.interval:.6g} s and "
                "each of its horizons must be whole multiples of that."
            )
        if self.slack < 0:
            raise UsageError(
                f"{store.path} holds {self.count} snapshots, a window takes {self.steps[-1] + 1} (history "
                f"{view.history}, last horizon {view.horizons[-1]:g}): take a shorter one, or generate more snapshots."
            )
        ports = first.cir.coefficients.shape[1:3]
        wanted = (view.rx_array.num_ports, view.tx_array.num_ports)
        if tuple(ports) != wanted:
            raise UsageError(
                f"{store.path} holds channels of {ports[0]} receive and {ports[1]} transmit ports, the view's arrays "
                f"have {wanted[0]} and {wanted[1]}: name the recipe's arrays as rx_array and tx_array."
            )

    @property
    def slack(self) -> int:
        """Snapshots by which a window can be shifted."""
        return self.count - 1 - int(self.steps.max())

    def fetch(self, store: Store, ids: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> tuple[CIR, Tensor]:
        """Impulse responses at the times of windows that start at given snapshots, and the users' speeds [m/s]."""
        links = store.cir_links(ids)
        at = torch.from_numpy(starts[:, None] + self.steps)
        a = links.cir.coefficients
        taken = a.gather(3, at[:, None, None, :, None].expand(-1, *a.shape[1:3], -1, a.shape[-1]))
        return CIR(taken, links.cir.delay, links.cir.carrier).trim(), links.velocities[:, 0].norm(dim=-1)


def stored_interval(store: Store) -> float | None:
    """Time between the snapshots of a store of impulse responses [s]; None if there is one only."""
    times = store.cir_links(store.sample_ids[:1]).snapshots[0]
    return float(times[-1]) / (len(times) - 1) if len(times) > 1 else None


def tap_channels(windows: TapWindows, view: CSIView, carrier: float) -> tuple[Tensor, Tensor]:
    """Noiseless channels of windows, computed on the device that holds them.

    Returns:
        History and target, complex64 `[batch, rx_ant, tx_ant, time, subcarrier]`.

    Raises:
        UsageError: If the taps were cast to a precision that can't hold their phases.
    """
    if windows.delay.dtype != torch.float32:
        raise UsageError(
            f"taps arrived as {windows.delay.dtype}, too coarse for their phases: use mixed precision (16-mixed, "
            "bf16-mixed) or mode='materialised'."
        )
    cir = CIR(windows.coefficients, windows.delay, carrier)
    past, future = cir.at(slice(view.history)), cir.at(slice(view.history, None))
    frequencies = view.frequencies().to(windows.delay.device)
    return past.cfr(frequencies), future.cfr(frequencies + view.band_offset)
