"""`data why` against the reasons that documents were made for, and against the source files."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.cli.main import main
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.root import Config
from pipeline.data.curate.stage import curate
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.document_search import records_with_id
from pipeline.data.provenance.document_to_steps import when
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.source_location import Origins
from pipeline.data.provenance.why_removed import CurationView, removed_note, why
from pipeline.data.provenance.why_show import Edits, FiredRule, Why
from tests.data.provenance.curated import curated_config, records, records_with

RULES = {
    "short": "gopher_quality.min_words",
    "near": "duplicates.near",
    "brackets": "c4.max_curly_brackets",
    "hostile": "gopher_quality.min_words",
}


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = curated_config(tmp_path_factory.mktemp("why"))
    curate(config)
    return config


def ask(config: Config, document: str, **options: Any) -> Why:
    return why(config, "web", document, say=lambda _: None, **options)


EQUAL = ("good-3", "exact")
"""Of which a keyed hash chooses the one that stays."""


@pytest.mark.parametrize("record", [record["id"] for record in records() if record["id"] not in EQUAL])
def test_every_document_has_the_reason_that_it_was_made_for(curated: Config, record: str) -> None:
    found = ask(curated, record)
    expected = RULES.get(record)
    assert (found.first.name if found.first else None) == expected
    assert found.state == ("kept" if expected is None else "removed")
    assert found.id == record and found.agrees and found.checks
    assert found.is_only_rule == (expected is not None and not found.others)


def test_an_id_is_found_without_reading_all_files(curated: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    curation = curated.data_dir / "web" / "curate"
    read: list[str] = []
    original = Origins.read
    monkeypatch.setattr(Origins, "read", lambda *args, **more: read.append(str(args[1])) or original(*args, **more))
    said: list[str] = []
    keys = {}
    for record in records():
        (key,) = records_with_id(curation, record["id"]) or []
        keys[record["id"]] = key
        assert CurationView(curated, "web", said.append).find(record["id"]) == key
    assert len(set(keys.values())) == len(keys) == len(read) and not said
    # A record that is no document has no id; the hash of another id finds nothing.
    assert records_with_id(curation, "broken") == records_with_id(curation, "") == []
    with pytest.raises(UserError, match="nor the id of one of its documents"):
        CurationView(curated, "web", said.append).find("nobody")


def test_measures_of_earlier_versions_have_no_ids(tmp_path: Path) -> None:
    config = curated_config(tmp_path)
    curate(config)
    folder = config.data_dir / "web" / "curate"
    for path in (folder / "receipts").rglob("*.json"):
        receipt = orjson.loads(path.read_bytes())
        del receipt["files"]["ids"]
        path.write_bytes(orjson.dumps(receipt))
    for path in (folder / "measured").rglob("*.ids"):
        path.unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert records_with_id(folder, "short") is None
    said: list[str] = []
    assert why(config, "web", "short", say=said.append).id == "short"
    assert any("ids are stored nowhere" in each for each in said)
    # They stay valid; one that is damaged is made again, and has ids from then on.
    curate(config)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    first = sorted((folder / "measured").rglob("*.measures"))[0]
    first.unlink()
    curate(config)
    assert {path: path.read_bytes() for path in before if path.suffix != ".json" or "receipts" not in path.parts} == {
        path: content for path, content in before.items() if path.suffix != ".json" or "receipts" not in path.parts
    }


def test_by_id_place_and_row_it_is_the_same(curated: Config, tmp_path: Path) -> None:
    by_id = ask(curated, "short")
    assert by_id.origin.file is not None and by_id.origin.number is not None
    by_place = ask(curated, f"{by_id.origin.file}:{by_id.origin.number}")
    by_row = ask(curated, f"{by_id.unit}:{by_id.row}")
    assert by_id.json == by_place.json == by_row.json
    line = Path(by_id.origin.file).read_bytes().splitlines()[by_id.origin.number - 1]
    assert orjson.loads(line)["id"] == "short"


def test_rule_value_bound_and_how_to_keep_it(curated: Config) -> None:
    found = ask(curated, "short").json
    assert (
        found["rule"].items()
        >= {
            "name": "gopher_quality.min_words",
            "key": "data.curate.rules.gopher_quality.min_words",
            "value": 6.0,
            "bound": 20,
            "to_keep": "data.curate.rules.gopher_quality.min_words at most 6",
        }.items()
    )
    shown = "\n".join(ask(curated, "short").lines())
    assert "removed by gopher_quality.min_words" in shown and "kept with" in shown


def test_all_other_rules_that_fire(curated: Config) -> None:
    found = ask(curated, "hostile")
    assert {"gopher_quality.min_stop_words"} <= {rule.name for rule in found.others}
    assert all(rule.name in "\n".join(found.lines()) for rule in found.others)


def test_a_duplicate_names_the_kept_document(curated: Config) -> None:
    one, other = sorted((ask(curated, each) for each in EQUAL), key=lambda found: found.state)
    assert (one.state, other.state) == ("kept", "removed") and one.agrees and other.agrees
    assert other.kept is not None and other.kept.id == one.id and other.kept.source == "web"
    assert other.first is not None and other.first.name == "duplicates.exact"
    near = ask(curated, "near", text=True)
    assert near.kept is not None and near.kept.id == "long-5" and near.first is not None
    assert 0.7 <= near.first.value < 1
    # Shingles of the two texts, which have no marks but full stops: counted with sets of words.
    texts = [re.findall("[a-z]+", str(each).lower()) for each in (near.text, near.kept.text)]
    one, two = ({tuple(words[at : at + 5]) for at in range(len(words) - 4)} for words in texts)
    assert near.kept.jaccard == pytest.approx(len(one & two) / len(one | two))
    assert near.first.value == pytest.approx(near.kept.jaccard)
    assert near.kept.estimate is not None and 0 < abs(near.kept.jaccard - near.kept.estimate) < 0.15
    assert ask(curated, f"{near.kept.unit}:{near.kept.row}").state == "kept"
    assert any(check.name == "duplicates.near" for check in near.checks)
    shown = "\n".join(near.lines())
    assert "kept instead: web" in shown and "this document" in shown and "port" in shown and "harbour" in shown


def test_the_cluster_of_a_document_is_that_of_its_keeper(curated: Config) -> None:
    kept, removed = sorted((ask(curated, each, cluster=True) for each in EQUAL), key=lambda found: found.state)
    assert removed.members == kept.members and removed.members is not None
    assert [(one.unit, one.row) for one in removed.members] == [(removed.unit, removed.row)]
    assert ask(curated, "good-1", cluster=True).members == []


def test_edits_of_a_kept_document(curated: Config) -> None:
    found = ask(curated, "masked", text=True)
    assert found.edits is not None and len(found.edits.changed) == 1
    _, before, after = found.edits.changed[0]
    assert "someone@mail.example.org" in before and re.search("<email:[0-9a-f]+>", after)
    assert found.text is not None and "someone@" not in found.text


@pytest.mark.guard
def test_lines_that_stay_in_another_document(tmp_path: Path) -> None:
    footer = "All of the rights to that are reserved, and have been."
    lines = {"lines": {"min_bytes": 20, "min_count": 6}}
    config = curated_config(tmp_path, {"duplicates": lines}, "\n" + footer)
    curate(config)
    view = CurationView(config, "web", say=lambda _: None)
    edits = [view.explain(view.find(f"good-{number}")).edits for number in range(10)]
    repeated = [each.repeated for each in edits if each is not None]
    assert sorted(repeated) == [[], *[[(13, footer)]] * 9]


def test_a_rejected_record(curated: Config) -> None:
    file = next(Path(curated.data_dir).parent.glob("web/part-0.jsonl"))
    found = ask(curated, f"{file}:10")
    assert found.state == "rejected" and found.rejected and "broken" in found.rejected
    assert any(line.startswith("rejected: ") for line in found.lines())
    with pytest.raises(UserError, match="blank"):
        ask(curated, f"{file}:5")


def test_all_rows_together_are_the_counts_of_the_report(curated: Config) -> None:
    folder = Path(curated.data_dir) / "web/curate"
    about = orjson.loads((folder / "curation.json").read_bytes())
    report = orjson.loads((folder / "decisions" / about["decide_hash"][:16] / "report.json").read_bytes())
    states: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    unit = row = 0
    view = CurationView(curated, "web", say=lambda _: None)
    while True:
        try:
            found = view.explain((unit, row))
        except UserError:
            if not row:
                break
            unit, row = unit + 1, 0
            continue
        assert found.agrees
        states[found.state] += 1
        if found.first is not None:
            rules[found.first.name] += 1
        row += 1
    funnel = report["funnel"]
    assert states["rejected"] == funnel["rejected"] == about["rejected"] == 1
    assert states["kept"] == funnel["kept"] == about["kept"]
    assert {rule["name"]: rule["first"] for rule in report["rules"] if rule["first"]} == dict(rules)
    assert states.total() == funnel["rows"] == len(records()) + 1
    assert {name: count for name, count in about["removed"].items() if count} == dict(rules)


def test_nothing_commands_the_terminal(curated: Config) -> None:
    for options in ({}, {"text": True}):
        shown = "\n".join(ask(curated, "hostile", **options).lines())
        assert not any(sign in shown for sign in ("\x1b", "\u202e", "\r"))


def test_other_bounds_in_the_run_file_are_told(curated: Config, tmp_path: Path) -> None:
    changed = load(Path(curated.data_dir).parent / "run.yaml", ["data.curate.rules.gopher_quality.min_words=25"])
    found = ask(changed, "short")
    assert found.first is not None and found.first.bound == 20 and found.agrees
    assert any("20" in note and "25" in note for note in found.notes)


def test_unknown_documents_and_sources(curated: Config) -> None:
    for document in ("nobody", "part-0.jsonl:9999", "77:0", "0:99999"):
        with pytest.raises(UserError, match="--document"):
            ask(curated, document)
    with pytest.raises(UserError, match="--source"):
        why(curated, "books", "0:0", say=lambda _: None)


@pytest.fixture
def copied(curated: Config, tmp_path: Path) -> Config:
    """The same curation, whose source files may be changed."""
    root = tmp_path / "copy"
    shutil.copytree(Path(curated.data_dir).parent, root)
    for path in root.rglob("plan.json"):
        path.write_text(path.read_text().replace(str(Path(curated.data_dir).parent), str(root)))
    (root / "run.yaml").write_text(
        (root / "run.yaml").read_text().replace(str(Path(curated.data_dir).parent), str(root))
    )
    return load(root / "run.yaml")


def test_a_changed_source_file_is_told(
    copied: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(copied.data_dir).parent
    found = ask(copied, "short")
    assert found.agrees and found.origin.file is not None
    file = Path(found.origin.file)
    words = ["data", "why", str(root / "run.yaml"), "--source", "web", "--document", f"{found.unit}:{found.row}"]
    with monkeypatch.context() as context:
        context.setattr("sys.argv", ["pipeline", *words])
        with pytest.raises(SystemExit, match="0"):
            main()
    file.write_bytes(file.read_bytes().replace(b"sea of words is short", b"seaXof words is short"))
    assert not ask(copied, f"{found.unit}:{found.row}").agrees
    with monkeypatch.context() as context:
        context.setattr("sys.argv", ["pipeline", *words])
        with pytest.raises(SystemExit, match="1"):
            main()
    assert "DIFFERS" in capsys.readouterr().out
    file.write_bytes(file.read_bytes() + b"\n")
    again = ask(copied, f"{found.unit}:{found.row}")
    assert again.first is not None and any("has changed" in note for note in again.notes)


@pytest.mark.guard
def test_observe_says_would_be(tmp_path: Path) -> None:
    config = curated_config(tmp_path, {"mode": "observe"})
    curate(config)
    assert any(line.startswith("would be removed") for line in ask(config, "short").lines())


def test_a_note_for_other_questions(curated: Config) -> None:
    found = ask(curated, "short")
    note = removed_note(curated.data_dir, "web", (found.unit, found.row))
    assert "gopher_quality.min_words" in note and f"--document {found.unit}:{found.row}" in note
    kept = ask(curated, "good-1")
    assert removed_note(curated.data_dir, "web", (kept.unit, kept.row)) == ""
    assert removed_note(curated.data_dir, "elsewhere", (0, 0)) == ""


@pytest.mark.guard
def test_when_says_that_curation_removed_it(tmp_path: Path) -> None:
    config = curated_config(tmp_path)
    curate(config)
    preprocess(config)
    removed, kept = ask(config, "short"), ask(config, "good-1")
    run = open_view(tmp_path / "run.yaml", ())
    places = [f"{Path(each.origin.file or '').name}:{each.origin.number}" for each in (removed, kept)]
    never, seen = (when(run, "web", row=place, say=lambda _: None) for place in places)
    assert "curation removed it by gopher_quality.min_words" in never.never and not never.documents
    assert "data why" in never.never
    assert "curation" not in seen.never
    with pytest.raises(UserError, match="data why"):
        when(run, "web", id="short", say=lambda _: None)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 2 / 3, 0.307971014, 7.0, 3.999999999, 123.4567894])
@pytest.mark.parametrize("keeps", ["min", "max"])
def test_the_bound_that_is_named_keeps_the_document(value: float, keeps: str) -> None:
    other = value + 1 if keeps == "min" else value - 1
    words = FiredRule("preset.rule", "data.curate.key", value, other, keeps, "words").to_keep().split()
    bound = float(words[-1])
    assert bound <= value if keeps == "min" else bound >= value
    assert abs(bound - value) < 2e-6


def test_edits_are_found_line_by_line() -> None:
    edits = Edits.of("one\ntwo\nthree\nfour@x\nfive", "one\nthree\nfour<m>", [2])
    assert edits.removed == [(2, "two"), (5, "five")] and edits.changed == [(4, "four@x", "four<m>")]
    assert edits.repeated == [(3, "four<m>")]
    assert edits.json["repeated"] == [{"line": 3, "text": "four<m>"}]


ITEM = "seven brave sailors counted nine golden lanterns while the tired captain slept beside his broken compass"
FOOTER = "\nAll rights of this page and of all the texts in it are reserved by the owners of it."


@pytest.fixture(scope="module")
def contaminated(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Documents with items of evaluations, one of which is common text."""
    root = tmp_path_factory.mktemp("contaminated")
    (root / "items.txt").write_text(f"{ITEM}{FOOTER}\n")
    items = {"files": [str(root / "items.txt")], "max_documents": 5}
    found = records_with(ITEM, "good-1")
    config = curated_config(root, {"decontaminate": items, "duplicates": {}}, FOOTER, found)
    curate(config)
    return config


