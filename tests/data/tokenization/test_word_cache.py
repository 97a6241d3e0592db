"""The cache of words: what it is filled with, and that ids do not depend on it."""

import pytest

from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.preprocess.run_tokenizer import run_tokenizer, tokenizer_folder
from pipeline.data.preprocess.source_plan import make_plan, source_job
from pipeline.data.preprocess.splits import make_splits
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.tokenize_unit import UnitJob, WorkerContext
from pipeline.data.tokenization import word_cache
from pipeline.data.tokenization.hard_texts import hard_texts
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.data.tokenization.word_cache import FrequentWords
from pipeline.data.work.units import cut_units, find_source_files
from tests.data.runs import make_config, tree, write_jsonl
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write


class Recorder:
    """Takes the place of a tokenizer."""

    def __init__(self):
        self.samples = []

    def cache_words(self, texts):
        self.samples.append(texts)


@pytest.fixture
def found(tmp_path):
    """(units, reader) of some files."""

    def find(type, **texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.txt").write_text(text)
        source = {"name": "s", "type": type, "paths": [f"{tmp_path}/*.txt"]}
        (files,) = find_source_files(make_config(tmp_path, [source]))
        return cut_units(files, 7, 2**30), files.reader

    return find


class TestSample:
    def test_the_first_large_unit_is_looked_at_once(self, found, monkeypatch):
        units, reader = found("text", a="one", b="two " * 2000)
        recorder = Recorder()
        look = FrequentWords(recorder)
        look.look_at(units[0], reader)
        assert recorder.samples == []
        monkeypatch.setattr(word_cache, "UNIT_BYTES", 1)
        look.look_at(units[0], reader)
        look.look_at(units[0], reader)
        assert recorder.samples == [["one", ("two " * 2000)[: 2**12]]]

    def test_it_is_bounded(self, found, monkeypatch):
        monkeypatch.setattr(word_cache, "UNIT_BYTES", 1)
        monkeypatch.setattr(word_cache, "_READ_BYTES", 10_000)
        many = {f"a{i:03}": "x" * 2000 for i in range(20)}
        units, reader = found("text", **many)
        recorder = Recorder()
        FrequentWords(recorder).look_at(units[0], reader)
        assert [len(text) for text in recorder.samples[0]] == [2000] * 5
        monkeypatch.setattr(word_cache, "_SAMPLE_CHARACTERS", 3000)
        FrequentWords(recorder).look_at(units[0], reader)
        assert [len(text) for text in recorder.samples[1]] == [2000] * 2

    def test_bad_records_do_no_harm(self, found, monkeypatch):
        monkeypatch.setattr(word_cache, "UNIT_BYTES", 1)
        units, reader = found("jsonl", a='{"text": "one"}\n{"text": \n{"text": "two"}\n')
        recorder = Recorder()
        FrequentWords(recorder).look_at(units[0], reader)
        assert recorder.samples == [["one", "", "two"]]


@pytest.mark.parametrize("sample", [[], ["", "the same words the same words", "漢字 🙂 <|endoftext|>\n\n" * 9]])
def test_ids_are_the_same(tmp_path, sample):
    config = TokenizerConfig.model_validate({"train": {"vocab_size": 300}})
    trained = Tokenizer.train(iter(["the same words the same", "other words 漢字 " * 30]), config)
    loaded = Tokenizer.load(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]), config)
    for tokenizer in (trained, loaded):
        texts = [*hard_texts(tokenizer, long=False), "the same words", *sample]
        before = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
        tokenizer.cache_words(sample)
        assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == before
        assert [tokenizer.encode_batch([text])[0].tolist() for text in texts] == before  # each alone


def test_a_unit_is_the_same(tmp_path, monkeypatch):
    """Its part and its receipt, with the words of the unit cached before."""
    path = write_jsonl(tmp_path / "a.jsonl", 60)
    config = make_config(tmp_path, [{"name": "s", "type": "jsonl", "paths": [str(path)]}])
    preprocess(config)
    before = tree(config.data_dir)
    (found,) = find_source_files(config)
    plan = make_plan(found, run_tokenizer(config), config, make_splits(config.data))
    monkeypatch.setattr(word_cache, "UNIT_BYTES", 1)
    bench = WorkerContext(tokenizer_folder(config), 0.0)
    for path in [*config.data_dir.rglob("*.bin"), *config.data_dir.glob("s/receipts/*/*.json")]:
        path.unlink()
    samples = []
    cache_words = Tokenizer.cache_words

    def caching(tokenizer, sample):
        samples.append(sample)
        cache_words(tokenizer, sample)

    monkeypatch.setattr(Tokenizer, "cache_words", caching)
    for unit in plan.units:
        UnitJob(source_job(plan, config, ""), unit).run(bench, lambda _: None)
    assert len(samples) == 1
    preprocess(config)
    assert tree(config.data_dir) == before
