"""Propagation paths: what every source of channels yields and what the store holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from chanlab.errors import UsageError

SPEED_OF_LIGHT = 299_792_458.0
"""Speed of light in vacuum [m/s]."""

# Axes that follow the batch axes of each tensor, `path` always last.
_TRAILING = {
    "transfer": 3,
    "delay": 1,
    "departure": 2,
    "arrival": 2,
    "doppler": 1,
    "interactions": 2,
    "vertices": 3,
    "mask": 1,
}


@dataclass(frozen=True)
class Paths:
    """Propagation paths of a batch of links, before any antenna pattern.

    `...` are the batch axes: `[user]` for static drops, `[user, anchor]` for users that move. Entries whose `mask` is
    False hold zeros everywhere.

    Attributes:
        transfer: Polarimetric transfer matrix of each path, linear amplitude (free-space loss included), carrier phase
            exp(-j 2π f_c τ) applied, complex `[..., 2, 2, path]`: receive (θ̂, φ̂) by transmit (θ̂, φ̂), both in the world
            basis at the arrival and departure direction.
        delay: Absolute delay τ [s], `[..., path]`.
        departure: Unit vector from the transmitter along the departing ray, world axes, `[..., 3, path]`.
        arrival: Unit vector from the receiver towards where the ray comes from, world axes, `[..., 3, path]`.
        doppler: Doppler shift ν [Hz], `[..., path]`; the path evolves as exp(+j 2π ν t).
        interactions: Interaction types from transmitter to receiver, int8 `[..., depth, path]`: 0 none, 1 specular
            reflection, 2 diffuse reflection, 4 refraction, 8 diffraction (Sionna RT's codes).
        vertices: First and last interaction point [m], `[..., 2, 3, path]`: what a near-field view needs. For a
            line-of-sight path the first is the receiver and the last the transmitter.
        mask: Which entries are paths, bool `[..., path]`.
        carrier: Carrier frequency f_c [Hz].
    """

    transfer: Tensor
    delay: Tensor
    departure: Tensor
    arrival: Tensor
    doppler: Tensor
    interactions: Tensor
    vertices: Tensor
    mask: Tensor
    carrier: float

    def __post_init__(self) -> None:
        batch = self.mask.shape[:-1]
        n = self.mask.shape[-1]
        middle = {"transfer": (2, 2), "departure": (3,), "arrival": (3,), "vertices": (2, 3)}
        for name, trailing in _TRAILING.items():
            shape = tuple(getattr(self, name).shape)
            want_middle = middle.get(name, shape[len(batch) : -1] if name == "interactions" else ())
            if shape != (*batch, *want_middle, n) or len(shape) != len(batch) + trailing:
                raise UsageError(
                    f"Paths.{name} has shape {list(shape)}; with mask {list(self.mask.shape)} it must be "
                    f"{[*batch, *(want_middle or ())]} followed by {n} paths (see chanlab.channels.Paths)."
                )

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch axes."""
        return self.mask.shape[:-1]

    @property
    def num_paths(self) -> int:
        """Length of the path axis (the largest number of paths of any link, unless padded)."""
        return int(self.mask.shape[-1])

    @property
    def wavelength(self) -> float:
        """Carrier wavelength [m]."""
        return SPEED_OF_LIGHT / self.carrier

    def _map(self, function: Callable[[str, Tensor], Tensor]) -> Paths:
        tensors: dict[str, Any] = {name: function(name, getattr(self, name)) for name in _TRAILING}
        return replace(self, **tensors)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Paths:
        """Move to a device and/or cast the real tensors to `dtype` (float32 or float64; complex follow)."""
        if dtype not in (None, torch.float32, torch.float64):
            raise UsageError(f"Paths.to(dtype=...) takes torch.float32 or torch.float64, not {dtype}.")

        def cast(_: str, x: Tensor) -> Tensor:
            if dtype is None or not (x.is_floating_point() or x.is_complex()):
                return x.to(device)
            return x.to(device, dtype.to_complex() if x.is_complex() else dtype)

        return self._map(cast)

    def __getitem__(self, index: Any) -> Paths:
        """Index the batch axes (any index that leaves the trailing axes alone)."""
        index = index if isinstance(index, tuple) else (index,)
        return self._map(lambda name, x: x[(*index, ..., *(slice(None),) * _TRAILING[name])])

    def pad(self, num_paths: int, depth: int | None = None) -> Paths:
        """Pad the path axis (and the interaction axis) with masked zeros.

        Raises:
            UsageError: If there are more than `num_paths` paths or `depth` interactions already.
        """
        extra = num_paths - self.num_paths
        have_depth = self.interactions.shape[-2]
        extra_depth = 0 if depth is None else depth - have_depth
        if extra < 0 or extra_depth < 0:
            raise UsageError(
                f"can't pad {self.num_paths} paths of depth {have_depth} to {num_paths} of depth {depth or have_depth}"
            )

        if not extra and not extra_depth:
            return self

        def grow(name: str, x: Tensor) -> Tensor:
            if name == "interactions":
                return torch.nn.functional.pad(x, (0, extra, 0, extra_depth))
            return torch.nn.functional.pad(x, (0, extra))

        return self._map(grow)

    def trim(self) -> Paths:
        """Drop trailing entries that no link of the batch uses; needs canonical order (`sort`)."""
        if not self.mask.numel():
            return self._map(lambda _, x: x[..., :0])
        used = self.mask.reshape(-1, self.num_paths).any(0).nonzero()
        n = int(used.max()) + 1 if used.numel() else 0
        return self._map(lambda _, x: x[..., :n])

    def sort(self) -> Paths:
        """Canonical order: paths first, by delay, ties by power, then by interactions; masked entries zeroed, last."""
        key_delay = torch.where(self.mask, self.delay, torch.inf)
        power = self.transfer.abs().square().sum((-3, -2))
        depth = self.interactions.shape[-2]
        weights = 16 ** torch.arange(depth, device=self.mask.device, dtype=torch.int64)
        kind = (self.interactions.to(torch.int64) * weights[:, None]).sum(-2)
        order = torch.argsort(kind, dim=-1, stable=True)
        order = order.gather(-1, torch.argsort(-power.gather(-1, order), dim=-1, stable=True))
        order = order.gather(-1, torch.argsort(key_delay.gather(-1, order), dim=-1, stable=True))

        def take(name: str, x: Tensor) -> Tensor:
            middle = _TRAILING[name] - 1
            index = order.reshape(*order.shape[:-1], *(1,) * middle, order.shape[-1])
            kept = torch.where(self.mask.reshape(index.shape), x, torch.zeros((), dtype=x.dtype, device=x.device))
            return kept.gather(-1, index.expand(x.shape))

        return self._map(take)

    @staticmethod
    def cat(items: Sequence[Paths], dim: int = 0) -> Paths:
        """Concatenate along a batch axis, padding to the largest number of paths and interactions."""
        if not items:
            raise UsageError("Paths.cat needs at least one item.")
        if len({p.carrier for p in items}) > 1:
            raise UsageError(f"Paths.cat: carriers differ: {sorted({p.carrier for p in items})} Hz.")
        n = max(p.num_paths for p in items)
        depth = max(p.interactions.shape[-2] for p in items)
        padded = [p.pad(n, depth) for p in items]
        dim = dim % len(items[0].batch_shape)
        parts = {name: torch.cat([getattr(p, name) for p in padded], dim) for name in _TRAILING}
        return Paths(**parts, carrier=items[0].carrier)


PATH_TENSORS: tuple[str, ...] = tuple(f.name for f in fields(Paths) if f.name != "carrier")
"""Names of the tensors of `Paths`, in the order of its definition."""
