"""Ours: a network reads the beam-delay domain and writes Doppler spectra; a Wiener filter does the prediction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from chanlab.csi.axial import AxialBlock
from chanlab.csi.beam_cleaning import BeamCleaning
from chanlab.csi.beam_taps import (
    NUM_FEATURES,
    NUM_LINES,
    beam_directions,
    coherence_features,
    noise_level,
    pick_taps,
    snapshot_noise,
    spectral_features,
    square,
    strongest_taps,
)
from chanlab.csi.doppler_wiener import doppler_posterior
from chanlab.csi.few_rays import with_few_rays
from chanlab.csi.localised_taps import NUM_TAPS, localised_taps
from chanlab.csi.lost_snapshots import fill_lost, unreached
from chanlab.csi.predictor import check_history, normalise
from chanlab.csi.recalibration import Circumstances, Recalibration, Signatures, misfits, signatures, tap_profile
from chanlab.csi.student_t import ComplexStudentT
from chanlab.csi.tap_language import TapLanguage
from chanlab.csi.window_augmentation import augment_windows
from chanlab.errors import UsageError

NUM_SHIFTS = 5  # taps that a predicted tap contributes to: itself and two on either side
STEPS = 4  # horizon steps at which the network learnt variances; between and beyond them they are interpolated and held


class _Seen(NamedTuple):
    """What the network sees of a window, and what it makes of it."""

    strong: Tensor  # numbers of the strongest taps, [batch, strong]
    weak: Tensor  # of the others
    cleaned: Tensor  # the strongest taps, complex [batch, series, column, row, strong, time]
    periodogram: Tensor  # of the strongest, [batch, column, row, strong, line]
    hidden: Tensor  # [batch, column, row, strong, dim]
    rest: Tensor  # the others, complex [batch, series, column, row, weak, time]


class _Band(NamedTuple):
    """Prediction on the beams and taps of the history's band (number 0) or the other one (1)."""

    number: int
    mean: Tensor  # [batch, series, horizon, column, row, tap]
    variance: Tensor  # of its error, averaged over beams, [batch, tap, horizon]
    process_variance: Tensor  # as the Gaussian process has it, same shape, taps in any order
    signatures: Signatures | None  # for the correction of stated errors, if there is one
    misfits: Tensor | None  # [batch, 2]


