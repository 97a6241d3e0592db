"""Held-out loss, perplexity, bits per byte and the reference lines, against sums written out by hand."""

import io
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import MachineError, UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.open import open_datasets
from pipeline.data.loading.heldout import HeldOut, sample
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.heldout_data import heldout_splits
from pipeline.eval.perplexity import evaluate, read_report
from pipeline.eval.reference import unigram_bits_per_byte, zstd_bits_per_byte
from pipeline.eval.reports import read_evaluations
from pipeline.train.loop.trainer import train
from pipeline.train.model.decoder import Context
from pipeline.train.run.folder import read_metrics
from pipeline.train.start.setup import load_for_inference
from slurm.local import stages
from tests import tiers, tiny


@pytest.fixture(scope="module", params=tiers.first(1, [True, False], rest="guard"), ids=["documents", "one text"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp("eval")
    changes = {"model.document_attention": request.param, "train.validation.samples": 10**6}
    file = tiny.write_run(root, {**changes, "train.duration": "3 steps"})
    loaded = load(file, ["train.precision.compute=fp32"])
    preprocess(loaded)
    train(loaded)
    return loaded


def changed(config: Config, **values: object) -> Config:
    """With other keys of `eval`."""
    return config.model_copy(update={"eval": config.eval.model_copy(update=values)})


def heldout(config: Config) -> dict[str, Dataset]:
    return open_datasets(config, "heldout")


def texts(config: Config, name: str) -> list[bytes]:
    """The held-out documents of a source, from its files: those whose text is in the held-out split."""
    dataset = heldout(config)[name]
    loaded = load_for_inference(config, None)
    decoded = {
        loaded.tokenizer.decode(
            dataset.read(dataset.document_start(d), dataset.document_start(d + 1) - dataset.document_start(d) - 1)
        ).encode()
        for d in range(dataset.documents)
    }
    source = next(s for s in config.data.sources if s.name == name)
    folder = Path(source.paths[0]).parent
    return [file.read_bytes() for file in sorted(folder.glob("*.txt")) if file.read_bytes() in decoded]


def rows_of(config: Config, dataset: Dataset, *, documents: bool = False) -> list[list[int]]:
    """What is read front to back, each after an end of document: the split, or each of its documents."""
    tokens = dataset.read(0, dataset.tokens).tolist()
    end = dataset.manifest.tokenizer.end_of_document
    if not documents:
        return [[end, *tokens]]
    rows = [[end]]
    for token in tokens:
        rows[-1].append(token)
        if token == end:
            rows.append([end])
    return rows[:-1]


def nats_by_hand(config: Config, rows: list[list[int]], stride: int) -> list[list[float]]:
    """By row, the cross entropy of every token, each looked at in the first window that has it.

    Window by window in fp64, without batches, padding or masks of the suite.
    """
    loaded = load_for_inference(config, None)
    model = loaded.model
    length, end = config.train.sequence_length, loaded.tokenizer.end_of_document
    found: list[list[float]] = []
    for row in rows:
        nats: list[float] = []
        start = 0
        while len(nats) < len(row) - 1:
            targets = row[start + 1 : start + length + 1]
            inputs = row[start : start + len(targets)]
            pieces: list[list[int]] = [inputs]
            if config.model.document_attention:
                pieces = [[]]
                for token in inputs:
                    pieces[-1].append(token)
                    if token == end:
                        pieces.append([])
            with torch.no_grad():
                logits = [model.whole(torch.tensor([piece]), Context())[0] for piece in pieces if piece]
            log_p = torch.cat(logits).double().log_softmax(-1)
            scored = [-log_p[i, target].item() for i, target in enumerate(targets)]
            nats += scored[len(nats) - start :]
            start += stride
        found.append(nats)
    return found


@pytest.mark.parametrize(
    "values",
    [
        {},
        pytest.param({"stride": 12}, marks=pytest.mark.slow),
        pytest.param({"documents": True}, marks=pytest.mark.slow),
        {"documents": True, "stride": 20, "batch_size": 3},
    ],
    ids=["whole", "stride", "documents", "documents with a stride"],
)
def test_every_token_counts_once(config: Config, values: dict[str, object]) -> None:
    wanted = changed(config, **values)
    report = evaluate(wanted)
    nats, count, size = 0.0, 0, 0
    for name, dataset in heldout(config).items():
        rows = rows_of(config, dataset, documents=wanted.eval.documents)
        if wanted.eval.documents:
            assert len(rows) == dataset.documents
        by_hand = sum(map(sum, nats_by_hand(config, rows, wanted.eval.stride or config.train.sequence_length)))
        score = report.sources[name]
        assert (score.targets, score.documents) == (dataset.tokens, dataset.documents)
        assert score.loss == pytest.approx(by_hand / dataset.tokens, rel=1e-6)
        assert score.perplexity == pytest.approx(math.exp(by_hand / dataset.tokens), rel=1e-5)
        assert score.text_bytes == sum(map(len, texts(config, name)))
        assert score.bits_per_byte == pytest.approx(by_hand / math.log(2) / score.text_bytes, rel=1e-6)
        nats, count, size = nats + by_hand, count + dataset.tokens, size + score.text_bytes
    assert report.blended.loss == pytest.approx(nats / count, rel=1e-6)
    assert report.blended.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert read_report(wanted, 3) == report


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"stride": 8}, marks=pytest.mark.slow),
        {"stride": 8, "documents": True},
    ],
)
def test_a_sample_has_the_loss_and_the_bytes_of_its_own_tokens(config: Config, values: dict[str, object]) -> None:
    wanted = changed(config, samples=7, **values)
    stride, length = wanted.eval.stride or 32, config.train.sequence_length
    splits = heldout_splits(wanted)
    chosen = sample(splits, 7)
    assert 4 <= sum(map(len, chosen.values())) <= 7
    report = evaluate(wanted)
    loaded = load_for_inference(config, None)
    for name, dataset in heldout(config).items():
        rows = rows_of(config, dataset, documents=wanted.eval.documents)
        # Of each window what counts: (row, its tokens from here, to there), by counting on from the start.
        spans = []
        for number, row in enumerate(rows):
            done = start = 0
            while done < len(row) - 1:
                end = min(start + length, len(row) - 1)
                spans.append((number, done, end))
                done, start = end, start + stride
        assert len(spans) == len(splits[name])
        mine = [spans[window] for window in chosen[name]]
        by_hand = nats_by_hand(config, rows, stride)
        nats = [nat for row, first, end in mine for nat in by_hand[row][first:end]]
        score = report.sources[name]
        assert score.targets == len(nats)
        assert score.loss == pytest.approx(sum(nats) / len(nats), rel=1e-6)
        tokens = [rows[row][first + 1 : end + 1] for row, first, end in mine]
        text = "".join(loaded.tokenizer.decode(each) for each in tokens).replace("<|endoftext|>", "")
        assert score.text_bytes == len(text.encode())
        assert score.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / len(text.encode()), rel=1e-6)
        assert 0 < score.documents <= len(mine) * (1 + length)
    assert read_report(wanted, 3) == report
    assert read_report(config, 3) is None
    assert report.blended.text_bytes == sum(score.text_bytes or 0 for score in report.sources.values())


