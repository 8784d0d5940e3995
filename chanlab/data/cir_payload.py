"""The payload `cir`: impulse responses of models whose rays are private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chanlab.channels.cir import CIR
from chanlab.channels.source import CIRLinks
from chanlab.data.fields import Array
from chanlab.errors import ChanlabError


def cir_arrays(links: CIRLinks) -> dict[str, Tensor]:
    """What a shard holds of impulse responses, by dataset.

    Raises:
        ChanlabError: If the snapshots of its users are not the same, or not evenly spaced.
    """
    times = links.snapshots
    step = times[0].diff()
    if (times != times[0]).any() or (len(step) and not torch.allclose(step, step[0], rtol=1e-6)):
        raise ChanlabError("all users of a store have the same evenly spaced snapshots; the source's differ.")
    return {
        "cir/coefficients": links.cir.coefficients,
        "cir/delay": links.cir.delay,
        "cir/snapshots": times,
        "cir/model": links.model,
    }


def cir_links_of(tensors: Mapping[str, Tensor], carrier: float, common: Mapping[str, Tensor]) -> CIRLinks:
    """`CIRLinks` of a shard's datasets."""
    return CIRLinks(
        cir=CIR(tensors["cir/coefficients"], tensors["cir/delay"], carrier),
        snapshots=tensors["cir/snapshots"],
        model=tensors["cir/model"],
        **common,
    )


def cat_cir_links(items: Sequence[CIRLinks], common: Mapping[str, Any]) -> CIRLinks:
    """Concatenate along users, padding to the largest number of taps.

    Raises:
        ChanlabError: If the numbers of antennas or snapshots differ.
    """
    if len({item.cir.coefficients.shape[1:4] for item in items}) > 1:
        raise ChanlabError("all users of a store have the same antennas and snapshots, but the source's differ.")
    return CIRLinks(
        cir=CIR.cat([item.cir for item in items]),
        snapshots=torch.cat([item.snapshots for item in items]),
        model=torch.cat([item.model for item in items]),
        **common,
    )


def used_taps(arrays: Mapping[str, Array]) -> list[int]:
    """Number of taps of each user, up to its last one with any power."""
    return leading_true((arrays["cir/coefficients"] != 0).any(axis=(1, 2, 3)))


def leading_true(flags: Array) -> list[int]:
    """Per row, the number of leading entries up to the last True."""
    length = flags.shape[1]
    last = length - np.argmax(flags[:, ::-1], axis=1) if length else np.zeros(len(flags), int)
    return [int(n) for n in np.where(flags.any(axis=1), last, 0)]
