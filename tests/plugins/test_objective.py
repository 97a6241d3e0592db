"""An objective of another package: what it makes, what is refused, and a training with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.common.hashing import mix
from pipeline.config.load import load
from pipeline.data.datasets.manifest import TokenizerInfo
from pipeline.data.loading.objectives.base import Arranged, PackRow, PackSizes, sample_key
from pipeline.data.loading.objectives.choice import make_objective
from pipeline.data.loading.objectives.custom import CustomObjective
from pipeline.data.loading.stream_shape import StreamShape
from tests.plugins.installed import installed
from tests.tiny import write_run

INFO = TokenizerInfo(
    fingerprint="f", vocab_size=50, end_of_document=0, end_of_document_token="<end>", special_tokens={}
)
SOME = {"train.objective": {"type": "example.some_documents", "options": {"rate": 0.4}}}
LENGTH = 12


@pytest.fixture(autouse=True)
def example(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path / "installed"):
        yield


def objective(root: Path, **changes: Any) -> Any:
    return make_objective(load(write_run(root, {**SOME, **changes})), INFO)


def counts(key: int, document: int) -> bool:
    """The rule of the example, document by document."""
    return int(mix(np.array([document], np.uint64), key)[0]) >> 11 >= 0.4 * 2**53


def test_windows_and_packs_are_what_a_loop_makes(tmp_path: Path) -> None:
    made, ids, begins = objective(tmp_path), np.arange(1, LENGTH + 2), np.array([0, 5, 9, LENGTH])
    seen = set()
    for sample in range(20):
        key = sample_key(1, sample)
        got, of_token, document = made.arrange(ids, begins, key), [], -1
        for token in range(LENGTH + 1):
            document += token in begins
            of_token.append(counts(key, document))
        assert got.weight.tolist() == of_token[1:] and got.targets.tolist() == ids[1:].tolist()
        assert got.tokens.tolist() == ids[:-1].tolist() and got.begins.tolist() == [0, 5, 9]
        assert made.valid(begins, np.array([0, 4]), LENGTH, lambda row, key=key: key).tolist() == [sum(of_token[1:])]
        seen.add(sum(of_token[1:]))
        pack = PackRow(ids[1:], np.array([0, 4]), np.array([0, 0]), np.array([False] * 2), np.array([True] * 2), 9)
        weight = [float(counts(key, place >= 4)) if place < 9 else 0.0 for place in range(LENGTH)]
        assert made.arrange_pack(pack, key).weight.tolist() == weight
        sizes = PackSizes(LENGTH, np.array([9]), np.array([0, 2]), np.array([4, 5]), *[np.array([True] * 2)] * 2)
        assert made.valid_packs(sizes, lambda row, key=key: key).tolist() == [sum(weight)]
    assert len(seen) > 2


def _change(**fields: Any) -> Callable[[Arranged], Arranged]:
    return lambda made: made._replace(**fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change(tokens=np.zeros(LENGTH + 1, np.int64)), "tokens must be 12 whole numbers"),
        (_change(targets=np.full(LENGTH, 50)), "targets must be from 0 to 49"),
        (_change(weight=np.full(LENGTH, 0.5, np.float32)), "weight must be 0 or 1"),
        (_change(weight=np.zeros(LENGTH, np.float32)), r"valid\(\) gives 12 targets that count, and weight has 0"),
        (_change(begins=np.array([1, 3])), "begins must ascend"),
        (_change(raw=np.full(LENGTH, -1)), "a target with a weight must be a token of the window"),
        (_change(predicted=np.arange(3)), "predicted must be 12 ascending positions"),
        (_change(prefix=np.zeros(3, np.int64)), "prefix must be 12 whole numbers"),
    ],
)
def test_wrong_windows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Arranged], Arranged], message: str
) -> None:
    made = objective(tmp_path, **{"train.objective": SOME["train.objective"] | {"options": {"rate": 0.0}}})
    of_class: Any = type(made._made)
    arrange = of_class.arrange
    monkeypatch.setattr(of_class, "arrange", lambda *arguments: change(arrange(*arguments)))
    with pytest.raises(UserError, match=rf"example.some_documents \(example-plugins 1.0\): {message}"):
        made.arrange(np.arange(LENGTH + 1), np.array([0]), 7)


def test_chance_of_its_own_and_changed_inputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, chance = objective(tmp_path), np.random.default_rng()
    of_class: Any = type(made._made)
    arrange = of_class.arrange
    random = lambda *arguments: arrange(*arguments)._replace(tokens=chance.integers(0, 50, LENGTH))  # noqa: E731
    monkeypatch.setattr(of_class, "arrange", random)
    with pytest.raises(UserError, match="tokens differs where the same window is arranged twice"):
        made.arrange(np.arange(LENGTH + 1), np.array([0]), 7)

    def writes(self: Any, ids: Any, begins: Any, key: int) -> None:
        ids[0] = 1

    monkeypatch.setattr(of_class, "arrange", writes)
    with pytest.raises(ValueError, match="read-only"):
        made.arrange(np.arange(LENGTH + 1), np.array([0]), 7)


def test_its_class_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_class: Any = type(objective(tmp_path)._made)
    assert issubclass(of_class, CustomObjective)
    load(write_run(tmp_path, {**SOME, "data.loader.packing": "best_fit"}))

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=message):
            load(write_run(tmp_path, {**SOME, **changes}))

    refused("model.mtp does not go with train.objective.type: example.some", **{"model.mtp": {"depth": 1}})
    own = {"sources": ["sea"], "objective": SOME["train.objective"]}
    refused("example.some_documents only rearranges documents", heldout_sets={"own": own})
    with monkeypatch.context() as patch:
        patch.setattr(of_class, "packs", False)
        refused("best_fit does not go with .*which takes windows alone", **{"data.loader.packing": "best_fit"})
    with monkeypatch.context() as patch:
        patch.setattr(of_class, "direction", "both")
        refused("example.some_documents needs model.direction: both")
    with monkeypatch.context() as patch:
        patch.setattr(of_class, "takes", lambda self, length: length > 64)
        with pytest.raises(UserError, match="does not take windows of 32 tokens"):
            objective(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(of_class, "stream_shape", classmethod(lambda cls, options, n: StreamShape(n, 0, n, 1)))
        with pytest.raises(UserError, match="predicted is missing, and stream_shape has 1 of 12"):
            objective(tmp_path).arrange(np.arange(LENGTH + 1), np.array([0]), 7)