def test_validation_while_training_gives_the_same_number(config: Config) -> None:
    (row,) = (row for row in read_metrics(config.run.dir) if row["step"] == 3 and "validation_loss" in row)
    report = evaluate(config)
    assert row["validation_loss"] == pytest.approx(report.blended.loss, rel=1e-6)
    for name, score in report.sources.items():
        assert row["validation_loss_by_source"][name] == pytest.approx(score.loss, rel=1e-6)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("stride", [1, 5, 32])
def test_windows_show_each_token_once_as_a_target_that_counts(config: Config, stride: int, documents: bool) -> None:
    dataset = heldout(config)["land"]
    tokens, end = dataset.read(0, dataset.tokens).tolist(), dataset.manifest.tokenizer.end_of_document
    starts = [0, *(place + 1 for place, token in enumerate(tokens[:-1]) if token == end)] if documents else [0]
    split = HeldOut(dataset, 32, stride=stride, documents=documents)
    counted: list[int] = []
    for window, (first, counts, last) in enumerate(split.targets(range(len(split))).tolist()):
        counted += range(counts, last)
        begin = max(start for start in starts if start <= first)
        assert counts == first or counts - first >= 32 - stride
        assert begin <= first and not any(first < start < last for start in starts), "tokens of another text"
        if window % 17 == 0:
            batch = split.batch([window])
            before = end if first == begin else tokens[first - 1]
            assert batch.tokens[0, : last - first].tolist() == [before, *tokens[first : last - 1]]
            assert batch.targets[0, : last - first].tolist() == tokens[first:last]
            weight = [0.0] * (counts - first) + [1.0] * (last - counts) + [0.0] * (32 - (last - first))
            assert batch.weight[0].tolist() == weight
    assert counted == list(range(dataset.tokens))


