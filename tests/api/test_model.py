"""`api.load_model`, `api.generate` and `api.evaluate` beside the commands."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from typer.testing import CliRunner

from pipeline import api
from pipeline.cli.main import app
from pipeline.eval.inference import load_decoder
from pipeline.train.checkpoint.export import export
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.process_group import destroy
from pipeline.train.huggingface.convert import to_hf
from pipeline.train.model.decoder import Context
from tests.api.runs import trained
from tests.train.distributed.ranks import Ranks, kept_ranks

QUIET = Console(quiet=True)
PROMPTS = ["the old", "wind", "a tower of"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    with kept_ranks() as get:
        yield get


@pytest.fixture(autouse=True)
def no_process_group() -> None:
    """The trainings of other tests leave theirs behind."""
    destroy()


def some_ids(model: api.Model, rows: int = 3, length: int = 20) -> torch.Tensor:
    return torch.randint(0, model.vocab_size, (rows, length), generator=torch.Generator().manual_seed(5))


def test_logits_are_those_of_the_model(windows: Path) -> None:
    model = api.load_model(str(windows), 4)
    ids = some_ids(model)
    loaded = load_decoder(api.Run(windows).config, 4)
    with torch.no_grad():
        logits = model(ids)
        expected = loaded.model(ids, Context())
    assert logits.shape == (3, 20, 300) and not model.training
    assert logits.equal(expected[..., :300]) and expected[..., 300:].eq(-math.inf).all()
    assert model.origin.step == 4 and model.origin.path == windows / "checkpoints/step-00000004"
    with torch.no_grad():
        changed = ids.clone()
        changed[:, 10] = (changed[:, 10] + 1) % 300
        assert model(changed)[:, :10].equal(logits[:, :10]), "it is causal"
        bounds = torch.zeros_like(ids)
        bounds[:, 12:] = 12
        parts = torch.cat([model(ids[:, :12]), model(ids[:, 12:])], dim=1)
        torch.testing.assert_close(model(ids, bounds=bounds), parts)


@pytest.mark.guard
def test_which_checkpoint(windows: Path) -> None:
    best = api.Run(windows).best_step()
    for what, step, wanted in (
        (windows, None, 8),
        (windows, "latest", 8),
        (windows, "best", best),
        (windows.parent / "run.yaml", 4, 4),
        (api.Run(windows), 4, 4),
        (windows / "checkpoints/step-00000004", None, 4),
    ):
        assert api.load_model(what, step).origin.step == wanted
    for what, step, message in (
        (windows, 5, r"a checkpoint of step 5 \(steps there: 4, 8\); choose one"),
        (windows, "newest", "give a number, 'latest' or 'best'"),
        (windows / "checkpoints/step-00000004", 8, "leave one of them out"),
        (windows.parent / "data", None, "is not a run folder"),
        (windows.parent / "nowhere", None, "does not exist; name a run, a checkpoint"),
    ):
        with pytest.raises(api.UserError, match=message):
            api.load_model(what, step)
    with pytest.raises(api.UserError, match="no moving average"):
        api.load_model(windows, weights="ema")
    with pytest.raises(api.UserError, match="there is one process"):
        api.load_model(windows, parallel={"tp": 2})


@pytest.mark.guard
def test_damage_is_found(windows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(windows, run)
    file = next((run / "checkpoints/step-00000008").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(api.UserError, match=r"has changed since it was written"):
        api.load_model(run)
    assert api.load_model(run, 4).origin.step == 4


@pytest.mark.guard
def test_it_learns_by_autograd(windows: Path) -> None:
    """Gradients of a matrix agree with differences of the loss, and steps of an optimizer lower it."""
    run = api.Run(windows)
    model, batch = api.load_model(run, dtype=torch.float64), run.batch(8)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten())

    before = loss()
    before.backward()
    weight = model.decoder.layers["0"].mixer.wq.weight
    assert weight.grad is not None and all(each.grad is not None for each in model.parameters())
    with torch.no_grad():
        direction = weight.grad / weight.grad.norm()
        # Large enough that the last digits of the loss, which differ between processors, do not count.
        weight += 1e-3 * direction
        up = loss()
        weight -= 2e-3 * direction
        assert float((up - loss()) / 2e-3) == pytest.approx(float(weight.grad.norm()), rel=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(4):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss() < before - 0.01
    with torch.no_grad():
        with_more = api.load_model(run)
        with_more.load_state_dict(model.state_dict())
        assert not with_more(batch.ids).equal(api.load_model(run)(batch.ids))


def test_ids_that_make_no_sense(windows: Path) -> None:
    model = api.load_model(windows)
    ids = some_ids(model)
    for arguments, given, message in (
        ([ids[0]], {}, r"must be \[rows, positions\]"),
        ([ids[:, :0]], {}, "at least one of each"),
        ([ids.float()], {}, "torch.int64"),
        ([ids + 300], {}, "the vocabulary of the model has 0 to 299"),
        ([ids, ids], {}, "the model has no encoder"),
        ([ids], {"bounds": ids[:, :5]}, "bounds has shape"),
        ([ids], {"prefix": ids}, "give bounds as well"),
        ([[[1, 2]]], {}, r"list, but must be a tensor \[rows, positions\]"),
        ([ids], {"bounds": torch.zeros(3, 20)}, "must be a tensor of torch.int64"),
        ([ids], {"bounds": torch.ones_like(ids)}, "at which its document begins"),
        ([ids], {"bounds": torch.arange(20).expand(3, 20) // 7}, "at which its document begins"),
        ([ids], {"bounds": torch.tensor([[0] * 9 + [9] * 9 + [0] * 2] * 3)}, "at which its document begins"),
    ):
        with pytest.raises(api.UserError, match=message):
            model(*arguments, **given)
    for settings, message in (
        ({"topk": 3}, "no setting 'topk'; settings: max_tokens"),
        ({"temperature": -1.0}, "generate.temperature: .*greater than or equal to 0"),
        ({"max_tokens": 1.5}, "generate.max_tokens: .*integer"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"stop": ""}, "stop"),
    ):
        with pytest.raises(api.UserError, match=message):
            model.generate("the", **settings)  # type: ignore[arg-type]
    for arguments, message in (
        ({"dtype": "float32"}, "such as torch.float32"),
        ({"weights": "best"}, "give 'model' or 'ema'"),
        ({"device": "gpu"}, "is not a device of torch"),
        ({"device": "cuda:99"}, "torch sees .* GPUs? here"),
    ):
        with pytest.raises(api.UserError, match=message):
            api.load_model(windows, **arguments)  # type: ignore[arg-type]
    with pytest.raises(api.UserError, match=r"\[\[1, 2, 3\]\]"):
        model.generate([1, 2])  # type: ignore[list-item]


@pytest.mark.guard
def test_texts_are_those_of_the_command(windows: Path) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.9, "top_k": 40, "seed": 11, "logprobs": 2}
    options = ["--max-tokens", "12", "--temperature", "0.9", "--top-k", "40", "--seed", "11", "--logprobs", "2"]
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    model = api.load_model(windows)
    found = model.generate(PROMPTS, **settings)
    alone = api.generate(windows, PROMPTS[0], **settings)
    assert not dist.is_initialized(), "nothing is left behind"
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, products)
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    for words, texts in ((prompts, found), (prompts[:2], [alone])):
        done = CliRunner().invoke(app, ["generate", str(windows), *words, *options, "--json"], catch_exceptions=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        for line, text in zip(lines, texts, strict=True):
            assert (line["text"], line["finish"]) == (text.text, text.finish)
            assert [(each["id"], each["logprob"]) for each in line["tokens"]] == [
                (each.id, each.logprob) for each in text.tokens
            ]
    ids = model.tokenizer.encode(PROMPTS[0])
    assert model.generate([ids], **settings)[0].text == alone.text
    assert model.generate("the", seed=1, max_tokens=3).text != "" and model.generate([]) == []


@pytest.mark.guard
def test_figures_are_those_of_the_command(windows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(windows, run)
    passages = tmp_path / "lambada.jsonl"
    passages.write_text("".join(json.dumps({"text": f"the sea {word} north wind"}) + "\n" for word in PROMPTS))
    task = {"type": "lambada", "path": str(passages)}
    settings = {"eval.samples": 7, "eval.tasks": [task]}
    before = dict(os.environ), sys.excepthook
    found = api.evaluate(run, 4, settings=settings)
    assert not (run / "eval").exists() and not dist.is_initialized()
    assert (dict(os.environ), sys.excepthook) == before
    with torch.inference_mode():
        assert api.evaluate(run, 4, settings=settings).heldout == found.heldout
    values = ["eval.samples=7", f"eval.tasks={json.dumps([task])}"]
    done = CliRunner().invoke(app, ["eval", str(run), *values, "--step", "4"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads((run / "eval/step-00000004.json").read_text())
    assert found.heldout.to_json() == report
    assert (found.loss, found.perplexity) == (report["blended"]["loss"], report["blended"]["perplexity"])
    tasks = json.loads((run / "eval/tasks-step-00000004.json").read_text())["tasks"]
    assert found.tasks == {name: each["results"] for name, each in tasks.items()} and found.tasks
    (evaluation,) = api.Run(run).evaluations()
    assert evaluation.scores["loss"] == found.loss

    model = api.load_model(run, 4)
    of_memory = api.evaluate(model, settings=settings)
    assert (of_memory.heldout.blended, of_memory.tasks) == (found.heldout.blended, found.tasks)
    with torch.no_grad():
        model.decoder.norm.weight.mul_(1.3)
    changed = api.evaluate(model, settings=settings)
    assert changed.loss != found.loss and changed.tasks != found.tasks, "nothing that is kept is of these weights"
    kept = api.evaluate(run, 8, settings={"eval.samples": 7}, keep=True)
    assert json.loads((run / "eval/step-00000008.json").read_text()) == kept.heldout.to_json()

    folder = tmp_path / "exported"
    export(Checkpoints.of_run(run), folder, step=4, weights="model", max_shard=None, console=QUIET)
    exported = api.load_model(folder)
    with pytest.raises(api.UserError, match="name one whose data is to be used"):
        api.evaluate(exported)
    assert api.evaluate(exported, run=run, settings={"eval.samples": 7}).heldout.blended == found.heldout.blended
    for arguments, message in (
        ({"what": model, "step": 3}, "is for runs"),
        ({"what": model, "keep": True}, "weights in memory"),
        ({"what": run, "run": run}, "is a run already"),
        ({"what": run, "step": 5}, "checkpoint of step 5"),
        ({"what": model, "settings": {"model.heads": 4}}, "another one than that of the run"),
    ):
        with pytest.raises(api.UserError, match=message):
            api.evaluate(**arguments)


@pytest.mark.guard
def test_exports_are_the_same_model(windows: Path, tmp_path: Path) -> None:
    """Also beside transformers, which reads the same folder."""
    from transformers import AutoModelForCausalLM

    model = api.load_model(windows)
    ids = some_ids(model)
    with torch.no_grad():
        expected = model(ids)
    own, hugging = tmp_path / "own", tmp_path / "hugging"
    export(Checkpoints.of_run(windows), own, step=None, weights="model", max_shard=None, console=QUIET)
    to_hf(windows, hugging, console=QUIET)
    for folder in (own, hugging):
        loaded = api.load_model(str(folder))
        with torch.no_grad():
            assert loaded(ids).equal(expected)
        assert loaded.origin.step is None and loaded.positions == 32
        # Draws depend on the padding of the vocabulary, which Hugging Face's format does not have.
        how: dict[str, Any] = {"seed": 3, "max_tokens": 9, "temperature": 0.0 if folder == hugging else 0.8}
        assert loaded.generate("the", **how).text == model.generate("the", **how).text
        with pytest.raises(api.UserError, match="is for the checkpoints of a run"):
            api.load_model(folder, 4)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(hugging)(ids).logits
    torch.testing.assert_close(theirs[..., :300].float(), expected, rtol=1e-4, atol=1e-4)
    assert api.load_model(hugging, dtype=torch.bfloat16)(ids).dtype == torch.bfloat16
    (hugging / "tokenizer.json").unlink()
    with pytest.raises(api.UserError, match="has no tokenizer.json"):
        api.load_model(hugging).generate("the")


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["masked", "spans"])
def test_models_that_are_no_decoders(tmp_path: Path, kind: str) -> None:
    model = api.load_model(trained(tmp_path, kind))
    ids = some_ids(model)
    with torch.no_grad():
        if kind == "masked":
            changed = ids.clone()
            changed[:, 10] = (changed[:, 10] + 1) % model.vocab_size
            assert not model(changed)[:, :10].equal(model(ids)[:, :10]), "it looks in both directions"
            with pytest.raises(api.UserError, match="generate: model.direction=both is an encoder"):
                model.generate("the")
            return
        decoder_ids = some_ids(model, length=6)
        assert model(ids, decoder_ids).shape == (3, 6, model.vocab_size)
        # Rows that end earlier are filled up with a document of their own.
        bounds = torch.zeros(3, 26, dtype=torch.int64)
        bounds[:, 20:] = 20
        with pytest.raises(api.UserError, match="is an encoder-decoder: give the ids of the decoder"):
            model(ids)
        with pytest.raises(api.UserError, match="decoder_ids has 2 rows, but ids has 3"):
            model(ids, decoder_ids[:2])
        torch.testing.assert_close(model(ids, decoder_ids, bounds=bounds), model(ids, decoder_ids))
    settings: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0}
    assert model.generate("the sea", **settings).tokens == api.generate(model, ["the sea"], **settings)[0].tokens


LAYOUTS: dict[str, dict[str, int]] = {"tp": {"tp": 2}, "shard": {"dp_shard": 2}, "replicate": {"dp_replicate": 2}}


@pytest.mark.slow
@pytest.mark.parallel
def test_two_processes_have_the_logits_and_gradients_of_one(windows: Path, ranks: Callable[[int], Ranks]) -> None:
    model = api.load_model(windows)
    with torch.no_grad():
        logits = model(some_ids(model))
    batch = api.Run(windows).batch(3)
    F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten()).backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    expected = api.evaluate(windows).loss
    for name, layout in LAYOUTS.items():
        for found, own, loss in ranks(2).call(_on_ranks, windows, layout):
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5, msg=name)
            assert own.keys() == gradients.keys()
            for parameter, gradient in own.items():
                torch.testing.assert_close(gradient, gradients[parameter], rtol=1e-4, atol=1e-6, msg=parameter)
            assert loss == pytest.approx(expected, rel=1e-6)


def _on_ranks(run: Path, layout: dict[str, int]) -> tuple[torch.Tensor, dict[str, torch.Tensor], float]:
    """Logits, whole gradients, and the held-out loss."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # as a user does, with what torchrun has set
    for wrong, message in (({"pp": 2}, "parallel.pp"), ({"tp": 3}, "tp"), ({"tp": 0}, "parallel.tp: ")):
        with pytest.raises(api.UserError, match=message):
            api.load_model(run, parallel=wrong)
    model = api.load_model(run, parallel=layout)
    with torch.no_grad():
        logits = model(some_ids(model))
    batch = api.Run(run).batch(3)
    data = 1 if "tp" in layout else 2
    rows = batch.ids.shape[0] // data
    mine = slice(dist.get_rank() % data * rows, (dist.get_rank() % data + 1) * rows)
    losses = F.cross_entropy(model(batch.ids[mine]).flatten(0, 1), batch.targets[mine].flatten(), reduction="sum")
    (losses / batch.ids.numel()).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradients[name] = parameter.grad.full_tensor()
    with pytest.raises(api.UserError, match="several processes"):
        model.generate("the")
    with pytest.raises(api.UserError, match="several"):
        api.evaluate(model)
    settings = {"eval.parallel": layout, "eval.processes": 2}
    return logits, gradients, api.evaluate(run, settings=settings).loss
