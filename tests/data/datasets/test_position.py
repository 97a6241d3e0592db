"""Documents that a run of Megatron-LM has read, compared with what its own datasets return; and files without them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.common.format import distinct_names
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import IndexedPart, IndexedWriter
from pipeline.data.datasets.left_out import read_left_out, write_without
from pipeline.data.datasets.megatron_position import read_positions
from pipeline.data.datasets.position_command import write_position
from pipeline.data.datasets.verify import verify

LENGTH = 16
_BUILD = """
import json, sys
import numpy as np
import torch
from types import SimpleNamespace
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

given = json.loads(sys.argv[1])
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
class Tokenizer(SimpleNamespace):
    unique_identifiers = {"class": "made up"}
    eod, vocab_size = 0, 2**30
names = ("sequence_length", "blend", "split", "path_to_cache")
config = GPTDatasetConfig(
    **{name: given[name] for name in names}, random_seed=1, mid_level_dataset_surplus=0.1, tokenizer=Tokenizer(),
    reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
)
train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [given["samples"], 4, 4], lambda: True, config).build()
np.save(given["to"], np.stack([np.append(train[n]["tokens"], train[n]["labels"][-1]) for n in range(given["samples"])]))
"""


def corpus(prefix: Path, documents: int, first: int, seed: int) -> tuple[Path, int]:
    """Documents whose ids occur nowhere else, so that an id says where it was read; the id behind the last."""
    lengths = np.random.default_rng(seed).integers(1, 40, documents)
    with IndexedWriter(prefix, np.int32) as writer:
        for length in lengths.tolist():
            writer.add_document(np.arange(first, first + length, dtype=np.int32))
            first += length
    return prefix, first


def megatron(tmp_path: Path, blend: Any, samples: int) -> np.ndarray:
    """Ids of samples that Megatron-LM's dataset returns, [samples, LENGTH + 1]; its indices are in `cache`."""
    given = {"sequence_length": LENGTH, "blend": blend, "split": "900,90,10", "samples": samples}
    given |= {"path_to_cache": str(tmp_path / "cache"), "to": str(tmp_path / "samples.npy")}
    subprocess.run([sys.executable, "-c", _BUILD, json.dumps(given)], check=True, cwd=tmp_path)
    return np.load(given["to"])


def expected(prefix: Path, first: int, samples: np.ndarray) -> tuple[list[int], list[int], int]:
    """Documents of a file that samples have touched, and those of which all ids occur in order; and tokens read."""
    part = IndexedPart(prefix)
    inputs = samples[:, :-1]
    ids = inputs[(inputs >= first) & (inputs < first + part.tokens)] - first
    counts = np.bincount(ids, minlength=part.tokens)
    touched, whole = [], []
    for document in range(part.documents):
        of_document = counts[part.document_start(document) : part.document_start(document + 1)]
        if of_document.any():
            touched.append(document)
        if of_document.all():
            whole.append(document)
    return touched, whole, len(ids)