def test_a_report_from_before_there_was_a_choice_of_windows_is_one_of_all(config: Config) -> None:
    report = evaluate(config)
    path = config.run.dir / "eval" / "step-00000003.json"
    value = storage.get_json(path)
    for key in ("samples", "stride", "documents"):
        del value["made_with"][key]
    storage.put_json(path, value)
    assert read_report(config, 3) == replace(report, made_with=value["made_with"])
    assert read_report(changed(config, stride=32), 3) is not None, "windows that begin every 32 do not overlap"
    for values in ({"samples": 5}, {"stride": 5}, {"documents": True}):
        assert read_report(changed(config, **values), 3) is None
    before = read_evaluations(config.run.dir)[0][0].measure
    evaluate(config)
    assert read_evaluations(config.run.dir)[0][0].measure == before
    evaluate(changed(config, samples=5))
    assert read_evaluations(config.run.dir)[0][0].measure != before


def test_a_stride_longer_than_a_window_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval.stride: 33 is more than train.sequence_length 32"):
        load(tiny.write_run(tmp_path), ["eval.stride=33"])


def test_batch_size_does_not_change_the_loss(config: Config) -> None:
    one, many = (evaluate(changed(config, batch_size=size)) for size in (1, 7))
    assert one.blended.loss == pytest.approx(many.blended.loss, rel=1e-5)


@pytest.mark.parametrize(
    "other",
    tiers.first(
        1,
        [
            ["train.optimizer.lr=1e-5"],  # another checkpoint of the same step
            ["train.sequence_length=16"],
            ["train.precision.compute=bf16"],
        ],
        rest="guard",
    ),
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

    monkeypatch.setattr("pipeline.eval.engine.heldout_loss", no_room)
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
    loaded = load_for_inference(config, None)
    held = heldout(config)
    original = b"".join(text for name in held for text in texts(config, name))
    expected = 8 * len(zstandard.ZstdCompressor(level=19).compress(original)) / len(original)
    # The documents lie in another order than the files.
    assert zstd_bits_per_byte(list(held.values()), loaded.tokenizer) == pytest.approx(expected, rel=0.02)


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

    monkeypatch.setattr("pipeline.train.run.folder.make_writable", refuse)
    before = sorted(config.run.dir.rglob("*"))
    out = io.StringIO()
    report = stages.evaluate(config, console=Console(file=out, width=200))
    assert report is not None and report.blended.loss > 0
    assert "bits" in out.getvalue() and "the result is not kept" in out.getvalue()
    assert sorted(config.run.dir.rglob("*")) == before
