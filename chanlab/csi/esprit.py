"""ESPRIT: the Dopplers of each angle-delay bin, their amplitudes, and their continuation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from chanlab.csi.exponentials import Exponentials, Order


class ESPRIT(Exponentials):
    """Sums of complex exponentials, fitted by ESPRIT and continued.

    The channel is taken to the angle-delay domain by DFTs over the transmit array and the subcarriers. There, the
    windows of a series span a signal subspace that is invariant to a shift in time: the eigenvalues of that shift are
    the exponentials' poles. Their amplitudes follow by least squares over the history. Source: Roy and Kailath,
    "ESPRIT", IEEE Trans. ASSP 37(7), 1989.

    Args:
        horizons: Number of steps predicted.
        window: Values in a window, more than the exponentials that can be found; at most the history. None: seven
            eighths of the history where many series share their Dopplers, three quarters otherwise.
        order: Number of exponentials: a number, of which a series that holds fewer gets those it holds; `noise`:
            eigenvalues above what the noise's variance explains; `mdl`: by minimum description length (Wax and Kailath,
            IEEE Trans. ASSP 33(2), 1985), with no noise variance.
        share: `tap`: all antennas, or beams, of a delay share their Dopplers; `bin`: each bin has its own.
        unit_modulus: Moves all poles onto the unit circle: paths neither grow nor fade. Otherwise those outside only.
        forward_backward: Counts each window also reversed and conjugated: twice the windows where nothing fades.
        margin: A bin is predicted if its mean power exceeds the noise's by this many standard deviations.
        tx_shape: `(polarizations, columns, rows)` of the transmit array, ports in the order of
            `chanlab.channels.PlanarArray`; None: a line of ports.
    """

    def __init__(
        self,
        horizons: int = 4,
        window: int | None = None,
        order: Order = "noise",
        share: Literal["tap", "bin"] = "tap",
        unit_modulus: bool = False,
        forward_backward: bool = True,
        margin: float = 2.0,
        tx_shape: Sequence[int] | None = None,
    ) -> None:
        super().__init__(horizons, window, order, share, unit_modulus, forward_backward, margin, tx_shape)

    def subspace(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Of the windows themselves, as columns."""
        values, vectors = torch.linalg.eigh(gram.conj())
        return values, vectors

    def poles(self, gram: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        """Eigenvalues of the shift by one step within the subspace, by least squares."""
        shift = torch.linalg.lstsq(vectors[:, :-1], vectors[:, 1:]).solution
        poles: Tensor = torch.linalg.eigvals(shift)
        return poles
