"""Channel impulse responses: taps at arbitrary delays, as the 3GPP models give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from chanlab.errors import UsageError


@dataclass(frozen=True)
class CIR:
    """Impulse responses h(t, τ) = Σ_m a_m(t) δ(τ - τ_m): taps that change over time and stay at their delays.

    Attributes:
        coefficients: a, complex64 `[..., rx_ant, tx_ant, time, tap]`.
        delay: τ [s], float32 `[..., tap]`, shared by the antennas. Taps beyond a channel's own have a = 0.
        carrier: Carrier frequency [Hz].
    """

    coefficients: Tensor
    delay: Tensor
    carrier: float

    def __post_init__(self) -> None:
        a, tau = self.coefficients, self.delay
        if a.ndim < 4 or not a.is_complex() or tau.is_complex() or a.shape[:-4] + a.shape[-1:] != tau.shape:
            raise UsageError(
                "a CIR is complex coefficients [..., rx_ant, tx_ant, time, tap] with real delays [..., tap], not "
                f"{list(a.shape)} ({a.dtype}) with {list(tau.shape)} ({tau.dtype})."
            )

    def __len__(self) -> int:
        return len(self.delay)

    def __getitem__(self, index: Tensor | slice) -> CIR:
        """Channels at `index` of the first axis."""
        if self.delay.ndim < 2:
            raise UsageError("this CIR is of one channel: it has no axis to index.")
        return replace(self, coefficients=self.coefficients[index], delay=self.delay[index])

    @property
    def num_taps(self) -> int:
        """Number of taps, padding included."""
        return self.delay.shape[-1]

    def at(self, steps: slice | Tensor) -> CIR:
        """The same channels at some of their times only."""
        return replace(self, coefficients=self.coefficients[..., steps, :])

    def to(self, device: torch.device | str) -> CIR:
        """The same channels on another device."""
        return replace(self, coefficients=self.coefficients.to(device), delay=self.delay.to(device))

    def pad(self, num_taps: int) -> CIR:
        """With taps of no power at delay 0 behind its own, `num_taps` in all."""
        more = num_taps - self.num_taps
        if more < 0:
            raise UsageError(f"a CIR of {self.num_taps} taps can't be padded to {num_taps}.")
        a, tau = (torch.nn.functional.pad(x, (0, more)) for x in (self.coefficients, self.delay))
        return replace(self, coefficients=a, delay=tau)

    def trim(self) -> CIR:
        """Without trailing taps that have no power in any channel."""
        used = (self.coefficients != 0).flatten(0, -2).any(0).nonzero()
        count = int(used.max()) + 1 if used.numel() else 0
        return replace(self, coefficients=self.coefficients[..., :count], delay=self.delay[..., :count])

    @classmethod
    def cat(cls, items: Sequence[CIR]) -> CIR:
        """Concatenate along the first axis, padded to the largest number of taps.

        Raises:
            UsageError: If there is none, or carriers differ.
        """
        if not items or any(item.carrier != items[0].carrier for item in items):
            raise UsageError("impulse responses that are concatenated have one carrier.")
        taps = max(item.num_taps for item in items)
        padded = [item.pad(taps) for item in items]
        a, tau = torch.cat([x.coefficients for x in padded]), torch.cat([x.delay for x in padded])
        return cls(a, tau, items[0].carrier)

    def cfr(self, frequencies: Tensor, normalize: bool = False) -> Tensor:
        """Channel frequency response h(t, f) = Σ_m a_m(t) exp(-j 2π f τ_m).

        Args:
            frequencies: Offsets from the carrier [Hz], `[subcarrier]`.
            normalize: Scale each channel to unit mean energy over antennas, times and `frequencies`, as
                `sionna.phy.channel.cir_to_ofdm_channel` does; a channel without power stays zero.

        Returns:
            Complex64 `[..., rx_ant, tx_ant, time, subcarrier]`.

        Raises:
            UsageError: If `frequencies` is not one-dimensional.
        """
        cir = self.normalized(frequencies) if normalize else self
        a = cir.coefficients
        response = a.flatten(-4, -2) @ self._turns(frequencies)
        return response.view(*a.shape[:-1], -1)

    def energy(self, frequencies: Tensor) -> Tensor:
        """Mean of |h(t, f)|² over antennas, times and `frequencies`, `[...]`, without computing h."""
        a = self.coefficients.flatten(-4, -2)
        turns = self._turns(frequencies)
        taps = (a.mT @ a.conj()) / a.shape[-2]
        grid = (turns @ turns.mH) / turns.shape[-1]
        # A sum that is zero but for rounding must not turn negative.
        return (taps * grid).sum((-2, -1)).real.clamp(min=0)

    def normalized(self, frequencies: Tensor) -> CIR:
        """Scaled to unit mean energy over antennas, times and `frequencies`; a channel without power stays zero."""
        energy = self.energy(frequencies)
        scale = torch.where(energy > 0, energy, 1.0).rsqrt()
        return replace(self, coefficients=self.coefficients * scale[..., None, None, None, None])

    def _turns(self, frequencies: Tensor) -> Tensor:
        """exp(-j 2π f τ), `[..., tap, subcarrier]`."""
        if frequencies.ndim != 1:
            raise UsageError(f"frequencies must be [subcarrier] [Hz], not {list(frequencies.shape)}.")
        phase = (-2 * torch.pi * self.delay)[..., None] * frequencies.to(self.delay)
        return torch.polar(torch.ones_like(phase), phase)
