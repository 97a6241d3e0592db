"""Packs in journals and plans."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.data.loading.loader import Loader
from pipeline.data.loading.objectives.causal import Causal
from pipeline.data.order.consumption import accounts
from pipeline.data.order.journal import Journal
from pipeline.data.order.packs import instances_of
from pipeline.data.order.phases import plan_journal
from pipeline.data.order.run_length import warnings
from pipeline.data.plan.build import Assumed
from tests.data.datasets.packing.made import reference, some_lengths
from tests.data.order.test_phases import run_file, sampler_of
from tests.data.preprocess.memory import EOD, MemoryDataset

DATA = {"a": MemoryDataset(some_lengths(8)), "b": MemoryDataset([5, 11, 2, 30] * 9)}
SOURCES = {"a": {"weight": 1}, "b": {"weight": 3}}
PACKED = [{"packing": "best_fit"}]


def plan(phases=(), saved=None, sources=SOURCES, data=DATA, **keys):
    return plan_journal(run_file(sources, phases, **keys), data, saved)


def through_json(journal):
    return Journal.from_json(json.loads(json.dumps(journal.to_json())))


def test_journals_with_and_without_packs():
    windows, packs = plan(), plan(PACKED)
    assert windows.to_json()["order_version"] == 1 and packs.to_json()["order_version"] == 2
    assert "packs" not in json.dumps(windows.to_json())
    sources = packs.to_json()["segments"][0]["sources"]
    assert {name: state["packs"] for name, state in sources.items()} == {
        name: len(reference(dataset.lengths, 8, 10_000)) for name, dataset in DATA.items()
    }
    for journal in (windows, packs):
        assert through_json(journal) == journal and through_json(journal).fingerprint == journal.fingerprint
        assert through_json(journal.forked(3).passing_over((1, 2), 1)).order_version == journal.order_version
    wrong = packs.to_json()
    for change in ({"order_version": 1}, {"order_version": 3}):
        with pytest.raises(UserError, match="order_version"):
            Journal.from_json(wrong | change)
    del wrong["segments"][0]["sources"]["a"]["packs"]
    with pytest.raises(UserError, match="have packs, or none"):
        Journal.from_json(wrong)


def test_the_past_keeps_its_packing():
    for one, two, first, second in (([], PACKED, "windows", "best_fit"), (PACKED, [], "best_fit", "windows")):
        saved = through_json(plan(one))
        message = (
            rf"from step 1 of the 5 .*data.loader.packing {first} -> {second}\. .*leave data.loader.packing={first} .*"
            rf"set blend.phases=\[{{until: 5 steps}}, {{packing: {second}}}\]"
        )
        with pytest.raises(UserError, match=message):
            plan(two, saved).going_on(saved, 5)
        later = [{"until": "5 steps", "packing": first}, {"packing": second}]
        journal = plan(later, saved).going_on(saved, 5)
        assert [segment.packing for segment in journal.segments] == [first, second]
        # The epochs of all sources are closed there, and the order of turns stays.
        assert all(state.lap == 1 and state.cursor == 0 for state in journal.segments[1].sources.values())
        turns = [sampler_of(each).steps(5, 9).source.tolist() for each in (journal, saved)]
        assert turns[0] == turns[1]
        (line,) = [
            line
            for line in warnings(run_file(SOURCES, later), journal, sampler_of(journal), 9)
            if "ends epochs" in line
        ]
        assert f"changes the packing to {second} and so ends epochs early" in line
        fork = plan(two, saved.forked(5)).going_on(saved.forked(5), 5)
        assert fork.segments[1] == journal.segments[1]


def test_other_documents_are_other_packs():
    saved = plan(PACKED)
    other = {"a": MemoryDataset(sorted(DATA["a"].lengths)), "b": MemoryDataset([6] * 72)}
    with pytest.raises(UserError, match=r"from step 1 of the 5 .*source 'b' has [0-9]+ -> [0-9]+ packs"):
        plan(PACKED, data=other).going_on(saved, 5)


def test_consumption_of_packs():
    """Epochs are exact; of a partial one, tokens are its share."""
    journal = plan(PACKED, sources={"a": {"max_epochs": 2.5}}, batch_size=1)
    sampler, packs, tokens = sampler_of(journal), journal.segments[0].sources["a"].packs, DATA["a"].tokens
    assert sampler.end().step == packs * 5 // 2
    for samples in (0, 1, packs - 1, packs, packs + 1, 2 * packs):
        account = accounts(sampler, samples)["a"].current
        assert account.drawn == samples * tokens // packs and account.slots == 8 * samples
        assert account.epochs == pytest.approx(samples / packs, abs=1 / tokens)
        assert account.lap == samples // packs and account.exact == (samples >= packs or samples == 0)
        assert account.unique == min(account.drawn, tokens)


def test_the_example_of_the_documentation():
    """The table of packs in docs/sampler.md, cell by cell, and the inputs that it names."""
    page = (Path(__file__).parents[3] / "docs" / "sampler.md").read_text()
    lines = page.split("## The example in packs")[1].split("\n## ")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")][2:]
    dataset = MemoryDataset([7, 3, 9, 6, 4])
    packs = reference(dataset.lengths, 4, 10_000)
    journal = plan(PACKED, sources={"web": {}}, data={"web": dataset}, seed=7, sequence_length=4)
    instances = instances_of(journal, {"web": dataset})[0]["web"]
    assert len(table) == len(packs) == instances.count == 8
    for position, row in enumerate(table):
        pack = int(instances.places(np.array([0]), np.array([position]))[0])
        pieces = ", ".join(f"{d}: {first}-{first + tokens - 1}" for d, first, tokens in packs[pack])
        padding = 4 - sum(tokens for _, _, tokens in packs[pack])
        assert row == [str(cell) for cell in (position, pack, pieces, padding)]
    (batch,) = Loader(journal, [{"web": instances}], Causal(), micro_batch_size=[4]).batches(1).micro_batches
    row, (start, first) = batch.samples.tolist().index(5), (dataset.document_start(2), dataset.document_start(1))
    assert batch.tokens[row].tolist() == [int(dataset.ids[start + 7]), EOD, *dataset.ids[first : first + 2].tolist()]


def test_assumed_sources_have_packs_without_padding():
    journal = plan(PACKED, sources={"a": {}}, data={"a": Assumed(100_001)})
    assert journal.segments[0].sources["a"].packs == 12_501
