"""The corpora that ship: a run file may include several, and each reads files of the published form."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
import zstandard

from pipeline.common.errors import UserError
from pipeline.config.load import load, packaged_configs
from pipeline.config.root import Config
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources.reader import UnitReader
from pipeline.data.work.units import cut_units, find_source_files
from tests import tiny

FILES = sorted(packaged_configs().glob("corpora/*.yaml"))
WEB = {"dump": "CC-MAIN-2024-10", "file_path": "s3://c/w.gz", "language": "en", "language_score": 0.9, "token_count": 7}
RECORD: dict[str, Callable[[int], dict[str, Any]]] = {
    "fineweb": lambda n: {
        "text": _text(n),
        "id": f"<urn:uuid:{n}>",
        "url": _url(n),
        "date": "2024-02-20T23:09:32Z",
        **WEB,
    },
    "fineweb-edu": lambda n: {
        "text": _text(n),
        "id": f"<urn:uuid:{n}>",
        "url": _url(n),
        **WEB,
        "score": 3.2,
        "int_score": 3,
    },
    "dclm-baseline": lambda n: {
        "bff_contained_ngram_count_before_dedupe": n,
        "language_id_whole_page_fasttext": {"en": 0.93},
        "metadata": {"Content-Length": "61769", "WARC-Record-ID": f"<urn:uuid:{n}>"},
        "previous_word_count": 70 + n,
        "text": _text(n),
        "url": _url(n),
        "warcinfo": "robots: classic\r\n",
        "fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train_prob": 0.08,
    },
    "dolma3": lambda n: {"id": f"d{n}", "text": _text(n), "source": "common_crawl-health"},
    "nemotron-cc": lambda n: {"warc_record_id": f"w{n}", "url": _url(n), "text": _text(n), "language": "eng"},
    "c4": lambda n: {"text": _text(n), "timestamp": "2019-04-25T12:57:54Z", "url": _url(n)},
    "stack-v2": lambda n: {
        "blob_id": f"b{n}",
        "directory_id": "d",
        "path": f"/src/{n}.py",
        "content_id": f"c{n}",
        "detected_licenses": ["MIT"],
        "license_type": "permissive",
        "repo_name": "a/b",
        "src_encoding": "UTF-8",
        "content": _text(n),
    },
    "finemath": lambda n: {
        "url": _url(n),
        "fetch_time": 1_700_000_000 + n,
        "content_mime_type": "text/html",
        "warc_filename": "crawl-data/w.gz",
        "warc_record_offset": n,
        "warc_record_length": 9,
        "text": _text(n),
        "token_count": 7,
        "char_count": 70,
        "metadata": "{}",
        "score": 4.1,
        "int_score": 4,
        "crawl": "CC-MAIN-2023-50",
        "snapshot_type": "latest",
        "language": "en",
        "language_score": 0.9,
    },
    "wikipedia": lambda n: {"id": str(n), "url": _url(n), "title": f"Title {n}", "text": _text(n)},
}
"""Records of the published form, by the name of the corpus. Their texts are made up."""
PLACES = {
    "fineweb": "sample/10BT/000_00000.parquet",
    "fineweb-edu": "sample/10BT/000_00000.parquet",
    "dclm-baseline": "global-shard_01_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zst",
    "dolma3": "data/common_crawl-health-0013/part-0.jsonl.zst",
    "nemotron-cc": "quality=high/kind=actual/kind2=actual/CC-MAIN-2013-20-part-00000.jsonl.zstd",
    "c4": "en/c4-train.00000-of-01024.json.gz",
    "stack-v2": "python/0.parquet",
    "finemath": "finemath-4plus/train-00000-of-00064.parquet",
    "wikipedia": "20231101.en/train-00000-of-00041.parquet",
}
"""Path of a file of each as it is published."""
IDS = {"stack-v2": "b0", "nemotron-cc": "w0", "dolma3": "d0", "wikipedia": "0"}
IDS |= {"c4": f"{PLACES['c4'][3:]}@0", "finemath": f"{PLACES['finemath'][15:]}#0"}
IDS |= {"dclm-baseline": f"{PLACES['dclm-baseline']}@0"} | dict.fromkeys(("fineweb", "fineweb-edu"), "<urn:uuid:0>")


def _url(number: int) -> str:
    return f"https://a.example/{number}"


def _text(number: int) -> str:
    return f"document {number} has a few words about the sea and the wind. " * 3


def _write(root: Path, name: str, count: int = 40) -> None:
    """A file of a corpus."""
    path = root / name / PLACES[name]
    path.parent.mkdir(parents=True)
    records = [RECORD[name](number) for number in range(count)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
        return
    lines = b"".join(orjson.dumps(each) + b"\n" for each in records)
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else zstandard.compress(lines))


def _config(root: Path, *names: str, **changes: Any) -> Config:
    """A run file that includes corpora, whose files lie under `root` in place of /data."""
    values = tiny.values(root)
    values["include"] = [f"corpora/{name}.yaml" for name in names]
    values["data"]["sources"] = sources = {}
    for name in names:
        shipped = yaml.safe_load((packaged_configs() / f"corpora/{name}.yaml").read_text())["data"]["sources"][name]
        assert all(path.startswith(f"/data/{name}/") for path in shipped["paths"])
        sources[name] = {"paths": [str(root) + path.removeprefix("/data") for path in shipped["paths"]]}
    sources |= changes
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return load(file)


def test_every_corpus_that_ships_is_tested() -> None:
    assert sorted(file.stem for file in FILES) == sorted(RECORD) == sorted(PLACES)
    page = (packaged_configs().parent / "docs" / "corpora.md").read_text()
    assert [file.stem for file in FILES if f"(../configs/corpora/{file.name})" not in page] == []


@pytest.mark.parametrize("name", RECORD)
def test_it_reads_files_of_the_published_form(name: str, tmp_path: Path) -> None:
    _write(tmp_path, name)
    config = _config(tmp_path, name)
    (found,) = find_source_files(config)
    found.reader.check_columns(found.files, every=True)
    documents = [d for unit in cut_units(found, 0, 2**30) for d in UnitReader(unit, found.reader)]
    title = "Title 0\n\n" if name == "wikipedia" else ""
    assert [d.reason for d in documents] == [None] * 40
    assert (documents[0].text, documents[0].id) == (title + _text(0), IDS[name])
    assert orjson.loads(documents[0].metadata or b"").keys() == set(config.data.sources[0].metadata)


def test_sources_by_name_are_merged_and_left_out(tmp_path: Path) -> None:
    config = _config(tmp_path, "c4", "wikipedia", "dolma3", dolma3=None, mine={"type": "text", "paths": ["/x/*.txt"]})
    assert [source.name for source in config.data.sources] == ["c4", "wikipedia", "mine"]
    assert config.data.sources[1].text_template == "{title}\n\n{text}"
    changed = load(tmp_path / "run.yaml", ["data.sources.c4.max_epochs=2"])
    assert changed.data.sources[0].max_epochs == 2


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (
            {"paths": ["/x/*.txt"], "typ": "text"},
            r"run.yaml:\d+: data\.sources\.mine\.typ: unknown key; did you mean data\.sources\.mine\.type",
        ),
        (3, r"run.yaml:\d+: data\.sources\.mine: must be a section with keys"),
    ],
)
def test_mistakes_in_sources_by_name_have_their_line(mine: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        _config(tmp_path, "c4", mine=mine)


@pytest.mark.guard
def test_all_of_them_go_through_the_stage(tmp_path: Path) -> None:
    for name in RECORD:
        _write(tmp_path, name)
    config = _config(tmp_path, *RECORD)
    preprocess(config)
    for name in RECORD:
        report = orjson.loads((config.data_dir / name / "report.json").read_bytes())
        assert (report["records"], report["rejected"]) == (40, {})
