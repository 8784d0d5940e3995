"""Matrix pencil: exponentials as the generalised eigenvalues of two Hankel matrices that lie one step apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from chanlab.csi.exponentials import Exponentials, Order
from chanlab.errors import UsageError


class MatrixPencil(Exponentials):
    """Sums of complex exponentials, fitted by the matrix pencil method and continued.

    The channel is taken to the angle-delay domain as for `ESPRIT`. The rows of Y1 are the windows of L values of a
    series, those of Y2 the windows one step later. Numbers z for which Y2 - z Y1 loses rank are the poles. With noise,
    Y1 is truncated to its largest singular values, Y1 ≈ U Σ V^H, and the poles are the eigenvalues of Σ⁻¹ U^H Y2 V.
    Several series that share their poles give the rows together. Amplitudes follow by least squares over the history.
    Source: Hua and Sarkar, "Matrix pencil method for estimating parameters of exponentially damped/undamped sinusoids
    in noise", IEEE Trans. ASSP 38(5), 1990, with their forward-and-backward form for undamped ones.

    Where `ESPRIT` takes the subspace of windows of L + 1 values and solves for their shift, here the first L values
    alone are truncated, and the step to the next ones is projected on them. To first order in the noise both err alike.

    Args:
        horizons: Number of steps predicted.
        pencil: L, the pencil parameter: at least the number of exponentials, below the history's length; a single
            series resolves no more than the history's length less L. None: one less than the window of `ESPRIT`.
        order: Number of exponentials, as for `ESPRIT`.
        share: `tap`: all antennas, or beams, of a delay share their poles; `bin`: each bin has its own.
        unit_modulus: Moves all poles onto the unit circle. Otherwise those outside only.
        forward_backward: Adds the rows reversed and conjugated: twice the rows where nothing fades.
        margin: A bin is predicted if its mean power exceeds the noise's by this many standard deviations.
        tx_shape: `(polarizations, columns, rows)` of the transmit array, ports in the order of
            `chanlab.channels.PlanarArray`; None: a line of ports.
    """

    def __init__(
        self,
        horizons: int = 4,
        pencil: int | None = None,
        order: Order = "noise",
        share: Literal["tap", "bin"] = "tap",
        unit_modulus: bool = False,
        forward_backward: bool = True,
        margin: float = 2.0,
        tx_shape: Sequence[int] | None = None,
    ) -> None:
        if pencil is not None and pencil < 1:
            raise UsageError(f"pencil must be at least 1, not {pencil}")
        window = None if pencil is None else pencil + 1
        super().__init__(horizons, window, order, share, unit_modulus, forward_backward, margin, tx_shape)

    def subspace(self, gram: Tensor) -> tuple[Tensor, Tensor]:
        """Squared singular values Σ² of Y1 and its right singular vectors V."""
        values, vectors = torch.linalg.eigh(gram[:, :-1, :-1])
        return values, vectors

    def poles(self, gram: Tensor, values: Tensor, vectors: Tensor) -> Tensor:
        """Eigenvalues of Σ⁻¹ U^H Y2 V = Σ⁻² V^H (Y1^H Y2) V."""
        step = vectors.mH @ gram[:, :-1, 1:] @ vectors
        poles: Tensor = torch.linalg.eigvals(step / values[..., None])
        return poles
