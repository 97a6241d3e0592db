"""A unit that takes more memory than there is: the others are done, it is reported, and done when there is more."""

import json
import os
import random
import resource

import pytest

from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from tests.data.runs import WORDS, datasets, make_config, write_jsonl
from tests.data.stage import left_behind, receipts, start, write_run_file

LIMIT = 640 * 2**20
"""Bytes of address space of each process. A worker takes 180 MB, and 900 MB for the large document."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    chance = random.Random(0)
    for name, size in (("a", 100), ("big", 8 * 10**6), ("c", 100)):
        words = chance.choices(WORDS, k=size // 4)
        (root / f"{name}.txt").write_bytes(" ".join(words).encode()[:size].rpartition(b" ")[0])
    write_jsonl(root / "lines.jsonl", 150, seed=1)
    return root


def config_of(root, corpus, **data):
    sources = [
        {"name": "t", "paths": [f"{corpus}/*.txt"]},
        {"name": "j", "type": "jsonl", "paths": [f"{corpus}/lines.jsonl"]},
    ]
    settings = {"unit_bytes": 10**6, "max_document_bytes": 32 * 2**20}
    return make_config(root, sources, heldout=0, preprocess=settings, **data)


@pytest.mark.slow
def test_a_worker_that_dies_of_memory(tmp_path, corpus):
    expected = config_of(tmp_path / "expected", corpus, tokenizer={"train": {"vocab_size": 300, "max_bytes": 1000}})
    preprocess(expected)
    config = config_of(tmp_path, corpus, tokenizer={"path": str(expected.data_dir / "tokenizer")})
    file = write_run_file(config, tmp_path / "run.yaml")
    process = start(
        file,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT)),
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a buffer for each thread is address space
    )
    said = process.communicate(timeout=300)[0].replace("\n", " ")
    assert process.returncode == 1, said
    for attempt, then in ((1, "it will be tried again"), (2, "it will be tried again"), (3, "it is given up")):
        assert f"big.txt); attempt {attempt} of 3, {then}" in said, said
    assert "error: 1 unit failed:" in said
    assert "Without them t cannot be finished" in said
    failures = [json.loads(line) for line in (config.data_dir / "t" / "failures.jsonl").open()]
    assert [failure["attempt"] for failure in failures] == [1, 2, 3]
    assert len({failure["unit"] for failure in failures}) == 1
    assert all("SIGABRT" in failure["how"] or "MemoryError" in failure["how"] for failure in failures), failures
    assert receipts(config) == receipts(expected) - 1
    assert (config.data_dir / "j" / "train" / "manifest.json").exists()
    assert not (config.data_dir / "t" / "train" / "manifest.json").exists()
    assert left_behind(config) == []

    process = start(file)  # with all the memory there is
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    assert "tokenizing 1 unit" in said
    assert datasets(config) == datasets(expected)
    assert verify(config.data_dir).problems == []
    assert left_behind(config) == []
