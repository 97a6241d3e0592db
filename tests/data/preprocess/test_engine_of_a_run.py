"""The engine of a run: the same datasets with each of them, also where texts contain special tokens."""

import orjson
import pytest
import tokenizers

from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.stage import preprocess
from tests import tiers
from tests.data import mixed
from tests.data.runs import datasets, make_config


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return mixed.write(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """A run with `tokenizers`."""
    config = mixed.config_of(tmp_path_factory.mktemp("reference"), corpus, "tokenizers")
    preprocess(config)
    return config


@pytest.mark.guard
@pytest.mark.parametrize(
    ("setting", "engine"), [("auto", "gigatoken"), pytest.param("fastokens", "fastokens", marks=pytest.mark.slow)]
)
def test_the_same_bytes_with_any_engine(corpus, reference, tmp_path, setting, engine, capsys):
    pytest.importorskip(engine)
    config = mixed.config_of(tmp_path, corpus, setting)
    preprocess(config)
    assert datasets(config) == datasets(reference)  # manifests too: which engine it was is in receipts and report
    for source in config.data.sources:
        assert list(mixed.report(config, source.name)["engines"]) == [mixed.own(engine)]
        assert list(mixed.report(reference, source.name)["engines"]) == [mixed.own("tokenizers")]
        made = mixed.report(config, source.name)["splits"]
        documents = sum(split["documents"] for split in made.values())
        # At least 64 a link, and the pieces of long ones.
        assert documents <= mixed.report(config, source.name)["checked"] <= 2 * documents
        assert mixed.report(reference, source.name)["checked"] == 0
    assert f"engine: {mixed.own(engine)}" in capsys.readouterr().out


@pytest.mark.parametrize("engine", tiers.first(1, ["tokenizers", "gigatoken", "fastokens"], rest="slow"))
@pytest.mark.parametrize("allowed", [[], ["<|sep|>"]])
def test_special_tokens_in_texts(tmp_path, engine, allowed):
    """The end of a document is never forged; what `allow_special` names is let through, and nothing else."""
    pytest.importorskip(engine)
    texts = ["<|endoftext|>", "a<|endoftext|>b" * 5, "<|sep|>x<|sep|>", "<|pad|> y", "<|endoftext|><|sep|><|pad|>"]
    texts = [f"{text}{number}" for number, text in enumerate(texts * 10)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    config = make_config(
        tmp_path,
        [{"name": "s", "type": "jsonl", "paths": [f"{tmp_path}/a.jsonl"]}],
        heldout=0,
        tokenizer={"train": {"vocab_size": 300}, "special_tokens": ["<|sep|>", "<|pad|>"], "allow_special": allowed},
        preprocess={"engine": engine},
    )
    assert preprocess(config).documents == 50
    dataset = Dataset.open(config.data_dir / "s" / "train")
    ids = dataset.read(0, dataset.tokens).tolist()
    engine_ = tokenizers.Tokenizer.from_file(str(config.data_dir / "tokenizer" / "tokenizer.json"))
    end, sep, pad = (engine_.token_to_id(token) for token in ("<|endoftext|>", "<|sep|>", "<|pad|>"))
    assert ids.count(end) == 50
    assert ids.count(sep) == (30 if allowed else 0)
    assert ids.count(pad) == 0
    tokenizer = run_tokenizer(config)
    found = set()
    for document in range(50):
        start, stop = dataset.document_start(document), dataset.document_start(document + 1)
        part = dataset.read(start, stop - start)
        assert part[-1] == end
        found.add(tokenizer.decode(part[:-1]))
    assert found == set(texts)
    assert verify(dataset.folder).problems == []
