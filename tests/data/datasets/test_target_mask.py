"""Trained targets of documents: the file, what reads it, and what copies it with its documents."""

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.datasets.adopt import adopt
from pipeline.data.datasets.dataset import Dataset, Slice
from pipeline.data.datasets.indexed import PROVENANCE, HashedFile, IndexedWriter, part_files, part_prefix
from pipeline.data.datasets.manifest import part_record, write_dataset
from pipeline.data.datasets.merge import merge
from pipeline.data.datasets.target_mask import mask_file, mask_problem, write_mask
from pipeline.data.datasets.verify import verify
from pipeline.data.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(iter(["a b c"]), TokenizerConfig.model_validate({"train": {"vocab_size": 300}}))


def masked_dataset(folder, tokenizer, counts=(5, 0, 7), seed=0):
    """A dataset of parts with so many documents: [(ids, mask)] in its order."""
    chance = np.random.default_rng(seed)
    table = np.zeros(len(counts), part_record(weights=False, mask=True))
    made = []
    for number, count in enumerate(counts):
        prefix = part_prefix(folder, number)
        prefix.parent.mkdir(parents=True, exist_ok=True)
        documents = []
        for _ in range(count):
            ids = chance.integers(1, 250, chance.integers(2, 20))
            ids[-1] = tokenizer.end_of_document
            mask = chance.integers(0, 2, len(ids)).astype(np.uint8)
            mask[0] = mask[-1] = 0
            documents.append((np.where(ids == tokenizer.end_of_document, 5, ids), mask))
            documents[-1][0][-1] = tokenizer.end_of_document
        with IndexedWriter(prefix, tokenizer.dtype) as writer, HashedFile(part_files(prefix)[2]) as provenance:
            for ids, _ in documents:
                writer.add_document(ids)
            provenance.write(np.zeros(count, PROVENANCE).tobytes())
            provenance.commit()
        lengths = np.array([len(ids) for ids, _ in documents], np.int64)
        mask = np.concatenate([np.zeros(0, np.uint8), *(each for _, each in documents)])
        with write_mask(prefix, mask, lengths) as file:
            file.commit()
        table[number] = (
            int(lengths.sum()),
            count,
            number,
            0,
            writer.bin.hash,
            writer.idx.hash,
            provenance.hash,
            0,
            file.hash,
        )
        made += documents
    trained = sum(int(mask.sum()) for _, mask in made)
    about = {"source": "s", "split": folder.name, "text_bytes": 1, "config_hash": "h", "code_version": "2"}
    write_dataset(folder, table, tokenizer, about | {"trained_tokens": trained})
    return made


def check(dataset, made):
    assert dataset.manifest.has_mask and dataset.documents == len(made)
    assert dataset.manifest.trained_tokens == sum(int(mask.sum()) for _, mask in made)
    numbers = np.random.default_rng(1).permutation(len(made))
    assert dataset.trained_targets(numbers).tolist() == [int(made[number][1].sum()) for number in numbers]
    for number, (ids, mask) in enumerate(made):
        assert dataset.mask(number).tolist() == mask.tolist()
        start = dataset.document_start(number)
        assert dataset.read(start, dataset.document_start(number + 1) - start).tolist() == ids.tolist()
    size = np.array([len(ids) for ids, _ in made])
    some = Slice(dataset, 1, len(made))
    out = np.full(some.tokens, 9, np.uint8)
    for _, column, part, start, length in zip(
        *(each.tolist() for each in some.pieces(np.array([0]), np.array([some.tokens]))), strict=True
    ):
        some.fill_mask(part, start, out[column : column + length])
    assert out.tolist() == np.concatenate([mask for _, mask in made[1:]]).tolist() and len(out) == size[1:].sum()


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_masks_of_documents(tmp_path, tokenizer, read):
    made = masked_dataset(tmp_path / "s" / "train", tokenizer)
    check(Dataset.open(tmp_path / "s" / "train", read), made)
    assert not verify(tmp_path / "s").problems