class LearnedWiener(nn.Module):
    """Wiener prediction in the beam-delay domain, with Doppler spectra that a network reads from the history.

    The history goes to beams (a DFT over the array) and delay taps (`localised_taps`), of which the network sees
    the strongest. What it sees of each (beam, tap) are its periodogram, its power over the noise and its coherence
    with neighbouring beams and taps: no common phase, no scale. Attention along taps and along beams turns that
    into the Doppler spectra of a few components per (beam, tap), as corrections of the periodogram. The prediction
    is the mean of a Gaussian process with these spectra (`doppler_posterior`), so that the network never handles
    the channel itself: it is a linear filter whose weights depend on the history's second moments, exact in phase
    and scale, for any number of snapshots and at any instant ahead that the snapshot rate resolves. Before the
    filter each tap's beams are cleaned by their coherence; after it complex weights spread each tap over its
    neighbours, in the history's band and, for FDD, in the other band. The weak taps share one spectrum in each
    beam, that of the strong ones. Last, each antenna and step is shrunk by a learned factor: means of per-antenna
    ratios ask for that. Stated errors are corrected where a window is unlike those of training (`Recalibration`).

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
        strong_taps: Delay taps that the network sees, the strongest of each window. In each beam the others share the
            Doppler spectrum of all of these.
        backbone: Language model that reads along the taps halfway through the blocks, if `backbone_layers` says so; see
            `TapLanguage`. None: a transformer of as many trained parameters in its place.
        backbone_layers: Layers of it; 0: neither.
        pretrained: False: the language model starts from random weights.
        augmentation: Probability of each change that training makes to a window; see `augment_windows`.
        few_rays: Probability that training puts a channel of few rays in the place of a window whose noise variance is
            told; see `with_few_rays`.
    """

    added_later = ("recalibration.",)

    def __init__(
        self,
        horizons: int = 4,
        tx_shape: Sequence[int] = (2, 4, 4),
        duplex: Literal["tdd", "fdd", "both"] = "tdd",
        fdd_offset: float = 1.5,
        dim: int = 256,
        layers: int = 5,
        components: int = 2,
        strong_taps: int = 24,
        backbone: str | None = None,
        backbone_layers: int = 0,
        pretrained: bool = True,
        augmentation: float = 0.0,
        few_rays: float = 0.0,
    ) -> None:
        super().__init__()
        if min(horizons, components, layers, strong_taps) < 1 or backbone_layers < 0:
            raise UsageError("horizons, components, layers and strong_taps are at least 1, backbone_layers at least 0")
        if not 0.0 <= augmentation < 1.0:
            raise UsageError(f"augmentation is a probability below 1, not {augmentation}")
        if not 0.0 <= few_rays <= 1.0:
            raise UsageError(f"few_rays is a probability, not {few_rays}")
        if len(tx_shape) != 3 or min(tx_shape) < 1:
            raise UsageError(f"tx_shape is [polarizations, columns, rows], not {list(tx_shape)}")
        if duplex not in ("tdd", "fdd", "both"):
            raise UsageError(f"duplex must be tdd, fdd or both, not {duplex!r}")
        self.horizons = horizons
        self.tx_shape = tuple(tx_shape)
        self.duplex = duplex
        self.fdd_offset = fdd_offset
        self.components = components
        self.strong_taps = min(strong_taps, NUM_TAPS - 1)
        self.augmentation = augmentation
        self.few_rays = few_rays
        self.embed = nn.Linear(NUM_FEATURES, dim)
        self.tap = nn.Parameter(0.02 * torch.randn(NUM_TAPS, dim))
        self.beam = nn.Linear(16, dim)
        blocks: list[nn.Module] = [AxialBlock(dim) for _ in range(layers)]
        if backbone_layers:
            blocks.insert((layers + 1) // 2, TapLanguage(dim, backbone, backbone_layers, pretrained))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dim)
        self.cleaning = BeamCleaning(dim)
        self.spectrum = nn.Linear(dim, components * NUM_LINES)
        self.whiteness = nn.Linear(dim, 1)
        self.spread = nn.Linear(dim, 2 * components * NUM_SHIFTS * 2)
        self.deviation = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, 2 * STEPS))
        self.rest = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.rest_deviation = nn.Parameter(torch.zeros(2, STEPS))
        self.shrink = nn.ModuleList(_per_antenna(1, [4.0]) for _ in range(2))
        self.trust = nn.ModuleList(_per_antenna(2, [0.0, 1.0]) for _ in range(2))
        self.recalibration = Recalibration(dim)
        for head in (self.shrink, self.trust):  # of a band that isn't predicted: there to be loaded, not to be trained
            for band, used in enumerate((duplex != "fdd", duplex != "tdd")):
                head[band].requires_grad_(used)
        with torch.no_grad():
            for layer in (self.spectrum, self.whiteness, self.spread, self.deviation[2]):
                layer.weight.mul_(0.1)  # type: ignore[operator]
                layer.bias.zero_()  # type: ignore[operator]
            self.spectrum.bias.view(components, NUM_LINES).add_(0.3 * torch.randn(components, NUM_LINES))
            self.whiteness.bias.fill_(math.log(1e-3))
            self.spread.bias.view(2, components, NUM_SHIFTS, 2)[0, :, NUM_SHIFTS // 2, 0] = 1.0

    def forward(self, history: Tensor, noise_variance: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        """Predicts complex `[batch, rx_ant, tx_ant, horizon, subcarrier]`; see `Predictor`.

        Args:
            history: Complex `[batch, rx_ant, tx_ant, time, subcarrier]`, two snapshots or more.
            noise_variance: Per entry, `[batch]`; None: estimated for each snapshot from its weakest delay taps, which
                also finds snapshots that are lost, and fills them, or hit by bursts.
            ahead: Instants asked for, in snapshots after the last, real `[horizon]`; None: 1 ... `horizons`.
        """
        return self.distribution(history, noise_variance, ahead).mean

    def distribution(
        self, history: Tensor, noise_variance: Tensor | None = None, ahead: Tensor | None = None
    ) -> ComplexStudentT:
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
        taps = localised_taps(num_subcarriers, device=history.device)
        delay = (history.to(torch.complex64) @ taps.conj()).mT
        grid = delay.reshape(batch, num_rx * self.tx_shape[0], *self.tx_shape[1:], NUM_TAPS, steps)
        return torch.fft.fft2(grid.flip(3), dim=(2, 3), norm="ortho")  # type: ignore[no-any-return]

    def predict_taps(
        self, taps: Tensor, num_subcarriers: int, noise_variance: Tensor | None, ahead: Tensor | None = None
    ) -> ComplexStudentT:
        """The prediction from `to_taps` of a window."""
        if ahead is None:
            ahead = torch.arange(1, self.horizons + 1, device=taps.device)
        scaled, scale = normalise(taps.flatten(2, 4).movedim(-1, -2)[:, :, None])
        scale = scale.flatten()
        taps = scaled[:, :, 0].movedim(-2, -1).reshape(taps.shape)
        if noise_variance is None:
            noise = snapshot_noise(taps)
            level = noise_level(noise)
            taps = fill_lost(taps, noise)
        else:
            level = (noise_variance.to(scale) / scale**2).clamp_min(1e-6)  # logarithms follow
            noise = level[:, None].expand(-1, taps.shape[-1])
        with torch.no_grad():
            strong, weak = strongest_taps(taps, self.strong_taps)
            chosen, next_taps, second_taps = (pick_taps(taps, strong + k) for k in range(3))
            coherences = coherence_features(chosen, next_taps, second_taps, level)
        read = self._read(chosen, coherences, strong, level)
        seen = _Seen(strong, weak, *read, pick_taps(taps, weak))
        with torch.autocast(taps.device.type, enabled=False):
            bands = self._bands(seen, noise, level, ahead)
            parts = [self._to_ports(band, num_subcarriers, scale, level, ahead) for band in bands]
        return ComplexStudentT(*(torch.cat(part, -1) for part in zip(*parts, strict=True)))

    def _read(self, taps: Tensor, coherences: Tensor, strong: Tensor, level: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The strongest taps cleaned, their periodogram, and what the network makes of them."""
        beams = self.beam(beam_directions(taps.shape[2], taps.shape[3], taps.device))
        place = self.tap[strong][:, None, None] + beams[:, :, None]
        spectral, _ = spectral_features(taps, level)
        taps = self.cleaning(taps, torch.cat([spectral, coherences], -1), place, level)
        spectral, periodogram = spectral_features(taps, level)
        hidden = self.embed(torch.cat([spectral, coherences], -1)) + place
        for block in self.blocks:
            hidden = block(hidden)
        return taps, periodogram, self.norm(hidden).float()

    def _bands(self, seen: _Seen, noise: Tensor, level: Tensor, ahead: Tensor) -> list[_Band]:
        """What is predicted of beams and taps in each band asked for."""
        hidden, floor = seen.hidden, level[:, None, None, None, None]
        base = torch.maximum(seen.periodogram - floor, 0.02 * seen.periodogram) + 1e-3 * floor + 1e-9
        corrections = self.spectrum(hidden).unflatten(-1, (self.components, NUM_LINES)).clamp(-15.0, 15.0)
        spectrum = torch.exp(corrections + torch.log(base)[..., None, :]) / NUM_LINES
        power = spectrum.sum((-2, -1))
        white = torch.exp(self.whiteness(hidden)[..., 0].clamp(-14.0, 0.0)) * power.detach() + 1e-5
        white = white + unreached(noise)[:, None, None, None] * power.detach()
        loading = noise[:, None, None, None] + white[..., None]
        posterior = doppler_posterior(spectrum, loading, seen.cleaned.movedim(1, -2), ahead, self.recalibration.active)
        mean = posterior.mean.permute(0, 5, 6, 4, 1, 2, 3)  # [batch, series, horizon, component, column, row, tap]
        weights = torch.view_as_complex(self.spread(hidden).unflatten(-1, (2, self.components, NUM_SHIFTS, 2)))
        variance = posterior.variance.clamp_min(1e-7)
        steps_seen = _at_steps(self.deviation(hidden.detach()).unflatten(-1, (2, STEPS)), ahead)
        prior = power.detach() + 1e-5 * level[:, None, None, None]
        rest, rest_variance, rest_prior = self._rest(seen, spectrum.detach().sum((-3, -2)), noise, level, ahead)
        order = torch.cat([seen.strong, seen.weak], 1).argsort(1)[..., None].expand(-1, -1, len(ahead))
        whole_window, misfit = None, None
        if posterior.misfit is not None:
            profile = tap_profile(seen.cleaned, seen.rest, seen.strong, seen.weak)
            above = (seen.periodogram.mean(-1) - floor[..., 0]).clamp_min(0.0)
            whole_window = signatures(hidden.detach(), above, level, profile)
            misfit = misfits(posterior.misfit, power.detach())
        bands = []
        for band in {"tdd": (0,), "fdd": (1,), "both": (0, 1)}[self.duplex]:
            shares = weights[..., band, :, :].permute(0, 4, 5, 1, 2, 3)[:, None, None]
            spread = (shares * mean[..., None, :, :, :]).sum(3)  # [batch, series, horizon, shift, column, row, tap]
            whole = _to_places(spread, seen.strong)
            whole = whole + self.rest[band] * _to_places(rest[:, :, :, None], seen.weak)
            # In its own band the process tells how sure it is; of the other band only how strong the channel is.
            known = variance + 1e-2 * floor if band == 0 else prior[..., None]
            rest_known = rest_variance + 1e-2 * floor if band == 0 else rest_prior
            log_variance = torch.log(known.mean((1, 2))) + steps_seen.mean((1, 2))[..., band, :]
            rest_log_variance = torch.log(rest_known.mean((1, 2))) + _at_steps(self.rest_deviation, ahead)[band]
            both = torch.cat([log_variance, rest_log_variance], 1).clamp_min(-14.0).exp().gather(1, order)
            process = torch.cat([variance, rest_variance], 3).mean((1, 2))
            bands.append(_Band(band, whole, both, process, whole_window, misfit))
        return bands

    def _rest(
        self, seen: _Seen, pooled: Tensor, noise: Tensor, level: Tensor, ahead: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weak taps by the pooled spectrum of each beam: mean, variance and prior variance.

        Shapes: `[batch, series, horizon, column, row, weak]`, `[batch, column, row, weak, horizon]`, that with 1 for
        the horizon.
        """
        count = seen.weak.shape[1]
        power = (square(seen.rest).mean((1, 4, 5)) - level[:, None, None]).clamp_min(1e-3 * level[:, None, None] + 1e-9)
        spectrum = pooled / pooled.sum(-1, keepdim=True) * power[..., None]
        loading = noise[:, None, None] + (1e-5 + 1e-2 * power)[..., None]
        history = seen.rest.permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
        posterior = doppler_posterior(spectrum[..., None, :], loading, history, ahead)
        mean = posterior.mean[:, :, :, 0].unflatten(3, (seen.rest.shape[1], count)).permute(0, 3, 5, 1, 2, 4)  # type: ignore[no-untyped-call]
        variance = posterior.variance.clamp_min(1e-7)[:, :, :, None].expand(-1, -1, -1, count, -1)
        return mean, variance, power[..., None, None].expand(-1, -1, -1, count, 1)

    def _to_ports(
        self, band: _Band, num_subcarriers: int, scale: Tensor, level: Tensor, ahead: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ports and subcarriers of a band's beams and taps, shrunk; variance of each entry's error and its shape."""
        ports = torch.fft.ifft2(band.mean, dim=(3, 4), norm="ortho").flip(4)
        energy = square(ports)
        total = energy.sum(-1)
        spread = band.process_variance  # per antenna
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
        known = torch.stack(seen, -1)
        factor = torch.sigmoid(self.shrink[band.number](known))
        taps = localised_taps(num_subcarriers, band.number * self.fdd_offset, ports.device)
        scaled = ports * factor * scale.view(-1, 1, 1, 1, 1, 1)
        mean = (scaled.movedim(2, 4) @ taps.mT).reshape(
            len(scaled), -1, math.prod(self.tx_shape), len(ahead), len(taps)
        )
        entry = (band.variance.mT * scale.view(-1, 1, 1).square()) @ square(taps).mT
        trust = self.trust[band.number](known.detach()).movedim(2, 4).flatten(1, 3).unflatten(1, (len(mean[0]), -1))
        scatter, tails = trust[..., :1].clamp(-8.0, 8.0), trust[..., 1:]
        if band.misfits is not None:
            correction = self._corrections(band, level, ahead)[:, None, None, :, :]
            scatter, tails = scatter + correction[..., :1], tails + correction[..., 1:]
        variance = entry[:, None, None] * torch.exp(scatter)
        shape = 1.1 + functional.softplus(tails)
        return mean, variance, shape.expand(mean.shape)

    @torch.no_grad()
    def _corrections(self, band: _Band, level: Tensor, ahead: Tensor) -> Tensor:
        """What `Recalibration` makes of the window, `[batch, horizon, 2]`."""
        power = square(band.mean).mean((1, 3, 4)).sum(-1)
        parts = [band.variance.sum(1), band.process_variance.sum(1), power]
        instants = (ahead.to(level) - 2.5).expand(len(level), -1)
        steps = torch.stack([*(torch.log(x + 1e-6) for x in parts), instants], -1)
        assert band.misfits is not None
        assert band.signatures is not None
        window = torch.log(torch.cat([level[:, None], band.misfits + 1e-5], 1))
        correction: Tensor = self.recalibration(Circumstances(band.signatures, window, steps), band.number)
        return correction

    def training_loss(self, history: Tensor, target: Tensor, noise_variance: Tensor | None = None) -> Tensor:
        """What is minimised: the mean of error over power per antenna and step, plus a likelihood for the variances.

        Powers are floored at 1 % of their sample's mean, so that deep fades don't rule the gradients; a window without
        power counts nothing.

        Args:
            history: See `forward`.
            target: Noiseless, as `forward` returns it.
            noise_variance: See `forward`.
        """
        if self.few_rays and noise_variance is not None:
            places = {"tdd": (0.0,), "fdd": (self.fdd_offset,), "both": (0.0, self.fdd_offset)}[self.duplex]
            history, target = with_few_rays(history, target, noise_variance, self.tx_shape, places, self.few_rays)
        if self.augmentation:
            offset = 0.0 if self.duplex == "tdd" else self.fdd_offset
            history, target, noise_variance = augment_windows(
                history, target, noise_variance, self.tx_shape, offset, self.augmentation
            )
        found = self.distribution(history, noise_variance)
        bands = 2 if self.duplex == "both" else 1
        error = square(found.mean - target).unflatten(-1, (bands, -1))  # type: ignore[no-untyped-call]
        power = square(target).unflatten(-1, (bands, -1)).sum(-1)  # type: ignore[no-untyped-call]
        floored = power + 0.01 * power.mean((1, 2, 3), keepdim=True)
        ratio = torch.where(floored > 0, error.sum(-1) / torch.where(floored > 0, floored, 1.0), 0.0)
        surprise = -found._replace(mean=found.mean.detach()).log_likelihood(target)
        surprise = torch.where(floored > 0, surprise.unflatten(-1, (bands, -1)).mean(-1), 0.0)  # type: ignore[no-untyped-call]
        return bands * ratio.mean() + 0.05 * surprise.mean()  # type: ignore[no-any-return]


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


def _per_antenna(outputs: int, start: Sequence[float]) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, outputs))
    with torch.no_grad():
        layers[4].weight.mul_(0.1)  # type: ignore[operator]
        layers[4].bias.copy_(torch.tensor(start))  # type: ignore[operator]
    return layers


def _to_places(spread: Tensor, number: Tensor) -> Tensor:
    """Sums `[batch, series, horizon, shift, column, row, tap]` over shifts, each moved by its number of taps.

    Args:
        spread: Complex; the middle one of the shifts stays where it is.
        number: Which of the `NUM_TAPS` taps those on the last axis are, `[batch, tap]`.

    Returns:
        Complex `[batch, series, horizon, column, row, NUM_TAPS]`.
    """
    shifts = spread.shape[3]
    moved = number[:, None] + torch.arange(shifts, device=number.device)[:, None] - shifts // 2  # [batch, shift, tap]
    places = (moved[..., None] == torch.arange(NUM_TAPS, device=number.device)).flatten(1, 2).float()
    parts = torch.view_as_real(spread.permute(0, 1, 2, 4, 5, 3, 6).flatten(5)).movedim(-1, 1)
    return torch.complex(*(parts.flatten(2, 5) @ places[:, None]).unflatten(2, parts.shape[2:6]).unbind(1))  # type: ignore[no-untyped-call]


def _at_steps(values: Tensor, ahead: Tensor) -> Tensor:
    """Values at steps 1 ... 4 (last axis), interpolated at the instants asked for and held beyond."""
    place = (ahead.to(values) - 1.0).clamp(0.0, STEPS - 1.0)
    low = place.floor().long().clamp(max=STEPS - 2)
    share = place - low
    return values[..., low] * (1 - share) + values[..., low + 1] * share
