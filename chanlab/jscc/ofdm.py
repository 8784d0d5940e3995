"""An OFDM link over any chanlab channel: frequency selective, moving, with pilots, estimation and MMSE equalisation."""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from chanlab.data.impairments import interpolate_pilots
from chanlab.errors import UsageError
from chanlab.jscc.channels import Equalised, SymbolChannel, equalise
from chanlab.jscc.contract import STANDARD, Convention
from chanlab.jscc.draws import Draws
from chanlab.jscc.estimation import wiener_estimate
from chanlab.jscc.realisations import Grid, Realisations


class OFDMLink(SymbolChannel):
    """Symbols on a resource grid over stored or drawn channels.

    In each group of `pilot_period` OFDM symbols the middle one is all pilots, of the symbols' power; an image takes as
    many groups as its sent symbols need, and the pilots of these groups count whatever the receiver makes of them.
    Symbols are spread over the resource elements of their groups by a fixed interleaver, so that a fade does not erase
    one part of an image.

    Each realisation is scaled to unit mean power over its receive ports and grid: the SNR is the one at a receive port,
    before combining. All receive ports are combined; one transmit port sends. The cyclic prefix is longer than the
    channel and costs time, not channel uses; interference between subcarriers of users that move is not modelled.

    The receiver knows N0 and either the channel (`perfect`), an estimate (`lmmse`: `wiener_estimate`, `ls`: linear
    interpolation over time between least-squares estimates, held at the edges), or nothing (`none`; one receive port).

    Args:
        realisations: Where the channels come from. With a key per image (see `chanlab.jscc.draws`) the channel of an
            image is its own as well.
        num_subcarriers: Subcarriers.
        subcarrier_spacing: [Hz].
        pilot_period: OFDM symbols of a group; None: no pilots.
        csi: See above.
        tx_port: Transmit port that sends.
        cyclic_prefix: Its length in OFDM symbols without prefix.
        convention: See `SymbolChannel`.

    Raises:
        UsageError: If the grid has no room, or an estimate has no pilots.
    """

    packs = True

    def __init__(
        self,
        realisations: Realisations,
        num_subcarriers: int = 64,
        subcarrier_spacing: float = 30e3,
        pilot_period: int | None = 4,
        csi: Literal["perfect", "lmmse", "ls", "none"] = "lmmse",
        tx_port: int = 0,
        cyclic_prefix: float = 1 / 14,
        convention: Convention | str = STANDARD,
    ) -> None:
        super().__init__(convention)
        if csi not in ("perfect", "lmmse", "ls", "none"):
            raise UsageError(f"csi must be perfect, lmmse, ls or none, not {csi!r}.")
        if csi in ("lmmse", "ls") and pilot_period is None:
            raise UsageError(f"csi={csi!r} estimates the channel: give a pilot_period, such as 4.")
        if num_subcarriers < 2 or subcarrier_spacing <= 0 or cyclic_prefix < 0 or (pilot_period or 2) < 2:
            raise UsageError(
                f"need num_subcarriers >= 2, subcarrier_spacing > 0, cyclic_prefix >= 0 and pilot_period >= 2, not "
                f"{num_subcarriers}, {subcarrier_spacing}, {cyclic_prefix} and {pilot_period}."
            )
        self.realisations = realisations
        self.num_subcarriers = num_subcarriers
        self.subcarrier_spacing = subcarrier_spacing
        self.symbol_duration = (1 + cyclic_prefix) / subcarrier_spacing
        self.pilot_period = pilot_period
        self.csi = csi
        self.tx_port = tx_port

    def pilot_uses(self, symbols: Tensor) -> Tensor:
        """Pilots of the groups that numbers of sent symbols take."""
        return self._groups(symbols) * self.num_subcarriers if self.pilot_period else torch.zeros_like(symbols)

    def receive(self, symbols: Tensor, count: Tensor, noise_variance: Tensor, draws: Draws) -> Equalised:
        """See `SymbolChannel.receive`."""
        groups = self._groups(count)
        found = torch.unique(groups)
        if len(found) == 1:
            return self._receive(symbols, max(1, int(found)), noise_variance, draws)
        # Images that take fewer groups send fewer pilots: their receivers have no others.
        parts, order = [], []
        for number in found.tolist():
            rows = (groups == number).nonzero()[:, 0]
            out = self._receive(symbols[rows], max(1, number), noise_variance[rows], draws.rows(rows))
            parts.append(out)
            order.append(rows)
        back = torch.cat(order).argsort()
        return Equalised(*(torch.cat(x)[back] for x in zip(*parts, strict=True)))

    def _receive(self, symbols: Tensor, groups: int, noise_variance: Tensor, draws: Draws) -> Equalised:
        """Images that take the same number of groups."""
        k, power = symbols.shape[1], self.convention.power
        pilot, data = _layout(groups, self.pilot_period)
        h = self._channel(len(pilot) + len(data), draws)
        slots = h[:, :, data].flatten(2)  # [batch, rx_ant, slot]
        capacity = slots.shape[2]
        place = _interleaver(capacity).to(h.device)[:k]
        n0 = noise_variance[:, None, None]
        sent = symbols[:, : len(place)]
        noise = n0.sqrt() * draws.complex_normal("noise", *slots.shape[1:])
        received = slots[..., place] * sent[:, None] + noise[..., place]
        if self.csi == "none":
            self._one_port(received)
            out = Equalised(received[:, 0], n0[:, 0], torch.ones_like(n0[:, 0]))
        else:
            known, error = self._known(h, pilot, noise_variance, draws)
            known = known[:, :, data].flatten(2)[..., place]
            error = error[:, data].flatten(1)[:, None, place]
            out = equalise(received, known, n0 + power * error, power)
        return Equalised(*(_fit(x, k) for x in out))

    def _channel(self, num_symbols: int, draws: Draws) -> Tensor:
        """Channels of unit mean power, `[batch, rx_ant, symbol, subcarrier]`."""
        grid = Grid(num_symbols, self.num_subcarriers, self.subcarrier_spacing, self.symbol_duration)
        count = self.realisations.count(grid)
        numbers = (draws.uniform("realisation").double() * count).long().clamp(max=count - 1).tolist()
        with torch.no_grad():
            response = self.realisations.cfr(numbers, grid, draws.device)
            if not self.tx_port < response.shape[2]:
                raise UsageError(f"these channels have {response.shape[2]} transmit ports: tx_port must be below that.")
            h = response[:, :, self.tx_port]
            energy = torch.view_as_real(h.contiguous()).square().sum(-1).mean((1, 2, 3), keepdim=True)
            return h * torch.where(energy > 0, energy, 1.0).rsqrt()

    @torch.no_grad()
    def _known(self, h: Tensor, pilot: Tensor, noise_variance: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """What the receiver knows, `[batch, rx_ant, symbol, subcarrier]`, and its error's variance without `rx_ant`."""
        if self.csi == "perfect":
            return h, torch.zeros_like(h[:, 0].real)
        pilot = pilot.to(h.device)
        variance = noise_variance / self.convention.power
        sent = h[:, :, pilot]
        observed = sent + variance.sqrt()[:, None, None, None] * draws.complex_normal("pilots", *sent.shape[1:])
        if self.csi == "lmmse":
            return wiener_estimate(observed, variance, pilot.cpu(), h.shape[2])
        assert self.pilot_period is not None
        weights = _interpolation(len(pilot), self.pilot_period).to(h.device)
        # Noise of two pilots that are averaged is less; what interpolation misses is not known to this receiver.
        error = variance[:, None, None] * weights.square().sum(1)[:, None]
        return weights.to(h.dtype) @ observed, error.expand(h[:, 0].shape)

    def _groups(self, symbols: Tensor) -> Tensor:
        """Groups of OFDM symbols that numbers of sent symbols take; without pilots a group is one OFDM symbol."""
        per_group = self.num_subcarriers * (self.pilot_period - 1 if self.pilot_period else 1)
        return -(-symbols // per_group)

    def _one_port(self, received: Tensor) -> None:
        if received.shape[1] > 1:
            raise UsageError(
                f"without CSI the receiver can't combine its {received.shape[1]} ports: take an array of one."
            )


def _layout(groups: int, period: int | None) -> tuple[Tensor, Tensor]:
    """OFDM symbols of pilots and of data, int64."""
    place = torch.arange(groups * (period or 1))
    is_pilot = place % period == period // 2 if period else torch.zeros_like(place, dtype=torch.bool)
    return place[is_pilot], place[~is_pilot]


@functools.lru_cache(maxsize=64)
def _interpolation(count: int, period: int) -> Tensor:
    """Weights of the pilots in each OFDM symbol of all groups, float32 `[symbol, pilot]`; see `interpolate_pilots`."""
    between = interpolate_pilots(torch.eye(count), (count - 1) * period + 1, period).mT
    held = (torch.arange(count * period) - period // 2).clamp(0, len(between) - 1)
    return between[held]


@functools.lru_cache(maxsize=64)
def _interleaver(count: int) -> Tensor:
    """A fixed order of the resource elements of a grid, int64 `[count]`."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def _fit(x: Tensor, k: int) -> Tensor:
    """Symbols of an image that sends fewer than its batch, up to the batch's number."""
    return torch.nn.functional.pad(x, (0, k - x.shape[1]), value=1.0) if 1 < x.shape[1] < k else x
