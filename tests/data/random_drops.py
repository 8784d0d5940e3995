"""A small source of random paths, and recipes of it, for the tests of the store."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from chanlab.channels.paths import Paths
from chanlab.channels.source import Links, Motion, sample_generator

RECIPE = """\
# comments are kept
name: random_drops
seed: {seed}
samples: {samples}
shard_size: {shard_size}
source:
  class_path: random_drops.RandomDrops
  init_args:
    carrier: 3.5e9
    num_paths: 6
splits: {{by: trajectory, fractions: {{train: 0.6, val: 0.2, test: 0.2}}, guard: 0.0}}
view: {{num_subcarriers: 16}}
"""


def recipe_text(samples: int = 40, shard_size: int = 8, seed: int = 1, **init_args: object) -> str:
    """YAML of a small recipe; further arguments go to the source."""
    text = RECIPE.format(samples=samples, shard_size=shard_size, seed=seed)
    lines = "".join(f"    {key}: {value}\n" for key, value in init_args.items())
    return text.replace("    num_paths: 6\n", "    num_paths: 6\n" + lines)


class RandomDrops:
    """Users at random places, moving straight, with a random number of random paths.

    Args:
        carrier: Carrier frequency [Hz].
        num_paths: Largest number of paths.
        anchors: Anchors per user.
        group: Users solved together.
        delay: Time that a call takes [s].
        log: Folder in which an empty file is made for each sample computed, named by its id.
    """

    def __init__(
        self,
        carrier: float = 3.5e9,
        num_paths: int = 6,
        anchors: int = 3,
        group: int = 2,
        delay: float = 0.0,
        log: str | None = None,
    ) -> None:
        self.carrier, self.num_paths, self.anchors, self.group = carrier, num_paths, anchors, group
        self.delay, self.log = delay, log

    def motion(self, ids: Sequence[int], seed: int) -> Motion:
        place = torch.stack([torch.rand(3, generator=sample_generator(seed, i)) * 200 for i in ids])
        velocity = torch.stack([torch.randn(3, generator=sample_generator(seed, i, 1)) * 5 for i in ids])
        times = (torch.arange(self.anchors, dtype=torch.float64) * 0.01).expand(len(ids), -1).contiguous()
        positions = place[:, None] + velocity[:, None] * times[..., None].float()
        velocities = velocity[:, None].expand(-1, self.anchors, -1).contiguous()
        return Motion(times, positions, velocities, torch.zeros_like(positions))

    def links(self, ids: Sequence[int], seed: int) -> Links:
        time.sleep(self.delay)
        if self.log is not None:
            for i in ids:
                (Path(self.log) / f"{i}-{os.getpid()}-{time.time_ns()}").touch()
        motion = self.motion(ids, seed)
        return Links(
            paths=Paths.cat([self._paths(i, seed) for i in ids]),
            times=motion.times,
            positions=motion.positions,
            velocities=motion.velocities,
            orientations=motion.orientations,
            tx_position=torch.tensor([0.0, 0.0, 25.0]),
            tx_orientation=torch.zeros(3),
            sample_ids=torch.tensor(list(ids)),
        )

    def _paths(self, sample_id: int, seed: int) -> Paths:
        generator = sample_generator(seed, sample_id, 7)
        count = torch.randint(0, self.num_paths + 1, (1, self.anchors), generator=generator)
        n = self.num_paths
        mask = torch.arange(n) < count[..., None]
        shape = (1, self.anchors)
        directions = torch.nn.functional.normalize(torch.randn(2, *shape, 3, n, generator=generator), dim=-2)

        return Paths(
            transfer=torch.randn(*shape, 2, 2, n, dtype=torch.complex64, generator=generator) * mask[:, :, None, None],
            delay=torch.rand(*shape, n, generator=generator) * 1e-6 * mask,
            departure=directions[0] * mask[:, :, None],
            arrival=directions[1] * mask[:, :, None],
            doppler=torch.randn(*shape, n, generator=generator) * 50 * mask,
            interactions=torch.randint(0, 3, (*shape, 2, n), generator=generator).to(torch.int8) * mask[:, :, None],
            vertices=torch.randn(*shape, 2, 3, n, generator=generator) * mask[:, :, None, None],
            mask=mask,
            carrier=self.carrier,
        ).sort()

    def versions(self) -> dict[str, str]:
        return {"tests": "1"}
