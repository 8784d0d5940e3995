"""The store: channels on disk, made from recipes, read as windows and views.

Names are imported when first used, so that `import chanlab.data` costs nothing. `generate` and `plan` are functions of
`chanlab.data.generate`, `verify` and `info` of `chanlab.data.verify`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chanlab.data.datamodule import CSIDataModule
    from chanlab.data.executor import Executor, LocalExecutor
    from chanlab.data.recipe import Recipe, find_recipe, load_recipe
    from chanlab.data.splits import SPLITS, SplitSpec, assign_splits
    from chanlab.data.store import Store
    from chanlab.data.verify import VerifyReport
    from chanlab.data.windows import CSIBatch, CSIWindows

_MODULES = {
    "CSIBatch": "windows",
    "CSIDataModule": "datamodule",
    "CSIWindows": "windows",
    "Executor": "executor",
    "LocalExecutor": "executor",
    "Recipe": "recipe",
    "SPLITS": "splits",
    "SplitSpec": "splits",
    "Store": "store",
    "VerifyReport": "verify",
    "assign_splits": "splits",
    "find_recipe": "recipe",
    "load_recipe": "recipe",
}

__all__ = [
    "SPLITS",
    "CSIBatch",
    "CSIDataModule",
    "CSIWindows",
    "Executor",
    "LocalExecutor",
    "Recipe",
    "SplitSpec",
    "Store",
    "VerifyReport",
    "assign_splits",
    "find_recipe",
    "load_recipe",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
