"""Scenes for the tests of `rasterize_sphere`, and where an image jumps."""

import math

import torch

from chanlab.rf import Panorama, rasterize_sphere, reference

NAMES = ("means", "quaternions", "scales", "opacities", "signals", "receivers", "rotations")


def turn(axis, angle):
    """Rotation matrix about a coordinate axis."""
    i, j = (axis + 1) % 3, (axis + 2) % 3
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[i, i] = matrix[j, j] = math.cos(angle)
    matrix[j, i], matrix[i, j] = math.sin(angle), -math.sin(angle)
    return matrix


def scene(gaussians, receivers=1, channels=2, seed=0, scales=(0.02, 0.3), opacities=(0.05, 0.95)):
    """Inputs of `rasterize_sphere`, float64: Gaussians all round, receivers near the origin, turned at random."""
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": torch.float64}
    direction = torch.nn.functional.normalize(torch.randn(gaussians, 3, **options), dim=-1)
    means = direction * (1 + 4 * torch.rand(gaussians, 1, **options))
    sizes = scales[0] + (scales[1] - scales[0]) * torch.rand(gaussians, 3, **options)
    alphas = opacities[0] + (opacities[1] - opacities[0]) * torch.rand(gaussians, **options)
    axes = torch.linalg.qr(torch.randn(receivers, 3, 3, **options))[0]
    axes = axes * torch.linalg.det(axes).sign()[:, None, None]
    return (
        means,
        torch.randn(gaussians, 4, **options),
        sizes,
        alphas,
        torch.randn(gaussians, channels, **options),
        0.3 * torch.randn(receivers, 3, **options),
        axes,
    )


def one(direction, distance=3.0, scale=0.1, opacity=0.8, signal=1.0):
    """A round Gaussian in a direction, seen from the origin along the world's axes."""
    double = {"dtype": torch.float64}
    mean = distance * torch.nn.functional.normalize(torch.as_tensor(direction, **double), dim=-1)
    return (
        mean[None],
        torch.tensor([[1.0, 0, 0, 0]], **double),
        torch.full((1, 3), float(scale), **double),
        torch.tensor([opacity], **double),
        torch.tensor([[signal]], **double),
        torch.zeros(1, 3, **double),
        torch.eye(3, **double)[None],
    )


def gradients(inputs, panorama, backend, by_image, by_transmittance, **options):
    """Rendering and gradients by all inputs of <by_image, image> + <by_transmittance, transmittance>."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    made = rasterize_sphere(*leaves, panorama=panorama, backend=backend, **options)
    loss = (made.image * by_image.to(made.image)).sum() + (made.transmittance * by_transmittance.to(made.image)).sum()
    return made, torch.autograd.grad(loss, leaves)


def away_from_cuts(inputs, panorama, band=1e-3, blur=None, nearest=0.01):
    """Pixels `[B, H, W]` where nothing is within a relative `band` of a cut, so that rounding can't move it across."""
    means, quaternions, scales, opacities, _, receivers, rotations = (x.double() for x in inputs)
    variance = 0.3 * panorama.row_step**2 if blur is None else blur**2
    root = reference.rotation_matrix(quaternions) * scales[:, None]
    rays = panorama.rays().reshape(-1, 3)
    clear = []
    for receiver, axes in zip(receivers, rotations, strict=True):
        offset = (means - receiver) @ axes
        distance = offset.norm(dim=-1)
        order = distance.argsort()
        order = order[distance[order] > nearest]
        covariance = axes.mT @ (root @ root.mT)[order] @ axes
        toward, inverse = reference._footprints(offset[order], distance[order], covariance, variance)
        cosine = rays @ toward.mT
        straight = rays[:, None] - cosine[..., None] * toward
        form = torch.einsum("pni,nij,pnj->pn", straight, inverse, straight)
        raw = opacities[order] * torch.exp(-reference._squared_angle_over_sine(cosine) * form / 2)
        alpha = raw.clamp(max=reference.ALPHA_MAX).where(raw >= reference.ALPHA_CUT, 0)
        after = torch.cumprod(1 - alpha, 1)
        near = [(x / cut - 1).abs() < band for x, cut in ((raw, reference.ALPHA_CUT), (raw, reference.ALPHA_MAX))]
        near += [
            (after / reference.TRANSMITTANCE_CUT - 1).abs() < 10 * band,
            (cosine - reference.COSINE_CUT).abs() < band,
        ]
        clear.append(~torch.stack(near).any(0).any(1))
    return torch.stack(clear).reshape(-1, panorama.height, panorama.width)


def weights_like(inputs, panorama, seed=1):
    """Random gradients by image and transmittance."""
    generator = torch.Generator().manual_seed(seed)
    size = (inputs[5].shape[0], panorama.height, panorama.width)
    image = torch.randn(size[0], inputs[4].shape[1], *size[1:], generator=generator, dtype=torch.float64)
    return image, torch.randn(size, generator=generator, dtype=torch.float64)


SPHERE = Panorama.sphere(18, 40)
HEMISPHERE = Panorama.hemisphere(21, 50)
