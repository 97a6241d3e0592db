"""Text that a tokenizer has no tokens for, or changes: counted for each split, shown, and refused above a limit."""

import json

import orjson
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.manifest import read_manifest
from pipeline.data.preprocess import run_units
from pipeline.data.preprocess.stage import is_complete, preprocess
from tests.data.runs import make_config, tree
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

END = "<|endoftext|>"
KNOWN = ["the", "a", "of", "to", "in"]
"""Words of a tokenizer of 7 entries."""


def words_tokenizer(path):
    engine = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", END, *KNOWN])}, "<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens([END])
    engine.save(str(path))
    return {"path": str(path)}


def config_of(tmp_path, texts, tokenizer, **preprocess):
    path = tmp_path / "a.jsonl"
    if not path.exists():
        path.write_bytes(b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    source = {"name": "s", "type": "jsonl", "paths": [str(path)]}
    return make_config(tmp_path, [source], tokenizer=tokenizer, preprocess=preprocess)


TEXTS = [f"the tokens of a text {number} in files" for number in range(400)]
"""Of 8 words each, 4 are known."""


@pytest.fixture
def tokenizer(tmp_path):
    return words_tokenizer(tmp_path / "t.json")


def test_refused(tmp_path, tokenizer):
    config = config_of(tmp_path, TEXTS, tokenizer)
    with pytest.raises(UserError) as error:
        preprocess(config)
    for word in ("source 's'", "44.44 % of", "data.preprocess.max_unknown (0.01)", "tokenizer.path"):
        assert word in str(error.value)
    assert not (config.data_dir / "s" / "train" / "manifest.json").exists()


def test_refused_after_the_first_units(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(run_units, "_REFUSE_AFTER_TOKENS", 100)
    config = config_of(tmp_path, TEXTS, tokenizer, unit_bytes=1000)
    with pytest.raises(UserError, match="so far"):
        preprocess(config)
    made = len(list((config.data_dir / "s" / "receipts").rglob("*.json")))
    assert made < len(orjson.loads((config.data_dir / "s" / "plan.json").read_bytes())["units"]) / 2


def test_a_dry_run_refuses_the_same(tmp_path, tokenizer):
    with pytest.raises(UserError, match=r"50 % of .* data\.preprocess\.max_unknown"):
        preprocess(config_of(tmp_path, TEXTS, tokenizer), dry_run=True)


def test_counted_where_it_is_allowed(tmp_path, tokenizer, capsys):
    config = config_of(tmp_path, TEXTS, tokenizer, max_unknown=1)
    preprocess(config)
    printed = capsys.readouterr().out
    assert "unknown" in printed and "44.44 %" in printed
    report = json.loads((config.data_dir / "s" / "report.json").read_bytes())
    for split in ("train", "heldout"):
        dataset = Dataset.open(config.data_dir / "s" / split)
        counted = int((dataset.read(0, dataset.tokens) == 0).sum())
        assert counted == 4 * dataset.documents == dataset.manifest.unknown_tokens
        assert report["coverage"][split]["unknown_tokens"] == counted
        assert 0 < dataset.manifest.round_trip.uncovered < dataset.manifest.round_trip.characters
    assert is_complete(config)
    again = config_of(tmp_path, TEXTS, tokenizer, max_unknown=0.1)
    assert not is_complete(again)
    with pytest.raises(UserError, match="max_unknown"):
        preprocess(again)


def test_lost_text_is_shown_and_not_refused(tmp_path, capsys):
    path = write(tmp_path / "t.json", byte_vocabulary())
    engine = tokenizers.Tokenizer.from_file(str(path))
    engine.normalizer = normalizers.Lowercase()
    engine.save(str(path))
    config = config_of(tmp_path, [f"ABcd{number % 10}{number // 10}EF" for number in range(90)], {"path": str(path)})
    preprocess(config)
    printed = capsys.readouterr().out
    assert "lost" in printed and "50 %" in printed and "ABcd" in printed
    manifest = read_manifest(config.data_dir / "s" / "train")
    assert manifest.unknown_tokens == 0
    assert manifest.round_trip.kept * 2 == manifest.round_trip.characters  # 4 of 8 are capital letters


def test_long_documents_are_counted(tmp_path, tokenizer):
    texts = ["the word " * 500 + "the " * number for number in range(20)]
    config = config_of(tmp_path, texts, tokenizer, max_document_bytes=1024, max_unknown=1, unit_bytes=2**20)
    preprocess(config)
    for split in ("train", "heldout"):
        manifest = read_manifest(config.data_dir / "s" / split)
        assert manifest.unknown_tokens == 500 * manifest.documents


def test_datasets_of_earlier_versions_stay_as_they_are(tmp_path, tokenizer):
    config = config_of(tmp_path, TEXTS, tokenizer, max_unknown=1)
    preprocess(config)
    for path in [*config.data_dir.rglob("receipts/*/*.json"), *config.data_dir.glob("s/*/manifest.json")]:
        value = orjson.loads(path.read_bytes())
        value.pop("seal", None)
        for about in [value, *value.get("splits", {}).values()]:
            about.pop("unknown_tokens", None)
            about.pop("round_trip", None)
        storage.put_json(path, value)
    before = tree(config.data_dir)
    assert preprocess(config_of(tmp_path, TEXTS, tokenizer)).units_done == 0
    after = tree(config.data_dir)
    assert {name for name in before if before[name] != after[name]} == {"s/report.json"}
    assert read_manifest(config.data_dir / "s" / "train").unknown_tokens is None
