"""A format of sources is one class: one that only tests have goes through the whole stage, and back to its files."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.data import DataConfig, SourceConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.provenance.adopted_location import open_origins
from pipeline.data.provenance.document_to_steps import when
from pipeline.data.provenance.run import open_view
from pipeline.data.provenance.source_location import Origins
from pipeline.data.provenance.step_to_documents import where
from pipeline.data.sources.formats import SOURCE_FORMATS
from pipeline.data.tokenization.tokenizer import Tokenizer
from tests.data.reading import check_chain, check_resume, files, units
from tests.data.runs import make_config, text, tree
from tests.data.sources.fortunes import FortuneReader

ROOT = Path(__file__).parents[3]
TYPE = SourceConfig.model_fields["type"]
OURS = get_args(get_args(TYPE.annotation)[0])
"""Names of the `Literal`; the other type is that of the names of plug-ins."""


def test_the_config_lists_the_formats_that_are_registered() -> None:
    assert tuple(SOURCE_FORMATS) == OURS
    assert {name: each.type for name, each in SOURCE_FORMATS.items()} == {name: name for name in SOURCE_FORMATS}


def test_no_module_of_ours_names_the_format_of_the_tests() -> None:
    named = [path for package in ("pipeline", "slurm") for path in (ROOT / package).rglob("*.py")]
    assert [path for path in named if re.search("fortune", path.read_text(encoding="utf-8"), re.IGNORECASE)] == []


def _rebuild() -> None:
    for section in (SourceConfig, DataConfig, Config):
        section.model_rebuild(force=True)


@pytest.fixture
def registered() -> Iterator[None]:
    """The two lines that a new format needs besides its own module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TYPE, "annotation", Literal[(*OURS, FortuneReader.type)] | str)
        patch.setitem(SOURCE_FORMATS, FortuneReader.type, FortuneReader)
        _rebuild()
        yield
    _rebuild()


def _write(folder: Path) -> dict[tuple[str, int], str]:
    """Two files; every good text by its path and first line."""
    chance, texts = random.Random(3), {}
    folder.mkdir()
    for name, count in (("a.txt", 150), ("b.txt", 20)):
        line, path = 1, folder / name
        with path.open("w") as file:
            for number in range(count):
                written = "" if number == 7 else f"{number} of {name}: {text(chance, 30)}\n" * chance.randint(1, 3)
                file.write(f"{written}%\n")
                if written:
                    texts[str(path), line] = written
                line += written.count("\n") + 1
    return texts


@pytest.mark.guard
@pytest.mark.usefixtures("registered")
def test_a_format_in_one_file_goes_through_the_stage(tmp_path: Path) -> None:
    expected = _write(tmp_path / "corpus")
    sources = [{"name": "s", "type": "fortunes", "paths": [f"{tmp_path}/corpus/*.txt"]}]
    config = make_config(tmp_path, sources, heldout=0, preprocess={"unit_bytes": 4000})
    reader = FortuneReader("text", "id")
    for unit in units(files(f"{tmp_path}/corpus/*.txt", type="fortunes"), reader):
        check_resume(unit, reader)
        check_chain(unit, reader, 7)
    preprocess(config)

    # Resumed in the middle of a unit: all but its first links are made again, and equal.
    folder = config.data_dir / "s"
    made = tree(folder)
    later = [name for name in made if re.search(r"receipts/.*\.json$", name) and json.loads(made[name])["link"] > 0]
    assert len(later) > 3
    for name in later:
        (folder / name).unlink()
    preprocess(config)
    assert tree(folder) == made

    # Every document is the text at its place, and the place leads back.
    dataset, tokenizer = Dataset.open(folder / "train"), Tokenizer.open(folder / "train")
    origins = open_origins(dataset.folder, dataset.manifest)
    assert isinstance(origins, Origins) and origins.id_key is None
    keys = [dataset.provenance(document)[:2] for document in range(dataset.documents)]
    places = origins.places(keys)
    found = {}
    for document, key in enumerate(keys):
        file, number = places[key].file, places[key].number
        assert file is not None and number is not None
        start, end = dataset.document_start(document), dataset.document_start(document + 1)
        found[file, number] = tokenizer.decode(dataset.read(start, end - start - 1))
        assert origins.find(file, number) == key
    assert found == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(SOURCE_FORMATS, FortuneReader.type)
        with pytest.raises(UserError, match="type 'fortunes' is not one of text, html, jsonl, "):
            Origins(folder).places(keys[:1])

    # `data where` and `data when`.
    run = tmp_path / "run.yaml"
    run.write_text(config.model_dump_json())
    sample = where(open_view(run), 1, rank=None, ranks=None, ids=True, say=print).json["samples"][0]
    for about in sample["documents"]:
        shown = expected[about["file"], about["file_line"]]
        assert " ".join(about["text"].split()).removesuffix("…")[:20] in " ".join(shown.split())
        row = f"{about['file']}:{about['file_line']}"
        (again,) = when(open_view(run), "s", id=None, document=None, row=row, ids=False, say=print).json["documents"]
        assert (again["document"], again["id"]) == (about["document"], about["id"])
