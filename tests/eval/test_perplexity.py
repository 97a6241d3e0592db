"""Held-out loss, perplexity, bits per byte and the reference lines, against sums written out by hand."""

import io
import math
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from rich.console import Console

from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.dataset import Dataset
from pipeline.data.heldout import HeldOut
from pipeline.data.preprocess import open_datasets, preprocess
from pipeline.errors import MachineError, UserError
from pipeline.eval.perplexity import evaluate, read_report
from pipeline.eval.reference import unigram_bits_per_byte, zstd_bits_per_byte
from pipeline.train.model.decoder import Context
from pipeline.train.setup import load_for_inference
from pipeline.train.trainer import train
from slurm import local
from tests import tiny


@pytest.fixture(scope="module", params=[False, True], ids=["one text", "documents"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("eval")
    file = tiny.write_run(root, {"model.document_attention": request.param, "train.duration": "3 steps"})
    loaded = load(file, ["train.precision.compute=fp32"])
    preprocess(loaded)
    train(loaded)
    return loaded


def heldout(config: Config) -> dict[str, Dataset]:
    return open_datasets(config, "heldout")


def texts(config: Config, name: str) -> list[bytes]:
    """The held-out documents of a source, from its files: those whose text is in the held-out split."""
    dataset = heldout(config)[name]
    setup, _, _, _ = load_for_inference(config, None)
    decoded = {
        setup.tokenizer.decode(
            dataset.read(dataset.document_start(d), dataset.document_start(d + 1) - dataset.document_start(d) - 1)
        ).encode()
        for d in range(dataset.documents)
    }
    source = next(s for s in config.data.sources if s.name == name)
    folder = Path(source.paths[0]).parent
    return [file.read_bytes() for file in sorted(folder.glob("*.txt")) if file.read_bytes() in decoded]


def nats_by_hand(config: Config, dataset: Dataset) -> float:
    """Window by window in fp64, without batches, padding or masks of the suite."""
    setup, model, _, _ = load_for_inference(config, None)
    length = config.train.sequence_length
    tokens = [setup.tokenizer.end_of_document, *dataset.read(0, dataset.tokens).tolist()]
    total = 0.0
    for start in range(0, dataset.tokens, length):
        inputs, targets = tokens[start : start + length], tokens[start + 1 : start + 1 + length]
        inputs = inputs[: len(targets)]
        pieces: list[list[int]] = [inputs]
        if config.model.document_attention:
            pieces = [[]]
            for token in inputs:
                pieces[-1].append(token)
                if token == setup.tokenizer.end_of_document:
                    pieces.append([])
        logits = [model.whole(torch.tensor([piece]), Context())[0] for piece in pieces if piece]
        log_p = torch.cat(logits).double().log_softmax(-1)
        total -= sum(log_p[i, target].item() for i, target in enumerate(targets))
    return total


def test_every_token_counts_once(config: Config) -> None:
    report = evaluate(config)
    nats, count, size = 0.0, 0, 0
    for name, dataset in heldout(config).items():
        by_hand = nats_by_hand(config, dataset)
        score = report.sources[name]
        assert score.targets == dataset.tokens
        assert score.loss == pytest.approx(by_hand / dataset.tokens, rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(by_hand / dataset.tokens), rel=1e-4)
        assert score.text_bytes == sum(map(len, texts(config, name)))
        assert score.bits_per_byte == pytest.approx(by_hand / math.log(2) / score.text_bytes, rel=1e-5)
        nats, count, size = nats + by_hand, count + dataset.tokens, size + score.text_bytes
    assert report.blended.loss == pytest.approx(nats / count, rel=1e-5)
    assert report.blended.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert read_report(config, 3) == report


def test_batch_size_does_not_change_the_loss(config: Config) -> None:
    one = evaluate(config.model_copy(update={"eval": config.eval.model_copy(update={"batch_size": 1})}))
    many = evaluate(config.model_copy(update={"eval": config.eval.model_copy(update={"batch_size": 7})}))
    assert one.blended.loss == pytest.approx(many.blended.loss, rel=1e-5)


@pytest.mark.parametrize(
    "other",
    [
        ["train.sequence_length=16"],
        ["train.precision.compute=bf16"],
        ["train.optimizer.lr=1e-5"],  # another checkpoint of the same step
    ],
)
def test_a_report_made_of_something_else_is_not_reused(tmp_path: Path, other: list[str]) -> None:
    file = tiny.write_run(tmp_path, {"train.duration": "3 steps", "train.precision.compute": "fp32"})
    config = load(file)
    preprocess(config)
    train(config)
    report = evaluate(config)
    assert read_report(config, 3) == report
    if "optimizer" in other[0]:
        shutil.rmtree(config.run.dir / "checkpoints")
        (config.run.dir / "metrics.jsonl").unlink()
        train(load(file, other))
    assert read_report(load(file, other), 3) is None


def test_out_of_memory_says_what_to_lower(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr("pipeline.eval.perplexity.heldout_loss", no_room)
    with pytest.raises(MachineError, match=r"out of memory: lower eval.batch_size \(8 now\) \(CUDA out of memory\)"):
        evaluate(config)


def test_a_damaged_report_is_made_again(config: Config) -> None:
    evaluate(config)
    path = config.run.dir / "eval" / "step-00000003.json"
    for content in (b"", b"{}", b"[1]"):
        path.write_bytes(content)
        assert read_report(config, 3) is None


def test_windows_spread_over_the_split_and_are_always_the_same(config: Config) -> None:
    split = HeldOut(heldout(config)["sea"], 32)
    few = split.spread(4)
    assert few == split.spread(4)
    assert len(set(few)) == 4 and few[0] == 0 and few[-1] < len(split)
    assert split.spread(10**6) == list(range(len(split)))


def test_unigram_line_equals_a_count_by_hand(config: Config) -> None:
    train_sets = list(open_datasets(config, "train").values())
    held = list(heldout(config).values())
    counts = Counter(dict.fromkeys(range(300), 1))
    for dataset in train_sets:
        counts.update(dataset.read(0, dataset.tokens).tolist())
    total = sum(counts.values())
    bits = sum(-math.log2(counts[token] / total) for d in held for token in d.read(0, d.tokens).tolist())
    expected = bits / sum(d.text_bytes for d in held)
    assert unigram_bits_per_byte(train_sets, held, 300) == pytest.approx(expected, rel=1e-9)


def test_zstd_line_is_that_of_the_original_bytes(config: Config) -> None:
    setup, _, _, _ = load_for_inference(config, None)
    held = heldout(config)
    original = b"".join(text for name in held for text in texts(config, name))
    expected = 8 * len(zstandard.ZstdCompressor(level=19).compress(original)) / len(original)
    # The documents lie in another order than the files.
    assert zstd_bits_per_byte(list(held.values()), setup.tokenizer) == pytest.approx(expected, rel=0.02)


def test_nothing_held_out_is_refused(tmp_path: Path) -> None:
    config = load(tiny.write_run(tmp_path), ["data.splits.heldout=0", "train.duration=2 steps"])
    preprocess(config)
    train(config)
    with pytest.raises(UserError, match=r"nothing is held out \(data.splits.heldout is 0"):
        evaluate(config)


def test_heldout_bounds_equal_a_scan_for_ends(config: Config) -> None:
    dataset = heldout(config)["land"]
    end = dataset.manifest.tokenizer.end_of_document
    split = HeldOut(dataset, 17)
    for window in range(len(split)):
        batch = split.batch([window])
        tokens = batch.tokens[0].numpy()
        valid = int(batch.weight.sum())
        ends = np.flatnonzero(tokens[:valid] == end)
        expected = [max([e + 1 for e in ends if e < q], default=0) for q in range(valid)]
        assert batch.bounds[0, :valid].tolist() == expected


def test_another_model_than_the_checkpoints_is_refused(config: Config) -> None:
    other = config.model_copy(update={"model": config.model.model_copy(update={"sliding_window": 3})})
    with pytest.raises(UserError, match="model.sliding_window: none -> 3"):
        evaluate(other)


def test_data_of_another_tokenizer_is_refused(config: Config, tmp_path: Path) -> None:
    other = load(tiny.write_run(tmp_path), ["tokenizer.train.vocab_size=290"])
    preprocess(other)
    mixed = config.model_copy(update={"data": other.data})
    with pytest.raises(UserError, match="source 'sea' .* was tokenized with another tokenizer .290 entries"):
        evaluate(mixed)


def test_a_folder_that_cannot_be_written_to_is_evaluated_all_the_same(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise MachineError("a colleague's")

    monkeypatch.setattr("pipeline.train.run_folder.make_writable", refuse)
    before = sorted(config.run.dir.rglob("*"))
    out = io.StringIO()
    report = local.evaluate(config, console=Console(file=out, width=200))
    assert report.blended.loss > 0
    assert "bits" in out.getvalue() and "the result is not kept" in out.getvalue()
    assert sorted(config.run.dir.rglob("*")) == before
