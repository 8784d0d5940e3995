"""Corrections of stated errors for windows unlike those of training: by distance from its kinds, and by misfit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from chanlab.csi.beam_taps import square
from chanlab.csi.localised_taps import NUM_TAPS

KINDS = 9
"""Kinds of channels that training drew from: profiles with their delay spreads."""
DIRECTIONS = 14
"""Directions of a signature whose variance within a kind is kept; that of all others is one number."""
_HIDDEN = 48


class Signatures(NamedTuple):
    """What a window looks like as a whole, whatever its scale, its phase and the sizes of array and history.

    Attributes:
        mean: Mean over beams and strong taps of what the network makes of them, `[batch, dim]`.
        strong: The same, weighted by the logarithm of their power over the noise, `[batch, dim]`.
        profile: Logarithm of each tap's share of the power, `[batch, NUM_TAPS]`.
    """

    mean: Tensor
    strong: Tensor
    profile: Tensor


class Circumstances(NamedTuple):
    """All that a correction depends on.

    Attributes:
        signatures: See there.
        window: Logarithms of the noise level and of two misfits (`misfits`), `[batch, 3]`.
        steps: For each step, logarithms of the stated variance, of the process's variance and of the prediction's
            power, then the instant less 2.5, `[batch, horizon, 4]`.
    """

    signatures: Signatures
    window: Tensor
    steps: Tensor


class Familiarity(nn.Module):
    """Distances of signatures from the kinds that training knew.

    Squared Mahalanobis distances with a covariance shared by all kinds: variances along `DIRECTIONS` principal
    directions, and one for all others (probabilistic PCA: M. E. Tipping, C. M. Bishop, J. R. Stat. Soc. B 61, 1999; as
    a sign of unfamiliar inputs: K. Lee et al., NeurIPS 2018). All buffers, as they are estimated and not trained.
    """

    centres: Tensor
    directions: Tensor
    gains: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("centres", torch.zeros(KINDS, width))
        self.register_buffer("directions", torch.zeros(width, DIRECTIONS))
        self.register_buffer("gains", torch.zeros(DIRECTIONS + 1))  # reciprocal variances, that of the others last

    def forward(self, signature: Tensor) -> Tensor:
        """Logarithms of the distances and of the smallest, `[batch, KINDS + 1]`."""
        away = signature[:, None] - self.centres
        along = (away @ self.directions).square()
        others = (away.square().sum(-1) - along.sum(-1)).clamp_min(0.0)
        distance = (along @ self.gains[:-1] + others * self.gains[-1]) / signature.shape[1]
        logarithm = torch.log(distance + 1e-6)
        return torch.cat([logarithm, logarithm.amin(1, keepdim=True)], 1)

    def estimate(self, signature: Tensor, kind: Tensor, shrinkage: float = 0.1) -> None:
        """Sets centres and covariance from windows of training.

        Args:
            signature: `[window, width]`.
            kind: Number of each window's kind, int64 `[window]`, each of 0 ... `KINDS` - 1 more than once.
            shrinkage: Of the covariance towards one variance for all directions.
        """
        centres = torch.stack([signature[kind == k].mean(0) for k in range(KINDS)])
        away = signature - centres[kind]
        covariance = away.mT @ away / len(away)
        mean = covariance.diagonal().mean()
        covariance = (1 - shrinkage) * covariance + shrinkage * mean * torch.eye(len(covariance)).to(covariance)
        values, vectors = torch.linalg.eigh(covariance)
        self.centres.copy_(centres)
        self.directions.zero_()
        self.gains.zero_()
        kept = min(DIRECTIONS, len(values) - 1)
        self.directions[:, :kept] = vectors[:, -kept:]
        self.gains[:kept] = values[-kept:].reciprocal()
        self.gains[-1] = values[:-kept].mean().reciprocal()


class Recalibration(nn.Module):
    """Corrections of the logarithm of a stated variance and of its shape, by window, band and step.

    How large errors are where training never was, training can't tell the network; that a window is unlike its
    training's, the network's own picture of it can. A small network per band turns distances from the known kinds
    (`Familiarity`) and the misfit between history and spectra (the normalised innovation squared of filter
    consistency tests: Y. Bar-Shalom et al., "Estimation with Applications to Tracking and Navigation", 2001) into
    corrections. It is fitted when the predictor is trained: `python benchmarks/csi_recalibrate.py`.

    Its state is buffers alone: no training of the predictor touches them. All zero, which weights older than it
    stand for, it corrects nothing and costs nothing.
    """

    centre: Tensor
    gain: Tensor
    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.familiarity = nn.ModuleList(Familiarity(width) for width in (dim, dim, NUM_TAPS))
        inputs = 7 + (KINDS + 1) * len(self.familiarity)
        for name, shape in (
            ("centre", (2, inputs)),
            ("gain", (2, inputs)),
            ("first", (2, _HIDDEN, inputs)),
            ("first_bias", (2, _HIDDEN)),
            ("second", (2, 2, _HIDDEN)),
            ("second_bias", (2, 2)),
        ):
            self.register_buffer(name, torch.zeros(shape))
        self._numbers: tuple[tuple[int, int], ...] = ()
        self._fitted = False
        self.observing = False  # while it is fitted: circumstances are wanted, corrected or not
        self.register_load_state_dict_pre_hook(_zero_where_absent)  # type: ignore[no-untyped-call]

    @property
    def active(self) -> bool:
        """Whether there is any correction, or `observing`; looked up again only when its numbers have changed."""
        if self.observing:
            return True
        numbers = tuple((x.data_ptr(), x._version) for x in (self.second, self.second_bias))
        if numbers != self._numbers:
            self._numbers, self._fitted = numbers, bool(self.second.any() or self.second_bias.any())
        return self._fitted

    def forward(self, seen: Circumstances, band: int) -> Tensor:
        """What to add to the logarithm of the variance, and to what the shape is the softplus of.

        Args:
            seen: Of the window.
            band: 0: the history's; 1: the other.

        Returns:
            `[batch, horizon, 2]`.
        """
        inputs = (self.inputs(seen) - self.centre[band]) * self.gain[band]
        hidden = functional.gelu(functional.linear(inputs.clamp(-5.0, 5.0), self.first[band], self.first_bias[band]))
        return functional.linear(hidden, self.second[band], self.second_bias[band]).clamp(-4.0, 4.0)

    def inputs(self, seen: Circumstances) -> Tensor:
        """Inputs of the small networks, `[batch, horizon, input]`."""
        known = [find(signature) for find, signature in zip(self.familiarity, seen.signatures, strict=True)]
        window = torch.cat([seen.window, *known], 1)
        return torch.cat([window[:, None].expand(-1, seen.steps.shape[1], -1), seen.steps], -1)


@torch.no_grad()
def signatures(hidden: Tensor, power: Tensor, level: Tensor, profile: Tensor) -> Signatures:
    """A window as a whole.

    Args:
        hidden: Of the strong taps, `[batch, column, row, strong, dim]`.
        power: Theirs, noise left out, `[batch, column, row, strong]`.
        level: Noise variance `[batch]`.
        profile: Power of all taps, `[batch, NUM_TAPS]`.
    """
    weight = torch.log1p(power / level[:, None, None, None])[..., None]
    strong = (hidden * weight).sum((1, 2, 3)) / weight.sum((1, 2, 3)).clamp_min(1e-9)
    share = profile / profile.sum(1, keepdim=True).clamp_min(1e-12)
    return Signatures(hidden.mean((1, 2, 3)), strong, torch.log(share.clamp_min(1e-5)))


@torch.no_grad()
def tap_profile(strong: Tensor, weak: Tensor, number: Tensor, rest: Tensor) -> Tensor:
    """Mean power of all taps in order of delay, `[batch, NUM_TAPS]`.

    Args:
        strong: Complex `[batch, series, column, row, tap, time]`.
        weak: The others, likewise.
        number: Which taps the strong ones are, `[batch, tap]`.
        rest: Which the others are.
    """
    power = torch.cat([square(taps).mean((1, 2, 3, 5)) for taps in (strong, weak)], 1)
    return power.gather(1, torch.cat([number, rest], 1).argsort(1))


@torch.no_grad()
def misfits(misfit: Tensor, power: Tensor) -> Tensor:
    """Mean over beams and taps of the misfit between history and spectra, plain and weighted by power, `[batch, 2]`.

    Args:
        misfit: `[batch, column, row, tap]`.
        power: Of the spectra, same shape.
    """
    weighted = (misfit * power).sum((1, 2, 3)) / power.sum((1, 2, 3)).clamp_min(1e-12)
    return torch.stack([misfit.mean((1, 2, 3)), weighted], 1)


def _zero_where_absent(module: nn.Module, state: dict[str, Any] | Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Checkpoints older than the correction have none."""
    own = module.state_dict()
    if isinstance(state, dict) and not any(prefix + name in state for name in own):
        state.update({prefix + name: torch.zeros_like(value) for name, value in own.items()})
