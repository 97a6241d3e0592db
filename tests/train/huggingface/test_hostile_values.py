"""Each value of a config.json in turn replaced by one that nobody writes: it loads, or the message names it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.common.errors import UserError
from pipeline.train.huggingface.folder import CONFIG_FILE, HuggingFaceFolder
from pipeline.train.huggingface.registry import FAMILIES
from tests import tiers
from tests.train.huggingface import parity, test_t5
from tests.train.huggingface.test_parity import ROWS

NO_NUMBERS: list[Any] = [[], {}, "x", True, math.nan, -1, math.inf]
OTHERS: list[Any] = [None, 0, 10**30, 10**400]
BY_FAMILY = {row.config.model_type: row for row in reversed([*ROWS.values(), *test_t5.ROWS.values()])}
QUICK = ("llama", "deepseek_v3", "t5")


def values_of(family: str) -> dict[str, Any]:
    row = BY_FAMILY[family]
    found: dict[str, Any] = row.config(**{"vocab_size": parity.VOCAB, **row.values}).to_dict()
    return found | ({"decoder_start_token_id": 0} if family == "t5" else {})


def opened(folder: Path, values: Any) -> tuple[Any, ...]:
    """All that is read from config.json, without weights."""
    (folder / CONFIG_FILE).write_text(json.dumps(values))
    found = HuggingFaceFolder(folder)
    assert found.spec and found.mapping
    return found.model, found.positions, found.start_token


def places(values: dict[str, Any], *above: str) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, *above, key)


def changed(values: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(values)
    inner = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"none": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def test_every_family_is_here() -> None:
    assert BY_FAMILY.keys() == FAMILIES.keys()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    "family", tiers.first(len(QUICK), [*QUICK, *(each for each in BY_FAMILY if each not in QUICK)], rest="slow")
)
def test_a_value_loads_or_is_named(folder: Path, family: str) -> None:
    values = values_of(family)
    wanted = opened(folder, values)
    for place in places(values):
        before: Any = values
        for key in place:
            before = before[key]
        for value in NO_NUMBERS + OTHERS:
            try:
                found = opened(folder, changed(values, place, value))
            except UserError as error:
                assert str(folder / CONFIG_FILE) in str(error), place
                named = place[-1] in str(error)
            else:
                named = found == wanted
            # Where there was a number, what is none is not read as one.
            if (
                isinstance(before, int | float)
                and not isinstance(before, bool)
                and any(value is each for each in NO_NUMBERS)
            ):
                assert named, (place, value)


@pytest.mark.parametrize(
    ("end", "entries", "message"),
    [
        ({"eos_token": ["a"]}, [], "eos_token: .* must be a text"),
        ({}, [7], "added_tokens.0 has no content"),
        ({}, [{"content": "a"}], "added_tokens gives 'a' the id None"),
    ],
)
def test_end_of_text(folder: Path, end: Any, entries: list[Any], message: str) -> None:
    (folder / CONFIG_FILE).write_text(json.dumps(values_of("llama") | {"eos_token_id": 1}))
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}, "merges": []}, "added_tokens": entries}))
    with pytest.raises(UserError, match=message):
        HuggingFaceFolder(folder).tokenizer()
