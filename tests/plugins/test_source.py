"""A source of another package: read, resumed, cut off, preprocessed by workers, grown, located and verified."""

from __future__ import annotations

import gzip
import json
import random
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock
from xml.sax.saxutils import escape, quoteattr

import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.adopted_location import open_origins
from pipeline.data.provenance.document_to_steps import when
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.step_to_documents import where
from pipeline.data.sources.formats import planned_reader, source_format
from pipeline.data.sources.reader import UnitReader
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.verify.command import verify_all
from tests.data.reading import check_chain, check_resume, units
from tests.data.runs import make_config, text, tree
from tests.plugins.installed import installed


@pytest.fixture(autouse=True)
def example(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path / "installed"):
        yield


def write(path: Path, documents: int, seed: int = 0) -> Path:
    """A dump with some noise between its elements, and an empty one."""
    chance, lines = random.Random(seed), ["<dump>"]
    for number in range(documents):
        about = f"id={quoteattr(f'{path.stem}-{number}')} title={quoteattr(f'<{number}> & more')}"
        body = (
            "" if number == 3 else escape(text(chance, chance.randint(1, 40)) + "\nsecond line").replace("\n\n", "\n")
        )
        lines += [f"<page {about}>", *body.splitlines(), "</page>", *chance.choice([[], ["", "<!-- noise -->"]])]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, "</dump>"]) + "\n")
    return path


def expected(path: Path) -> dict[str, str]:
    """Texts by id, as Python's parser of XML has them; an empty one is left out."""
    pages = {page.attrib["id"]: (page.text or "").strip("\n") for page in ET.parse(path).getroot().iter("page")}
    return {id: text for id, text in pages.items() if text}


def source(path: Path, **keys: Any) -> dict[str, Any]:
    return {
        "name": "s",
        "type": "example.xml",
        "paths": [str(path / "*.xml*")],
        "options": {"tag": "page"},
        "metadata": ["title"],
        **keys,
    }


def reader_of(config: Config) -> Any:
    found = source_format("example.xml").from_config(config.data.sources[0])
    return found.find(config.data.sources[0].paths, [], "data.sources.0", dict)


