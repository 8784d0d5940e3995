"""Rays found one by one in delay, direction and Doppler at once, refined together and continued."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from chanlab.csi.predictor import check_history, rms
from chanlab.errors import UsageError

CHUNK = 16
"""Windows treated at once: bounds the memory, never changes a result."""

FASTEST_DECAY = 0.5  # neper per snapshot
DECAY_SPREAD = 0.05  # what decays are expected to be, standard deviation [neper per snapshot]
_TIME = 2  # place of time among the axes (column, row, time, subcarrier)
_NUM_SHIFTS = 5  # of a ray: its frequency along each axis, and its decay


class Rays(NamedTuple):
    """Rays of a batch of windows: Σ gain · exp(j 2π Σ frequency · index - decay · snapshot).

    Indices and snapshots are counted from the middle of their axis.

    Attributes:
        shift: Frequency along columns, rows, snapshots and subcarriers [cycle per index], then the decay
            [neper per snapshot], float64 `[batch, ray, 5]`.
        gain: In each series (receive antenna and polarization), complex128 `[batch, series, ray]`.
        found: Which entries are rays, bool `[batch, ray]`.
    """

    shift: Tensor
    gain: Tensor
    found: Tensor


class Separation(NamedTuple):
    """A window taken apart.

    Attributes:
        prediction: Of the rays, complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.
        remainder: The history without the rays: noise, and what is not specular; of the history's shape.
    """

    prediction: Tensor
    remainder: Tensor


class RayPursuit(nn.Module):
    """Newtonised orthogonal matching pursuit of rays over the whole window, and their continuation.

    A specular ray is a complex exponential along columns, rows, snapshots and subcarriers at once, with a gain of its
    own in every polarization and receive antenna. All entries of the window together tell it from noise and from other
    rays, far better than its beam and delay tap alone can. The strongest exponential of what is left is found by a
    padded DFT over all four axes; after each find all rays are refined jointly by Gauss-Newton steps, until what is
    left looks like noise. A ray may decay along the window, as one does that walks behind a corner. Gains are shrunk by
    the noise (LMMSE, with each gain's own power as prior). Source: Mamandipoor, Ramasamy, Madhow, "Newtonized
    orthogonal matching pursuit: frequency estimation over the continuum", IEEE Trans. Signal Process. 64(19), 2016,
    which has a single axis and refines one frequency after the other.

    It is made for specular propagation, as ray tracing has it: where scattering is diffuse, a window holds more rays
    than can be told apart.

    Args:
        horizons: Number of steps predicted.
        rays: Most rays that are looked for.
        false_alarms: Expected number of rays found in noise alone.
        decay: Whether rays may decay.
        refinements: Gauss-Newton steps at the end; one is made after each find.
        tx_shape: `(polarizations, columns, rows)` of the transmit array, ports in the order of
            `chanlab.channels.PlanarArray`; None: a line of ports.
        duplex: Band predicted: `tdd`, the history's; `fdd`, another, by the rays' delays; `both`, one after the other
            along subcarriers.
        fdd_offset: Distance of the other band in bandwidths of the history's, a whole number of subcarriers.
    """

    def __init__(
        self,
        horizons: int = 4,
        rays: int = 32,
        false_alarms: float = 0.1,
        decay: bool = True,
        refinements: int = 4,
        tx_shape: Sequence[int] | None = None,
        duplex: Literal["tdd", "fdd", "both"] = "tdd",
        fdd_offset: float = 1.5,
    ) -> None:
        super().__init__()
        if horizons < 1 or rays < 1 or refinements < 0:
            raise UsageError(f"horizons and rays must be at least 1, refinements 0: {horizons}, {rays}, {refinements}")
        if not false_alarms > 0.0:
            raise UsageError(f"false_alarms must be above 0, not {false_alarms!r}")
        if tx_shape is not None and len(tx_shape) != 3:
            raise UsageError(f"tx_shape is [polarizations, columns, rows], not {list(tx_shape)}")
        if duplex not in ("tdd", "fdd", "both"):
            raise UsageError(f"duplex must be tdd, fdd or both, not {duplex!r}")
        self.horizons = horizons
        self.rays = rays
        self.false_alarms = false_alarms
        self.decay = decay
        self.refinements = refinements
        self.tx_shape = None if tx_shape is None else tuple(tx_shape)
        self.duplex = duplex
        self.fdd_offset = fdd_offset

    def forward(self, history: Tensor, noise_variance: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Args:
            history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`.
            noise_variance: Per entry, `[batch]`; None: estimated from the median of the window's periodogram.
            ahead: Instants asked for, in snapshots after the last, real `[horizon]`; None: 1 ... `horizons`.

        Raises:
            UsageError: The transmit array has another number of ports, or another band lies between subcarriers.
        """
        return self.separate(history, noise_variance, ahead).prediction

    @torch.no_grad()
    def separate(
        self, history: Tensor, noise_variance: Tensor | None = None, ahead: Tensor | None = None
    ) -> Separation:
        """The rays' prediction and what they leave of the history, for another predictor; arguments as in `forward`."""
        check_history(history, min_time=2)
        if ahead is None:
            ahead = torch.arange(1, self.horizons + 1, device=history.device)
        polarizations, columns, rows = self.tx_shape or (1, history.shape[2], 1)
        if polarizations * columns * rows != history.shape[2]:
            raise UsageError(
                f"The history has {history.shape[2]} transmit ports, but tx_shape {list(self.tx_shape or ())} says "
                f"{polarizations * columns * rows}: set tx_shape to [polarizations, columns, rows] of the array"
            )
        distance = 0 if self.duplex == "tdd" else self._band_distance(history.shape[4])
        scale = rms(history)
        seen = (history / scale).to(torch.complex128)
        seen = seen.reshape(len(seen), -1, columns, rows, *seen.shape[3:])  # [batch, series, 4 axes]
        noise = _estimated_noise(seen) if noise_variance is None else noise_variance.double() / scale.flatten() ** 2
        predicted, left = [], []
        for some, level in zip(seen.split(CHUNK), noise.split(CHUNK), strict=True):  # type: ignore[no-untyped-call]
            rays = self.find(some, level.clamp_min(1e-10))
            places = _places(some)
            left.append(some - _sum(_factors(rays.shift, places), rays.gain))
            places[_TIME] = (history.shape[3] - 1) / 2 + ahead.double()
            band, parts = places[3], []
            for number in {"tdd": (0,), "fdd": (1,), "both": (0, 1)}[self.duplex]:
                places[3] = band + number * distance
                parts.append(_sum(_factors(rays.shift, places), rays.gain))
            predicted.append(torch.cat(parts, -1))

        def joined(parts: list[Tensor]) -> Tensor:
            whole = torch.cat(parts).to(history.dtype)
            return whole.reshape(*history.shape[:3], *whole.shape[-2:]) * scale

        return Separation(joined(predicted), joined(left))

    def _band_distance(self, num_subcarriers: int) -> int:
        """Subcarriers from the history's band to the other; delays are known up to a turn of each subcarrier."""
        distance = self.fdd_offset * num_subcarriers
        whole = round(distance)
        if abs(distance - whole) > 0.01:
            raise UsageError(
                f"fdd_offset {self.fdd_offset:g} places the other band {distance:g} subcarriers from the history's "
                f"{num_subcarriers}: set fdd_offset to {whole / num_subcarriers:.9g}, which is {whole}"
            )
        return whole

    @torch.no_grad()
    def find(self, seen: Tensor, noise: Tensor) -> Rays:
        """The rays of windows.

        Args:
            seen: Complex128 `[batch, series, column, row, time, subcarrier]`, of unit mean power.
            noise: Variance of the noise on each entry, `[batch]`.
        """
        size, places = seen.shape[2:], _places(seen)
        least = noise * _threshold(seen.shape[1], size.numel(), self.false_alarms)
        rays = Rays(
            torch.zeros(len(seen), self.rays, _NUM_SHIFTS, dtype=torch.float64, device=seen.device),
            seen.new_zeros(len(seen), seen.shape[1], self.rays),
            torch.zeros(len(seen), self.rays, dtype=torch.bool, device=seen.device),
        )
        live, left = torch.arange(len(seen), device=seen.device), seen
        for count in range(1, self.rays + 1):
            power, peak = _strongest(left)
            going = power > least[live]
            live, peak = live[going], peak[going]
            if not len(live):
                break
            rays.shift[live, count - 1, :4] = peak
            rays.found[live, count - 1] = True
            some = Rays(rays.shift[live, :count], rays.gain[live, :, :count], rays.found[live, :count])
            some = _gains(some, seen[live], noise[live], places, shrink=False)
            some = _gains(self._refined(some, seen[live], noise[live], places), seen[live], noise[live], places, False)
            rays.shift[live, :count], rays.gain[live, :, :count] = some.shift, some.gain
            left = seen[live] - _sum(_factors(some.shift, places), some.gain)
        most = max(1, int(rays.found.sum(1).max()))
        rays = Rays(rays.shift[:, :most], rays.gain[..., :most], rays.found[:, :most])
        for _ in range(self.refinements):
            rays = _gains(self._refined(rays, seen, noise, places), seen, noise, places, shrink=False)
        return _gains(rays, seen, noise, places, shrink=True)

    def _refined(self, rays: Rays, seen: Tensor, noise: Tensor, places: list[Tensor]) -> Rays:
        """One Gauss-Newton step of all rays' shifts and gains together, of which the shifts are kept."""
        shifts = _NUM_SHIFTS if self.decay else _NUM_SHIFTS - 1
        factors = _factors(rays.shift, places)
        atoms = [factors, *(_derivative(factors, places, i) for i in range(shifts))]
        matrix, right = _normal_equations(rays, _matched(seen, atoms), [[_gram(a, b) for b in atoms] for a in atoms])
        batch, count = rays.found.shape
        gains = matrix.shape[-1] - shifts * count
        prior = noise[:, None] * _shift_prior(seen, shifts).repeat_interleave(count)
        if self.decay:  # towards none
            right[:, -count:] -= prior[:, -count:] * rays.shift[..., 4]
        prior = torch.cat([prior.new_zeros(batch, gains), prior], -1)
        found = rays.found.repeat(1, matrix.shape[-1] // count)
        matrix = torch.where(found[:, :, None] & found[:, None], matrix, 0.0)
        loading = 1e-3 * matrix.diagonal(dim1=-2, dim2=-1) + prior + 1e-30
        matrix = matrix + torch.diag_embed(torch.where(found, loading, 1.0))
        moved = torch.linalg.solve(matrix, torch.where(found, right, 0.0))[:, gains:]
        most = torch.tensor([*(0.2 / n for n in seen.shape[2:]), 0.1], dtype=torch.float64, device=seen.device)[:shifts]
        shift = rays.shift.clone()
        shift[..., :shifts] += torch.minimum(torch.maximum(moved.view(batch, shifts, count).mT, -most), most)
        shift[..., :4] -= shift[..., :4].round()
        shift[..., 4].clamp_(0.0, FASTEST_DECAY)
        return rays._replace(shift=shift)


def _places(seen: Tensor) -> list[Tensor]:
    """Indices along each axis of windows `[batch, series, ...]`, from the middle."""
    return [torch.arange(n, dtype=torch.float64, device=seen.device) - (n - 1) / 2 for n in seen.shape[2:]]


def _factors(shift: Tensor, places: list[Tensor]) -> list[Tensor]:
    """Rays along each axis, complex128 `[batch, ray, index]`."""
    found = []
    for i, place in enumerate(places):
        phase = 2 * math.pi * shift[..., i, None] * place
        size = torch.exp(-shift[..., 4, None] * place) if i == _TIME else torch.ones_like(phase)
        found.append(torch.polar(size, phase))
    return found


def _derivative(factors: list[Tensor], places: list[Tensor], shift: int) -> list[Tensor]:
    """Rays' derivatives by one of their shifts."""
    axis, slope = (_TIME, -1.0) if shift == 4 else (shift, 2j * math.pi)
    return [x * (slope * places[axis]) if i == axis else x for i, x in enumerate(factors)]


def _normal_equations(rays: Rays, matched: list[Tensor], gram: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Of a Gauss-Newton step: what small changes of gains and shifts make of the misfit.

    Args:
        rays: Where the step starts.
        matched: Inner products of the window with the rays, then with their derivatives, `[batch, series, ray]` each.
        gram: Inner products of the rays and their derivatives, `[batch, ray, ray]` each.

    Returns:
        Matrix and right side. Unknowns: real, then imaginary parts of each series' gains, then the shifts one by one.
    """
    gain, series = rays.gain, rays.gain.shape[1]
    left = [m - (row[0] @ gain.mT).mT for m, row in zip(matched, gram, strict=True)]
    still = gram[0][0]
    one = torch.cat([torch.cat([still.real, -still.imag], -1), torch.cat([still.imag, still.real], -1)], -2)
    apart = torch.eye(series, dtype=one.dtype, device=one.device)[:, None, :, None]
    gains = (apart * one[:, None, :, None, :]).flatten(3).flatten(1, 2)
    cross = torch.cat([g[:, None] * gain[:, :, None] for g in gram[0][1:]], -1)
    cross = torch.cat([cross.real, cross.imag], 2).flatten(1, 2)
    weights = gain.conj().mT @ gain
    inner = torch.cat([torch.cat([(weights * g).real for g in row[1:]], -1) for row in gram[1:]], -2)
    right = [torch.cat([x.real, x.imag], -1) for x in left[0].unbind(1)]  # type: ignore[no-untyped-call]
    right += [(gain.conj() * x).sum(1).real for x in left[1:]]
    return torch.cat([torch.cat([gains, cross], -1), torch.cat([cross.mT, inner], -1)], -2), torch.cat(right, -1)


def _gram(one: list[Tensor], two: list[Tensor]) -> Tensor:
    """Inner products of atoms, `[batch, ray, ray]`."""
    products = [a.conj() @ b.mT for a, b in zip(one, two, strict=True)]
    return functools.reduce(torch.mul, products)


def _matched(seen: Tensor, atoms: list[list[Tensor]]) -> list[Tensor]:
    """Inner products of atoms with windows, `[batch, series, ray]` each; what atoms share is computed once."""
    bands: dict[int, Tensor] = {}
    found = []
    for column, row, time, band in atoms:
        if id(band) not in bands:
            bands[id(band)] = torch.einsum("bscrtf,bkf->bscrtk", seen, band.conj())
        x = torch.einsum("bscrtk,bkt->bscrk", bands[id(band)], time.conj())
        found.append(torch.einsum("bscrk,bkc,bkr->bsk", x, column.conj(), row.conj()))
    return found


def _sum(factors: list[Tensor], gain: Tensor) -> Tensor:
    """The channel of rays, `[batch, series, column, row, time, subcarrier]`."""
    column, row, time, band = factors
    x = torch.einsum("bsk,bkc,bkr,bkt->bscrtk", gain, column, row, time)
    return torch.einsum("bscrtk,bkf->bscrtf", x, band)


def _gains(rays: Rays, seen: Tensor, noise: Tensor, places: list[Tensor], shrink: bool) -> Rays:
    """Rays with the gains that least squares gives them, or LMMSE with their own powers as prior."""
    factors = _factors(rays.shift, places)
    gram = torch.where(rays.found[:, :, None] & rays.found[:, None], _gram(factors, factors), 0.0)
    matched = _matched(seen, [factors])[0] * rays.found[:, None]
    ridge = noise[:, None] / rays.gain.abs().square().mean(1).clamp_min(1e-30) if shrink else 1e-6 * seen[0, 0].numel()
    loading = torch.where(rays.found, ridge, 1.0).to(gram)
    gain = torch.linalg.solve((gram + torch.diag_embed(loading))[:, None], matched[..., None])[..., 0]
    return rays._replace(gain=gain)


def _strongest(left: Tensor) -> tuple[Tensor, Tensor]:
    """Power of a matched filter, over the noise's variance in noise alone, and the frequencies where it is greatest.

    Returns:
        `[batch]` and `[batch, 4]`.
    """
    padded = [2 * n if n > 1 else 1 for n in left.shape[2:]]
    spectrum = torch.fft.fftn(left.to(torch.complex64), s=padded, dim=(2, 3, 4, 5))
    power, index = (torch.view_as_real(spectrum).square().sum((1, -1)).flatten(1) / left[0, 0].numel()).max(1)
    place = torch.stack(torch.unravel_index(index, padded), -1)
    return power.double(), place.double() / torch.tensor(padded, device=left.device)


def _shift_prior(seen: Tensor, shifts: int) -> Tensor:
    """Inverse variance of shifts before anything is known, times the noise's: a resolution cell, and slow decay."""
    cells = [(2.0 * n) ** 2 for n in seen.shape[2:]]
    return torch.tensor([*cells, DECAY_SPREAD**-2][:shifts], dtype=torch.float64, device=seen.device)


@functools.lru_cache(maxsize=64)
def _threshold(series: int, cells: int, false_alarms: float) -> float:
    """Power over the noise's that noise alone exceeds so many times in a window; padding offers four tries a cell."""
    from scipy.special import gammainccinv

    return float(gammainccinv(series, min(0.5, false_alarms / (4 * cells))))


def _estimated_noise(seen: Tensor) -> Tensor:
    """Noise variance from the median of the periodogram: most cells hold no ray."""
    from scipy.special import gammaincinv

    cells = torch.view_as_real(torch.fft.fftn(seen, dim=(2, 3, 4, 5), norm="ortho")).square().sum((1, -1)).flatten(1)
    return cells.median(1).values / float(gammaincinv(seen.shape[1], 0.5))
