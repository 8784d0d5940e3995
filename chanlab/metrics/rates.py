"""What a channel estimate is worth on the air: spectral efficiency, SINR and beam gain, as pure functions.

Channels are `[..., rx_ant, tx_ant, time, subcarrier]`, precoders `[..., tx_ant, stream, time, subcarrier]`. A precoder
carries the transmit power: ‖W‖² summed over antennas and streams is the power spent on that subcarrier, 1 for those
made here.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from chanlab.errors import UsageError
from chanlab.metrics.functional import check_finite, check_power, to_db


def _matrices(x: Tensor, name: str) -> Tensor:
    """`[..., row, column, time, subcarrier]` -> `[..., time, subcarrier, row, column]`."""
    if x.ndim < 4:
        raise UsageError(f"{name} has shape {list(x.shape)}; it needs axes [..., antenna, antenna, time, subcarrier].")
    return x.movedim((-4, -3), (-2, -1))


def _noise(noise_variance: Tensor | float, like: Tensor) -> Tensor:
    """Noise variance, scalar or `[batch]` for the first axis, shaped to divide the real tensor `like`."""
    n0 = torch.as_tensor(noise_variance, dtype=like.dtype, device=like.device)
    if bool((n0 <= 0).any()):
        raise UsageError("noise_variance must be positive.")
    if n0.ndim == 0:
        return n0
    if n0.ndim != 1 or n0.shape[0] != like.shape[0]:
        raise UsageError(
            f"noise_variance has shape {list(n0.shape)}; give a number or one per sample [{like.shape[0]}]."
        )
    return n0.reshape(-1, *(1,) * (like.ndim - 1))


def mrt_precoder(channel: Tensor) -> Tensor:
    """Single-stream precoder of unit power that puts most power into a channel: maximum-ratio transmission.

    With one receive antenna it is h^*/‖h‖; with several, the dominant right singular vector of each subcarrier.

    Args:
        channel: Known (perfect, outdated, predicted) channel, complex `[..., rx_ant, tx_ant, time, subcarrier]`.

    Returns:
        Complex `[..., tx_ant, 1, time, subcarrier]`; zero where the channel is zero and there is one receive antenna.
    """
    h = _matrices(channel, "channel")
    if h.shape[-2] == 1:
        w = h.mH
        norm = torch.linalg.vector_norm(w, dim=(-2, -1), keepdim=True)
        w = w / torch.where(norm > 0, norm, torch.ones_like(norm))
    else:
        w = torch.linalg.svd(h, full_matrices=False).Vh[..., :1, :].mH
    return w.movedim((-2, -1), (-4, -3))


def spectral_efficiency(channel: Tensor, precoder: Tensor, noise_variance: Tensor | float) -> Tensor:
    """Achievable rate log2 det(I + H W W^H H^H / N0) of a precoder on the true channel, with Gaussian symbols.

    Args:
        channel: True channel H, complex `[..., rx_ant, tx_ant, time, subcarrier]`.
        precoder: W, complex `[..., tx_ant, stream, time, subcarrier]`; its power is the transmit power.
        noise_variance: N0 per receive antenna, a number or `[batch]` for the first axis.

    Returns:
        Rate [bit/s/Hz], real `[..., time, subcarrier]`.

    Raises:
        UsageError: If shapes don't fit or N0 isn't positive.
    """
    _check_precoder(channel, precoder)
    g = _matrices(channel, "channel") @ _matrices(precoder, "precoder")
    gram = g.mH @ g if g.shape[-1] <= g.shape[-2] else g @ g.mH  # det(I + AB) = det(I + BA): the smaller one
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    n0 = _noise(noise_variance, gram.real)
    rate: Tensor = torch.linalg.slogdet(eye + gram / n0).logabsdet / math.log(2.0)
    return rate


def multiuser_sinr(channel: Tensor, precoder: Tensor, noise_variance: Tensor | float) -> Tensor:
    """SINR of single-antenna users served at once: |h_k w_k|² / (Σ_{j≠k} |h_k w_j|² + N0).

    Args:
        channel: True channels, one user per row, complex `[..., user, tx_ant, time, subcarrier]`.
        precoder: One column per user, complex `[..., tx_ant, user, time, subcarrier]`.
        noise_variance: N0 per user antenna, a number or `[batch]` for the first axis.

    Returns:
        Linear, real `[..., user, time, subcarrier]`; `sum_rate` turns it into bit/s/Hz.

    Raises:
        UsageError: If shapes don't fit or N0 isn't positive.
    """
    _check_precoder(channel, precoder)
    if precoder.shape[-3] != channel.shape[-4]:
        raise UsageError(f"{channel.shape[-4]} users need as many precoding vectors, got {precoder.shape[-3]}.")
    received = (_matrices(channel, "channel") @ _matrices(precoder, "precoder")).abs().square()
    signal = received.diagonal(dim1=-2, dim2=-1)
    sinr = signal / (received.sum(-1) - signal + _noise(noise_variance, signal))
    return sinr.movedim(-1, -3)


def sum_rate(sinr: Tensor) -> Tensor:
    """Sum rate Σ_k log2(1 + SINR_k) [bit/s/Hz], `[..., user, time, subcarrier]` -> `[..., time, subcarrier]`."""
    return torch.log2(1 + sinr).sum(-3)


def beam_gains(channel: Tensor, codebook: Tensor) -> Tensor:
    """Power each transmit beam brings, Σ |h w_b|² over receive antennas, time and subcarriers.

    Args:
        channel: Complex `[..., rx_ant, tx_ant, time, subcarrier]`.
        codebook: Beams w_b, complex `[beam, tx_ant]`.

    Returns:
        Linear, real `[..., beam]`.

    Raises:
        UsageError: If the codebook has another number of transmit antennas.
    """
    if codebook.ndim != 2 or channel.ndim < 4 or codebook.shape[1] != channel.shape[-3]:
        raise UsageError(
            f"codebook {list(codebook.shape)} must be [beam, tx_ant] for a channel {list(channel.shape)} "
            "[..., rx_ant, tx_ant, time, subcarrier]."
        )
    check_finite("channel", channel)
    received = torch.einsum("...rtmf,bt->...brmf", channel, codebook.to(channel))
    return received.abs().square().sum((-3, -2, -1))


def beam_gain_ratio(channel: Tensor, codebook: Tensor, beam: Tensor) -> Tensor:
    """Power of the chosen beam over that of the best one, linear in [0, 1], the shape of `beam`.

    Args:
        channel: True channel, complex `[..., rx_ant, tx_ant, time, subcarrier]`.
        codebook: Beams, complex `[beam, tx_ant]`.
        beam: Index of the chosen beam, int64 `[...]`.

    Raises:
        UsageError: If shapes don't fit, an index is out of range, or no beam receives power.
    """
    gains = beam_gains(channel, codebook)
    if beam.shape != gains.shape[:-1] or beam.is_floating_point():
        raise UsageError(
            f"beam must hold one integer per link, shape {list(gains.shape[:-1])}; got {list(beam.shape)}."
        )
    if bool(((beam < 0) | (beam >= gains.shape[-1])).any()):
        raise UsageError(f"beam indices must lie in 0..{gains.shape[-1] - 1}.")
    best = gains.amax(-1)
    check_power(best)
    return gains.gather(-1, beam[..., None].to(torch.int64)).squeeze(-1) / best


def beam_gain_loss_db(
    channel: Tensor, codebook: Tensor, beam: Tensor, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Loss of the chosen beam against the best of the codebook [dB], >= 0; 0 is perfect.

    Beams of a fine codebook overlap: a wrong index often costs little, which top-1 accuracy doesn't tell.

    Args:
        channel: True channel, complex `[..., rx_ant, tx_ant, time, subcarrier]`.
        codebook: Beams, complex `[beam, tx_ant]`.
        beam: Index of the chosen beam, int64 `[...]`.
        reduction: `mean`: dB of the mean ratio; `none`: each link's own loss.

    Raises:
        UsageError: As `beam_gain_ratio`.
    """
    ratio = beam_gain_ratio(channel, codebook, beam)
    return -to_db(ratio.mean() if reduction == "mean" else ratio)


def _check_precoder(channel: Tensor, precoder: Tensor) -> None:
    if channel.ndim < 4 or precoder.ndim < 4 or channel.shape[-3] != precoder.shape[-4]:
        raise UsageError(
            f"precoder {list(precoder.shape)} must be [..., tx_ant, stream, time, subcarrier] for a channel "
            f"{list(channel.shape)} [..., rx_ant, tx_ant, time, subcarrier]."
        )
    check_finite("channel", channel)
    check_finite("precoder", precoder)
