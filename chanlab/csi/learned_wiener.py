"""Ours: a network reads the beam-delay domain and writes Doppler spectra; a Wiener filter does the prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from chanlab.csi.axial import AxialBlock
from chanlab.csi.doppler_wiener import doppler_posterior
from chanlab.csi.localised_taps import NUM_TAPS, localised_taps
from chanlab.csi.predictor import check_history, normalise
from chanlab.errors import UsageError

NUM_LINES = 64  # lines of a Doppler spectrum over one cycle per snapshot
NUM_SHIFTS = 5  # taps that a predicted tap contributes to: itself and two on either side
STEPS = 4  # horizon steps at which the network learnt variances; between and beyond them they are interpolated and held
_FEATURES = 99


class Distribution(NamedTuple):
    """A prediction with its uncertainty.

    Attributes:
        mean: Complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`.
        variance: Variance of the complex error of each entry, real, same shape.
    """

    mean: Tensor
    variance: Tensor


class LearnedWiener(nn.Module):
    """Wiener prediction in the beam-delay domain, with Doppler spectra that a network reads from the history.

    The history goes to beams (a DFT over the array) and delay taps (`localised_taps`). What the network sees of each
    (beam, tap) are its periodogram, its power over the noise and its coherence with neighbouring beams and taps: no
    common phase, no scale. Attention along taps and along beams turns that into the Doppler spectra of a few components
    per (beam, tap), as corrections of the periodogram. The prediction is the mean of a Gaussian process with these
    spectra (`doppler_posterior`), so that the network never handles the channel itself: it is a linear filter whose
    weights depend on the history's second moments, exact in phase and scale, for any number of snapshots and at any
    instant ahead that the snapshot rate resolves. Before the filter each tap's beams are cleaned by their coherence;
    after it complex weights spread each tap over its neighbours, in the history's band and, for FDD, in the other band.
    Last, each antenna and step is shrunk by a learned factor: means of per-antenna ratios ask for that.

    Polarizations and receive antennas are series that share a spectrum: any number of them will do, as any array, any
    number of subcarriers and any history of two snapshots or more, by the same weights.

    Args:
        horizons: Number of steps predicted.
        tx_shape: Polarizations, columns and rows of the transmit array, in the order of `PlanarArray`'s ports.
        duplex: Band predicted: `tdd`, the history's; `fdd`, the other; `both`, one after the other along subcarriers.
        fdd_offset: Distance of the other band in bandwidths of the history's; weights are bound to the one trained for.
        dim: Width of the network.
        layers: Blocks of attention.
        components: Doppler spectra per beam and tap.
    """

    def __init__(
        self,
        horizons: int = 4,
        tx_shape: Sequence[int] = (2, 4, 4),
        duplex: Literal["tdd", "fdd", "both"] = "tdd",
        fdd_offset: float = 1.5,
        dim: int = 256,
        layers: int = 4,
        components: int = 2,
    ) -> None:
        super().__init__()
        if horizons < 1 or components < 1 or layers < 1:
            raise UsageError("horizons, components and layers must be at least 1")
        if len(tx_shape) != 3 or min(tx_shape) < 1:
            raise UsageError(f"tx_shape is [polarizations, columns, rows], not {list(tx_shape)}")
        if duplex not in ("tdd", "fdd", "both"):
            raise UsageError(f"duplex must be tdd, fdd or both, not {duplex!r}")
        self.horizons = horizons
        self.tx_shape = tuple(tx_shape)
        self.duplex = duplex
        self.fdd_offset = fdd_offset
        self.components = components
        self.embed = nn.Linear(_FEATURES, dim)
        self.tap = nn.Parameter(0.02 * torch.randn(NUM_TAPS, dim))
        self.beam = nn.Linear(16, dim)
        self.blocks = nn.ModuleList(AxialBlock(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.cleaning = BeamCleaning(dim)
        self.spectrum = nn.Linear(dim, components * NUM_LINES)
        self.spread = nn.Linear(dim, 2 * components * NUM_SHIFTS * 2)
        self.deviation = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 2 * STEPS))
        self.shrink = nn.ModuleList(_shrinkage() for _ in range(2))
        with torch.no_grad():
            for layer in (self.spectrum, self.spread, self.deviation[2]):
                layer.weight.mul_(0.1)  # type: ignore[operator]
                layer.bias.zero_()  # type: ignore[operator]
            self.spectrum.bias.view(components, NUM_LINES).add_(0.3 * torch.randn(components, NUM_LINES))
            self.spread.bias.view(2, components, NUM_SHIFTS, 2)[0, :, NUM_SHIFTS // 2, 0] = 1.0

    def forward(self, history: Tensor, noise_variance: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Args:
            history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`, two snapshots or more.
            noise_variance: Per entry, `[batch]`; None: estimated for each snapshot from its weakest delay taps, which
                also finds snapshots that are lost or hit by bursts.
            ahead: Instants asked for, in snapshots after the last, real `[horizon]`; None: 1 ... `horizons`.
        """
        return self.distribution(history, noise_variance, ahead).mean

    def distribution(
        self, history: Tensor, noise_variance: Tensor | None = None, ahead: Tensor | None = None
    ) -> Distribution:
        """The prediction and the variance of its error; arguments as in `forward`."""
        check_history(history, min_time=2)
        return self.predict_taps(self.to_taps(history), history.shape[-1], noise_variance, ahead)

    def to_taps(self, history: Tensor) -> Tensor:
        """Beams and delay taps of snapshots, complex `[batch, series, column, row, tap, time]`.

        Snapshots don't mix: a window's taps may be put together from those of its snapshots (`CachedPrediction`).
        """
        batch, num_rx, num_tx, steps, num_subcarriers = history.shape
        if num_tx != math.prod(self.tx_shape):
            raise UsageError(
                f"The history has {num_tx} transmit ports, but tx_shape {list(self.tx_shape)} says "
                f"{math.prod(self.tx_shape)}: set tx_shape to [polarizations, columns, rows] of the array"
            )
        taps = localised_taps(num_subcarriers).to(history.device)
        delay = (history.to(torch.complex64) @ taps.conj()).mT
        grid = delay.reshape(batch, num_rx * self.tx_shape[0], *self.tx_shape[1:], NUM_TAPS, steps)
        return torch.fft.fft2(grid.flip(3), dim=(2, 3), norm="ortho")  # type: ignore[no-any-return]

    def predict_taps(
        self, taps: Tensor, num_subcarriers: int, noise_variance: Tensor | None, ahead: Tensor | None = None
    ) -> Distribution:
        """The prediction from `to_taps` of a window."""
        if ahead is None:
            ahead = torch.arange(1, self.horizons + 1, device=taps.device)
        scaled, scale = normalise(taps.flatten(2, 4).movedim(-1, -2)[:, :, None])
        scale = scale.flatten()
        taps = scaled[:, :, 0].movedim(-2, -1).reshape(taps.shape)
        if noise_variance is None:
            noise = snapshot_noise(taps)
            level = noise.median(-1).values
        else:
            level = (noise_variance.to(scale) / scale**2).clamp_min(1e-6)  # logarithms follow
            noise = level[:, None].expand(-1, taps.shape[-1])
        place = self.tap + self.beam(beam_directions(*taps.shape[2:4]).to(self.tap))[:, :, None]
        taps = self.cleaning(taps, features(taps, level)[0], place, level)
        seen, periodogram, _ = features(taps, level)
        hidden = self.embed(seen) + place
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden).float()
        with torch.autocast(taps.device.type, enabled=False):
            bands = self._bands(taps, hidden, periodogram, noise, level, ahead)
            shown = {"tdd": (0,), "fdd": (1,), "both": (0, 1)}[self.duplex]
            parts = [self._to_ports(bands[i], i, num_subcarriers, scale, level, ahead, len(taps)) for i in shown]
        return Distribution(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))

    def _bands(
        self, taps: Tensor, hidden: Tensor, periodogram: Tensor, noise: Tensor, level: Tensor, ahead: Tensor
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each band the beam-tap prediction, its variance, and that of the Gaussian process."""
        floor = level[:, None, None, None, None]
        base = torch.log(torch.maximum(periodogram - floor, 0.02 * periodogram) + 1e-3 * floor + 1e-9)
        corrections = self.spectrum(hidden).unflatten(-1, (self.components, NUM_LINES)).clamp(-15.0, 15.0)
        spectrum = torch.exp(corrections + base[..., None, :]) / NUM_LINES
        power = spectrum.sum((-2, -1))
        loading = noise[:, None, None, None] + (1e-5 + 3e-4 * power.detach())[..., None]
        posterior = doppler_posterior(spectrum, loading, taps.movedim(1, -2), ahead)
        mean = posterior.mean.permute(0, 5, 6, 4, 1, 2, 3)  # [batch, series, horizon, component, column, row, tap]
        weights = torch.view_as_complex(self.spread(hidden).unflatten(-1, (2, self.components, NUM_SHIFTS, 2)))
        variance = posterior.variance.clamp_min(1e-7)
        steps_seen = _at_steps(self.deviation(hidden.detach()).unflatten(-1, (2, STEPS)), ahead)
        prior = power.detach() + 1e-5 * level[:, None, None, None]
        bands = []
        for band in range(2):
            shares = weights[..., band, :, :].permute(0, 4, 5, 1, 2, 3)[:, None, None]
            spread = (shares * mean[..., None, :, :, :]).sum(3)  # [batch, series, horizon, shift, column, row, tap]
            known = variance + 1e-2 * level[:, None, None, None, None] if band == 0 else prior[..., None]
            log_variance = (torch.log(known) + steps_seen[..., band, :]).clamp_min(-14.0)
            bands.append((_gather_shifts(spread), log_variance.exp(), variance))
        return bands

    def _to_ports(
        self,
        band: tuple[Tensor, Tensor, Tensor],
        number: int,
        num_subcarriers: int,
        scale: Tensor,
        level: Tensor,
        ahead: Tensor,
        batch: int,
    ) -> tuple[Tensor, Tensor]:
        """Ports and subcarriers of a band's beams and taps, shrunk, and the variance of each entry."""
        predicted, variance, process = band  # [batch, series, horizon, col, row, tap], [batch, col, row, tap, horizon]
        ports = torch.fft.ifft2(predicted, dim=(3, 4), norm="ortho").flip(4)
        energy = _square(ports)
        total = energy.sum(-1)
        spread = process.mean((1, 2))  # per antenna: [batch, tap, horizon]
        unknown = spread.sum(1)
        occupied = unknown**2 / (spread.square().sum(1) + 1e-12)

        def per_step(x: Tensor) -> Tensor:
            return torch.log(x + 1e-6)[:, None, :, None, None].expand_as(total)

        log_power = torch.log(total + 1e-5)
        seen = [
            log_power - per_step(unknown),
            log_power - torch.log(total.mean((1, 3, 4), keepdim=True) + 1e-6),
            torch.log(total**2 / (energy.square().sum(-1) + 1e-9) + 1e-6),
            per_step(unknown),
            per_step(occupied),
            torch.log(level)[:, None, None, None, None].expand_as(total),
            (ahead.to(total) - 2.5)[None, None, :, None, None].expand_as(total),
            log_power,
        ]
        factor = torch.sigmoid(self.shrink[number](torch.stack(seen, -1)))
        taps = localised_taps(num_subcarriers, number * self.fdd_offset).to(ports.device)
        scaled = ports * factor * scale.view(-1, 1, 1, 1, 1, 1)
        mean = (scaled.movedim(2, 4) @ taps.mT).reshape(
            batch, -1, math.prod(self.tx_shape), *scaled.shape[2:3], len(taps)
        )
        entry = (variance.mean((1, 2)).mT * scale.view(-1, 1, 1).square()) @ _square(taps).mT
        return mean, entry[:, None, None].expand(mean.shape)

    def training_loss(self, history: Tensor, target: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """What is minimised: the mean of error over power per antenna and step, plus a likelihood for the variances.

        Powers are floored at 1 % of their sample's mean, so that deep fades don't rule the gradients.

        Args:
            history: See `forward`.
            target: Noiseless, as `forward` returns it.
            noise_variance: See `forward`.
        """
        mean, variance = self.distribution(history, noise_variance)
        bands = 2 if self.duplex == "both" else 1
        error = _square(mean - target).unflatten(-1, (bands, -1))  # type: ignore[no-untyped-call]
        power = _square(target).unflatten(-1, (bands, -1)).sum(-1)  # type: ignore[no-untyped-call]
        ratio = error.sum(-1) / (power + 0.01 * power.mean((1, 2, 3), keepdim=True))
        relative = power.mean((1, 2, 3)).mean(-1).view(-1, 1, 1, 1, 1) / target.shape[-1] * bands
        likelihood = error.detach().flatten(-2) / variance + torch.log(variance / relative)
        return bands * ratio.mean() + 0.05 * likelihood.mean()  # type: ignore[no-any-return]


class BeamCleaning(nn.Module):
    """Takes from each beam what it shares with the others of its tap, or adds it, by learned signs of their coherence.

    The weight of beam j in beam i is a learned real number times their measured complex coherence: what is added has
    the phase of beam i, whatever the common phase.
    """

    def __init__(self, dim: int, heads: int = 4, head_dim: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Linear(_FEATURES, dim)
        self.block = AxialBlock(dim)
        self.norm = nn.LayerNorm(dim)
        self.query = nn.Linear(dim, heads * head_dim)
        self.key = nn.Linear(dim, heads * head_dim)
        self.strength = nn.Parameter(torch.zeros(heads))

    def forward(self, taps: Tensor, seen: Tensor, place: Tensor, level: Tensor) -> Tensor:
        """Cleaned taps, same shape `[batch, series, column, row, tap, time]`."""
        hidden = self.norm(self.block(self.embed(seen) + place)).flatten(1, 2)
        query, key = (f(hidden).unflatten(-1, (self.heads, -1)).permute(0, 3, 2, 1, 4) for f in (self.query, self.key))
        signs = torch.tanh((query @ key.mT).float() / math.sqrt(query.shape[-1]))
        with torch.autocast(taps.device.type, enabled=False):
            beams = taps.flatten(2, 3).permute(0, 3, 2, 1, 4).flatten(3)  # [batch, tap, beam, series * time]
            covariance = beams @ beams.mH / beams.shape[-1]
            power = covariance.diagonal(dim1=-2, dim2=-1).real + 0.3 * level[:, None, None]
            coherence = covariance / (power[..., :, None] * power[..., None, :]).sqrt()
            weights = (signs * self.strength[:, None, None, None].float()).sum(1) * coherence
            beams = beams + weights @ beams
        shape = taps.shape
        return beams.reshape(shape[0], shape[4], -1, shape[1], shape[5]).permute(0, 3, 2, 1, 4).reshape(shape)


class CachedPrediction:
    """Predicts after each new snapshot; a snapshot is taken to beams and taps once, when it comes.

    Args:
        predictor: In evaluation mode.
        history: Snapshots that a prediction reads, the last ones.
    """

    def __init__(self, predictor: LearnedWiener, history: int = 16) -> None:
        self.predictor = predictor
        self.history = history
        self._taps: Tensor | None = None

    @torch.no_grad()
    def push(self, snapshot: Tensor, noise_variance: Tensor | None = None) -> Tensor | None:
        """Takes a snapshot in and predicts what follows it.

        Args:
            snapshot: Complex `[batch, rx_ant, tx_ant, subcarrier]`.
            noise_variance: See `LearnedWiener.forward`.

        Returns:
            What `LearnedWiener` predicts from the last `history` snapshots; None after the very first.
        """
        new = self.predictor.to_taps(snapshot[:, :, :, None])
        self._taps = new if self._taps is None else torch.cat([self._taps, new], -1)[..., -self.history :]
        if self._taps.shape[-1] < 2:
            return None
        return self.predictor.predict_taps(self._taps, snapshot.shape[-1], noise_variance).mean


@torch.no_grad()
def features(taps: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the network sees of beams and taps: second moments, without phase and scale.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
        level: Noise variance `[batch]`.

    Returns:
        Features `[batch, column, row, tap, 99]`, periodogram `[..., 64]`, power `[..., 1]`.
    """
    steps = taps.shape[-1]
    noise = level[:, None, None, None, None]
    periodogram = _square(torch.fft.fft(taps, n=NUM_LINES, dim=-1) if steps <= NUM_LINES else _folded(taps)).mean(1)
    periodogram = periodogram / steps
    power = _square(taps).mean((1, -1))[..., None]
    coarse = periodogram[..., :: NUM_LINES // 32]

    def coherence(other: Tensor, reach: int) -> Tensor:
        scale = (power * _square(other).mean((1, -1))[..., None]).sqrt() + 0.3 * noise
        found = []
        for lag in range(-reach, reach + 1):
            one = taps[..., max(0, lag) : steps + min(0, lag)]
            two = other[..., max(0, -lag) : steps - max(0, lag)]
            product = (one * two.conj()).sum((1, -1))[..., None] / (taps.shape[1] * steps)
            found.append(product / scale)
        return torch.view_as_real(torch.cat(found, -1)).flatten(-2)

    next_tap, second_tap = (functional.pad(taps[..., k:, :], (0, 0, 0, k)) for k in (1, 2))
    seen = [
        torch.log1p(coarse / noise),
        coarse / (power + 1e-9) * 0.3,
        torch.log1p(power / noise),
        torch.log(power + 1e-7),
        torch.log(noise).expand_as(power),
        coherence(next_tap, 2),
        coherence(second_tap, 2),
        coherence(taps.roll(-1, 2), 1),
        coherence(taps.roll(-1, 3), 1),
    ]
    return torch.cat(seen, -1), periodogram, power


@torch.no_grad()
def snapshot_noise(taps: Tensor) -> Tensor:
    """Noise variance of each snapshot from its weakest tenth of beams and taps, `[batch, time]`.

    A snapshot with almost no power (a lost one) is marked by a variance of 1e3.

    Args:
        taps: Complex `[batch, series, column, row, tap, time]`, of unit mean power.
    """
    power = _square(taps).mean(1).flatten(1, 3)  # [batch, beam and tap, time]
    weakest = power.median(-1).values.argsort(1)[:, : max(1, power.shape[1] // 10)]
    noise = power.gather(1, weakest[..., None].expand(-1, -1, power.shape[-1])).mean(1)
    whole = power.mean(1)
    lost = whole < 1e-3 * whole.median(1, keepdim=True).values
    noise = noise.clamp_min(1e-4)
    return torch.where(lost, 1e3, noise)


def beam_directions(columns: int, rows: int) -> Tensor:
    """Harmonics of the beams' spatial frequencies, `[column, row, 16]`, for arrays of any size."""

    def harmonics(count: int) -> Tensor:
        turn = 2 * math.pi * torch.arange(count) / count
        return torch.stack([turn.cos(), turn.sin(), (2 * turn).cos(), (2 * turn).sin()], -1)

    one = harmonics(columns)[:, None].expand(columns, rows, 4)
    two = harmonics(rows)[None].expand(columns, rows, 4)
    first = (one[..., :2, None] * two[..., None, :2]).flatten(-2)
    second = (one[..., 2:, None] * two[..., None, 2:]).flatten(-2)
    return torch.cat([one, two, first, second], -1)


def _shrinkage() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    with torch.no_grad():
        layers[4].weight.mul_(0.1)  # type: ignore[operator]
        layers[4].bias.fill_(4.0)  # type: ignore[operator]
    return layers


def _gather_shifts(spread: Tensor) -> Tensor:
    """Sums `[..., shift, column, row, tap]` over shifts, each moved by its number of taps, into `[..., tap]`."""
    half, taps = NUM_SHIFTS // 2, spread.shape[-1]
    padded = functional.pad(torch.view_as_real(spread), (0, 0, half, half))
    moved = [padded[..., s, :, :, 2 * half - s : 2 * half - s + taps, :] for s in range(NUM_SHIFTS)]
    return torch.view_as_complex(torch.stack(moved).sum(0))


def _at_steps(values: Tensor, ahead: Tensor) -> Tensor:
    """Values at steps 1 ... 4 (last axis), interpolated at the instants asked for and held beyond."""
    place = (ahead.to(values) - 1.0).clamp(0.0, STEPS - 1.0)
    low = place.floor().long().clamp(max=STEPS - 2)
    share = place - low
    return values[..., low] * (1 - share) + values[..., low + 1] * share


def _folded(taps: Tensor) -> Tensor:
    """DFT at 64 frequencies of a series longer than that."""
    steps = taps.shape[-1]
    padded = functional.pad(torch.view_as_real(taps), (0, 0, 0, -steps % NUM_LINES))
    return torch.fft.fft(torch.view_as_complex(padded).unflatten(-1, (-1, NUM_LINES)).sum(-2), dim=-1)  # type: ignore[no-any-return, no-untyped-call]


def _square(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square()
