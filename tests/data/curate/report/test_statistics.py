"""Statistics against loops over documents; their sum is the same in any order and grouping."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.curate.files import NOBODY
from pipeline.data.curate.report.bins import dense
from pipeline.data.curate.report.build import build
from pipeline.data.curate.report.examples import MOST, is_early
from pipeline.data.curate.report.statistics import JudgedChunk, chunk_statistics, merge
from tests.data.curate.report.chunks import LOCAL, NAMES, curation, judged

SEED = 3
CHUNKS = [judged(seed, rows, unit=seed // 2, first=200 * (seed % 2)) for seed, rows in enumerate((200, 150, 0, 1, 300))]
PARTS = [chunk_statistics(chunk, SEED, early=number % 2 == 0) for number, chunk in enumerate(CHUNKS)]
NOTHING: dict[str, Any] = {"sizes": [], "largest": []}


@settings(max_examples=50)
@given(st.permutations(range(len(PARTS))), st.integers(0, len(PARTS)), st.integers(0, len(PARTS)))
def test_order_and_grouping_do_not_matter(order: list[int], first: int, second: int) -> None:
    low, high = sorted((first, second))
    groups = [merge(PARTS[at] for at in order[a:b]) for a, b in ((0, low), (low, high), (high, len(order))) if a < b]
    # As it is read from the receipts of chunks.
    assert merge(orjson.loads(orjson.dumps(group)) for group in groups) == merge(PARTS)


def test_the_sum_of_one_is_the_same() -> None:
    assert merge([PARTS[0]]) == PARTS[0]
    assert merge([])["rows"] == 0


def test_counts_are_those_of_the_documents() -> None:
    total = merge(PARTS)
    counts: Counter[str] = Counter()
    fires, first, alone, first_bytes = (np.zeros(len(NAMES), int) for _ in range(4))
    together = np.zeros((len(NAMES), len(NAMES)), int)
    for chunk in CHUNKS:
        for row, verdict in enumerate(chunk.verdicts):
            size, state = int(chunk.table["bytes"][row]), chunk.table["state"][row]
            counts["rows"] += 1
            if state == 1:
                counts["rejected"] += 1
                continue
            counts["documents"] += 1
            counts["bytes"] += size
            fired = [place for place in range(len(NAMES)) if chunk.fires[place, row]]
            if not fired:
                counts["kept"] += 1
                counts["kept_bytes"] += size
                counts["edited"] += int(chunk.table["edited"][row])
            else:
                first[fired[0]] += 1
                first_bytes[fired[0]] += size
                alone[fired[0]] += len(fired) == 1
            counts["duplicates"] += int(verdict["kept"]) != NOBODY
            for one in fired:
                fires[one] += 1
                for other in fired:
                    together[one, other] += 1
    assert {name: total[name] for name in counts} == dict(counts)
    for name, expected in (("fires", fires), ("first", first), ("alone", alone), ("first_bytes", first_bytes)):
        assert [rule[name] for rule in total["rules"]] == expected.tolist()
    assert total["together"] == together.tolist()
    assert total["rows"] == total["rejected"] + total["kept"] + sum(rule["first"] for rule in total["rules"])
    assert sum(total["similarity"][1]) == total["rules"][-1]["first"]


def test_groups_are_counted_exactly() -> None:
    total = merge(PARTS)
    expected: dict[str, dict[str, list[int]]] = {"languages": {}, "domains": {}}
    for chunk in CHUNKS:
        for name, (codes, names) in chunk.groups.items():
            for row, code in enumerate(codes):
                if code < 0 or chunk.table["state"][row] == 1:
                    continue
                counts = expected[name].setdefault(names[code], [0, 0, 0, 0])
                size, kept = int(chunk.table["bytes"][row]), chunk.verdicts["rule"][row] == 0
                for place, amount in enumerate((1, size, int(kept), size * int(kept))):
                    counts[place] += amount
    assert {name: total[name] for name in expected} == expected


def _kept_under(chunk: JudgedChunk, place: int, bound: float | None) -> int:
    """Documents that no rule removes if one has another bound; what is found by comparing stays."""
    rule = LOCAL[place]
    fires = chunk.fires.copy()
    values = rule.values(chunk.table)
    text = chunk.table["state"] == 0
    beyond = np.zeros(len(values), bool)
    if bound is not None:
        beyond = values < bound if rule.keeps == "min" else values > bound
    fires[place] = beyond & text
    return int((~fires.any(axis=0) & (chunk.table["state"] != 1)).sum())


def test_what_if_counts_are_those_of_rules_with_these_bounds() -> None:
    report = build(curation(), merge(PARTS), NOTHING)
    for place, rule in enumerate(report["rules"][: len(LOCAL)]):
        if rule["scale"] is None:
            continue
        assert len(rule["what_if"]) > 4
        assert [row["bound"] for row in rule["what_if"]][-1] is None
        for row in rule["what_if"]:
            assert row["kept"] == sum(_kept_under(chunk, place, row["bound"]) for chunk in CHUNKS)
            values = [LOCAL[place].values(chunk.table)[chunk.table["state"] == 0] for chunk in CHUNKS]
            bound, alone = row["bound"], np.concatenate(values)
            if bound is not None:
                alone = alone[alone >= bound] if rule["keeps"] == "min" else alone[alone <= bound]
            assert row["passes"] == len(alone)


def test_a_rule_may_remove_for_another_reason_than_its_bound() -> None:
    chunk = judged(9, 400)
    chunk.fires[5] |= (np.arange(400) % 7 == 0) & (chunk.table["state"] == 0)
    of = chunk_statistics(chunk, SEED)["rules"][5]
    values = LOCAL[5].values(chunk.table)
    assert of["otherwise"] == (chunk.fires[5] & (values <= LOCAL[5].bound)).sum() > 0
    assert dense(of["all"]).sum() == (chunk.table["state"] == 0).sum() - of["otherwise"]
    others = np.delete(chunk.fires, 5, axis=0).any(axis=0) | (chunk.table["state"] != 0)
    assert dense(of["free"]).sum() == (~others & ~(chunk.fires[5] & (values <= LOCAL[5].bound))).sum()


def test_examples_are_the_nearest_and_of_the_right_side() -> None:
    total = merge(PARTS)
    for place, examples in enumerate(total["examples"]):
        for kind, found in examples.items():
            assert len(found) <= MOST[kind] and found == sorted(found)
            assert len({(unit, row) for _, _, _, unit, row, _ in found}) == len(found)
        rows = [
            (number % 2, chunk.unit, chunk.first + row, float(value))
            for number, chunk in enumerate(CHUNKS)
            for row, value in enumerate(LOCAL[place].values(chunk.table) if place < len(LOCAL) else [])
            if chunk.table["state"][row] == 0 and not np.delete(chunk.fires[:, row], place).any()
        ]
        if 0 < place < len(LOCAL):
            rule = LOCAL[place]
            for kind, removes in (("inside", False), ("beyond", True)):
                side = [
                    (late, abs(value - rule.bound))
                    for late, _, _, value in rows
                    if (value < rule.bound if rule.keeps == "min" else value > rule.bound) == removes
                ]
                assert [(each[0], each[1]) for each in examples[kind]] == sorted(side)[: MOST[kind]]
        removed = sum(int((chunk.verdicts["rule"] == place + 1).sum()) for chunk in CHUNKS)
        assert len(examples["removed"]) == min(removed, MOST["removed"])


def test_examples_depend_on_the_seed() -> None:
    chosen = [chunk_statistics(CHUNKS[0], seed)["examples"][1]["removed"] for seed in (1, 2, 1)]
    assert chosen[0] == chosen[2] != chosen[1]


@pytest.mark.parametrize("chunks", [1, 63, 1000])
def test_few_chunks_of_many_give_the_examples(chunks: int) -> None:
    early = sum(is_early(SEED, unit, 0, chunks) for unit in range(chunks))
    assert early == chunks if chunks < 128 else 30 < early < 130
