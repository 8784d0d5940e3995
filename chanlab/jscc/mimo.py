"""Spatial multiplexing over a Rayleigh MIMO channel, with linear MMSE detection or along its singular vectors."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from chanlab.errors import UsageError
from chanlab.jscc.channels import Equalised, SymbolChannel
from chanlab.jscc.contract import STANDARD, Convention
from chanlab.jscc.draws import Draws


class MIMO(SymbolChannel):
    """Spatial multiplexing: y = H F s / √streams + n with i.i.d. Rayleigh H, constant over blocks of channel uses.

    A channel use carries one symbol per stream, and the streams share the power of one symbol: the SNR is the one at
    each receive port. With `mmse` stream i leaves from antenna i, and the transmitter knows nothing; with `svd` F holds
    the first right singular vectors of the channel as the receiver knows it, which is fed back without loss. The
    receiver is linear MMSE in either case (for `svd` with perfect CSI that is one gain per stream). Streams have equal
    power, symbols go round the streams.

    Args:
        num_tx: Transmit antennas.
        num_rx: Receive antennas.
        num_streams: Streams; None: as many as the smaller side has antennas.
        detection: `mmse` or `svd`.
        coherence: Channel uses of a block, pilots included; None: all of an image.
        csi: What the receiver knows: all, or a least-squares or linear MMSE estimate from pilots.
        pilots: Channel uses of orthogonal pilots per block, at the power of data; None: one per antenna sounded
            (`mmse`: one per stream) if the receiver estimates, else 0. Counted whatever the receiver makes of them.
        convention: See `SymbolChannel`.

    Raises:
        UsageError: If streams, antennas, pilots and blocks don't fit together.
    """

    packs = True

    def __init__(
        self,
        num_tx: int = 2,
        num_rx: int = 2,
        num_streams: int | None = None,
        detection: Literal["mmse", "svd"] = "mmse",
        coherence: int | None = None,
        csi: Literal["perfect", "ls", "lmmse"] = "perfect",
        pilots: int | None = None,
        convention: Convention | str = STANDARD,
    ) -> None:
        super().__init__(convention)
        streams = min(num_tx, num_rx) if num_streams is None else num_streams
        if not 1 <= streams <= min(num_tx, num_rx):
            raise UsageError(f"{num_tx} x {num_rx} antennas carry 1 to {min(num_tx, num_rx)} streams, not {streams}.")
        if detection not in ("mmse", "svd") or csi not in ("perfect", "ls", "lmmse"):
            raise UsageError(f"detection must be mmse or svd, csi perfect, ls or lmmse, not {detection!r} and {csi!r}.")
        self.sounded = num_tx if detection == "svd" else streams
        estimates = csi != "perfect"
        pilots = self.sounded * estimates if pilots is None else pilots
        if estimates and pilots < self.sounded:
            raise UsageError(f"{self.sounded} antennas need at least as many orthogonal pilots, not {pilots}.")
        if coherence is not None and not pilots < coherence:
            raise UsageError(f"blocks of {coherence} channel uses have no room for data beside {pilots} pilots.")
        self.num_rx = num_rx
        self.symbols_per_use = streams
        self.detection = detection
        self.coherence = coherence
        self.csi = csi
        self.pilots = pilots

    def pilot_uses(self, symbols: Tensor) -> Tensor:
        """Pilots of all blocks that carry sent symbols."""
        if self.coherence is None:
            return self.pilots * (symbols > 0).long()
        uses = -(-symbols // self.symbols_per_use)
        return self.pilots * -(-uses // (self.coherence - self.pilots))

    def receive(self, symbols: Tensor, count: Tensor, noise_variance: Tensor, draws: Draws) -> Equalised:
        """See `SymbolChannel.receive`."""
        batch, k = symbols.shape
        streams, power = self.symbols_per_use, self.convention.power
        uses = -(-k // streams)
        size = uses if self.coherence is None else self.coherence - self.pilots
        blocks = -(-uses // size)
        s = pad(symbols, (0, blocks * size * streams - k)).view(batch, blocks, size, streams)
        n0 = noise_variance[:, None, None, None]
        h = draws.complex_normal("fading", blocks, self.num_rx, self.sounded)
        known, error = self._known(h, n0, draws)
        precoder = self._precoder(known)
        noise = n0.sqrt() * draws.complex_normal("noise", blocks, size, self.num_rx)
        received = s @ (h @ precoder).mT + noise
        # Symbols of all streams go through the error of the estimate: power in all, whatever their number.
        estimate, variance, gain = detect(received, known @ precoder, n0 + power * error, power)
        out = (x.expand(s.shape).reshape(batch, -1)[:, :k] for x in (estimate, variance, gain))
        return Equalised(*out)

    def _known(self, h: Tensor, n0: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """The channel as the receiver knows it, and the variance of the error on each entry."""
        if self.csi == "perfect":
            return h, torch.zeros_like(n0)
        # Each antenna has its share of the power in every pilot.
        error = n0 * self.sounded / (self.convention.power * self.pilots)
        known = h + error.sqrt() * draws.complex_normal("pilots", *h.shape[1:])
        return (known, error) if self.csi == "ls" else (known / (1 + error), error / (1 + error))

    def _precoder(self, known: Tensor) -> Tensor:
        """F / √streams, complex64 `[..., tx_ant, stream]`.

        Singular vectors are known up to a phase, which libraries choose differently: here the first antenna's is zero.
        """
        streams = self.symbols_per_use
        if self.detection == "svd":
            f: Tensor = torch.linalg.svd(known, full_matrices=False).Vh[..., :streams, :].mH
            first = f[..., :1, :]
            f = f * (first.conj() / first.abs().clamp_min(1e-12))
        else:
            f = torch.eye(streams, dtype=known.dtype, device=known.device)
        return f / math.sqrt(streams)


def detect(received: Tensor, gain: Tensor, noise_variance: Tensor, power: float) -> Equalised:
    """Linear MMSE detection of y = A s + n, white n.

    Args:
        received: Complex `[..., use, rx_ant]`.
        gain: A, complex `[..., rx_ant, stream]`.
        noise_variance: `[..., 1, 1]`.
        power: E|s|² of each stream.

    Returns:
        Symbols `[..., use, stream]`, noise variance and gain `[..., 1, stream]`; see `Received`.
    """
    streams = gain.shape[-1]
    identity = torch.eye(streams, dtype=gain.dtype, device=gain.device)
    gram = gain.mH @ gain * (power / noise_variance) + identity
    inverse = torch.linalg.inv(gram)
    estimate = received @ (inverse @ gain.mH * (power / noise_variance)).mT
    # Mean square error per unit power: 1 - q is the bias, (1 - q) / q the SINR.
    q = inverse.diagonal(dim1=-2, dim2=-1).real[..., None, :].clamp(max=1 - 1e-6)
    return Equalised(estimate, power * q / (1 - q), 1 - q)
