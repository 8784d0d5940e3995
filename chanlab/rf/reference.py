"""The definition of `rasterize_sphere`: dense, in double precision, gradients by autograd.

It shares no code with the kernels (`kernels/sphere.h`) and avoids their formulas: a 3x3 inverse instead of a basis of
the tangent plane, cumulative products over all Gaussians instead of tiles. Slow and meant to be read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from chanlab.rf.panorama import Panorama

ALPHA_CUT = 1 / 255
"""Less opaque than this is nothing."""
ALPHA_MAX = 0.999
"""No footprint is quite opaque."""
TRANSMITTANCE_CUT = 1e-4
"""Compositing stops before the transmittance falls below."""
COSINE_CUT = -0.995
"""Cosine of the angle to a mean beyond which its footprint ends: the log map has no direction at the antipode."""

PAIRS = 2_000_000
"""Pixels times Gaussians held at once."""


class Dense(NamedTuple):
    """Image `[B, C, H, W]`, transmittance `[B, H, W]`, and radius, weight and peak, each `[B, N]`."""

    image: Tensor
    transmittance: Tensor
    radius: Tensor
    weight: Tensor
    peak: Tensor


def rotation_matrix(quaternions: Tensor) -> Tensor:
    """Rotation matrices `[..., 3, 3]` of quaternions `[..., 4]`, real part first, of any length but zero."""
    w, x, y, z = (quaternions * (quaternions.square().sum(-1, keepdim=True) + 1e-24).rsqrt()).unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def rasterize(
    means: Tensor,
    quaternions: Tensor,
    scales: Tensor,
    opacities: Tensor,
    signals: Tensor,
    receivers: Tensor,
    rotations: Tensor,
    panorama: Panorama,
    nearest: float,
    blur: float,
) -> Dense:
    """See `chanlab.rf.rasterize_sphere`; `blur` is a variance [rad²]. Float64 inside, whatever the inputs' dtype."""
    kind = means.dtype
    given = (means, quaternions, scales, opacities, signals, receivers, rotations)
    means, quaternions, scales, opacities, signals, receivers, rotations = (x.double() for x in given)
    rays = panorama.rays(device=means.device).reshape(-1, 3)
    square_root = rotation_matrix(quaternions) * scales[:, None, :]
    covariance = square_root @ square_root.mT
    chunk = max(1, PAIRS // max(1, means.shape[0]))
    images, transmittances, radii, weights, peaks = [], [], [], [], []
    for receiver, rotation in zip(receivers, rotations, strict=True):
        offset = (means - receiver) @ rotation
        distance = torch.linalg.vector_norm(offset, dim=-1)
        visible = (distance.detach() > nearest) & (opacities.detach() >= ALPHA_CUT)
        order = torch.sort(distance.detach(), stable=True).indices
        order = order[visible[order]]
        toward, flat = _footprints(offset[order], distance[order], rotation.mT @ covariance[order] @ rotation, blur)
        opacity, signal = opacities[order], signals[order]
        parts = []
        for some in torch.split(rays, chunk):
            if torch.is_grad_enabled() and len(some) < len(rays):
                parts.append(checkpoint(_composite, some, toward, flat, opacity, signal, use_reentrant=False))
            else:
                parts.append(_composite(some, toward, flat, opacity, signal))
        size = (panorama.height, panorama.width)
        images.append(torch.cat([p[0] for p in parts]).mT.reshape(-1, *size))
        transmittances.append(torch.cat([p[1] for p in parts]).reshape(size))
        with torch.no_grad():
            radius, weight, peak = (torch.zeros_like(distance) for _ in range(3))
            radius[order] = _radius(flat, toward, opacity)
            weight[order] = torch.stack([p[2] for p in parts]).sum(0)
            peak[order] = torch.stack([p[3] for p in parts]).amax(0)
        radii.append(radius)
        weights.append(weight)
        peaks.append(peak)
    found = (images, transmittances, radii, weights, peaks)
    return Dense(*(torch.stack(x).to(kind) for x in found))


def _footprints(offset: Tensor, distance: Tensor, covariance: Tensor, blur: float) -> tuple[Tensor, Tensor]:
    """Mean directions `[N, 3]` and inverse covariances `[N, 3, 3]` [rad⁻²] in their tangent planes, null along them."""
    toward = offset / distance[:, None]
    along = toward[:, :, None] * toward[:, None, :]
    across = torch.eye(3, dtype=offset.dtype, device=offset.device) - along
    flat = across @ covariance @ across / distance[:, None, None] ** 2 + blur * across
    return toward, torch.linalg.inv(flat + along) - along


def _radius(inverse: Tensor, toward: Tensor, opacity: Tensor) -> Tensor:
    """Largest angle at which alpha reaches the cut [rad], `[N]`."""
    along = toward[:, :, None] * toward[:, None, :]
    spread = torch.linalg.inv(inverse + along) - along
    largest: Tensor = torch.linalg.eigvalsh(spread)[:, -1]
    return (2 * (opacity / ALPHA_CUT).log() * largest).clamp(0).sqrt()


def _squared_angle_over_sine(cosine: Tensor) -> Tensor:
    """(θ / sin θ)² from cos θ; a series where both vanish, good to 1e-24 there."""
    square = (1 - cosine) * (1 + cosine)
    close = (cosine > 0) & (square < 1e-6)
    inside = torch.where(close, 0.5, cosine).clamp(-1 + 1e-9, 1)
    exact = torch.acos(inside).square() / ((1 - inside) * (1 + inside))
    return torch.where(close, 1 + square / 3 + 8 * square**2 / 45 + 4 * square**3 / 35, exact)


def _composite(
    rays: Tensor, toward: Tensor, inverse: Tensor, opacity: Tensor, signal: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Colours `[P, C]` and transmittances `[P]` of rays `[P, 3]`; weight and peak of each Gaussian, nearest first."""
    cosine = rays @ toward.mT
    form = (rays[:, :, None] * rays[:, None, :]).reshape(-1, 9) @ inverse.reshape(-1, 9).mT  # of the rays' flat parts
    alpha = (opacity * torch.exp(-_squared_angle_over_sine(cosine) * form / 2)).clamp(max=ALPHA_MAX)
    alpha = torch.where((alpha < ALPHA_CUT) | (cosine < COSINE_CUT), 0.0, alpha)
    after = torch.cumprod(1 - alpha, 1)
    alpha = torch.where(after.detach() < TRANSMITTANCE_CUT, 0.0, alpha)
    after = torch.cumprod(1 - alpha, 1)
    before = torch.cat([torch.ones_like(rays[:, :1]), after[:, :-1]], 1)[:, : alpha.shape[1]]
    weights = alpha * before
    through = torch.cat([torch.ones_like(rays[:, :1]), after], 1)[:, -1]
    held = weights.detach()
    peak = held.amax(0) if len(rays) else opacity.detach() * 0
    return weights @ signal, through, held.sum(0), peak
