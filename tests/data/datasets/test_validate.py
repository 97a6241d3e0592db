"""What is found before training: parts that are missing or have another size, sources that do not fit together."""

import os
import shutil
import struct

import numpy as np
import pytest

from pipeline.common import retry
from pipeline.common.errors import MachineError, UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets import validate
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.manifest import PART, write_dataset
from pipeline.data.datasets.validate import check_datasets, file_sizes, part_prefixes
from pipeline.data.tokenization.tokenizer import Tokenizer

DOCUMENTS = 5


def write(folder, tokenizer, units=(0, 1, 2, 1000), settings=None):
    """A dataset of parts of 5 documents, the second of two sequences, 20 tokens in all."""
    table = np.zeros(len(units), PART)
    for index, unit in enumerate(units):
        prefix = part_prefix(folder, unit, chunk=unit % 2)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with IndexedWriter(prefix, tokenizer.dtype) as writer:
            for document in range(DOCUMENTS):
                writer.add_document(np.arange(2, 6), [3, 1] if document == 1 else [])
        table[index]["tokens"], table[index]["documents"] = 4 * DOCUMENTS, DOCUMENTS
        table[index]["unit"], table[index]["link"] = unit, unit % 2
        table[index]["bin"], table[index]["idx"] = writer.bin.hash, writer.idx.hash
    about = {"source": "s", "split": "train", "text_bytes": 1, "config_hash": "", "code_version": ""}
    write_dataset(folder, table, tokenizer, about | {"settings": settings or {}})
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(iter(["a text"]), TokenizerConfig.model_validate({"train": {"vocab_size": 300}}))


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory):
    return write(tmp_path_factory.mktemp("made") / "train", tokenizer)


@pytest.fixture
def dataset(made, tmp_path):
    return Dataset.open(shutil.copytree(made, tmp_path / "s" / "train"))


def files(dataset, index):
    unit = (0, 1, 2, 1000)[index]
    return part_files(part_prefix(dataset.folder, unit, unit % 2))[:2]


def test_sound(dataset, tokenizer, tmp_path):
    other = Dataset.open(write(tmp_path / "o" / "train", tokenizer))
    check_datasets({"s": dataset, "o": other, "s again": dataset})
    # What the sizes follow from: 4 tokens of 2 bytes a document, and 6 sequences of 5 documents.
    bin_path, idx_path = files(dataset, 1)
    assert (bin_path.stat().st_size, idx_path.stat().st_size) == (5 * 4 * 2, 34 + 12 * 6 + 8 * 6)


def test_prefixes(dataset):
    parts = np.fromfile(dataset.folder / "parts.bin", PART)
    expected = [str(part_prefix(dataset.folder, unit, unit % 2)) for unit in (0, 1, 2, 1000)]
    assert part_prefixes(dataset.folder, parts) == expected


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("change", [-2, -1, 1, 2, 12])
def test_tokens_of_another_size(dataset, index, change):
    path = files(dataset, index)[0]
    os.truncate(path, 40 + change)
    with pytest.raises(UserError) as error:
        check_datasets({"s": dataset})
    assert f"{path} has {40 + change} bytes; expected: 40 bytes\n" in str(error.value)
    assert "run `pipeline preprocess RUN.yaml`" in str(error.value)


@pytest.mark.parametrize("size", [0, 33, 34 + 48 + 12 * 4, 34 + 48 + 12 * 6 - 1, 34 + 48 + 12 * 21])
def test_an_index_of_no_possible_size(dataset, size):
    path = files(dataset, 3)[1]
    os.truncate(path, size)
    with pytest.raises(UserError) as error:
        check_datasets({"s": dataset})
    assert (
        f"{path} has {size} bytes; expected: {34 + 48 + 12 * 5} bytes for 5 documents, or 12 more for each further "
        "sequence\n"
    ) in str(error.value)


def test_every_size_that_a_real_index_can_have(dataset):
    path = files(dataset, 0)[1]
    for sequences in range(DOCUMENTS, 4 * DOCUMENTS + 1):
        os.truncate(path, len(struct.pack("<9sQBQQ", b"", 1, 8, 0, 0)) + 12 * sequences + 8 * (DOCUMENTS + 1))
        check_datasets({"s": dataset})


@pytest.mark.parametrize("kind", [0, 1])
def test_missing(dataset, kind):
    path = files(dataset, 2)[kind]
    path.unlink()
    with pytest.raises(UserError, match=r"is missing; expected: ") as error:
        check_datasets({"s": dataset})
    assert str(path) in str(error.value)


def test_all_problems_at_once(dataset, tokenizer, tmp_path):
    """The first ten, and how many more; each repair once."""
    adopted = Dataset.open(write(tmp_path / "a" / "train", tokenizer, range(12), {"adopted": ["x"]}))
    shutil.rmtree(adopted.folder / "parts")
    files(dataset, 0)[0].unlink()
    with pytest.raises(UserError) as error:
        check_datasets({"s": dataset, "a": adopted})
    lines = str(error.value).split("\n")
    assert all(line.startswith("  /") and "is missing" in line for line in lines[1:11])
    assert lines[11] == "  and 15 more"
    assert lines[12].startswith("run `pipeline preprocess") and "; or restore the adopted file" in lines[12]


def test_a_link_to_nothing(dataset):
    path = files(dataset, 0)[0]
    path.rename(path.with_suffix(".away"))
    path.symlink_to(path.with_suffix(".elsewhere"))
    with pytest.raises(UserError, match="is missing"):
        check_datasets({"s": dataset})
    path.unlink()
    path.symlink_to(path.with_suffix(".away"))
    check_datasets({"s": dataset})


def test_a_file_system_that_does_not_answer(dataset, monkeypatch):
    stat = os.stat

    def fails(path, **options):
        if str(path).endswith("00001-00001.idx"):
            raise OSError(5, "Input/output error", path)
        return stat(path, **options)

    monkeypatch.setattr(validate.os, "stat", fails)
    monkeypatch.setattr(retry, "PAUSES_S", (0.0, 0.0))
    with pytest.raises(MachineError, match=r"00001-00001.idx: looking at its size failed 3 times, EIO") as error:
        check_datasets({"s": dataset})
    assert isinstance(error.value.__cause__, OSError)


def test_slow_file_systems_are_asked_by_threads(tmp_path, monkeypatch):
    """The answers are the same, and in the same order."""
    for number in range(50):
        (tmp_path / str(number)).write_bytes(bytes(number))
    paths = [str(tmp_path / str(number)) for number in range(51)]
    expected = [*range(50), -1]
    assert file_sizes(paths).tolist() == expected
    monkeypatch.setattr(validate, "_SLOW_S", 0.0)
    assert file_sizes(paths).tolist() == expected
    assert file_sizes([]).tolist() == []


def test_another_tokenizer(dataset, tmp_path):
    texts = iter(["words of another kind, many words"])
    other = Tokenizer.train(texts, TokenizerConfig.model_validate({"train": {"vocab_size": 300}}))
    odd = Dataset.open(write(tmp_path / "odd" / "train", other))
    with pytest.raises(UserError, match="sources 's' and 'odd' were tokenized with different tokenizers") as error:
        check_datasets({"s": dataset, "odd": odd})
    for tokenizer in (other.fingerprint, dataset.manifest.tokenizer.fingerprint):
        assert tokenizer in str(error.value)
