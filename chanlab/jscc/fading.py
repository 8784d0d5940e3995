"""Flat fading: Rayleigh and Rician, slow, in blocks or fast, with a receiver that knows, estimates or ignores it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from chanlab.errors import UsageError
from chanlab.jscc.channels import Equalised, SymbolChannel, equalise
from chanlab.jscc.contract import STANDARD, Convention
from chanlab.jscc.draws import Draws

CSI = Literal["perfect", "ls", "lmmse", "phase", "none"]
"""What the receiver knows of the channel: all, an estimate from pilots, its phase, nothing."""


class Rayleigh(SymbolChannel):
    """Rayleigh fading, h ~ CN(0, 1): y = h x + n, constant over blocks of channel uses.

    The SNR asked for is the mean one; |h|² of a block scales it. Every block has `pilots` channel uses of pilots of the
    symbols' power; they are counted whatever the receiver makes of them. An LMMSE receiver knows the channel's variance
    and N0, and counts the error of its estimate as noise; so does an LS receiver, which takes its estimate as unbiased.

    Args:
        coherence: Channel uses of a block, pilots included; None: all of an image (slow fading); 1: fast fading.
        csi: What the receiver knows: with `perfect`, `ls` and `lmmse` it equalises (MMSE); with `phase` it turns the
            phase back (WITT's and kurka/deepJSCC-feedback's `fading-real` receiver); with `none` it hands on y.
        pilots: Pilots per block; None: 1 if the receiver estimates, else 0.
        convention: See `SymbolChannel`.

    Raises:
        UsageError: If a block has no room for pilots and data, or an estimate has no pilots.
    """

    packs = True

    def __init__(
        self,
        coherence: int | None = None,
        csi: CSI = "perfect",
        pilots: int | None = None,
        convention: Convention | str = STANDARD,
    ) -> None:
        super().__init__(convention)
        estimates = csi in ("ls", "lmmse")
        pilots = int(estimates) if pilots is None else pilots
        if csi not in ("perfect", "ls", "lmmse", "phase", "none"):
            raise UsageError(f"csi must be perfect, ls, lmmse, phase or none, not {csi!r}.")
        if pilots < estimates:
            raise UsageError(f"csi={csi!r} estimates the channel: it needs pilots >= 1.")
        if coherence is not None and not pilots < coherence:
            raise UsageError(f"blocks of {coherence} channel uses have no room for data beside {pilots} pilots.")
        self.coherence = coherence
        self.csi = csi
        self.pilots = pilots

    def pilot_uses(self, symbols: Tensor) -> Tensor:
        """Pilots of all blocks that carry sent symbols."""
        blocks = (symbols > 0).long() if self.coherence is None else -(-symbols // (self.coherence - self.pilots))
        return self.pilots * blocks

    def receive(self, symbols: Tensor, count: Tensor, noise_variance: Tensor, draws: Draws) -> Equalised:
        """See `SymbolChannel.receive`."""
        k, power = symbols.shape[1], self.convention.power
        size = k if self.coherence is None else self.coherence - self.pilots
        blocks = -(-k // size)
        block = torch.arange(k, device=symbols.device) // size
        h = self.gains(blocks, draws)
        n0 = noise_variance[:, None]
        received = h[:, block] * symbols + n0.sqrt() * draws.complex_normal("noise", k)
        if self.csi == "none":
            return Equalised(received, n0, torch.ones_like(n0))
        if self.csi == "phase":
            turned = received * torch.exp(-1j * h.angle())[:, block]
            return Equalised(turned, n0, torch.ones_like(n0))
        error = torch.zeros_like(n0)
        if self.csi != "perfect":
            error = n0 / (power * self.pilots)
            h = h + error.sqrt() * draws.complex_normal("pilots", blocks)
            if self.csi == "lmmse":
                h, error = h / (1 + error), error / (1 + error)
        return equalise(received[:, None], h[:, None, block], (n0 + power * error)[:, None], power)

    def gains(self, blocks: int, draws: Draws) -> Tensor:
        """Draw the channel of each block, complex64 `[batch, block]`, of unit mean power."""
        return draws.complex_normal("fading", blocks)


class Rician(Rayleigh):
    """Rician fading: a line of sight of random phase, the same for all blocks of an image, beside Rayleigh fading.

    Args:
        k_factor_db: Power of the line of sight over that of the rest [dB].
        coherence: As the following ones, see `Rayleigh`.
        csi: See `Rayleigh`.
        pilots: See `Rayleigh`.
        convention: See `Rayleigh`.
    """

    def __init__(
        self,
        k_factor_db: float = 6.0,
        coherence: int | None = None,
        csi: CSI = "perfect",
        pilots: int | None = None,
        convention: Convention | str = STANDARD,
    ) -> None:
        super().__init__(coherence, csi, pilots, convention)
        self.k_factor_db = k_factor_db

    def gains(self, blocks: int, draws: Draws) -> Tensor:
        """See `Rayleigh.gains`."""
        k: float = 10 ** (self.k_factor_db / 10)
        phase = 2 * torch.pi * draws.uniform("line of sight")[:, None]
        sight = torch.polar(torch.full_like(phase, math.sqrt(k / (k + 1))), phase)
        return sight + math.sqrt(1 / (k + 1)) * draws.complex_normal("fading", blocks)
