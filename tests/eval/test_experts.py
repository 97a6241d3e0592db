"""Models with experts: evaluated on every layout as on one process, continued, served, and their choices shown."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.engine import open_engine
from pipeline.eval.expert_choices import ChoiceCollector, ExpertChoices, show_choices
from pipeline.eval.generation import batch as module
from pipeline.eval.generation.generate import as_they_end
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.inference import load_decoder
from pipeline.eval.perplexity import evaluate
from pipeline.eval.scoring import Request, continue_greedily, score
from pipeline.train.distributed.process_group import of_environment
from pipeline.train.loop.trainer import train
from pipeline.train.model.context import Context
from pipeline.train.model.mlps.experts.routing import Routed
from pipeline.train.rules.layout import check_evaluation_layout
from tests import tiny
from tests.eval.generation.test_generate import Letters, decoder, draw_prompts
from tests.eval.server.running import running
from tests.eval.test_scoring import prompts_of, requests_of
from tests.train.distributed.ranks import Ranks, kept_ranks
from tests.train.parallel.layouts import EXPERT_FAMILIES

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2-ep2": {"dp_shard": 2, "ep": 2},
    "fsdp2": {"dp_shard": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "tp2-no_sp": {"tp": 2, "sequence_parallel": False},
    "cp2-ep2": {"cp": 2, "ep": 2},
    "pp2": {"pp": 2},
    "pp2-fsdp2-ep2": {"pp": 2, "dp_shard": 2, "ep": 2},
    "pp2-tp2-ep2": {"pp": 2, "tp": 2, "ep": 2},
    "fsdp2-tp2-ep4": {"dp_shard": 2, "tp": 2, "ep": 4},
    "hsdp-ep2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
}
WINDOWS: tuple[tuple[str, ...], ...] = (
    ("eval.samples=1",),
    ("eval.stride=12", "eval.samples=19"),
    ("eval.stride=20", "eval.documents=true", "eval.batch_size=3"),
)
"""Of the first all ranks but one have nothing; of the others the last batches are not full."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each family, trained on one process; the first family has a moving average."""
    root = tmp_path_factory.mktemp("experts")
    for family, keys in EXPERT_FAMILIES.items():
        more = {"train.ema": {"decay": 0.5}} if family == "deepseek" else {}
        common = {"run.dir": str(root / family), "train.duration": "4 steps", "launch.device": "cpu"}
        common |= {"train.precision.compute": "fp32", "train.checkpoint.every_steps": 4, "model.layers": 4}
        file = tiny.write_run(root, {**common, "model.heads": 4, **keys, "train.batch_size": 4, **more})
        preprocess(load(file))
        train(load(file))
        file.rename(root / f"{family}.yaml")
    return root


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    with kept_ranks() as get:
        yield get


def everything(file: Path, values: list[str]) -> tuple[list[dict[str, Any]], list[Any], list[list[int]]]:
    """Held-out losses, scores and greedy continuations, on as many processes as there are."""
    ranks = of_environment()
    reports = [asdict(evaluate(load(file, [*values, *windows]), ranks=ranks, keep=False)) for windows in WINDOWS]
    engine = open_engine(load(file, values), None, ranks)
    requests = requests_of(300, engine.max_length)
    scores = score(engine, [Request([1, 2, 3], 2)], batch_size=3) + score(engine, requests, batch_size=3)
    return reports, scores, continue_greedily(engine, prompts_of(300), batch_size=2)


def on_layout(ranks: Callable[[int], Ranks], parallel: dict[str, Any], file: Path, *values: str) -> list[Any]:
    """`everything` by rank."""
    world = math.prod(parallel.get(axis, 1) for axis in ("pp", "tp", "cp", "dp_replicate", "dp_shard"))
    given = [f"eval.parallel={json.dumps(parallel)}", f"eval.processes={world}", *values]
    return ranks(world).call(everything, file, given)


def assert_equal(found: Any, expected: Any) -> None:
    for report, other in zip(found[0], expected[0], strict=True):
        assert report["blended"]["targets"] == other["blended"]["targets"]
        assert report["blended"]["loss"] == pytest.approx(other["blended"]["loss"], rel=1e-6)
    assert [each.nats for each in found[1]] == pytest.approx([each.nats for each in expected[1]], rel=1e-5)
    assert [each.greedy for each in found[1]] == [each.greedy for each in expected[1]]
    assert found[2] == expected[2]


