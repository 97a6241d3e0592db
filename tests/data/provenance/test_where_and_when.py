"""Provenance: `where` against the source files and the loader's batches, `when` as the inverse of `where`."""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import yaml

from pipeline.cli.main import app
from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.config.load import dump
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.manifest import REPAIR
from pipeline.data.datasets.merge import merge
from pipeline.data.datasets.open import open_datasets
from pipeline.data.order.phases import plan_journal
from pipeline.data.plan.build import make_data_plan
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.document_to_steps import When, when
from pipeline.data.provenance.run import RunView, open_view
from pipeline.data.provenance.step_to_documents import Where, where
from pipeline.data.sources.records import printable
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data import mixed
from tests.data.runs import make_config


def _quiet(_: str) -> None:
    pass


def _where(run: RunView, step: int, **options: Any) -> Where:
    return where(run, step, say=_quiet, **options)


def _when(run: RunView, source: str, **options: Any) -> When:
    return when(run, source, say=_quiet, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with datasets of sources of all kinds, and `run.yaml`: several laps, phases, limits and skips."""
    root = tmp_path_factory.mktemp("provenance")
    corpus = mixed.write(root / "corpus")
    sources = mixed.sources(corpus)[:2] + mixed.sources(corpus)[3:]
    sources[0]["metadata"] = ["id"]
    settings = {"unit_bytes": 16000, "max_document_bytes": 3000, "max_error_rate": 0.1}
    config = make_config(root, sources, preprocess=settings)
    preprocess(config)
    values = yaml.safe_load(dump(config))
    values["train"] |= {"duration": "150 steps", "sequence_length": 64, "batch_size": 6, "micro_batch_size": 2}
    values["train"] |= {"batch_ramp": {"start": 2, "increment": 2, "tokens": 9000}}
    for source, weight in zip(values["data"]["sources"], (3, 2, 1, 4), strict=True):
        source["weight"] = weight
    values["data"]["sources"][3] |= {"max_epochs": 1.7}
    values["blend"] = {
        "phases": [
            {"until": "60 steps"},
            {
                "until": "90 steps",
                "sequence_length": 100,
                "sources": ["plain", "gz", "text"],
                "slices": {"gz": [0.2, 0.7]},
            },
            {"name": "end", "batch_size": 5, "micro_batch_size": 3},
        ],
        "skip": [
            {"steps": "7-8"},
            {"samples": "30-33"},
            {"source": "plain", "documents": ["3-9", 20], "from_step": 10},
            {"source": "pq", "from_step": 120},
        ],
    }
    (root / "run.yaml").write_text(yaml.safe_dump(values))
    return root


@pytest.fixture(scope="module")
def run(root: Path) -> RunView:
    """The run, before it was begun."""
    return open_view(root / "run.yaml")


@pytest.fixture(scope="module")
def steps(run: RunView) -> list[Where]:
    """All its steps."""
    return [_where(run, step + 1, ids=True) for step in range(run.steps)]


def _texts(corpus: Path) -> Callable[[str, int | None], tuple[str, str]]:
    """(id, text) of the record at a file's line or row, by other means."""
    lines = {str(path): path.read_bytes().splitlines(keepends=True) for path in corpus.glob("*.jsonl")}
    packed = corpus / "c.jsonl.gz"
    lines[str(packed)] = gzip.decompress(packed.read_bytes()).splitlines(keepends=True)
    table = pq.read_table(corpus / "e.parquet").to_pylist()

    @cache
    def record(file: str, number: int | None) -> tuple[str, str]:
        if number is None:
            return str(Path(file).relative_to(corpus / "text")), Path(file).read_bytes().decode()
        if file.endswith(".parquet"):
            return table[number]["id"] or f"e.parquet#{number}", table[number]["body"]
        value = json.loads(lines[file][number - 1])
        byte = sum(map(len, lines[file][: number - 1]))
        return str(value.get("id", f"{Path(file).name}@{byte}")), value["text"]

    return record


def test_pieces_are_tokens_of_the_records_at_their_places(root: Path, run: RunView, steps: list[Where]) -> None:
    record = _texts(root / "corpus")
    tokenizer = Tokenizer.open(run.datasets["plain"].folder)
    laps = defaultdict(set)
    for answer in steps:
        for sample in answer.shown:
            ids: list[int] = []
            for piece in sample.pieces:
                about = piece.about
                assert about.origin is not None and about.origin.file is not None
                id, text = record(about.origin.file, about.origin.number)
                assert about.id == id
                # A long document is encoded in pieces, so the ids of its text differ there.
                encoded = [*tokenizer.encode(text), tokenizer.end_of_document]
                if len(text.encode()) > 3000:
                    start = run.datasets[sample.source].document_start(about.document)
                    encoded = run.datasets[sample.source].read(start, about.tokens).tolist()
                assert about.tokens == len(encoded)
                part = encoded[slice(*piece.tokens)]
                whole = tokenizer.decode(part[: len(part) - (piece.tokens[1] == about.tokens and len(part) > 1)])
                assert piece.words == whole[:60] + "…" * (len(whole) > 60)
                ids += part
            segment = run.journal.segments[run.journal.segment_number(answer.step - 1)]
            assert len(ids) == segment.sequence_length + 1
            expected, _ = run.instances[run.journal.segment_number(answer.step - 1)][sample.source].read(
                sample.epoch, sample.position
            )
            assert ids == expected.tolist()
            laps[sample.source].add(sample.epoch)
    assert {source: max(seen) for source, seen in laps.items()} == {"plain": 3, "gz": 5, "pq": 0, "text": 1}


def test_the_samples_are_the_loaders(run: RunView, steps: list[Where]) -> None:
    from pipeline.data.loading.loader import open_loader

    share: dict[tuple[int, int], Any] = {}
    for rank in (0, 1):
        loader = open_loader(run.config, run.datasets, dp_rank=rank, dp_size=2)
        for step in (0, 20, 59, 60, 75, 90, 149):
            share[rank, step] = loader.batches(step)
    for (rank, step), data in share.items():
        mine = _where(run, step + 1, rank=rank, ranks=2)
        everything = {sample.sample: sample for sample in steps[step].shown}
        rows = iter(mine.shown)
        for number, batch in enumerate(data.micro_batches):
            for row, source in enumerate(batch.sources.tolist()):
                if source < 0:
                    continue
                sample = next(rows)
                assert (sample.micro_batch, sample.source) == (number, run.journal.names[source])
                same = everything[sample.sample]
                assert [(p.about.document, p.tokens) for p in sample.pieces] == [
                    (p.about.document, p.tokens) for p in same.pieces
                ]
                dataset = run.datasets[sample.source]
                ids = np.concatenate(
                    [
                        dataset.read(dataset.document_start(p.about.document) + p.tokens[0], p.tokens[1] - p.tokens[0])
                        for p in sample.pieces
                    ]
                )
                assert batch.tokens[row].tolist() == ids[:-1].tolist()
                assert batch.targets[row].tolist() == ids[1:].tolist()
                weights = []
                for place, piece in enumerate(sample.pieces):
                    length = piece.targets[1] - piece.targets[0]
                    assert length == piece.tokens[1] - piece.tokens[0] - (place == 0)
                    weights += [0.0 if piece.masked else 1.0] * length
                assert batch.weight[row].tolist() == weights
        assert next(rows, None) is None


def test_masks_are_those_of_the_run_file(run: RunView, steps: list[Where]) -> None:
    masked = 0
    for answer in steps:
        assert answer.skipped == (answer.step in (7, 8))
        for sample in answer.shown:
            whole = answer.skipped or 30 <= sample.sample <= 33 or (sample.source == "pq" and answer.step >= 120)
            assert (sample.masked is not None) == whole
            for piece in sample.pieces:
                document = piece.about.document
                named = sample.source == "plain" and (3 <= document <= 9 or document == 20) and answer.step >= 10
                assert (piece.masked is not None) == (whole or named), (answer.step, sample)
                masked += named
    assert masked > 10


def test_when_is_the_inverse_of_where(run: RunView, steps: list[Where]) -> None:
    expected: dict[tuple[str, int], list[tuple[Any, ...]]] = defaultdict(list)
    for answer in steps:
        for sample in answer.shown:
            for piece in sample.pieces:
                if piece.targets[0] < piece.targets[1]:
                    seen = sample.epoch, answer.step, sample.sample, piece.targets, piece.masked
                    expected[sample.source, piece.about.document].append(seen)
    reasons = defaultdict(int)
    closed: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source, dataset in run.datasets.items():
        for document in range(dataset.documents):
            (times,) = _when(run, source, document=document).documents
            seen = [(one.lap, one.step, one.sample, one.tokens, one.masked) for one in [*times.seen, *times.masked]]
            assert {one.masked for one in times.seen} <= {None} and all(one.masked for one in times.masked)
            assert sorted(seen) == sorted(expected.pop((source, document), [])), (source, document)
            # In each lap every token is seen once or said not to be.
            covered = defaultdict(list)
            for one in [*times.seen, *times.masked, *times.unseen]:
                covered[one.lap] += range(*one.tokens)
            assert covered, (source, document)
            for lap, tokens in covered.items():
                assert sorted(tokens) == list(range(times.about.tokens)), (source, document, lap)
            for one in times.unseen:
                if "closed" in one.why:
                    closed[source][one.lap].add(one.why)
            for one in [*times.unseen, *times.without]:
                reasons[one.why.translate({ord(c): "N" for c in "0123456789"}).replace("NN", "N")] += 1
            # Neighbours with one reason are one.
            for one, two in itertools.pairwise(times.unseen):
                touch = one.lap == two.lap and one.tokens[1] == two.tokens[0]
                assert not touch or (one.why, one.due is None) != (two.why, two.due is None)
    assert not expected
    said = " / ".join(sorted(reasons))
    for reason in (
        "among the N tokens that the epoch leaves out",
        "after the end of the run",
        "where slice and sequence_length change",
        "where sequence_length changes",
        "the source has reached its max_epochs",
        "the source is not in the blend",
        "the slice has documents N to N only",
    ):
        assert reason in said
    # A lap is closed where the next segment of the source begins.
    changes = {"plain": "sequence_length changes", "gz": "slice and sequence_length change"}
    for source, what in changes.items():
        drawn = [(sample.epoch, answer.step) for answer in steps for sample in answer.shown if sample.source == source]
        laps = {max(lap for lap, step in drawn if step < end): end for end in (61, 91)}
        expected_whys = {lap: {f"the epoch was closed before step {step}, where {what}"} for lap, step in laps.items()}
        assert closed[source] == expected_whys, source
    (times,) = _when(run, "pq", document=0).documents
    assert [str(one) for one in times.without] == ["steps 61 to 90: the source is not in the blend"]


def test_reasons_hold_for_a_longer_run(root: Path) -> None:
    """What is due comes at these steps in a longer run; what max_epochs leaves out comes in none."""
    for on_exhausted in ("renormalize", "stop"):
        limits = ["data.sources.3.max_epochs=0.5", f"data.sources.3.on_exhausted={on_exhausted}"]
        changes = ["blend={phases: [{until: 9 steps}, {slices: {plain: [0.5, 1]}}]}", *limits]
        short, long = (open_view(root / "run.yaml", [*changes, f"train.duration={n} steps"]) for n in (20, 60))
        assert long.steps == 60 if on_exhausted == "renormalize" else 20 < long.steps < 60
        due = beyond = closed = 0
        for source, dataset in short.datasets.items():
            for document in range(0, dataset.documents, 5):
                (now,), (then,) = (_when(run, source, document=document).documents for run in (short, long))
                steps = {(one.lap, token): one.step for one in then.seen for token in range(*one.tokens)}
                for one in now.unseen:
                    found = {steps[one.lap, token] for token in range(*one.tokens) if (one.lap, token) in steps}
                    if one.due:
                        due += one.due[1] <= long.steps
                        assert one.due[1] > long.steps or (min(found), max(found)) == one.due
                        assert one.due[0] > 20
                    elif one.why == "not drawn by step 20, the end of the run":
                        assert min(found, default=long.steps) > 22  # in another level of the ramp
                    else:
                        assert not found, (source, document, one)
                        beyond += one.why == "beyond the source's max_epochs"
                    if "closed" in one.why:
                        closed += 1
                        assert (source, one.why) == (
                            "plain",
                            "the epoch was closed before step 10, where slice changes",
                        )
                    assert "not in the blend" not in one.why
        assert min(due, beyond, closed) > 0


def test_a_document_in_many_windows(root: Path) -> None:
    (root / "fine.yaml").write_text(
        (root / "run.yaml").read_text().replace("sequence_length: 64", "sequence_length: 4")
    )
    run = open_view(root / "fine.yaml", ["blend=null", "data.sources.3.max_epochs=null", "train.duration=400 steps"])
    lengths = run.describe("plain", range(95), False, _quiet)
    longest = max(lengths.values(), key=lambda about: about.tokens)
    answer = _when(run, "plain", document=longest.document)
    (times,) = answer.documents
    lines = list(answer.lines())
    assert lines[0].endswith(f", {longest.tokens:,} tokens")
    seen = {token for one in times.seen for token in range(*one.tokens)}
    steps = {one.step for one in times.seen}
    assert lines[1] == (
        f"  trained on: 0 of {longest.tokens:,} tokens; to come: {len(seen):,}, in {len(steps):,} steps"
    )
    told = len(times.seen) + len(times.unseen)
    assert told > 60
    assert lines[52] == f"  and {told - 50} more lines: --json has all"
    assert [line[:9] for line in lines[2:52]] == 50 * ["  epoch 0"]
    masked = _when(
        open_view(root / "fine.yaml", ["blend={skip: [{source: plain}]}"]), "plain", document=longest.document
    )
    assert masked.documents[0].seen == []
    assert "tokens; masked or skipped: " in list(masked.lines())[1]


def test_a_document_whose_prov_record_is_lost(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run" / "data", tmp_path / "data")
    run = open_view(root / "run.yaml", [f"data.dir={tmp_path}/data"])
    before = [_where(run, step) for step in range(1, 20)]
    for path in (tmp_path / "data" / "text" / "train").rglob("*.prov"):
        path.unlink()
    for path in (tmp_path / "data" / "plain" / "train").rglob("*.prov"):
        path.write_bytes(path.read_bytes()[:-1])
    lost = 0
    for old in before:
        answer = _where(run, old.step)
        for one, two in zip(old.shown, answer.shown, strict=True):
            for piece, other in zip(one.pieces, two.pieces, strict=True):
                assert (piece.words, piece.targets) == (other.words, other.targets)
                assert (piece.about.document, piece.about.tokens) == (other.about.document, other.about.tokens)
                lost += other.about.origin is None
        assert [*answer.lines()] and orjson.dumps(answer.json)
    assert lost > 5
    answer = _when(run, "text", document=4)
    assert next(answer.lines()).startswith("document 4 of text: origin unknown, ")
    assert any(
        note.startswith("the origin of 1 document is unknown: ") and ".prov is missing; " in note and REPAIR in note
        for note in answer.notes
    )
    with pytest.raises(UserError, match=r"\.prov is missing"):
        _when(run, "text", id="x")


def test_documents_by_id_and_row(root: Path, run: RunView, steps: list[Where]) -> None:
    chosen = {}
    for answer in steps[::17]:
        for sample in answer.shown:
            for piece in sample.pieces:
                chosen[sample.source, piece.about.document] = piece.about
    for (source, document), about in chosen.items():
        assert about.id is not None
        by_id = [times.about.document for times in _when(run, source, id=about.id).documents]
        assert document in by_id
        assert all(_when(run, source, document=n, ids=True).documents[0].about.id == about.id for n in by_id)
        by_hash = _when(run, source, id=f"xxh3:{about.id_hash:016x}").documents
        assert [times.about.document for times in by_hash] == by_id
        # The id that was typed is known without a look into the files.
        assert f", id {printable(about.id)}, " in next(_when(run, source, id=about.id).lines())
        (by_row,) = _when(run, source, row=str(about.origin), ids=True).documents
        assert by_row.about == about
        # The names that `data why` takes.
        unit, row = run.dataset(source).provenance(document)[:2]
        for name in (str(document), str(about.origin), f"{unit}:{row}", *([] if about.id.isdecimal() else [about.id])):
            assert document in [times.about.document for times in _when(run, source, document=name).documents]
    rejected = _when(run, "plain", row=f"{root}/corpus/a.jsonl:11")
    assert rejected.documents == []
    assert rejected.never.startswith("the record was rejected: text is not a string")
    heldout = run.datasets["gz"].folder.with_name("heldout")
    unit, row, _, _ = Dataset.open(heldout).provenance(2)
    origins = run.origins("gz")
    assert origins is not None
    place = origins.places([(unit, row)], read=True)[unit, row]
    for found in (_when(run, "gz", row=str(place)), _when(run, "gz", id=place.id)):
        assert (found.documents, found.never) == ([], "it is document 2 of the split 'heldout'")


def test_ids_are_shown_where_they_can_be_proved(run: RunView) -> None:
    about = run.describe("plain", [0], True, _quiet)[0]
    assert str(about._replace(id=1000 * "\n")).endswith(", id " + 200 * r"\n" + "…")
    for source, known in (("plain", 63), ("gz", 0), ("pq", 12), ("text", 34)):
        documents = range(run.datasets[source].documents)
        described = run.describe(source, documents, False, _quiet)
        shown = [about for about in described.values() if about.id is not None]
        assert len(shown) >= known
        read = run.describe(source, documents, True, _quiet)
        assert all(about.id == read[about.document].id for about in shown)
        unknown = next((about for about in described.values() if about.id is None), None)
        assert (unknown is None) == (source == "text")
        if unknown:
            assert f"id xxh3:{unknown.id_hash:016x}" in str(unknown)


def test_questions_without_an_answer(run: RunView) -> None:
    with pytest.raises(UserError, match=r"--source: 'plian' is not one of the run's sources \(plain, gz, pq, text\)"):
        _when(run, "plian", document=0)
    with pytest.raises(
        UserError, match="no document of source 'text' has the id 'x' in any split; ids are like '.*txt'"
    ):
        _when(run, "text", id="x")
    with pytest.raises(UserError, match="--document: 1000: plain has documents 0 to 94 only"):
        _when(run, "plain", document=1000)
    with pytest.raises(UserError, match="--document: no document of source 'plain' has the id 'nothing'"):
        _when(run, "plain", document="nothing")
    with pytest.raises(UserError, match="e.parquet is not one of the files that .*plain was made from"):
        _when(run, "plain", row="e.parquet: row 3")
    with pytest.raises(UserError, match="exactly one of --doc ID, --document N and --row FILE"):
        _when(run, "plain", row="a.jsonl:3", id="x")
    for row in ("", "a.jsonl\n", "~nobody/a.jsonl:3", "\udcff.jsonl:1", "a.jsonl:" + 5000 * "9"):
        with pytest.raises(UserError, match="is not one of the files that"):
            _when(run, "plain", row=row)
    with pytest.raises(UserError, match=r"no document of source 'plain' has the id '\\udcff' in any split"):
        _when(run, "plain", id="\udcff")  # a word of a command line that is not UTF-8
    for step in (0, 151):
        with pytest.raises(UserError, match=rf"--step: {step}: the run has steps 1 to 150 only \(train.duration"):
            _where(run, step)
    with pytest.raises(UserError, match="--rank: 2: the run has ranks 0 to 1 only"):
        _where(run, 3, rank=2, ranks=2)
    with pytest.raises(UserError, match="--rank: 1: the run has rank 0 only"):
        _where(run, 3, rank=1, ranks=1)
    with pytest.raises(UserError, match="--rank: 0: also give the number of ranks with --ranks; .* has no checkpoint"):
        _where(run, 3, rank=0)
    with pytest.raises(UserError, match="--ranks: 2: also give the rank with --rank"):
        _where(run, 3, ranks=2)


def test_a_rank_that_has_padding_alone(run: RunView) -> None:
    answer = _where(run, 1, rank=1, ranks=2)  # the ramp begins with 2 samples
    assert [len(_where(run, 1, rank=0, ranks=2).shown), len(answer.shown)] == [1, 1]
    answer = _where(run, 1, rank=2, ranks=3)
    assert answer.shown == []
    assert list(answer.lines())[1] == "rank 2 of 3, with micro-batches of 1: all its samples of this step are padding"


def test_a_run_under_way(root: Path, tmp_path: Path) -> None:
    """Its journal, its newest checkpoint and its last metrics say more than the run file."""
    folder = tmp_path / "run"
    folder.mkdir()
    values = yaml.safe_load((root / "run.yaml").read_text())
    values["data"]["dir"] = str(root / "run" / "data")
    values["run"]["dir"] = "/nowhere"  # it was moved
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    before = open_view(folder)
    assert (before.folder, before.done) == (folder, 0)
    assert "has no journal.json yet" in before.notes[0]
    storage.put_json(folder / "journal.json", before.journal.to_json())
    for step, ranks in ((12, 8), (30, 3)):
        path = folder / "checkpoints" / f"step-{step:08d}"
        path.mkdir(parents=True)
        storage.put_json(path / "state.json", {"layout": {"world_size": ranks}})
    (folder / "checkpoints" / "step-00000040.1.tmp").mkdir()
    rows = [{"step": step, "attempt": 1} for step in range(1, 35)]
    cut = b'\n{"step": "?"}\n[]\n{"step": 35, "att'
    (folder / "metrics.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)) + cut)
    run = open_view(folder, ["train.loss.mask_document_start=true"])
    assert (run.done, run.journal.to_json()) == (34, before.journal.to_json())
    assert run.notes == ["train.loss.mask_document_start: token 0 of each document has no weight"]
    assert [_where(run, step).done for step in (34, 35)] == [True, False]
    assert _where(run, 100, rank=2).rank == (2, 3, 2)
    seen = [one for number in range(30) for one in _when(run, "plain", document=number).documents[0].seen]
    assert {one.done for one in seen} == {True, False}
    assert all(one.done == (one.step <= 34) for one in seen)

    # With as many tokens as before, which the journal does not tell from the old ones.
    made = {name: dataset.fingerprint for name, dataset in run.datasets.items()}
    trained_on = made | {"gz": "0123", "gone": "4567"}
    storage.put_json(path / "state.json", {"layout": {}, "fingerprints": {"data": trained_on}})
    (note,) = open_view(folder).warnings
    assert (
        f"gz/train was made again: the newest checkpoint was trained on fingerprint 0123, and it has {made['gz']}"
        in note
    )
    storage.put_json(path / "state.json", {"layout": {}, "fingerprints": {"data": made}})
    assert open_view(folder).warnings == []
    (path / "state.json").unlink()
    assert (open_view(folder).warnings, open_view(folder).notes) == ([], [])

    # The run file may have changed since: what was trained stays, what comes is as the review says.
    storage.put_json(path / "state.json", {"layout": {}, "journal": before.journal.to_json()})
    file = folder / "other.yaml"
    file.write_text((folder / "config.yaml").read_text().replace("/nowhere", str(folder)))
    assert (open_view(file).notes, open_view(file).warnings) == ([], [])
    later = open_view(file, ["blend.phases.2.batch_size=4", "train.duration=160 steps"])
    review = make_data_plan(later.config)
    assert (later.journal.fingerprint, later.steps, later.done) == (review.journal, review.steps, 34)
    assert later.warnings == []
    assert later.notes == [
        f"step 35 and later ones are planned from the run file, which has changed since {folder}/journal.json was "
        "written; a training process that is running now still uses the latter"
    ]
    assert _where(later, 90).shown == _where(run, 90).shown
    assert (len(_where(later, 91).shown), len(_where(run, 91).shown)) == (4, 5)
    assert next(_where(later, 91).lines()).startswith("step 91 of 160: ")

    # Steps since the newest checkpoint, which has 30, will be made again; their journal is still there.
    again = open_view(file, ["blend.phases.0.until=32 steps"])
    review = make_data_plan(again.config)
    assert (again.journal.fingerprint, again.steps, again.done) == (review.journal, review.steps, 30)
    (warning,) = again.warnings
    assert warning.startswith("steps 31 to 34, made since the newest checkpoint, will be made again as the run file")
    assert [_where(again, step).done for step in (34, 35)] == [True, False]
    assert _where(again, 34).shown == _where(run, 34).shown
    assert next(_where(again, 34).lines()).endswith(f"with other data; this is by {folder}/journal.json")
    assert all(one.done == (one.step <= 30) for one in _when(again, "gz", document=3).documents[0].seen)

    # A spike in one of them is passed over then.
    spike = ["blend.skip=[{steps: 33}]"]
    storage.put_json(folder / "journal.json", open_view(file, ["blend.skip=[]", "run.dir=/nowhere"]).journal.to_json())
    storage.put_json(path / "state.json", {"layout": {}, "journal": json.loads((folder / "journal.json").read_text())})
    again = open_view(file, spike)
    assert again.journal.fingerprint == make_data_plan(again.config).journal
    assert [again.journal.is_skipped(step) for step in (31, 32, 33)] == [False, True, False]
    assert (again.done, _where(again, 33).done, _where(again, 33).skipped) == (30, True, False)
    storage.put_json(folder / "journal.json", before.journal.to_json())

    refused = open_view(file, ["train.sequence_length=60"])
    (warning,) = refused.warnings
    assert warning.startswith(f"answered by {folder}/journal.json: the run file now gives other data")
    assert (refused.journal.to_json(), refused.done) == (before.journal.to_json(), 34)
    for answer in (_where(refused, 100), _when(refused, "gz", document=3)):
        assert next(answer.lines()) == f"note: {warning}"
        assert answer.json["notes"] == [warning, *answer.notes]

    other = json.loads((folder / "journal.json").read_text())
    other["segments"][0]["sources"]["gz"]["tokens"] += 1
    storage.put_json(folder / "journal.json", other)
    with pytest.raises(UserError, match=r"gz/train is not the dataset that the run was started with"):
        open_view(folder)
    storage.put_json(folder / "journal.json", other | {"order_version": 2})
    with pytest.raises(UserError, match=f"(?s)^{folder}/journal.json: the journal of the run is damaged, .*training"):
        open_view(folder)
    with pytest.raises(UserError, match="is not a run folder: it has no config.yaml"):
        open_view(tmp_path)


def test_datasets_of_others(root: Path, tmp_path: Path) -> None:
    """A dataset made for another run, whose files are gone; adopted files; one with nothing beside it."""
    made = root / "run" / "data"
    merge(made / "text" / "train", tmp_path / "old" / "words")
    tokenizer = made / "text" / "train" / "tokenizer.json"
    adopt([tmp_path / "old"], tmp_path / "adopted", tokenizer=tokenizer)
    for name in ("gz", "pq"):
        shutil.copytree(made / name, tmp_path / name)
    plan = tmp_path / "gz" / "plan.json"
    plan.write_text(plan.read_text().replace("c.jsonl.gz", "gone.jsonl.gz"))
    (tmp_path / "pq" / "plan.json").unlink()
    sources = [
        {"name": "others", "dataset": str(tmp_path / "gz")},
        {"name": "old", "dataset": str(tmp_path / "adopted")},
        {"name": "bare", "dataset": str(tmp_path / "pq")},
    ]
    config = make_config(tmp_path, sources, tokenizer={"path": str(tokenizer)})
    (tmp_path / "run.yaml").write_text(dump(config))
    run = open_view(tmp_path / "run.yaml", ["train.duration=40 steps", "train.batch_size=8"])
    answers = [_where(run, step) for step in range(1, 41)]
    pieces = defaultdict(list)
    for answer in answers:
        for sample in answer.shown:
            pieces[sample.source] += sample.pieces
        assert list(answer.lines())
    documents = {piece.about.document for piece in pieces["old"]}
    assert {str(piece.about.origin) for piece in pieces["old"]} == {
        f"{tmp_path}/old/words: document {n}" for n in documents
    }
    assert {piece.about.id for piece in pieces["old"]} == {f"words#{n}" for n in documents}
    assert {piece.about.origin for piece in pieces["bare"]} == {None}
    notes = {piece.about.origin.note for piece in pieces["others"] if piece.about.origin}
    assert any("gone.jsonl.gz" in note for note in notes)
    (times,) = _when(run, "old", row="words:3").documents
    assert times.about.id == "words#3"
    with pytest.raises(UserError, match="no file beside .* says what it was made from; use --document N"):
        _when(run, "bare", row="e.parquet:3")


def test_the_commands(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As users run them."""

    def said(*arguments: object) -> str:
        app([str(argument) for argument in ("data", *arguments)], standalone_mode=False)
        return capfd.readouterr().out

    file = root / "run.yaml"
    lines = said("where", file, "train.duration=20 steps", "--step", 20).splitlines()
    assert lines == list(_where(open_view(file, ["train.duration=20 steps"]), 20).lines())
    assert lines[0].startswith("step 20 of 20: samples 38 to 39, ") and lines[0].endswith("of the run; not yet trained")
    value = json.loads(said("where", file, "--step", 40, "--rank", 0, "--ranks", 2, "--json"))
    sample = value["samples"][0]
    assert sample["documents"][0]["tokens"] and value["micro_batch_size"] == 2
    whole = json.loads(said("where", file, "--step", 40, "--json"))
    assert [one["sample"] for one in whole["samples"]] == list(range(whole["first_sample"], whole["end_sample"]))
    for one in whole["samples"]:  # both ranges are half-open; of a window all tokens but the first are targets
        count = {
            name: sum(end - first for first, end in (d[name] for d in one["documents"]))
            for name in ("tokens", "targets")
        }
        assert count["tokens"] == count["targets"] + 1
    asked = ("--source", sample["source"], "--document", sample["documents"][0]["document"])
    times = json.loads(said("when", file, *asked, "--json"))["documents"][0]["seen"]
    assert any(one["step"] == 40 and one["sample"] == sample["sample"] for one in times)


_ASK = """
import sys
from pipeline.cli.main import app, main
run = sys.argv[3]
app(["data", "where", run, "--step", "3"], standalone_mode=False)
app(["data", "when", run, "--source", "plain", "--document", "3"], standalone_mode=False)
print({"torch", "pyarrow"} & set(sys.modules))
main()
"""


def test_nothing_heavy_is_imported(root: Path) -> None:
    """torch takes seconds. The last command is one that is refused."""
    last = ("data", "when", root / "run.yaml", "--source", "plain", "--doc", "nobody")
    found = subprocess.run([sys.executable, "-c", _ASK, *last], capture_output=True, text=True, check=False)
    assert found.stdout.splitlines()[-1] == "set()"
    assert found.returncode == 2 and "no document of source 'plain' has the id 'nobody'" in found.stderr


def test_the_plan_is_that_of_the_journal(run: RunView) -> None:
    assert run.journal == plan_journal(run.config, open_datasets(run.config, "train"))
    assert len(run.journal.segments) == 5
