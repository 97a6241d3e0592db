"""Evaluation of rules over tables."""

from __future__ import annotations

import numpy as np

from pipeline.config.curation.rules import RulesConfig
from pipeline.data.curate.measures.counters import COUNTERS
from pipeline.data.curate.rules import evaluate as module
from pipeline.data.curate.rules.evaluate import evaluate, fires_alone, first_fires, first_values
from pipeline.data.curate.rules.presets import empty_rule, preset_rules

COLUMNS = [("state", "u1"), *((name, "<u4") for name in COUNTERS)]
RULES = (
    empty_rule("data.curate.clean"),
    *preset_rules(RulesConfig.model_validate({"c4": {}, "fineweb": {"min_punctuated_lines": None}}), "r"),
)


def random_table(size: int) -> np.ndarray:
    random = np.random.default_rng(1)
    table = np.zeros(size, COLUMNS)
    table["state"] = random.integers(0, 3, size)
    for name in COUNTERS:
        table[name] = random.integers(0, 8, size)
    table["curly_brackets"] //= 4
    table["lorem_ipsum"] //= 7
    return table


def test_rules_by_loops(monkeypatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 64)
    table = random_table(1000)
    fires = evaluate(RULES, table)
    first, alone = first_fires(fires), fires_alone(fires)
    values = first_values(RULES, table, first)
    assert (fires.shape, first.dtype, values.dtype) == ((len(RULES), 1000), np.uint16, np.float32)
    for k, record in enumerate(table):
        expected = []
        for rule in RULES:
            fire = bool(rule.fires(record.reshape(1))[0])
            expected.append(fire and record["state"] == (2 if rule.name == "clean.empty" else 0))
        assert fires[:, k].tolist() == expected
        assert first[k] == (expected.index(True) + 1 if any(expected) else 0)
        assert alone[k] == (sum(expected) == 1)
        value = RULES[first[k] - 1].values(record.reshape(1))[0] if first[k] else 0
        assert values[k] == np.float32(value)
    assert len(set(first.tolist())) > 4


def test_empty_and_rejected() -> None:
    table = np.zeros(3, COLUMNS)
    table["state"] = [0, 1, 2]
    fires = evaluate(RULES, table)
    assert fires[0].tolist() == [False, False, True] and not fires[1:, 1:].any()
    assert first_fires(fires).tolist() == [2, 0, 1]
    assert first_values(RULES, table, first_fires(fires)).tolist() == [0, 0, 1]


def test_without_rules_or_records() -> None:
    table = random_table(3)
    assert evaluate((), table).shape == (0, 3)
    assert first_fires(evaluate((), table)).tolist() == [0, 0, 0] and not fires_alone(evaluate((), table)).any()
    assert evaluate(RULES, table[:0]).shape == (len(RULES), 0)
