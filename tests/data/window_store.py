"""A small store of two-ray channels for the tests of windows."""

from __future__ import annotations

from pathlib import Path

from chanlab.data.generate import generate
from chanlab.data.recipe import parse_recipe
from chanlab.data.store import Store

RECIPE = """\
name: windows
seed: 5
samples: 30
shard_size: 8
source:
  class_path: chanlab.channels.TwoRay
  init_args:
    users:
      class_path: chanlab.channels.Ring
      init_args: {{distance: [20.0, 60.0], speed: [2.0, 15.0], length: {length}, anchor_spacing: 0.1}}
splits: {{fractions: {{train: 0.6, val: 0.2, test: 0.2}}}}
view:
  tx_array: {{num_rows: 2, num_cols: 1, pattern: tr38901, polarization: cross}}
  rx_array: {{num_rows: 1, num_cols: 2}}
  num_subcarriers: 6
  subcarrier_spacing: 180.0e3
  history: 5
  horizons: 3
"""


def make_store(path: Path, length: float = 1.0) -> Store:
    """30 users who move `length` metres at 2 to 15 m/s (0: they stay, with one anchor)."""
    generate(parse_recipe(RECIPE.format(length=length)), path, progress=False)
    return Store(path)