def test_masks_go_with_their_documents(tmp_path, tokenizer):
    made = masked_dataset(tmp_path / "s" / "train", tokenizer)
    merge(tmp_path / "s" / "train", tmp_path / "whole")
    options = {"tokenizer": tmp_path / "s" / "train", "end_of_document": tokenizer.end_of_document_token}
    adopt([tmp_path / "whole"], tmp_path / "again", **options)
    check(Dataset.open(tmp_path / "again" / "train"), made)
    assert not verify(tmp_path / "again").problems
    np.save(tmp_path / "out.npy", [0, 4, 5])
    adopt([tmp_path / "whole"], tmp_path / "fewer", leave_out=tmp_path / "out.npy", **options)
    check(Dataset.open(tmp_path / "fewer" / "train"), [each for n, each in enumerate(made) if n not in (0, 4, 5)])
    assert not verify(tmp_path / "fewer").problems


def test_appended_ends_are_no_targets(tmp_path, tokenizer):
    """Foreign files with an empty document, and documents without an end."""
    end, prefix = tokenizer.end_of_document, tmp_path / "x"
    documents = [([5, 6, 7], [0, 1, 1]), ([], []), ([8, end], [0, 0]), ([9, 5], [0, 1])]
    with IndexedWriter(prefix, "<u2") as writer:
        for ids, _ in documents:
            writer.add_document(np.array(ids, np.int64))
    mask = np.array([each for _, mask in documents for each in mask], np.uint8)
    with write_mask(prefix, mask, np.array([3, 0, 2, 2])) as file:
        file.commit()
    tokenizer.save(tmp_path)
    adopt(
        [prefix],
        tmp_path / "a",
        tokenizer=tmp_path,
        end_of_document=tokenizer.end_of_document_token,
        append_eod=True,
    )
    expected = [([5, 6, 7, end], [0, 1, 1, 0]), ([8, end], [0, 0]), ([9, 5, end], [0, 1, 0])]
    check(Dataset.open(tmp_path / "a" / "train"), [(np.array(i), np.array(m, np.uint8)) for i, m in expected])
    assert not verify(tmp_path / "a").problems


def test_faults_of_masks_are_seen(tmp_path, tokenizer, monkeypatch):
    lengths = np.array([3, 0, 4, 1])
    with write_mask(tmp_path / "p", np.array([0, 1, 1, 0, 0, 1, 0, 0], np.uint8), lengths) as file:
        file.commit()
    path = mask_file(tmp_path / "p")
    good = path.read_bytes()
    for chunk in (1, 3, 2**20):
        monkeypatch.setattr("pipeline.data.datasets.target_mask.CHUNK_BYTES", chunk)
        assert mask_problem(path, lengths) is None
        for place, value, words in (
            (17, 2, "neither"),
            (16, 1, "first token"),
            (22, 1, "count of document 2"),
            (4, 1, "document 1"),
        ):
            path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
            assert words in mask_problem(path, lengths)
        path.write_bytes(good[:-1])
        assert "bytes for" in mask_problem(path, lengths)
        path.write_bytes(good)
    path.unlink()
    assert "is missing" in mask_problem(path, lengths)


def test_damage_in_a_dataset_is_seen(tmp_path, tokenizer):
    folder = tmp_path / "s" / "train"
    masked_dataset(folder, tokenizer)
    path = mask_file(part_prefix(folder, 2))
    good = path.read_bytes()
    for bad in (good[:-1], good[:-3] + bytes([1 - good[-3]]) + good[-2:], None):
        path.unlink() if bad is None else path.write_bytes(bad)
        assert any(path.name in problem for problem in verify(tmp_path / "s").problems)
    with pytest.raises(UserError, match="mask is missing"):
        Dataset.open(folder, "pread").mask(11)
