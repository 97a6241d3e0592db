"""The Python interface: datasets, runs, their batches, models, evaluation. `docs/python.md` says what is stable.

`import pipeline.api` imports neither torch nor anything else that takes long; what needs it imports it when it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.api.batches import RunBatch
    from pipeline.api.dataset import DatasetReader as Dataset
    from pipeline.api.evaluation import EvaluationResult, evaluate
    from pipeline.api.metrics import RunMetrics
    from pipeline.api.model import Model, generate, load_model
    from pipeline.api.run import CheckpointInfo, Run, SampleLosses
    from pipeline.common.errors import MachineError, UserError

__all__ = [
    "CheckpointInfo",
    "Dataset",
    "EvaluationResult",
    "MachineError",
    "Model",
    "Run",
    "RunBatch",
    "RunMetrics",
    "SampleLosses",
    "UserError",
    "evaluate",
    "generate",
    "load_model",
]

_PLACES = {
    "CheckpointInfo": ("pipeline.api.run", "CheckpointInfo"),
    "Dataset": ("pipeline.api.dataset", "DatasetReader"),
    "EvaluationResult": ("pipeline.api.evaluation", "EvaluationResult"),
    "MachineError": ("pipeline.common.errors", "MachineError"),
    "Model": ("pipeline.api.model", "Model"),
    "Run": ("pipeline.api.run", "Run"),
    "RunBatch": ("pipeline.api.batches", "RunBatch"),
    "RunMetrics": ("pipeline.api.metrics", "RunMetrics"),
    "SampleLosses": ("pipeline.api.run", "SampleLosses"),
    "UserError": ("pipeline.common.errors", "UserError"),
    "evaluate": ("pipeline.api.evaluation", "evaluate"),
    "generate": ("pipeline.api.model", "generate"),
    "load_model": ("pipeline.api.model", "load_model"),
}
"""Module of each name, and its name there."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    module, own = _PLACES[name]
    value = globals()[name] = getattr(importlib.import_module(module), own)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
