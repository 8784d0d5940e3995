"""Windows of 3GPP channels drawn on the fly: nothing is written, and in training no sample comes twice."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from chanlab.channels import subcarrier_frequencies
from chanlab.data import counter
from chanlab.data.draws import hashed
from chanlab.data.impairments import Impairments
from chanlab.data.protocol import (
    Cell,
    Condition,
    Duplex,
    add_noise,
    cell_number,
    find_protocol,
    number_in_cell,
    sample_ids,
)
from chanlab.data.windows import CSIBatch
from chanlab.errors import UsageError

DRAWN = -1
"""In place of a condition's number: Gaussian noise at an SNR drawn for each sample."""

Taps = tuple[Tensor, Tensor]
"""Coefficients `[batch, port, time, tap]` and delays `[batch, tap]` [s]."""


class SampleRequest(NamedTuple):
    """A batch before its channels are drawn.

    Attributes:
        sample_id: Int64 `[batch]` on the CPU.
        condition: Number of the condition among `StreamedCSI.conditions`, or `DRAWN`.
        split: Split of the samples.
    """

    sample_id: Tensor
    condition: int = DRAWN
    split: str = "train"


class StreamedCSI:
    """Windows of one set of a protocol, drawn by sample id on the device that asks.

    A sample's channel is drawn together with the others of its block: `block_size` samples of one cell, which are then
    kept as taps (a twelfth of the channels' size) until others take their place. What is drawn depends on (seed, split,
    block size, sample id) alone, not on batch, order or process; on another kind of device Sionna draws other numbers
    of the same distribution. SNR, noise and impairments depend on (seed, split, sample id), on every device.

    Args:
        protocol: Short name of a protocol, see `chanlab.data.protocol`.
        split: `train`, `val` or `test`: the same ids are other samples there.
        cells: Set of cells and conditions: `regular`, `generalization` or `robustness`.
        duplex: Band of the targets: `tdd` the history's, `fdd` the other one, `both` side by side on the axis of
            subcarriers, first the history's.
        snr_db: SNR that is drawn from uniformly (low, high) [dB]; None: the protocol's.
        conditions: What requests choose from; None: the set's own.
        seed: Seed.
        block_size: Samples of a cell that are drawn at once: on a GPU the time of a block hardly depends on its size.
        max_blocks: Blocks kept; a block of 64 takes 8 MB.
        impairments: What stands between the channel and the history.

    Raises:
        UsageError: If a name is unknown or a number out of range.
    """

    def __init__(
        self,
        protocol: str = "csi4cast",
        split: str = "train",
        *,
        cells: str = "regular",
        duplex: Duplex = "tdd",
        snr_db: tuple[float, float] | None = None,
        conditions: Sequence[Condition] | None = None,
        seed: int = 0,
        block_size: int = 64,
        max_blocks: int = 32,
        impairments: Impairments | None = None,
    ) -> None:
        self.protocol = find_protocol(protocol)
        self.cells = self.protocol.set_cells(cells)
        self.conditions = self.protocol.conditions[cells] if conditions is None else tuple(conditions)
        if split not in ("train", "val", "test"):
            raise UsageError(f"unknown split {split!r}; splits are train, val, test.")
        if duplex not in get_args(Duplex):
            raise UsageError(f"duplex must be one of {', '.join(get_args(Duplex))}, not {duplex!r}.")
        if block_size < 1 or max_blocks < 1:
            raise UsageError("block_size and max_blocks must be >= 1.")
        low, high = self.protocol.snr_db if snr_db is None else snr_db
        if not -math.inf < low <= high < math.inf:
            raise UsageError(f"snr_db is (low, high) in dB, finite and ascending, not {snr_db!r}.")
        self.split = split
        self.duplex = duplex
        self.snr_db = (float(low), float(high))
        self.seed = seed
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.impairments = impairments or Impairments()
        self._blocks: OrderedDict[tuple[int, int, torch.device], Taps] = OrderedDict()
        self._last: tuple[Tensor, torch.device, tuple[Tensor, Tensor]] | None = None

    def ids(self, samples_per_cell: int, start: int = 0) -> Tensor:
        """Ids of the same number of samples of each cell, cell by cell, int64 `[cell * samples_per_cell]`."""
        numbers = torch.arange(start, start + samples_per_cell)
        return torch.cat([sample_ids(c, numbers) for c in self.protocol.cell_numbers(self.cells)])

    def batch(self, request: SampleRequest, device: torch.device | str = "cpu") -> CSIBatch:
        """The windows that a request names; `window` is 0, and `snr_db` infinite where the noise isn't Gaussian."""
        device = torch.device(device)
        ids = request.sample_id.cpu()
        history, target = self.channels(ids, device)
        on_device = ids.to(device)
        noise_key = self._key(on_device, "noise")
        condition = None if request.condition == DRAWN else self.conditions[request.condition]
        if condition is None:
            low, high = self.snr_db
            snr = low + (high - low) * counter.uniform(self._key(on_device, "snr"))
            noisy, variance = add_noise(history, snr, noise_key)
        else:
            noisy, variance = condition.disturb(history, noise_key)
            snr = torch.full_like(variance, condition.level if condition.kind == "gaussian" else math.inf)
        noisy = self.impairments.apply(
            noisy,
            variance,
            self._key(on_device, "impairments"),
            self.protocol.interval,
            self.protocol.subcarrier_spacing,
        )
        speed = torch.tensor([self.protocol.cell(c).speed for c in cell_number(ids).tolist()], device=device)
        return CSIBatch(noisy, target, variance, snr, on_device, torch.zeros_like(on_device), speed)

    @torch.no_grad()
    def channels(self, sample_id: Tensor, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Noiseless histories and targets, of unit mean energy over both bands, the gap and all snapshots.

        Args:
            sample_id: Int64 `[batch]` on the CPU.
            device: Where to draw and keep them.

        Returns:
            Complex64 `[batch, 1, port, time, subcarrier]` and `[batch, 1, port, horizon, subcarrier]`.
        """
        device = torch.device(device)
        if self._last and self._last[1] == device and torch.equal(self._last[0], sample_id):
            return self._last[2]
        p = self.protocol
        coefficients, delays = self._gather(sample_id, device)
        grid = subcarrier_frequencies(p.fft_size, p.subcarrier_spacing).to(delays)
        coefficients = coefficients / grid_energy(coefficients, delays, grid).sqrt()[:, None, None, None]
        lower, upper = grid[: p.num_subcarriers], grid[p.band_distance :]
        bands = {"tdd": (lower,), "fdd": (upper,), "both": (lower, upper)}[self.duplex]
        history = taps_to_cfr(coefficients[:, :, : p.history], delays, lower)
        target = taps_to_cfr(coefficients[:, :, -p.horizons :], delays, torch.cat(bands))
        result = history[:, None], target[:, None]
        self._last = sample_id.clone(), device, result
        return result

    def _gather(self, sample_id: Tensor, device: torch.device) -> Taps:
        """Taps of samples, from the blocks that hold them."""
        number = number_in_cell(sample_id)
        names = torch.stack([cell_number(sample_id), number // self.block_size], 1)
        found, where = torch.unique(names, dim=0, return_inverse=True)
        # Older blocks first: a batch between two rounds then draws new blocks only when it is done with the old ones.
        order = sorted(range(len(found)), key=lambda i: tuple(found[i].tolist()[::-1]))
        rows, parts = [], []
        for i in order:
            chosen = (where == i).nonzero()[:, 0]
            coefficients, delays = self._block(int(found[i, 0]), int(found[i, 1]), device)
            place = (number[chosen] % self.block_size).to(device)
            rows.append(chosen)
            parts.append((coefficients[place], delays[place]))
        taps = max(delays.shape[1] for _, delays in parts)
        padded = [tuple(torch.nn.functional.pad(x, (0, taps - x.shape[-1])) for x in part) for part in parts]
        back = torch.cat(rows).argsort().to(device)
        coefficients, delays = (torch.cat(x)[back] for x in zip(*padded, strict=True))
        return coefficients, delays

    def _block(self, cell: int, block: int, device: torch.device) -> Taps:
        name = (cell, block, device)
        if name not in self._blocks:
            while len(self._blocks) >= self.max_blocks:
                self._blocks.popitem(last=False)
            self._blocks[name] = self._draw(*name)
        self._blocks.move_to_end(name)
        return self._blocks[name]

    def _draw(self, cell: int, block: int, device: torch.device) -> Taps:
        steps = self.protocol.history + self.impairments.feedback_delay + self.protocol.horizons
        seed = hashed(self.seed, self.split, "channel", cell, block, self.block_size)
        return _sionna(self.protocol.cell(cell), self.block_size, steps, seed, device)

    def _key(self, sample_id: Tensor, use: str) -> Tensor:
        return counter.keys(sample_id, self.seed, self.split, use)


def taps_to_cfr(coefficients: Tensor, delays: Tensor, frequencies: Tensor) -> Tensor:
    """Channel frequency response of taps that stay in their place.

    Args:
        coefficients: Complex `[batch, port, time, tap]`.
        delays: `[batch, tap]` [s].
        frequencies: `[subcarrier]` [Hz].

    Returns:
        Complex `[batch, port, time, subcarrier]`.
    """
    phase = -2 * math.pi * delays[..., None] * frequencies
    turns = torch.polar(torch.ones_like(phase), phase)
    return (coefficients.flatten(1, 2) @ turns).view(*coefficients.shape[:3], len(frequencies))


def grid_energy(coefficients: Tensor, delays: Tensor, frequencies: Tensor) -> Tensor:
    """Mean of |h|² over ports, times and subcarriers, `[batch]`; the arguments are those of `taps_to_cfr`."""
    stacked = coefficients.flatten(1, 2)
    covariance = stacked.mT @ stacked.conj() / stacked.shape[1]
    phase = -2 * math.pi * delays[..., None] * frequencies
    steering = torch.polar(torch.ones_like(phase), phase)
    return (covariance * (steering @ steering.mH) / len(frequencies)).sum((1, 2)).real


def _sionna(cell: Cell, count: int, steps: int, seed: int, device: torch.device) -> Taps:
    from sionna.phy import config
    from sionna.phy.channel.tr38901 import CDL, PanelArray

    fc, dev = 2.4e9, str(device)
    ut = PanelArray(1, 1, "single", "V", "omni", fc, device=dev)
    bs = PanelArray(4, 4, "dual", "cross", "38.901", fc, device=dev)
    v = cell.speed
    cdl = CDL(cell.model, cell.delay_spread, fc, ut, bs, "uplink", min_speed=v, max_speed=v, device=dev)
    rng = config.torch_rng(dev)
    state = rng.get_state()
    rng.manual_seed(seed % 2**63)
    a, tau = cdl(count, steps, 1 / 2.352e-3)
    rng.set_state(state)
    return a[:, 0, :, 0, 0].permute(0, 1, 3, 2).contiguous(), tau[:, 0, 0]
