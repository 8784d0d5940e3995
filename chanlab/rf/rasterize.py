"""`rasterize_sphere`: 3-D Gaussians as a receiver sees them on its sphere, composited front to back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from chanlab.errors import UsageError
from chanlab.rf import reference, sphere
from chanlab.rf.panorama import Panorama

BACKENDS = ("reference", "cpu", "cuda")
"""Back ends of one meaning; `chanlab.rf.reference` defines it."""


class Visibility(NamedTuple):
    """What densification and pruning ask of each Gaussian, without gradient.

    Attributes:
        radius: Largest angle from its direction at which alpha reaches the cut [rad], `[B, N]`; 0 if it is not drawn.
            Compiled back ends round it up by 1e-4 of itself and 1e-4 rad.
        weight: Sum over the image of its blending weights, `[B, N]`; None unless `statistics` was asked for.
        peak: Largest of its blending weights, `[B, N]`; None unless `statistics` was asked for.
    """

    radius: Tensor
    weight: Tensor | None
    peak: Tensor | None


class Rendering(NamedTuple):
    """What `rasterize_sphere` returns.

    Attributes:
        image: `[B, C, H, W]`, unit of `signals`.
        transmittance: What is left of the light from behind all Gaussians, 0 to 1, `[B, H, W]`.
        visibility: Statistics of each Gaussian.
    """

    image: Tensor
    transmittance: Tensor
    visibility: Visibility


def rasterize_sphere(
    means: Tensor,
    quaternions: Tensor,
    scales: Tensor,
    opacities: Tensor,
    signals: Tensor,
    receivers: Tensor,
    rotations: Tensor | None = None,
    *,
    panorama: Panorama,
    nearest: float = 0.01,
    blur: float | None = None,
    statistics: bool = False,
    backend: str | None = None,
    capacity: int | None = None,
) -> Rendering:
    """Render 3-D Gaussians on the sphere (or a hemisphere) of each receiver.

    A Gaussian at offset v from the receiver, |v| = r, has the footprint α = min(0.999, opacity · exp(-q / 2)) with
    q = dᵀ (Π Σ Πᵀ / r² + blur² I)⁻¹ d in the tangent plane of its direction v / r, d the log map there of the pixel's
    ray: first order in scale / r, without a seam, regular at the poles. α below 1/255 is nothing, and so is what lies
    within 0.1 rad of the antipode of the direction. Gaussians are sorted by distance, equal distances by their index,
    and composited front to back: weight α T, transmittance T the product of 1 - α before; a pixel ends before T falls
    below 1e-4. All inputs have gradients; the cuts count as constant. Second derivatives and forward mode (jvp) are the
    reference's alone; the other back ends refuse them.

    Args:
        means: Centres [m], world axes, `[N, 3]`.
        quaternions: Rotations of the principal axes, real part first, of any length but zero, `[N, 4]`.
        scales: Standard deviations along the principal axes [m], not negative, `[N, 3]`; zero gives needles and points,
            of the width of the blur. A model that holds logarithms passes their exponential.
        opacities: Largest α of each, 0 to 1, `[N]`.
        signals: What each emits towards the receivers, `[N, C]`; real of either sign: a complex signal is two channels.
        receivers: Positions [m], `[B, 3]`.
        rotations: Axes of the receivers, as columns, in world axes (local to world), `[B, 3, 3]`; None: the world's.
        panorama: Pixels of the image.
        nearest: Gaussians this near to a receiver [m], or nearer, are not drawn.
        blur: Standard deviation [rad] by which footprints are widened, so that none falls between pixels; None is 0.55
            of a row (a variance of 0.3 pixels², as in 3-D Gaussian splatting).
        statistics: Also return weight and peak of each Gaussian.
        backend: `reference` (dense, float64 inside, any device, slow: the definition), `cpu` (float32 or float64) or
            `cuda` (float32, up to 38 channels); None is that of the inputs' device.
        capacity: For `cuda`: how many pairs of tile (16 x 8 pixels) and Gaussian there is room for in one call; None is
            learnt from earlier calls. If there are more, the image is NaN and a later call, or
            `chanlab.rf.sphere.check`, raises. Calls that are compiled, traced or captured in a CUDA graph neither
            learn nor raise, nor does one while 64 others are unread: there give the capacity and look for NaN.

    Returns:
        Image, transmittance and visibility, in the inputs' dtype and on their device.

    Raises:
        UsageError: For wrong shapes, dtypes, devices or sizes, an unknown back end, or a derivative that it lacks.
        MissingDependencyError: If a back end must be compiled and there is no compiler.

    Source: Kerbl et al., 3D Gaussian Splatting, ACM TOG 42(4), 2023, for the compositing; the footprint is that of
    EWA splatting (Zwicker et al., 2001) with the log map in place of the perspective projection.
    """
    if rotations is None:
        rotations = torch.eye(3, dtype=means.dtype, device=means.device).expand(receivers.shape[0], 3, 3)
    inputs = (means, quaternions, scales, opacities, signals, receivers, rotations)
    _check_inputs(inputs)
    kind = means.device.type
    backend = kind if backend is None else backend
    if backend not in BACKENDS or backend not in ("reference", kind):
        raise UsageError(
            f"rasterize_sphere: back end {backend!r} can't draw tensors on {means.device}. Use one of {BACKENDS}; "
            "`cpu` and `cuda` want the tensors there, `reference` takes them anywhere."
        )
    if not nearest > 0 or (blur is not None and not blur > 0):
        raise UsageError(f"rasterize_sphere: nearest ({nearest}) and blur ({blur}) must be positive.")
    variance = 0.3 * panorama.row_step**2 if blur is None else blur**2
    if capacity is not None and capacity < 1:
        raise UsageError(f"rasterize_sphere: capacity ({capacity}) is a number of pairs, 1 or more; None is learnt.")
    if backend == "reference":
        dense = reference.rasterize(*inputs, panorama, nearest, variance)
        seen = Visibility(dense.radius, *((dense.weight, dense.peak) if statistics else (None, None)))
        return Rendering(dense.image, dense.transmittance, seen)
    image, transmittance, radius, weight, peak = sphere.rasterize(
        inputs, panorama, float(nearest), variance, statistics, capacity
    )
    return Rendering(image, transmittance, Visibility(radius, *((weight, peak) if statistics else (None, None))))


def _check_inputs(inputs: tuple[Tensor, ...]) -> None:
    if _fit(inputs):  # at once: the device waits meanwhile
        return
    shapes, kinds = [x.shape for x in inputs], [(x.dtype, x.device) for x in inputs]
    n, b, dtype = shapes[0][:1], shapes[5][:1], kinds[0][0]
    wanted = [(*n, 3), (*n, 4), (*n, 3), n, (*n, *shapes[4][1:2]), (*b, 3), (*b, 3, 3)]
    for name, shape, want, kind in zip(sphere.INPUTS, shapes, wanted, kinds, strict=True):
        if shape != want:
            raise UsageError(f"rasterize_sphere: {name} must be {list(want)}, got {list(shape)}.")
        if kind != kinds[0]:
            raise UsageError(
                f"rasterize_sphere: {name} is {kind[0]} on {kind[1]}, means are {dtype} on {kinds[0][1]}; convert "
                "with .to()."
            )
    if len(shapes[4]) != 2:
        raise UsageError("rasterize_sphere: means are [N, 3], signals [N, C] and receivers [B, 3].")
    if not b[0]:
        raise UsageError("rasterize_sphere: there are no receivers; give at least one position.")
    raise UsageError(f"rasterize_sphere: float32 or float64 is needed, got {dtype}; convert with .float().")


def _fit(inputs: tuple[Tensor, ...]) -> bool:
    shapes, dtype, device = [x.shape for x in inputs], inputs[0].dtype, inputs[0].device
    if len(shapes[4]) != 2 or not shapes[5] or dtype not in (torch.float32, torch.float64):
        return False
    (n, c), b = shapes[4], shapes[5][0]
    return (
        b > 0
        and shapes == [(n, 3), (n, 4), (n, 3), (n,), (n, c), (b, 3), (b, 3, 3)]
        and [x.dtype for x in inputs] == [dtype] * 7
        and [x.device for x in inputs] == [device] * 7
    )
