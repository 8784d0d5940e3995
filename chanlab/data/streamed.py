"""Windows of 3GPP channels drawn on the fly: nothing is written, and in training no sample comes twice."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from chanlab.channels import CDL, CIR, PlanarArray, subcarrier_frequencies
from chanlab.channels.sionna1 import UplinkOfSionna1
from chanlab.data import counter
from chanlab.data.draws import hashed
from chanlab.data.impairments import Impairments
from chanlab.data.protocol import (
    Cell,
    Condition,
    Duplex,
    Protocol,
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
        self._sources: dict[int, CDL] = {}
        self._blocks: OrderedDict[tuple[int, int, torch.device], CIR] = OrderedDict()
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
        cells = self.protocol.all_cells
        speed = torch.tensor([cells[c].speed for c in cell_number(ids).tolist()], device=device)
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
        grid = subcarrier_frequencies(p.fft_size, p.subcarrier_spacing).to(device)
        cir = self._gather(sample_id, device).normalized(grid)
        lower, upper = grid[: p.num_subcarriers], grid[p.band_distance :]
        band = {"tdd": lower, "fdd": upper, "both": torch.cat([lower, upper])}[self.duplex]
        steps = cir.coefficients.shape[3]
        result = (
            cir.at(slice(p.history)).cfr(lower),
            cir.at(slice(steps - p.horizons, steps)).cfr(band),
        )
        self._last = sample_id.clone(), device, result
        return result

    def velocities(self, sample_id: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Velocities of the users of samples [m/s], `[batch, 3]`; arguments as for `channels`."""
        found = []
        for cell, number in zip(cell_number(sample_id).tolist(), number_in_cell(sample_id).tolist(), strict=True):
            block, place = divmod(number, self.block_size)
            motion = self._source(cell).motion(self.block_size, self._seed(cell, block), device)
            found.append(motion.velocities[place, 0])
        return torch.stack(found)

    def _gather(self, sample_id: Tensor, device: torch.device) -> CIR:
        """Impulse responses of samples, from the blocks that hold them."""
        number = number_in_cell(sample_id)
        names = torch.stack([cell_number(sample_id), number // self.block_size], 1)
        found, where = torch.unique(names, dim=0, return_inverse=True)
        # Older blocks first: a batch between two rounds then draws new blocks only when it is done with the old ones.
        order = sorted(range(len(found)), key=lambda i: tuple(found[i].tolist()[::-1]))
        rows, parts = [], []
        for i in order:
            chosen = (where == i).nonzero()[:, 0]
            block = self._block(int(found[i, 0]), int(found[i, 1]), device)
            rows.append(chosen)
            parts.append(block[(number[chosen] % self.block_size).to(device)])
        return CIR.cat(parts)[torch.cat(rows).argsort().to(device)]

    def _block(self, cell: int, block: int, device: torch.device) -> CIR:
        name = (cell, block, device)
        if name not in self._blocks:
            while len(self._blocks) >= self.max_blocks:
                self._blocks.popitem(last=False)
            self._blocks[name] = self._draw(*name)
        self._blocks.move_to_end(name)
        return self._blocks[name]

    def _draw(self, cell: int, block: int, device: torch.device) -> CIR:
        steps = self.protocol.history + self.impairments.feedback_delay + self.protocol.horizons
        seed = self._seed(cell, block)
        return self._source(cell).draw(self.block_size, seed, steps, self.protocol.interval, device)

    def _source(self, cell: int) -> CDL:
        if cell not in self._sources:
            self._sources[cell] = cell_channels(self.protocol, self.protocol.cell(cell))
        return self._sources[cell]

    def _seed(self, cell: int, block: int) -> int:
        return hashed(self.seed, self.split, "channel", cell, block, self.block_size) >> 1

    def _key(self, sample_id: Tensor, use: str) -> Tensor:
        return counter.keys(sample_id, self.seed, self.split, use)


def cell_channels(protocol: Protocol, cell: Cell) -> CDL:
    """The channels of a cell: the base station's ports on the axis tx."""
    kind = CDL if protocol.doppler == "user" else UplinkOfSionna1
    return kind(
        cell.model,  # type: ignore[arg-type]
        cell.delay_spread,
        cell.speed,
        protocol.carrier,
        bs_array=PlanarArray(protocol.rows, protocol.columns, pattern="tr38901", polarization="cross"),
        ut_array=PlanarArray(pattern="iso", polarization="V"),
    )
