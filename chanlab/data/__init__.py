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
    from chanlab.data.impairments import Impairments
    from chanlab.data.protocol import Cell, Condition, Protocol, find_protocol
    from chanlab.data.recipe import Recipe, find_recipe, load_recipe
    from chanlab.data.splits import SPLITS, SplitSpec, assign_splits
    from chanlab.data.store import Store
    from chanlab.data.streamed import SampleRequest, StreamedCSI
    from chanlab.data.streamed_datamodule import StreamedCSIDataModule
    from chanlab.data.verify import VerifyReport
    from chanlab.data.windows import CSIBatch, CSIWindows

_MODULES = {
    "CSIBatch": "windows",
    "CSIDataModule": "datamodule",
    "CSIWindows": "windows",
    "Cell": "protocol",
    "Condition": "protocol",
    "Executor": "executor",
    "Impairments": "impairments",
    "LocalExecutor": "executor",
    "Protocol": "protocol",
    "Recipe": "recipe",
    "SPLITS": "splits",
    "SampleRequest": "streamed",
    "SplitSpec": "splits",
    "Store": "store",
    "StreamedCSI": "streamed",
    "StreamedCSIDataModule": "streamed_datamodule",
    "VerifyReport": "verify",
    "assign_splits": "splits",
    "find_protocol": "protocol",
    "find_recipe": "recipe",
    "load_recipe": "recipe",
}

__all__ = [
    "SPLITS",
    "CSIBatch",
    "CSIDataModule",
    "CSIWindows",
    "Cell",
    "Condition",
    "Executor",
    "Impairments",
    "LocalExecutor",
    "Protocol",
    "Recipe",
    "SampleRequest",
    "SplitSpec",
    "Store",
    "StreamedCSI",
    "StreamedCSIDataModule",
    "VerifyReport",
    "assign_splits",
    "find_protocol",
    "find_recipe",
    "load_recipe",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