def cases() -> Iterator[Any]:
    """Every layout, with the families in turn."""
    for number, name in enumerate(LAYOUTS):
        for place, family in enumerate(EXPERT_FAMILIES):
            own = number % len(EXPERT_FAMILIES) == place
            mark = pytest.mark.guard if own and name == "tp2-ep2" else pytest.mark.slow
            yield pytest.param(name, family, id=f"{name}-{family}", marks=mark)


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(("layout", "family"), list(cases()))
def test_every_layout_evaluates_as_one_process_does(
    root: Path, ranks: Callable[[int], Ranks], layout: str, family: str
) -> None:
    file = root / f"{family}.yaml"
    expected = everything(file, [])
    for found in on_layout(ranks, LAYOUTS[layout], file):
        assert_equal(found, expected)


def trained_on_rank(file: Path, values: list[str]) -> None:
    train(load(file, values))


@pytest.mark.slow
@pytest.mark.parallel
def test_a_checkpoint_of_one_layout_is_evaluated_on_another(
    root: Path, ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """Trained with ep, evaluated alone and with tp and ep; the moving average, too."""
    file, run = root / "deepseek.yaml", f"run.dir={tmp_path / 'run'}"
    ranks(2).call(trained_on_rank, file, [run, "parallel.dp_shard=2", "parallel.ep=2"])
    for weights in ("model", "ema"):
        values = [run, f"eval.weights={weights}"]
        expected = everything(file, values)
        assert_equal(expected, everything(file, values[1:]))  # that of the run of one process
        for found in on_layout(ranks, LAYOUTS["tp2-ep2"], file, *values):
            assert_equal(found, expected)


@pytest.mark.guard
def test_a_layout_of_an_evaluation_that_does_not_fit_the_experts(root: Path) -> None:
    file = root / "mixtral.yaml"
    with pytest.raises(UserError, match=r"model.experts.count=8 cannot be dealt to eval.parallel.ep=3"):
        check_evaluation_layout(load(file, ["eval.parallel={dp_shard: 3, ep: 3}"]), 3)
    with pytest.raises(UserError, match=r"eval.parallel.ep=4 does not divide the 2 processes"):
        check_evaluation_layout(load(file, ["eval.parallel={dp_shard: 2, ep: 4}"]), 2)
    # One process needs no layout, whatever the training's is.
    assert check_evaluation_layout(load(file, ["parallel.ep=4"]), 1).ep == 1


@pytest.mark.guard
def test_an_evaluation_goes_by_the_router_whatever_the_training_did(root: Path) -> None:
    engine = open_engine(load(root / "mixtral.yaml", ["train.balance.force=true"]), None, of_environment())
    assert not any(module.force for module in engine.model.whole.modules() if hasattr(module, "force"))


@pytest.mark.slow
def test_in_16_bits_the_bias_of_a_choice_stays_in_fp32(root: Path) -> None:
    file = root / "deepseek.yaml"
    whole, half = (
        load_decoder(load(file, [f"train.precision.compute={kind}"]), None).model for kind in ("fp32", "bf16")
    )
    name = "layers.1.mlp.router.score_bias"
    assert whole.get_buffer(name).abs().max() > 0
    assert torch.equal(whole.get_buffer(name), half.get_buffer(name))
    assert half.get_buffer(name).dtype == torch.float32
    assert half.get_parameter("layers.1.mlp.experts.w1").dtype == torch.bfloat16


@pytest.mark.slow
def test_rows_of_a_server_come_and_leave(root: Path) -> None:
    """More requests than slots, of unequal lengths: each gets what it gets alone."""
    config = load(root / "gpt_oss.yaml", ["serve.port=0", "serve.slots=2", "serve.max_length=64"])
    loaded = load_decoder(config, None)
    prompts = ["the", "boat wind sails north harbour", "a sea", "light old night before storm keeper", "of", "tower"]
    bodies = [
        {"prompt": prompt, "max_tokens": 3 + 4 * place, "temperature": 0, "logprobs": 1}
        for place, prompt in enumerate(prompts)
    ]
    with running(config) as server, ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(lambda body: server.post("/v1/completions", body).json(), bodies))
    for body, answer in zip(bodies, answers, strict=True):
        ((_, alone),) = as_they_end(
            *(loaded.model, loaded.tokenizer, [str(body["prompt"])]),
            Sampling(temperature=0, max_tokens=int(str(body["max_tokens"])), logprobs=1),
        )
        (choice,) = answer["choices"]
        assert choice["text"] == alone.text
        logprobs = [token.logprob for token in alone.tokens]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-5)


def chosen_by_hand(model: Any, tokens: list[int]) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = {}

    def note(layer: int, routed: Routed) -> None:
        found[layer] = routed.ids_TK.sort(-1).values.tolist()

    with torch.no_grad():
        model(torch.tensor([tokens]), Context(on_routed=note))
    return found