class TestContamination:
    def test_ngrams_and_items_of_a_removed_document(self, contaminated: Config) -> None:
        found = ask(contaminated, "good-1")
        assert found.first is not None and found.first.name == "decontaminate"
        counted = [each for each in found.ngrams if not each.common]
        assert len(counted) == found.first.value == len(ITEM.split()) - 12
        assert all(each.items == [{"task": "items.txt", "item": "1"}] and each.text in ITEM for each in counted)
        common = [each for each in found.ngrams if each.common]
        assert {each.items[0]["item"] for each in common} == {"2"}
        assert any(check.name == "decontaminate" for check in found.checks) and found.agrees
        assert "items.txt item 1" in "\n".join(found.lines())
        assert found.json["ngrams"][0].keys() == {"start", "end", "places", "text", "items", "common"}

    def test_common_text_keeps_a_document(self, contaminated: Config) -> None:
        found = ask(contaminated, "good-2")
        assert found.state == "kept" and not found.others
        assert found.ngrams and all(each.common for each in found.ngrams)


def test_a_rejected_record_has_no_language(curated: Config) -> None:
    found = next(each for each in (ask(curated, f"0:{row}") for row in range(12)) if each.state == "rejected")
    assert found.language is None and ", id" not in next(found.lines())


def test_a_unit_that_does_not_exist(curated: Config) -> None:
    with pytest.raises(UserError, match="no unit 77"):
        ask(curated, "77:0")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.875, "d.near.min_similarity at least 0.8751"),
        (102 / 112, "d.near.min_similarity at least 0.9108"),
        (1, "d.near: null"),
    ],
)
def test_a_bound_above_a_similarity(value: float, expected: str) -> None:
    rule = FiredRule("duplicates.near", "d.near.min_similarity", value, 0.7, "max", "similarity")
    assert rule.to_keep() == expected
