"""Places of documents in their files: every one compared with the record that is there, read by other means."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.manifest import REPAIR
from pipeline.data.datasets.merge import merge
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.adopted_location import open_origins
from pipeline.data.provenance.document_search import documents_of_record, documents_with_id, hash_of_id
from pipeline.data.provenance.inspect import inspect
from pipeline.data.provenance.source_location import Origin, Origins
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests import tiers
from tests.data import mixed
from tests.data.runs import make_config

SPLITS = ("train", "heldout")
Places = dict[tuple[str, int | None], tuple[str, str]]
"""(path, line or row) -> (id, text) of every good record."""


def _lines(path: Path, data: bytes) -> Places:
    found: Places = {}
    byte = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        start, byte = byte, byte + len(line)
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except ValueError:
            continue
        if isinstance(record.get("text"), str) and record["text"]:
            found[str(path), number] = str(record.get("id", f"{path.name}@{start}")), record["text"]
    return found


def _rows(path: Path, table: pa.Table, key: str = "body") -> Places:
    rows = enumerate(table.to_pylist())
    return {(str(path), n): (row["id"] or f"{path.name}#{n}", row[key]) for n, row in rows if row[key]}


def _write(root: Path) -> dict[str, tuple[dict[str, Any], Places]]:
    """Files of sources of all kinds: their entries in the run file, and what is in them."""
    mixed.write(root)
    # Sound lines only, so that their numbers need no second look; files are cut into several units.
    made = mixed.records(100, 9)
    made = [record for record in made if record["text"]]
    (root / "sound.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
    # Blank lines of all kinds, at the beginning and the end, too.
    blank = "\ufeff\n \t\n" + "".join(json.dumps(r) + "\n" + "\r\n" * (i % 5 == 0) for i, r in enumerate(made)) + "\n\n"
    (root / "blank.jsonl").write_text(blank)
    # The last of three members is cut, and what lies before it is there.
    whole_lines = ("\n" + "".join(json.dumps(record) + "\n" for record in made[:60])).encode()
    half = len(whole_lines) // 2
    sound = gzip.compress(whole_lines[:half], mtime=0) + gzip.compress(whole_lines[half:], mtime=0)
    (root / "cut.jsonl.gz").write_bytes(sound + gzip.compress(json.dumps(made[60]).encode())[:-3])
    table = pa.table(
        {
            "id": [str(r["id"]) if "id" in r else None for r in made],
            "body": [r["text"] for r in made],
        }
    )
    damaged = root / "damaged.parquet"
    pq.write_table(
        table, damaged, row_group_size=20, write_page_checksum=True, compression="none", use_dictionary=False
    )
    column = pq.read_metadata(damaged).row_group(2).column(1)
    at = column.data_page_offset + column.total_compressed_size // 2
    data = bytearray(damaged.read_bytes())
    data[at] ^= 255
    damaged.write_bytes(data)
    with pa.OSFile(str(root / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=15)
    kept = {place: record for place, record in _rows(damaged, table).items() if not 40 <= (place[1] or 0) < 60}
    texts = {
        (str(path), None): (str(path.relative_to(root / "text")), path.read_bytes().decode())
        for path in (root / "text").rglob("*.txt")
        if path.stat().st_size and path.name != "latin.txt"
    }

    def lines(name: str) -> Places:
        raw = (root / name).read_bytes()
        return _lines(root / name, gzip.decompress(raw) if name.endswith(".gz") else raw)

    table_file = root / "e.parquet"
    jsonl: dict[str, Any] = {"type": "jsonl"}
    parquet = {"type": "parquet", "text_key": "body"}
    return {
        "sound": (jsonl | {"paths": [f"{root}/sound.jsonl"], "metadata": ["id"]}, lines("sound.jsonl")),
        "blank": (jsonl | {"paths": [f"{root}/blank.jsonl"]}, lines("blank.jsonl")),
        "plain": (jsonl | {"paths": [f"{root}/[ab].jsonl"]}, lines("a.jsonl") | lines("b.jsonl")),
        "gz": (jsonl | {"paths": [f"{root}/c.jsonl.gz"]}, lines("c.jsonl.gz")),
        "cut": (jsonl | {"paths": [f"{root}/cut.jsonl.gz"]}, _lines(root / "cut.jsonl.gz", whole_lines)),
        "pq": (
            parquet | {"paths": [f"{root}/e.parquet"]},
            _rows(table_file, pq.read_table(table_file)),
        ),
        "damaged": (parquet | {"paths": [str(damaged)]}, kept),
        "arrow": (
            {"type": "arrow", "text_key": "body", "paths": [f"{root}/stream.arrow"]},
            _rows(root / "stream.arrow", table),
        ),
        "text": ({"paths": [f"{root}/text/**/*.txt"]}, texts),
    }


Made = tuple[Config, dict[str, Places]]
"""A run, and what is in the files of its sources."""


def _make(root: Path, shuffle: str, only: set[str] | None = None) -> Made:
    written = {name: value for name, value in _write(root / "corpus").items() if only is None or name in only}
    settings = {"unit_bytes": 16000, "max_error_rate": 0.5, "max_document_bytes": 3000, "shuffle": shuffle}
    settings["on_damaged_file"] = "keep"
    config = make_config(root, [value | {"name": name} for name, (value, _) in written.items()], preprocess=settings)
    preprocess(config)
    return config, {name: places for name, (_, places) in written.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run with sources of all kinds."""
    return _make(tmp_path_factory.mktemp("unit"), "unit")


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run whose documents are shuffled over all units."""
    return _make(tmp_path_factory.mktemp("global"), "global", {"blank", "pq"})


def _opened(config: Config, source: str) -> Iterator[tuple[Dataset, Origins]]:
    for split in SPLITS:
        dataset = Dataset.open(config.data_dir / source / split)
        origins = open_origins(dataset.folder, dataset.manifest)
        assert isinstance(origins, Origins)
        yield dataset, origins


def _number(origin: Origin) -> tuple[str, int | None]:
    assert origin.file is not None
    return origin.file, origin.number


@pytest.mark.parametrize("run", tiers.first(1, ["made", "shuffled"], rest="guard"))
def test_each_document_is_the_record_at_its_place(run: str, request: pytest.FixtureRequest) -> None:
    config, expected = request.getfixturevalue(run)
    for source, places in expected.items():
        tokenizer = Tokenizer.open(config.data_dir / source / "train")
        found: Places = {}
        for dataset, origins in _opened(config, source):
            records = [dataset.provenance(document) for document in range(dataset.documents)]
            origin_of = origins.places([record[:2] for record in records])
            read = origins.places([record[:2] for record in records], read=True)
            for document, (unit, row, _, id_hash) in enumerate(records):
                start, end = dataset.document_start(document), dataset.document_start(document + 1)
                text = tokenizer.decode(dataset.read(start, end - start - 1))
                origin, again = origin_of[unit, row], read[unit, row]
                assert again.id is not None and hash_of_id(again.id) == id_hash
                assert _number(origin) == _number(again)
                found[_number(origin)] = again.id, text
        assert found == places, source


@pytest.mark.first(1)
@pytest.mark.parametrize("run", ["made", "shuffled"])
def test_a_place_leads_back_to_the_document(run: str, request: pytest.FixtureRequest) -> None:
    config, expected = request.getfixturevalue(run)
    for source, places in expected.items():
        for dataset, origins in _opened(config, source):
            mine = {}
            for document in range(dataset.documents):
                unit, row, _, _ = dataset.provenance(document)
                mine[_number(origins.places([(unit, row)])[unit, row])] = document
            for place, (id, _) in list(places.items())[::11]:
                key = origins.find(*place)
                wanted = [mine[place]] if place in mine else []
                assert documents_of_record(dataset.folder, dataset.manifest, *key) == wanted
                same = [mine[other] for other, (its, _) in places.items() if its == id and other in mine]
                assert documents_with_id(dataset.folder, dataset.manifest, id) == sorted(same)
                assert origins.rejected(key) is None


def test_a_rejected_record_says_why(made: Made) -> None:
    config, _ = made
    for source in config.data.sources:
        path = config.data_dir / source.name / "rejected.jsonl"
        if not path.exists():
            continue
        _, (_, origins) = list(_opened(config, source.name))
        for record in map(json.loads, path.read_text().splitlines()):
            number = record["line"] if source.type == "jsonl" else None if source.type == "text" else record["byte"]
            key = origins.find(record["file"], number)
            assert key == (record["unit"], record["row"])
            assert (origins.rejected(key) or "").startswith(record["reason"])


def test_places_that_hold_nothing(made: Made) -> None:
    config, _ = made
    (_, lines), _ = _opened(config, "plain")
    (_, table), _ = _opened(config, "damaged")
    (_, texts), _ = _opened(config, "text")
    with pytest.raises(UserError, match=r"line 6 of .*a\.jsonl holds no record: it is blank"):
        lines.find("a.jsonl", 6)
    with pytest.raises(UserError, match=r"had 63 lines when it was read, so it has no line 64"):
        lines.find("a.jsonl", 64)
    with pytest.raises(UserError, match=r"lines are counted from 1"):
        lines.find("a.jsonl", 0)
    with pytest.raises(UserError, match=r"say which line of .*a\.jsonl"):
        lines.find("a.jsonl", None)
    with pytest.raises(UserError, match=r"c\.jsonl is not one of the files that .*plain was made from: .*a\.jsonl, "):
        lines.find("c.jsonl", 1)
    with pytest.raises(UserError, match=r"row 45 of .* holds no record: the file was damaged"):
        table.find("damaged.parquet", 45)
    with pytest.raises(UserError, match=r"is one document: name it without a number"):
        texts.find("0000.txt", 3)
    assert texts.find("0000.txt", None) == texts.find("0/0000.txt", None)


def test_without_source_files_or_receipts(made: Made, tmp_path: Path) -> None:
    config, expected = made
    for name in ("sound", "blank"):
        shutil.copytree(config.data_dir / name, tmp_path / name)
        plan = (tmp_path / name / "plan.json").read_text()
        (tmp_path / name / "plan.json").write_text(plan.replace(f"/{name}.jsonl", f"/gone/{name}.jsonl"))
        dataset = Dataset.open(tmp_path / name / "train")
        origins = open_origins(dataset.folder, dataset.manifest)
        assert isinstance(origins, Origins)
        keys = [dataset.provenance(document)[:2] for document in range(dataset.documents)]
        places = origins.places(keys)
        lines = {place.number for place in places.values()}
        if name == "sound":  # the receipts say everything
            assert lines <= {line for _, line in expected[name]}
            assert len(lines) == dataset.documents
        else:
            assert None in lines
            assert all(("No such file" in place.note) == (place.number is None) for place in places.values())
        for receipt in (tmp_path / name / "receipts").rglob("0*.json"):
            receipt.unlink()
        without = Origins(tmp_path / name)
        assert str(without.places(keys[:1])[keys[0]]) == "(its receipt is missing)"
        with pytest.raises(UserError, match="receipts of .* are missing") as error:
            without.find(f"{name}.jsonl", 3)
        assert REPAIR in str(error.value)


def test_a_file_that_has_changed(made: Made, tmp_path: Path) -> None:
    """Its lines are other ones now. What the receipts say of those it had is right all the same."""
    config, expected = made
    shutil.copytree(config.data_dir / "blank", tmp_path / "blank")
    file = tmp_path / "blank.jsonl"
    (old,) = {path for path, _ in expected["blank"]}
    file.write_bytes(b"\n" + Path(old).read_bytes())
    plan = tmp_path / "blank" / "plan.json"
    plan.write_text(plan.read_text().replace(old, str(file)))
    dataset = Dataset.open(tmp_path / "blank" / "train")
    origins = open_origins(dataset.folder, dataset.manifest)
    assert isinstance(origins, Origins)
    keys = [dataset.provenance(document)[:2] for document in range(dataset.documents)]
    places = origins.places(keys, read=True).values()
    note = f"{file} has changed: it had {file.stat().st_size - 1:,} bytes when it was read first, now "
    assert all(note in place.note and place.id is None for place in places)
    assert None in {place.number for place in places}
    assert {place.number for place in places} <= {line for _, line in expected["blank"]} | {None}
    with pytest.raises(UserError, match="has changed"):
        origins.find(str(file), 10)


def test_adopted_files(made: Made, tmp_path: Path) -> None:
    config, _ = made
    for name in ("sound", "text"):
        merge(config.data_dir / name / "train", tmp_path / "old" / name)
    tokenizer = config.data_dir / "sound" / "train" / "tokenizer.json"
    folder = adopt([tmp_path / "old"], tmp_path / "new", tokenizer=tokenizer).folder
    dataset = Dataset.open(folder / "train")
    origins = open_origins(dataset.folder, dataset.manifest)
    assert origins is not None
    first = Dataset.open(config.data_dir / "sound" / "train").documents
    for document in range(dataset.documents):
        unit, row, _, id_hash = dataset.provenance(document)
        name, own = ("sound", document) if document < first else ("text", document - first)
        place = origins.places([(unit, row)])[unit, row]
        assert str(place) == f"{tmp_path}/old/{name}: document {own}"
        assert place.id is not None and hash_of_id(place.id) == id_hash
        assert origins.find(f"{tmp_path}/old/{name}.bin", own) == origins.find(name, own) == (unit, row)
        assert documents_of_record(dataset.folder, dataset.manifest, unit, row) == [document]
        assert documents_with_id(dataset.folder, dataset.manifest, place.id) == [document]
    with pytest.raises(UserError, match="not one of the files that .* adopted: sound, text"):
        origins.find("other", 1)


def test_a_cut_prov_file_is_named(made: Made, tmp_path: Path) -> None:
    config, _ = made
    shutil.copytree(config.data_dir / "sound", tmp_path / "sound")
    dataset = Dataset.open(tmp_path / "sound" / "train")
    path = next(path for path in sorted((tmp_path / "sound" / "train").rglob("*.prov")) if path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-24])
    with pytest.raises(UserError, match=f"{path.name} is truncated"):
        documents_with_id(dataset.folder, dataset.manifest, "x")
    path.unlink()
    with pytest.raises(UserError, match=f"{path.name} is missing"):
        documents_with_id(dataset.folder, dataset.manifest, "x")


def test_inspect_shows_places(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    config, expected = made
    for source in ("blank", "pq", "text"):
        folder = config.data_dir / source / "train"
        inspect(folder, documents=2)
        shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("document ")]
        dataset = Dataset.open(folder)
        for document, line in enumerate(shown):
            unit, row, _, _ = dataset.provenance(document)
            origins = open_origins(folder, dataset.manifest)
            assert origins is not None
            place = str(origins.places([(unit, row)])[unit, row])
            row_of_unit = "" if source == "text" else f", row {row} of unit {unit}"
            assert line.endswith(f", {place}{row_of_unit}")
            assert any(place.startswith(path) for path, _ in expected[source])
