"""The sample that a tokenizer is trained on: how much of it there is, and from where."""

import random
from collections import Counter

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from rich.console import Console

from pipeline.data.preprocess.make_tokenizer import SAMPLE_BYTES, sample_texts
from pipeline.data.preprocess.split_counts import find_splits
from pipeline.data.work.units import find_source_files
from tests.data.runs import is_heldout, make_config

DOCUMENT = 4000


def sample(config):
    files = find_source_files(config)
    return list(sample_texts(config, files, find_splits(config, Console(quiet=True), files)))


def texts_of(name, count, plain=False):
    """Documents that begin with a name; hexadecimal digits are half as long compressed, equal ones nearly nothing."""
    chance = random.Random(name)
    return [
        f"{name} {number} {'x' * DOCUMENT if plain else chance.randbytes(DOCUMENT // 2).hex()}"
        for number in range(count)
    ]


def write(root, kind, name, texts):
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), root / f"{name}.parquet", compression="none")
        return
    data = b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts)
    (root / f"{name}.jsonl{'' if kind == 'jsonl' else '.zst'}").write_bytes(
        data if kind == "jsonl" else zstandard.compress(data)
    )


def config_of(root, kind, wanted, seed=7, **options):
    type = "parquet" if kind == "parquet" else "jsonl"
    source = {"name": "s", "type": type, "paths": [f"{root}/*.{'parquet' if kind == 'parquet' else 'jsonl*'}"]}
    train = {"train": {"max_bytes": wanted}}
    return make_config(root, [source], tokenizer=train, preprocess={"seed": seed}, **options)


@pytest.mark.parametrize("kind", ["jsonl", "zst", "parquet"])
def test_it_ends_where_it_is_enough(tmp_path, kind):
    """One file, whose one piece of work has far more."""
    write(tmp_path, kind, "a", texts_of("a", 1000))
    wanted = 5 * DOCUMENT
    config = config_of(tmp_path, kind, wanted)
    found = sample(config)
    assert wanted <= sum(map(len, found)) < wanted + 2 * DOCUMENT
    assert not any(is_heldout(text.encode(), 0.2) for text in found)
    assert sample(config) == found


def test_every_compressed_file_gives_its_share(tmp_path):
    """8 files, each of which is expected to have as much text as a piece; 4 pieces are wanted."""
    for name in "abcdefgh":
        # Of 400 kB on disk 100 kB are left, which are expected to be 400 kB of text.
        half = texts_of(name, 50) + texts_of(name, 50, plain=True)
        random.Random(0).shuffle(half)
        write(tmp_path, "zst", name, half)
    config = config_of(tmp_path, "zst", 4 * SAMPLE_BYTES, heldout=0)
    given = Counter()
    for text in sample(config):
        given[text[0]] += len(text)
    assert 4 * SAMPLE_BYTES <= given.total() < 4 * SAMPLE_BYTES + 2 * DOCUMENT
    assert len(given) in (4, 5)
    assert max(given.values()) < SAMPLE_BYTES + 2 * DOCUMENT


def test_large_files_give_more_than_small_ones(tmp_path):
    """A large compressed file beside small plain ones: it has most of the text, and so most of the sample."""
    write(tmp_path, "zst", "z", texts_of("z", 2000))
    for name in "abcd":
        write(tmp_path, "jsonl", name, texts_of(name, 60))
    shares = []
    for seed in range(5):
        found = sample(config_of(tmp_path, "zst", 8 * SAMPLE_BYTES, seed, heldout=0))
        shares.append(sum(len(text) for text in found if text[0] == "z") / sum(map(len, found)))
    assert 0.8 < sum(shares) / 5 < 1  # 64 of 68 pieces


@pytest.mark.parametrize("kind", ["jsonl", "zst", "parquet"])
def test_all_of_a_corpus_that_is_smaller(tmp_path, kind):
    """Also where there is far more text than the sizes of files let expect; every document once."""
    made = []
    for name in "abc":
        texts = texts_of(name, 300, plain=True)
        write(tmp_path, kind, name, texts)
        made += [text for text in texts if not is_heldout(text.encode(), 0.2)]
    size = sum(map(len, made))
    assert sorted(sample(config_of(tmp_path, kind, 10 * size))) == sorted(made)
    most = sample(config_of(tmp_path, kind, size * 9 // 10))
    assert len(most) == len(set(most)) < len(made)
    assert size * 9 // 10 <= sum(map(len, most)) < size * 9 // 10 + 2 * DOCUMENT
    assert {text[0] for text in most} == set("abc")
