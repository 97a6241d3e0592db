"""Estimates of a dry run: from so little that a login node does not feel it, and right all the same."""

import pytest

from pipeline.data.preprocess.source_plan import counting_job
from pipeline.data.preprocess.source_sample import SAMPLE_BYTES, take_sample
from pipeline.data.preprocess.splits import make_splits
from pipeline.data.tokenization.engines import open_engine
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.work.units import cut_units, find_source_files
from tests.data.runs import make_config, write_text
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write


class Recording:
    """An engine that notes how many bytes it is given at a time."""

    def __init__(self, engine):
        self._engine = engine
        self.name, self.batch_bytes, self.batch_documents = engine.name, engine.batch_bytes, engine.batch_documents
        self.batches = []

    def encode(self, texts):
        self.batches.append((len(texts), sum(len(text.encode()) for text in texts)))
        return self._engine.encode(texts)


@pytest.fixture
def look(tmp_path):
    """A look at a source of text files, with settings."""
    path = write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"])

    def take(paths, with_engine=True, **settings):
        config = make_config(
            tmp_path, [{"name": "s", "paths": [paths]}], tokenizer={"path": str(path)}, preprocess=settings
        )
        tokenizer = Tokenizer.load(path, config.tokenizer)
        engine = Recording(open_engine(tokenizer, "tokenizers"))
        (found,) = find_source_files(config)
        units = cut_units(found, 7, config.data.preprocess.unit_bytes)
        source = counting_job(found, config, make_splits(config.data))
        return take_sample(units, source, tokenizer, engine if with_engine else None), engine.batches

    return take


@pytest.mark.guard
def test_a_long_document_is_encoded_in_pieces_and_not_to_its_end(tmp_path, look):
    size = 12 * 2**20
    (tmp_path / "a.txt").write_text(("some words and others\n" * (size // 22 + 1))[:size])
    sample, batches = look(f"{tmp_path}/*.txt")
    assert max(bytes for _, bytes in batches) <= 2**19
    assert sum(bytes for _, bytes in batches) <= 4 * 2**20
    assert sample.text_bytes == sample.disk_bytes == size
    assert sample.tokens == pytest.approx(size + 1, rel=1e-5)  # a token a byte
    # As long as all of it would take.
    more, batches = look(f"{tmp_path}/*.txt", max_document_bytes=1024)
    assert max(bytes for _, bytes in batches) <= 2**19 + 1024
    assert more.tokens == pytest.approx(size + 1, rel=1e-5)


def test_batches_and_the_limits(tmp_path, look):
    (tmp_path / "a").mkdir()
    for number in range(40):
        (tmp_path / "a" / f"{number:02}.txt").write_text(f"{number} words\n" * 10_000)
    sample, batches = look(f"{tmp_path}/a/*.txt", unit_bytes="1GiB")
    assert SAMPLE_BYTES <= sample.text_bytes < SAMPLE_BYTES + 100_000
    assert max(bytes for _, bytes in batches) < 2**19 + 100_000
    assert sample.tokens == sample.text_bytes + sum(count for count, _ in batches)
    assert 0 < sample.seconds < 30


def test_text_is_a_limit_too(tmp_path, look):
    """A small file on disk holds a lot."""
    import gzip

    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"words " * 2**19))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"words " * 2**19))
    sample, _ = look(f"{tmp_path}/*.gz", unit_bytes="1GiB")
    assert sample.text_bytes == 6 * 2**19
    assert sample.tokens == pytest.approx(6 * 2**19 + 1, rel=1e-5)


def test_what_is_rejected_gives_no_tokens(tmp_path, look):
    (tmp_path / "a.txt").write_text("x" * 2000)
    (tmp_path / "b.txt").write_text("x" * 1000)
    sample, _ = look(f"{tmp_path}/*.txt", max_document_bytes=1024, on_long_document="reject", unit_bytes="1GiB")
    assert (sample.text_bytes, sample.tokens, sample.disk_bytes) == (1000, 1001, 3000)


def test_one_document_at_least(tmp_path, look):
    """The first ones are none, and larger than the limit."""
    (tmp_path / "a.txt").write_bytes(b"\xff" * (SAMPLE_BYTES + 1))
    (tmp_path / "b.txt").write_text("words")
    for order in ({"seed": 1}, {"seed": 2}, {"seed": 3}):
        sample, _ = look(f"{tmp_path}/*.txt", unit_bytes="1GiB", **order)
        assert sample.tokens == 6


def test_without_a_tokenizer(tmp_path, look):
    write_text(tmp_path / "t", 10)
    sample, batches = look(f"{tmp_path}/t/**/*.txt", with_engine=False, unit_bytes="1GiB")
    assert not batches
    assert sample.tokens == pytest.approx(sample.text_bytes / 4, abs=11)
