"""Precoders of a multi-user downlink, computed from whatever CSI the base station has.

The channels of K single-antenna users to M ports are the rows of H, `[..., user, tx_ant, time, subcarrier]`; a
precoder W is `[..., tx_ant, stream, time, subcarrier]`, one stream per user. Every stream gets 1/K of the transmit
power, so that the power of a resource element, the sum of |W|² over ports and streams, is exactly 1.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from chanlab.channels.sionna_phy import phy
from chanlab.errors import UsageError

PrecoderName = Literal["mrt", "rzf", "zf"]
"""Names that `precode` knows: maximum-ratio transmission, regularised zero forcing, zero forcing."""


def mrt(csi: Tensor, granularity: int = 1) -> Tensor:
    """Maximum-ratio transmission: each stream towards its own user, w_k = h_k^H / (‖h_k‖ √K).

    With one user it is the matched filter. It heeds no interference between users.

    Args:
        csi: Known channels, complex `[..., user, tx_ant, time, subcarrier]`.
        granularity: Adjacent subcarriers that share a precoder, computed from their mean channel: 1 for one per
            subcarrier.

    Returns:
        Precoder of unit power, complex `[..., tx_ant, stream, time, subcarrier]`; zero for a user whose CSI is zero.

    Raises:
        UsageError: If the shape, the granularity or a value can't be.
    """
    h = _bundle(_check(csi), granularity)
    norm = torch.linalg.vector_norm(h, dim=-3, keepdim=True)
    w = h.conj() / torch.where(norm > 0, norm, 1.0) / math.sqrt(csi.shape[-4])
    return _unbundle(w.transpose(-4, -3), granularity, csi.shape[-1])


def regularised_zero_forcing(csi: Tensor, regularisation: Tensor | float, granularity: int = 1) -> Tensor:
    """Regularised zero forcing: columns of H^H (H H^H + αI)^{-1}, each scaled to the power 1/K.

    α = K N0 (transmit power 1) minimises the mean square error when the CSI is right (Peel, Hochwald, Swindlehurst,
    2005); α = 0 is zero forcing, which needs K ≤ M and users of different directions.

    Args:
        csi: Known channels, complex `[..., user, tx_ant, time, subcarrier]`.
        regularisation: α ≥ 0 in the unit of |h|², a number or real, broadcast against `[..., time, subcarrier]`.
        granularity: As for `mrt`.

    Returns:
        Precoder of unit power, complex `[..., tx_ant, stream, time, subcarrier]`.

    Raises:
        UsageError: If the shape, the granularity or a value can't be, or zero forcing meets channels that are
            linearly dependent.
    """
    alpha = torch.as_tensor(regularisation, dtype=torch.float64, device=csi.device)
    if bool((alpha < 0).any()):
        raise UsageError("regularisation must not be negative.")
    if alpha.ndim and granularity != 1:
        raise UsageError("a regularisation per subcarrier needs granularity=1.")
    h = _bundle(_check(csi), granularity).movedim((-4, -3), (-2, -1))
    # in float64: at high SNR the matrix to invert is as ill-conditioned as the users are alike
    w = phy("mimo").rzf_precoding_matrix(h, alpha.expand(h.shape[:-2]), precision="double").to(h.dtype)
    if not bool(torch.isfinite(torch.view_as_real(w)).all()):
        raise UsageError(
            "zero forcing can't separate users whose channels are linearly dependent: give a regularisation > 0 "
            "(precoder 'rzf') or serve fewer users."
        )
    w = w.movedim((-2, -1), (-4, -3)) / math.sqrt(csi.shape[-4])
    return _unbundle(w, granularity, csi.shape[-1])


def precode(name: PrecoderName, csi: Tensor, noise_variance: float, granularity: int = 1) -> Tensor:
    """Precoder by name, with the regularisation α = K N0 for `rzf`.

    Args:
        name: `mrt`, `rzf` or `zf`.
        csi: Known channels, complex `[..., user, tx_ant, time, subcarrier]`.
        noise_variance: N0 at a user's antenna for a transmit power of 1, in the unit of |h|².
        granularity: As for `mrt`.

    Returns:
        Precoder of unit power, complex `[..., tx_ant, stream, time, subcarrier]`.
    """
    if name == "mrt":
        return mrt(csi, granularity)
    if name == "rzf":
        return regularised_zero_forcing(csi, csi.shape[-4] * noise_variance, granularity)
    if name == "zf":
        return regularised_zero_forcing(csi, 0.0, granularity)
    raise UsageError(f"precoder {name!r} is unknown; choose 'mrt', 'rzf' or 'zf'.")


def effective_gain(channel: Tensor, precoder: Tensor) -> Tensor:
    """What user k receives of stream j through the true channel: h_k w_j.

    Args:
        channel: True channels, complex `[..., user, tx_ant, time, subcarrier]`.
        precoder: Complex `[..., tx_ant, stream, time, subcarrier]`; its time axis may be 1.

    Returns:
        Complex `[..., user, stream, time, subcarrier]`.
    """
    h = channel.movedim((-4, -3), (-2, -1))
    w = precoder.movedim((-4, -3), (-2, -1))
    return (h @ w).movedim((-2, -1), (-4, -3))


def _check(csi: Tensor) -> Tensor:
    if csi.ndim < 4 or not csi.is_complex():
        raise UsageError(f"CSI must be complex [..., user, tx_ant, time, subcarrier], not {csi.dtype} {[*csi.shape]}.")
    if csi.shape[-4] > csi.shape[-3]:
        raise UsageError(f"{csi.shape[-4]} users need at least as many ports, there are {csi.shape[-3]}.")
    if not bool(torch.isfinite(torch.view_as_real(csi)).all()):
        raise UsageError("the CSI holds NaN or infinity: no precoder can be computed from it.")
    return csi


def _bundle(csi: Tensor, granularity: int) -> Tensor:
    """Mean over groups of adjacent subcarriers, the last group may be short."""
    if granularity < 1:
        raise UsageError(f"granularity must be at least 1 subcarrier, not {granularity}.")
    if granularity == 1:
        return csi
    parts = torch.split(csi, granularity, dim=-1)
    return torch.stack([part.mean(-1) for part in parts], dim=-1)


def _unbundle(precoder: Tensor, granularity: int, num_subcarriers: int) -> Tensor:
    return precoder.repeat_interleave(granularity, dim=-1)[..., :num_subcarriers] if granularity > 1 else precoder