@pytest.mark.guard
def test_positions_are_what_megatron_has_read(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    web, behind = corpus(tmp_path / "web", 300, 1, 0)
    code, _ = corpus(tmp_path / "code", 120, behind, 1)
    samples = megatron(tmp_path, [[str(web), str(code)], [0.7, 0.3]], 500)
    for consumed in (0, 1, 97, 250, 500):
        found = read_positions(tmp_path / "cache", consumed)
        assert [each.prefix for each in found] == [web, code] and [each.weight for each in found] == [0.7, 0.3]
        for each, first in zip(found, (1, behind), strict=True):
            touched, whole, tokens = expected(each.prefix, first, samples[:consumed])
            assert each.touched.tolist() == touched and each.tokens == tokens
            # In a second epoch a document may be read in two parts, each of another reading.
            assert set(each.whole.tolist()) <= set(whole)
            assert consumed > 100 or each.whole.tolist() == whole
        assert found[0].splits == {"train": (0, 270), "valid": (270, 297), "test": (297, 300)}

    write_position(tmp_path / "cache", 250, tmp_path / "lists")
    for each in read_positions(tmp_path / "cache", 250):
        left_out = np.load(tmp_path / "lists" / f"{each.prefix.name}.train.npy")
        documents = IndexedPart(each.prefix).documents
        assert left_out.tolist() == sorted({*each.touched.tolist(), *range(each.splits["train"][1], documents)})
        assert np.load(tmp_path / "lists" / f"{each.prefix.name}.valid.npy").tolist() == [
            number for number in range(documents) if number not in range(*each.splits["valid"])
        ]


@pytest.mark.guard
def test_a_run_on_one_file(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    web, _ = corpus(tmp_path / "web", 300, 1, 0)
    samples = megatron(tmp_path, [[str(web)], None], 200)
    (found,) = read_positions(tmp_path / "cache", 200)
    assert found.touched.tolist() == expected(web, 1, samples)[0]
    with pytest.raises(UserError, match="has read 9,999 samples"):
        read_positions(tmp_path / "cache", 9999)
    for path in sorted((tmp_path / "cache").glob("*-train-*_index.npy")):
        whole = path.read_bytes()
        for damaged in (whole[:50], whole[:-8], b""):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=re.escape(path.name)):
                read_positions(tmp_path / "cache", 200)
        path.unlink()
        with pytest.raises(UserError, match="is missing"):
            read_positions(tmp_path / "cache", 200)
        path.write_bytes(whole)
    corpus(tmp_path / "web", 10, 1, 2)
    with pytest.raises(UserError, match="of another file than"):
        read_positions(tmp_path / "cache", 200)
    with pytest.raises(UserError, match="has no indices"):
        read_positions(tmp_path, 200)


def test_every_list_has_a_name_of_its_own() -> None:
    prefixes = ["/a/web", "/b/web", "/c/web-2", "/d/a b", "/d/a-b"]
    assert distinct_names(Path(prefix).name for prefix in prefixes) == ["web", "web-2", "web-2-2", "a-b", "a-b-2"]


@pytest.mark.parametrize("left_out", [[], [0], [199], [0, 1, 5, 7, 100, 198], list(range(0, 200, 2))])
def test_files_without_documents(tmp_path: Path, left_out: list[int]) -> None:
    prefix, _ = corpus(tmp_path / "web", 200, 1, 0)
    part = IndexedPart(prefix)
    done: list[int] = []
    kept = write_without(part, np.array(left_out, np.int64), tmp_path / "kept", done.append)
    found = IndexedPart(tmp_path / "kept")
    assert kept.tolist() == [each for each in range(200) if each not in left_out]
    assert found.documents == len(kept) and sum(done) == found.tokens * 4
    for number, document in enumerate(kept.tolist()):
        ids = [each.read(s := each.document_start(n), each.document_start(n + 1) - s).tolist()
               for each, n in ((found, number), (part, document))]  # fmt: skip
        assert ids[0] == ids[1]


def test_numbers_of_documents(tmp_path: Path) -> None:
    part = IndexedPart(corpus(tmp_path / "web", 5, 1, 0)[0])
    path = tmp_path / "numbers.npy"
    np.save(path, np.array([3, 1, 3], np.uint8))
    assert read_left_out(path, part).tolist() == [1, 3]
    bad: list[Any] = [np.arange(5), np.array([5]), np.array([-1]), np.array([[1]]), np.array([1.0]), np.array([{}])]
    for each in bad:
        np.save(path, each, allow_pickle=True)
        with pytest.raises(UserError, match="--leave-out"):
            read_left_out(path, part)


def test_a_dataset_without_documents_knows_where_they_were(config: Any, tmp_path: Path) -> None:
    folder = config.data_dir / "t" / "train"
    origin, prefix = Dataset.open(folder), next(folder.glob("parts/*/*0.bin")).with_suffix("")
    part = IndexedPart(prefix)
    np.save(tmp_path / "read.npy", np.arange(0, part.documents, 2))
    token = origin.manifest.tokenizer.end_of_document_token
    done = adopt([prefix], tmp_path / "web", tokenizer=folder, end_of_document=token, leave_out=tmp_path / "read.npy")
    found = Dataset.open(tmp_path / "web" / "train")
    assert found.documents == part.documents // 2 and not verify(tmp_path / "web").problems
    assert [found.provenance(number)[1] for number in range(found.documents)] == [*range(1, part.documents, 2)]
    assert done.manifest.settings["kept"]["documents"] == found.documents
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    with pytest.raises(UserError, match="there are 2"):
        prefixes = [path.with_suffix("") for path in sorted(folder.glob("parts/*/*.bin"))[:2]]
        adopt(prefixes, tmp_path / "x", tokenizer=folder, end_of_document=token, leave_out=tmp_path / "read.npy")