def test_it_reads_what_a_parser_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "a.xml", 40)
    reader, files = reader_of(make_config(tmp_path, [source(tmp_path)]))
    (unit,) = units(files, reader)
    documents = check_resume(unit, reader)
    check_chain(unit, reader, 7)
    assert {each.id: each.text for each in documents if each.reason is None} == expected(path)
    lines = path.read_text().splitlines()
    for each in documents:
        assert f'id="{each.id}"' in lines[each.line] and json.loads(each.metadata)["title"].endswith("> & more")
    # A compressed file that is cut off gives what is before, and says what is lost.
    whole = gzip.compress(path.read_bytes())
    (tmp_path / "b.xml.gz").write_bytes(gzip.compress(path.read_bytes()) + whole[: len(whole) // 2])
    last = max(number for number, line in enumerate(lines) if line == "</page>")
    path.write_text("\n".join(lines[:last]) + "\n")  # the last element has no end
    reader, files = reader_of(make_config(tmp_path, [source(tmp_path)]))
    (unit,) = units(files, reader)
    through = UnitReader(unit, reader)
    ids = [each.id for each in documents if each.reason is None]
    assert [each.id for each in through if each.reason is None] == [*ids[:-1], *ids]
    assert [each.reason for each in through.damage] == ["truncated XML file", "truncated gzip file"]


def test_a_plan_that_does_not_fit_is_refused() -> None:
    plan = {"type": "example.xml", "metadata": [], "plugin": {"distribution": "example-plugins", "version": "1.0"}}
    assert planned_reader(Path("plan.json"), plan | {"options": {"tag": "a"}}).options.tag == "a"
    for change, message in (
        ({"options": {"tags": "a"}}, "options.tags: Extra inputs are not permitted; the plug-in example.xml has other"),
        ({"options": 3}, "plan.json: options: "),
        ({"plugin": None}, "read with another package, and example-plugins==1.0 is installed"),
        ({"type": "other.xml"}, "plan.json: type 'other.xml': no installed package has this plug-in"),
    ):
        with pytest.raises(UserError, match=message):
            planned_reader(Path("plan.json"), plan | change)


@pytest.mark.guard
def test_it_goes_through_the_stage_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "corpus"
    texts = expected(write(corpus / "a.xml", 120, 1)) | expected(write(corpus / "b.xml", 30, 2))
    config = make_config(tmp_path, [source(corpus)], heldout=0, preprocess={"unit_bytes": 4000, "workers": 2})
    preprocess(config)
    folder = config.data_dir / "s"
    settings = json.loads((folder / "plan.json").read_text())["settings"]
    assert settings["plugin"] == {"distribution": "example-plugins", "version": "1.0"}
    assert settings["options"] == {"tag": "page"}

    # Resumed in the middle of a unit, with one worker: all is made again, and equal.
    made = tree(folder)
    later = [name for name in made if "receipts/" in name and '"link":2' in made[name].decode().replace(" ", "")]
    assert later
    for name in later:
        (folder / name).unlink()
    preprocess(config)
    assert tree(folder) == made

    # Every document is the text at its place, and the place leads back.
    dataset, tokenizer = Dataset.open(folder / "train"), Tokenizer.open(folder / "train")
    origins: Any = open_origins(dataset.folder, dataset.manifest)
    keys = [dataset.provenance(document)[:2] for document in range(dataset.documents)]
    places, found = origins.places(keys), {}
    for document, key in enumerate(keys):
        start, end = dataset.document_start(document), dataset.document_start(document + 1)
        line = Path(places[key].file).read_text().splitlines()[places[key].number - 1]
        found[line.split('"')[1]] = tokenizer.decode(dataset.read(start, end - start - 1))
        assert origins.find(places[key].file, places[key].number) == key
    assert found == texts

    # A damaged part is made again.
    part = next(path for path in sorted((folder / "train").rglob("*.bin")) if path.name != "parts.bin")
    part.write_bytes(bytes(len(part.read_bytes())))
    console = Console(file=StringIO())
    assert not verify_all(folder, (), console)
    verify_all(folder, (), console, repairs=True)
    assert verify_all(folder, (), console) and tree(folder / "train") == {
        name.removeprefix("train/"): made[name] for name in made if name.startswith("train/")
    }

    # `data where` and `data when`.
    run = tmp_path / "run.yaml"
    run.write_text(config.model_dump_json())
    sample = where(open_view(run), 1, rank=None, ranks=None, ids=True, say=print).json["samples"][0]
    for about in sample["documents"]:
        assert about["id"] in texts
        (again,) = when(open_view(run), "s", id=about["id"], document=None, row=None, ids=False, say=print).json[
            "documents"
        ]
        assert again["document"] == about["document"]

    # A preview reads a sample of it.
    preprocess(make_config(tmp_path, [source(corpus)], dir=tmp_path / "elsewhere"), dry_run=True)
    shown = capsys.readouterr().out
    assert "Estimated from" in shown and "would be refused" not in shown

    # More files are appended by `--grow`; another version, or none, does not touch the folder.
    write(corpus / "c.xml", 20, 3)
    preprocess(config, grow=True)
    assert Dataset.open(folder / "train").documents == len(texts) + len(expected(corpus / "c.xml"))
    grown = tree(folder)
    shutil.rmtree(tmp_path / "installed")
    with installed(tmp_path / "newer", version="1.1"):
        with pytest.raises(UserError, match=r"plug-in: .*'1.0'.* then, .*'1.1'.* now"):
            preprocess(config)
        with pytest.raises(UserError, match=r"read with example-plugins==1.0, and example-plugins==1.1 is"):
            open_origins(dataset.folder, Dataset.open(folder / "train").manifest).places(keys[:1])  # type: ignore[union-attr]
    with mock.patch.object(sys, "path", sys.path[2:]), pytest.raises(UserError, match="no installed package has"):
        preprocess(config)
    assert tree(folder) == grown
