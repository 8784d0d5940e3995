"""Random paths for tests of what holds for any paths."""

from __future__ import annotations

import torch

from chanlab.channels import Paths


def random_paths(*batch: int, num_paths: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> Paths:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, kind: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.randn(*batch, *shape, generator=generator, dtype=kind)

    def unit() -> torch.Tensor:
        return torch.nn.functional.normalize(normal(3, num_paths), dim=-2)

    mask = torch.rand(*batch, num_paths, generator=generator) > 0.2
    mask[..., 0] = True
    paths = Paths(
        transfer=normal(2, 2, num_paths, kind=torch.complex128),
        delay=1e-7 + 5e-7 * torch.rand(*batch, num_paths, generator=generator, dtype=torch.float64),
        departure=unit(),
        arrival=unit(),
        doppler=50 * normal(num_paths),
        interactions=torch.ones(*batch, 2, num_paths, dtype=torch.int8),
        vertices=10 * normal(2, 3, num_paths),
        mask=mask,
        carrier=3.5e9,
    )
    return paths.sort().to(dtype=dtype)
