"""The coherent sum as its definition reads: dense, in double precision, differentiated by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def coherent_sum_reference(
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
) -> Tensor:
    """h[b, m, k, f] = Σ_n g_n exp(-j 2π f τ_n) exp(j 2π/λ (w_n·q_m + u_n·p_k)) over a dense tensor.

    Args:
        gain: g [linear], complex `[batch, path]`.
        delay: τ [s], `[batch, path]`.
        departure: Unit vectors u, `[batch, 3, path]`.
        arrival: Unit vectors w, `[batch, 3, path]`.
        tx_positions: p [m], `[batch, tx_ant, 3]`.
        rx_positions: q [m], `[batch, rx_ant, 3]`.
        frequencies: f [Hz], `[subcarrier]`.
        wavelength: λ [m].

    Returns:
        complex128 `[batch, rx_ant, tx_ant, subcarrier]`. Memory grows as rx_ant · tx_ant · path · subcarrier.
    """
    real = [x.double() for x in (delay, departure, arrival, tx_positions, rx_positions, frequencies)]
    delay, departure, arrival, tx_positions, rx_positions, frequencies = real
    rx_phase = (rx_positions @ arrival)[:, :, None, :, None]
    tx_phase = (tx_positions @ departure)[:, None, :, :, None]
    phase = (2 * math.pi / wavelength) * (rx_phase + tx_phase)
    phase = phase - 2 * math.pi * delay[:, None, None, :, None] * frequencies
    waves = torch.complex(phase.cos(), phase.sin())
    return (gain.to(torch.complex128)[:, None, None, :, None] * waves).sum(-2)
