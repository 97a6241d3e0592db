"""Evaluation of encoders: masked loss, pseudo-perplexity, and what is refused."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.heldout_data import heldout_splits
from pipeline.eval.perplexity import evaluate, read_report
from pipeline.eval.server.watch import load_served
from pipeline.eval.summary import show, summarize
from pipeline.eval.text import continue_prompt
from pipeline.train.loop.trainer import train
from pipeline.train.model.context import Context
from pipeline.train.start.setup import load_for_inference
from tests import tiny

QUIET = Console(quiet=True)
ENCODER: dict[str, Any] = {
    "train.objective": {"type": "masked", "rate": 0.3},
    "tokenizer.special_tokens": ["[MASK]"],
    "model.direction": "both",
    "model.document_attention": True,
    "model.head_transform": "gelu_exact",
    "model.head_bias": True,
    "train.precision": {"compute": "fp32"},
    "train.duration": "3 steps",
}
TOKENS = 20


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    loaded = load(tiny.write_run(tmp_path_factory.mktemp("encoder"), ENCODER), [f"eval.pseudo_tokens={TOKENS}"])
    preprocess(loaded)
    train(loaded)
    return loaded


def test_pseudo_perplexity_is_that_of_a_plain_loop(config: Config) -> None:
    report = evaluate(config, console=QUIET)
    found = load_for_inference(config, None)
    mask, length = found.tokenizer.special_tokens["[MASK]"], config.train.sequence_length
    assert report.pseudo.keys() == heldout_splits(config).keys()
    for name, split in heldout_splits(config).items():
        dataset, nats = split.dataset, list[float]()
        end = dataset.manifest.tokenizer.end_of_document
        for place in (number * dataset.tokens // TOKENS for number in range(min(TOKENS, dataset.tokens))):
            first = place // length * length
            window = torch.from_numpy(dataset.read(first, min(length, dataset.tokens - first)).astype("int64"))
            target = int(window[place - first])
            if target == end:
                continue
            window[place - first] = mask
            # The document alone: attention stays in it, and positions begin with it.
            ends = [index for index, token in enumerate(window.tolist()) if token == end]
            begin = max((index + 1 for index in ends if index < place - first), default=0)
            stop = min((index + 1 for index in ends if index >= place - first), default=len(window))
            logits = found.model.whole(window[None, begin:stop], Context())
            nats.append(-logits[0, place - first - begin].log_softmax(-1)[target].item())
        assert report.pseudo[name].targets == len(nats) > 5
        assert report.pseudo[name].loss == pytest.approx(sum(nats) / len(nats), rel=1e-5)
        assert report.pseudo[name].perplexity == pytest.approx(math.exp(report.pseudo[name].loss))
    assert report.blended.targets < sum(split.dataset.tokens for split in heldout_splits(config).values()) * 0.35
    assert report.step is not None
    assert read_report(config, report.step) == report
    fewer = config.model_copy(update={"eval": config.eval.model_copy(update={"pseudo_tokens": 0})})
    assert read_report(fewer, report.step) is None
    assert evaluate(fewer, console=QUIET, keep=False).pseudo == {}


def test_the_masked_loss_is_that_of_validation(config: Config) -> None:
    first, again = (evaluate(config, console=QUIET, keep=False) for _ in range(2))
    assert first == again


def test_an_encoder_writes_no_text(config: Config, tmp_path: Path) -> None:
    for ask in (lambda: continue_prompt(config, console=QUIET), lambda: load_served(config, None)):
        with pytest.raises(UserError, match="model.direction=both is an encoder"):
            ask()
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat\n")
    for key, value in (
        ("tasks", [{"type": "wikitext", "path": str(file)}]),
        ("harness", {"tasks": ["lambada_openai"]}),
    ):
        asked = load(config.run.dir / "config.yaml", [f"eval.{key}={value}"])
        with pytest.raises(UserError, match=f"eval.{key} scores how texts continue"):
            evaluate(asked, console=QUIET, keep=False)
    report = evaluate(config, console=QUIET)
    figures = summarize(config, report, {}, QUIET)
    assert figures["continuation"] is None
    shown = io.StringIO()
    show(config, figures, Console(file=shown, width=200))
    assert "data inspect" in shown.getvalue() and " generate " not in shown.getvalue()
