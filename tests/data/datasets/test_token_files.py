"""Token files of other suites, written as these suites write them, become datasets with the same documents."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.verify import verify

END = 0
DOCUMENTS = [[1, 2, 3, END], [END], [300, 299, END], [*range(20, 260), END], [5, 5, 5, END]]
"""The tokenizer of the tests has the end of documents at 0."""


def flat(dtype: str) -> np.ndarray:
    return np.concatenate([np.array(each, dtype) for each in DOCUMENTS])


def write_ds(path: Path, dtype: str) -> Path:
    """A file of datatrove's DocumentTokenizer, with its index."""
    path.write_bytes(flat(dtype).tobytes())
    ends = np.cumsum([len(each) for each in DOCUMENTS])
    path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends.tolist()))
    return path


def write_mds(folder: Path, encoding: str, length: int, per_shard: int) -> Path:
    """Shards of MosaicML's streaming, each sample so many tokens of the documents one behind the other."""
    folder.mkdir()
    ids = flat("<i4" if encoding.startswith("ndarray") else "<i8")
    samples = [ids[at : at + length].tobytes() for at in range(0, len(ids) // length * length, length)]
    shards = []
    for number, first in enumerate(range(0, len(samples), per_shard)):
        some = samples[first : first + per_shard]
        is_fixed = encoding.startswith("ndarray")
        bodies = some if is_fixed else [struct.pack("<I", len(each)) + each for each in some]
        about = b'{"config": "of the shard"}'
        begin = 4 * (len(bodies) + 2) + len(about)
        bounds = np.cumsum([begin, *map(len, bodies)]).astype("<u4")
        data = struct.pack("<I", len(bodies)) + bounds.tobytes() + about + b"".join(bodies)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        shards.append(
            {
                "column_encodings": [encoding],
                "column_names": ["tokens"],
                "column_sizes": [len(some[0]) if is_fixed else None],
                "compression": None,
                "format": "mds",
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(bodies),
                "zip_data": None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


@pytest.fixture
def tokenizer(config: Any) -> dict[str, Any]:
    """A tokenizer of 300 and some entries, in which the token `END` ends documents."""
    folder = config.data_dir / "t" / "train"
    about = Dataset.open(folder).manifest.tokenizer
    assert about.end_of_document == END and about.vocab_size > 300
    return {"tokenizer": folder / "tokenizer.json", "end_of_document": about.end_of_document_token}


def documents(folder: Path) -> list[list[int]]:
    found = Dataset.open(folder / "train")
    assert not verify(folder).problems
    starts = [found.document_start(number) for number in range(found.documents + 1)]
    return [found.read(first, end - first).tolist() for first, end in itertools.pairwise(starts)]


@pytest.mark.parametrize("form", ["npy", "saved", "uint32", "ds", "ds32", "mds", "bytes"])
def test_documents_are_those_of_the_files(tmp_path: Path, tokenizer: dict[str, Any], form: str) -> None:
    expected, options, path = DOCUMENTS, {}, tmp_path / "part-0.npy"
    if form == "npy":
        path.write_bytes(flat("<u2").tobytes())
    elif form == "saved":
        np.save(path, flat("<i8"))
    elif form == "uint32":
        path.write_bytes(flat("<u4").tobytes())
        options = {"ids": "uint32"}
    elif form.startswith("ds"):
        path = write_ds(tmp_path / "0.ds", "<u2" if form == "ds" else "<u4")
    else:
        path = write_mds(tmp_path / "mds", "bytes" if form == "bytes" else "ndarray:int32:16", 16, 5)
        options = {"ids": "int64"} if form == "bytes" else {}
        whole = sum(map(len, DOCUMENTS)) // 16 * 16
        cut = np.concatenate(DOCUMENTS)[:whole]
        ends = [0, *(np.flatnonzero(cut == END) + 1).tolist()]
        expected = [cut[a:b].tolist() for a, b in itertools.pairwise(ends)]
        options["append_eod"] = True
        if ends[-1] < whole:
            expected.append([*cut[ends[-1] :].tolist(), END])
    kind: Any = "ds" if form.startswith("ds") else "mds" if path.is_dir() else "npy"
    done = adopt([path], tmp_path / "web", form=kind, **tokenizer, **options)
    assert documents(tmp_path / "web") == expected
    assert done.manifest.settings["adopted"] == [path.name]
    assert sorted(each.name for each in tmp_path.iterdir() if each.name.startswith(".")) == []


def test_documents_across_blocks(tmp_path: Path, tokenizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.data.datasets.token_files._BLOCK", 3)
    (tmp_path / "a.npy").write_bytes(flat("<u2").tobytes())
    adopt([tmp_path / "a.npy"], tmp_path / "web", form="npy", **tokenizer)
    adopt([write_ds(tmp_path / "b.ds", "<u2")], tmp_path / "more", form="ds", **tokenizer)
    assert documents(tmp_path / "web") == documents(tmp_path / "more") == DOCUMENTS


def test_what_does_not_fit_is_refused(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    def refused(path: Path, form: Any, match: str, **options: Any) -> None:
        with pytest.raises(UserError, match=match):
            adopt([path], tmp_path / "web", form=form, **tokenizer, **options)
        assert not (tmp_path / "web").exists()

    path = tmp_path / "a.npy"
    path.write_bytes(np.array([1, 60000, END], "<u2").tobytes())
    refused(path, "npy", "token 1 has the id 60000")
    path.write_bytes(b"123")
    refused(path, "npy", "is not a number of ids")
    path.write_bytes(flat("<u4").tobytes() + b"\0\0")
    refused(path, "npy", "is not a number of ids", ids="uint32")
    np.save(path, np.array([[1]]))
    refused(path, "npy", "in one dimension")
    np.save(path, np.array([{}]), allow_pickle=True)
    refused(path, "npy", "cannot be read")
    refused(tmp_path / "none", "npy", "there is no such file")
    refused(path, "npy", "--leave-out", leave_out=path)

    path = write_ds(tmp_path / "a.ds", "<u2")
    index = tmp_path / "a.ds.index"
    whole = index.read_bytes()
    for data, match in (
        (whole[:-3], "damaged"),
        (whole[:-8], "one of them is damaged"),
        (struct.pack("<2Q", 9, 3), "not ascending"),
        (struct.pack("<2Q", 3, 2**63), "not ascending"),
        (b"", "one of them is damaged"),
    ):
        index.write_bytes(data)
        refused(path, "ds", match)
    index.unlink()
    refused(path, "ds", "is missing")

    path = tmp_path / "wide.npy"
    path.write_bytes(flat("<u4").tobytes())
    refused(path, "npy", "every second id is 0")
    with pytest.raises(UserError, match="is given twice"):
        adopt([path, path], tmp_path / "web", form="npy", ids="uint32", **tokenizer)

    folder = write_mds(tmp_path / "mds", "bytes", 16, 5)
    refused(folder, "mds", "nothing says the type")
    index = folder / "index.json"
    about = json.loads(index.read_text())
    for change, match in (
        ({"compression": "zstd", "zip_data": {"basename": "x"}}, "not compressed"),
        ({"column_names": ["text"]}, "single column"),
        ({"column_encodings": ["pkl"]}, "the encoding 'pkl' cannot be read"),
        ({"column_encodings": ["ndarray:float32:3"], "column_sizes": [12]}, "not one of whole numbers"),
        ({"column_encodings": ["ndarray:x:3"], "column_sizes": [12]}, "cannot be read"),
        ({"raw_data": {"basename": "../x"}}, "x"),
        ({"raw_data": {"basename": "none.mds"}}, "is missing"),
        ({"samples": 4}, "cut or damaged"),
        ({"samples": 10**9}, "is cut"),
        ({"samples": None}, "damaged"),
    ):
        index.write_text(json.dumps({"shards": [about["shards"][0] | change]}))
        refused(folder, "mds", match, ids="int64")
    index.write_text(json.dumps(about))
    shard = folder / about["shards"][0]["raw_data"]["basename"]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    refused(folder, "mds", "cut or damaged", ids="int64")
