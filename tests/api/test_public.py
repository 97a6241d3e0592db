"""The public names and signatures, which `docs/python.md` calls stable: who changes one, changes it here and there."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline import api

SIGNATURES = {
    "evaluate": "(what, step=None, *, run=None, settings=None, keep=False)",
    "generate": "(model, prompts, step=None, **sampling)",
    "load_model": "(path, step=None, *, weights=None, device=None, dtype=None, parallel=None)",
    "Dataset.open": "(path, source=None, split=None, *, read='mmap')",
    "Dataset.metadata": "(self, index)",
    "Dataset.read_tokens": "(self, start, count)",
    "Dataset.text": "(self, index)",
    "Model.forward": "(self, ids, decoder_ids=None, *, bounds=None, prefix=None)",
    "Model.generate": "(self, prompts, **sampling)",
    "Run.__init__": "(self, path, settings=None)",
    "Run.batch": "(self, step)",
    "Run.batches": "(self, start=1, stop=None)",
    "Run.best_step": "(self)",
    "Run.checkpoints": "(self)",
    "Run.dataset": "(self, source, split='train')",
    "Run.evaluations": "(self)",
    "Run.journal": "(self)",
    "Run.ledger": "(self)",
    "Run.losses": "(self, start=1, stop=None)",
    "Run.metrics": "(self)",
    "Run.plan": "(file, settings=None)",
    "Run.where": "(self, step, *, ids=False)",
    "RunMetrics.columns": "(self)",
    "RunMetrics.series": "(self, name)",
}
FIELDS = {
    "CheckpointInfo": "step path tokens validation_loss",
    "EvaluationResult": "heldout tasks harness",
    "RunBatch": "step ids targets weight loss_weight positions bounds segments samples sources documents skipped "
    "valid_targets total_weight order_hash data_hash encoder prefix predicted ahead_targets ahead_weight",
    "SampleLosses": "step sample source loss",
}
PROPERTIES = {
    "Dataset": "tokenizer",
    "EvaluationResult": "loss perplexity",
    "Model": "device",
    "Run": "done steps tokenizer",
    "RunMetrics": "names",
}
ERRORS = {"MachineError", "UserError"}


def test_names_and_signatures() -> None:
    functions = {name.partition(".")[0] for name in SIGNATURES}
    assert set(api.__all__) == functions | FIELDS.keys() | ERRORS
    assert dir(api) == sorted(api.__all__)
    for name, wanted in SIGNATURES.items():
        owner, _, method = name.partition(".")
        found = getattr(api, owner)
        assert _signature(getattr(found, method) if method else found) == wanted, name
    for name, wanted in FIELDS.items():
        of = getattr(api, name)
        assert " ".join(of._fields if issubclass(of, tuple) else [f.name for f in dataclasses.fields(of)]) == wanted
    with pytest.raises(AttributeError, match="no attribute 'datasets'"):
        _ = api.datasets


def test_nothing_else_is_public() -> None:
    """Methods and properties of the classes are those that are pinned above."""
    for name in set(api.__all__) - ERRORS:
        found = getattr(api, name)
        if not inspect.isclass(found):
            continue
        own = {key: value for key, value in vars(found).items() if not key.startswith("_")}
        inherited = {"extra_repr", "forward", *FIELDS.get(name, "").split()}
        methods = {key.partition(".")[2] for key in SIGNATURES if key.startswith(f"{name}.")}
        assert own.keys() - inherited == methods - {"__init__", "forward"} | set(PROPERTIES.get(name, "").split()), name


def test_everything_public_has_a_docstring_and_a_place_in_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/python.md").read_text()
    for name in api.__all__:
        found = getattr(api, name)
        assert found.__doc__, name
        assert f"api.{name}" in page or f"`{name}`" in page, name
    for name in SIGNATURES:
        owner, _, method = name.partition(".")
        if method and method != "__init__":
            assert getattr(getattr(api, owner), method).__doc__, name
            assert f"{method}(" in page or method == "forward", f"docs/python.md does not name {name}"


@pytest.mark.guard
def test_torch_is_imported_where_it_is_needed() -> None:
    code = (
        "import sys; from pipeline import api; before = {*sys.modules} & {'torch', 'pydantic', 'numpy'}; "
        "api.Dataset, api.Run, api.UserError; print(sorted(before), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