@pytest.mark.parametrize("at_once", [2048, 8])
def test_choices_are_those_of_one_pass_over_the_text(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Of rows that are padded, read in parts, join and leave."""
    monkeypatch.setattr(module, "_READ_AT_ONCE", at_once)
    monkeypatch.setattr(module, "_SHORT", at_once // 4)
    model, tokenizer, prompts = decoder("experts"), Letters(end_of_document=11), draw_prompts()
    settings = [Sampling(temperature=1, seed=number, max_tokens=2 + 3 * number) for number in range(len(prompts))]
    for index, found in as_they_end(model, tokenizer, prompts, settings, slots=3, experts=True):
        text = [*prompts[index], *(token.id for token in found.tokens)]
        choices = found.choices
        assert choices is not None and set(choices.layers) == {1, 2}
        assert len(choices.tokens) == len(text) - (found.finish == "length")
        assert list(choices.tokens) == text[: len(choices.tokens)]
        assert choices.layers == chosen_by_hand(model, list(choices.tokens))
        assert choices.of_token(len(text)) is None
        for layer, shares in choices.shares({1: 12, 2: 12}).items():
            assert sum(shares) == pytest.approx(3)
            flat = [expert for of in choices.layers[layer] for expert in of]
            assert shares == pytest.approx([flat.count(expert) / len(choices.tokens) for expert in range(12)])


def test_choices_of_a_text_that_is_dropped_are_forgotten() -> None:
    collector = ChoiceCollector()
    batch = module.GenerationBatch(decoder("experts"), Letters(), slots=2, max_length=30, choices=collector)
    keys = [batch.start([5, 6, 7], Sampling(max_tokens=9)) for _ in range(2)]
    batch.step()
    batch.drop(keys[0])
    batch.step()
    assert collector.take(keys[0], [5, 6, 7]).tokens == ()
    assert len(collector.take(keys[1], [5, 6, 7, 1, 2]).tokens) == 4


def generate(file: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["generate", str(file), "--greedy", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_choices_are_printed(root: Path) -> None:
    file = root / "mixtral.yaml"
    loaded = load_decoder(load(file), None)
    (found,) = map(json.loads, generate(file, "--experts", "--json", "--prompt", "the boat").splitlines())
    prompt = loaded.tokenizer.encode("the boat")
    assert [token["id"] for token in found["prompt_tokens"]] == prompt
    tokens = found["prompt_tokens"] + found["tokens"]
    assert tokens[-1]["experts"] is None
    expected = chosen_by_hand(loaded.model, [token["id"] for token in tokens[:-1]])
    for place, token in enumerate(tokens[:-1]):
        assert token["experts"] == {str(layer): ids[place] for layer, ids in expected.items()}
    assert {len(shares) for shares in found["expert_shares"].values()} == {8}
    assert all(sum(shares) == pytest.approx(2) for shares in found["expert_shares"].values())

    text = generate(file, "--experts", "--prompt", "the boat", "--prompt", "a", "--max-tokens", "2")
    lines = text.splitlines()
    header = next(place for place, line in enumerate(lines) if line.split()[:3] == ["token", "layer", "0"])
    first = " ".join(" ".join(map(str, expected[layer][0])) for layer in range(4))
    assert lines[header + 1].split(maxsplit=1)[1].split() == first.split()
    assert text.count("share of tokens by expert") == 2
    assert len([line for line in lines if " of 8 " in line]) == 2 * 4
    # Without it nothing of the kind is there.
    assert "layer" not in generate(file, "--prompt", "the boat")
    (plain,) = map(json.loads, generate(file, "--json", "--prompt", "the boat").splitlines())
    assert set(plain) == {"prompt", "text", "finish", "tokens"}
    assert set(plain["tokens"][0]) == {"id", "text"}


def test_many_layers_are_printed_beside_each_other_as_far_as_there_is_room() -> None:
    choices = ExpertChoices((5, 6), {layer: [[layer, 100], [0, layer]] for layer in range(1, 30)})
    out = io.StringIO()
    show_choices(Console(file=out, width=60), choices, dict.fromkeys(range(30), 128), lambda token: f"\n{token}" * 20)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    shown = [word for line in lines if line.startswith("token") for word in line.split("layer")[1:]]
    assert [int(word) for word in shown] == list(range(1, 30))
    assert lines[1].startswith("'" + r"\n5" * 4 + r"\n" + "\u2026 ")


def test_a_model_without_experts_has_none_to_show(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tiny.write_run(tmp_path)), "--experts"])
    assert result.exit_code == 2
    assert "--experts: no layer of the model has experts" in " ".join(result.output.split())
