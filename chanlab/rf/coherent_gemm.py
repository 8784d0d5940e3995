"""The coherent sum and its gradients as real matrix products over blocks of paths; on any device.

With θ = 2π f τ, a path's weights W = g · exp(j array phase) meet its delay phasors exp(-jθ) in one product of stacked
real matrices, [Re W; Im W] · [cos θ; sin θ]ᵀ, whose four quarters hold all that the complex product needs. Weights and
phasors exist for one block of paths at a time; the tensor over antennas, paths *and* subcarriers never does. Backward
forms the phasors anew and needs one more such product.

Phases are formed in double precision as cycles, whole cycles taken off before they become single: f τ is 28,000 cycles
at 28 GHz and 1 µs, of which single precision would keep three decimals.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_ELEMENTS = {"cpu": 2**19, "cuda": 2**25}
"""Largest number of weights and phasors [real elements] of a block: what a cache holds, or what fills a GPU."""

_SPLIT = 512  # paths per partial product on a GPU: a product this long and thin fills it only if split

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def coherent_sum_forward(
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
) -> Tensor:
    """As `coherent_sum_reference`, in the precision of `gain`; geometry and frequencies are float64."""
    batch, antennas, tones = gain.shape[0], (rx_positions.shape[1], tx_positions.shape[1]), frequencies.shape[0]
    pairs = math.prod(antennas)
    total = delay.new_zeros(batch, 2 * pairs, 2 * tones)
    for rows, cols in _blocks(gain, 2 * pairs + 2 * tones):
        wave = _array_wave(departure, arrival, tx_positions, rx_positions, wavelength, rows, cols, gain.dtype)
        weight = wave * gain[rows, None, cols]
        total[rows] += _product(_stack(weight), _delay_wave(delay[rows, cols], frequencies, gain.real.dtype))
    quarters = total.view(batch, 2, pairs, 2, tones)
    real = quarters[:, 0, :, 0] + quarters[:, 1, :, 1]
    imag = quarters[:, 1, :, 0] - quarters[:, 0, :, 1]
    return torch.complex(real, imag).to(gain.dtype).view(batch, *antennas, tones)


def coherent_sum_backward(
    grad: Tensor,
    gain: Tensor,
    delay: Tensor,
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    frequencies: Tensor,
    wavelength: float,
) -> Gradients:
    """Gradients of a real loss with respect to the first six inputs of `coherent_sum_forward`.

    Args:
        grad: ∂L/∂Re h + j ∂L/∂Im h, `[batch, rx_ant, tx_ant, subcarrier]`.
        gain: As in the forward pass, as are the others.
        delay: See `gain`.
        departure: See `gain`.
        arrival: See `gain`.
        tx_positions: See `gain`.
        rx_positions: See `gain`.
        frequencies: See `gain`.
        wavelength: See `gain`.

    Returns:
        Of gain, delay, departure, arrival, transmit and receive positions, each as its input.
    """
    batch, num_rx, num_tx, tones = grad.shape
    pairs, wavenumber = num_rx * num_tx, 2 * math.pi / wavelength
    gains, delays = torch.zeros_like(gain), torch.zeros_like(delay)
    departures, arrivals = torch.zeros_like(departure), torch.zeros_like(arrival)
    tx_grads, rx_grads = torch.zeros_like(tx_positions), torch.zeros_like(rx_positions)

    # V = Σ_f conj(G) exp(-jθ), then the same with f inside, for the delays: [Re; Im] of both from one product.
    down = grad.reshape(batch, pairs, tones)
    once = torch.cat([torch.cat([down.real, -down.imag], -1), torch.cat([-down.imag, -down.real], -1)], 1)
    left = torch.cat([once, once * frequencies.repeat(2).to(once.dtype)], 1)
    for rows, cols in _blocks(gain, 6 * pairs + 2 * tones):
        wave = _array_wave(departure, arrival, tx_positions, rx_positions, wavelength, rows, cols, gain.dtype)
        phasor = _delay_wave(delay[rows, cols], frequencies, gain.real.dtype)
        back = (left[rows] @ phasor).view(-1, 2, 2, pairs, phasor.shape[-1])
        back = torch.complex(back[:, :, 0], back[:, :, 1]) * wave[:, None]
        held = gain[rows, cols]
        both = back.sum(2)
        gains[rows, cols] = both[:, 0].conj()
        delays[rows, cols] = 2 * math.pi * (both[:, 1] * held).imag
        turn = -(back[:, 0] * held[:, None]).imag.double().view(-1, num_rx, num_tx, held.shape[-1]) * wavenumber
        rx_turn, tx_turn = turn.sum(2), turn.sum(1)
        arrivals[rows, :, cols] = rx_positions[rows].mT @ rx_turn
        departures[rows, :, cols] = tx_positions[rows].mT @ tx_turn
        rx_grads[rows] += rx_turn @ arrival[rows, :, cols].mT
        tx_grads[rows] += tx_turn @ departure[rows, :, cols].mT
    return gains, delays, departures, arrivals, tx_grads, rx_grads


def _blocks(gain: Tensor, width: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and paths whose weights and phasors stay below `BLOCK_ELEMENTS`."""
    batch, paths = gain.shape
    if not paths:
        return
    budget = max(BLOCK_ELEMENTS["cpu" if gain.device.type == "cpu" else "cuda"] // width, 1)
    along = min(paths, max(budget, 64))
    across = max(budget // along, 1)
    for row in range(0, batch, across):
        for col in range(0, paths, along):
            yield slice(row, row + across), slice(col, col + along)


def _reduced(cycles: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole cycles taken off in double precision, then radians in `dtype`; consumes its argument."""
    return cycles.frac_().to(dtype).mul_(2 * math.pi)


def _delay_wave(delay: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """[cos; sin] of 2π f τ, `[batch, 2 subcarrier, path]`."""
    angle = _reduced(frequencies[:, None] * delay[:, None, :], dtype)
    wave = angle.new_empty(angle.shape[0], 2, *angle.shape[1:])
    torch.cos(angle, out=wave[:, 0])
    torch.sin(angle, out=wave[:, 1])
    return wave.flatten(1, 2)


def _array_wave(
    departure: Tensor,
    arrival: Tensor,
    tx_positions: Tensor,
    rx_positions: Tensor,
    wavelength: float,
    rows: slice,
    cols: slice,
    dtype: torch.dtype,
) -> Tensor:
    """exp(j 2π/λ (w·q + u·p)), complex `[batch, rx_ant tx_ant, path]`."""
    ends = []
    for positions, direction in ((rx_positions, arrival), (tx_positions, departure)):
        angle = _reduced((positions[rows] / wavelength) @ direction[rows, :, cols], dtype.to_real())
        ends.append(torch.complex(angle.cos(), angle.sin()))
    return (ends[0][:, :, None] * ends[1][:, None]).flatten(1, 2)


def _stack(x: Tensor) -> Tensor:
    """[Re; Im] along the second axis."""
    return torch.cat([x.real, x.imag], 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Left times right transposed, summed over paths."""
    split = left.device.type != "cpu" and left.shape[-1] >= 2 * _SPLIT
    return _split_product(left, right) if split else left @ right.mT


def _split_product(left: Tensor, right: Tensor) -> Tensor:
    """The same as partial products over `_SPLIT` paths each, summed after."""
    paths = left.shape[-1]
    whole = paths - paths % _SPLIT
    parts = [x[..., :whole].reshape(*x.shape[:-1], -1, _SPLIT).transpose(1, 2) for x in (left, right)]
    product = (parts[0] @ parts[1].mT).sum(1)
    if whole < paths:
        product = torch.baddbmm(product, left[..., whole:], right[..., whole:].mT)
    return product
