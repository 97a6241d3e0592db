"""`--weights DIR`: exported, averaged and converted weights are evaluated, served and generated from as a checkpoint's.

They are compared with the checkpoint that they are of, and with an average that is made here.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import load
from pipeline.data.datasets.open import open_datasets
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.inference import load_decoder
from pipeline.eval.perplexity import EvalReport, evaluate, read_report
from pipeline.eval.reports import read_evaluations, read_weights_evaluations
from pipeline.eval.server.serve import Access, opened
from pipeline.eval.tasks.builtin import run_tasks
from pipeline.train.checkpoint.export import average, export
from pipeline.train.checkpoint.exported import ExportedWeights
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.distributed.rank import of_environment
from pipeline.train.huggingface.convert import from_hf, to_hf
from pipeline.train.model.decoder import Context
from slurm.local import stages
from tests import tiny
from tests.eval import small
from tests.eval.server.running import running
from tests.train.distributed.ranks import Ranks, kept_ranks

QUIET = Console(quiet=True)
STEPS = (3, 6)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, and weights of it in folders: one of step 3, the moving average, the mean of two steps."""
    root = tmp_path_factory.mktemp("weights")
    changes = {"train.duration": "6 steps", "train.ema.decay": 0.5, "model.vocab_multiple": 2}
    small.trained(root, **changes)
    checkpoints = Checkpoints.of_run(root / "run")
    for name, weights in (("exported", "model"), ("ema", "ema")):
        export(checkpoints, root / name, step=3, weights=weights, max_shard=2**14, console=QUIET)  # type: ignore[arg-type]
    export(checkpoints, root / "whole", step=3, weights="model", max_shard=None, console=QUIET)
    average(checkpoints, root / "averaged", steps=STEPS, last=None, weights="model", max_shard=None, console=QUIET)
    return root


@pytest.fixture
def config(root: Path) -> Config:
    return load(root / "run.yaml")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    with kept_ranks() as get:
        yield get


def pipeline(*words: object) -> tuple[int, str, str]:
    """Exit code and both outputs of a command."""
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def figures(report: EvalReport) -> dict[str, Any]:
    return {key: value for key, value in asdict(report).items() if key in ("sources", "blended")}


def evaluations(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / "run" / "eval").glob("*")}


def test_exported_weights_of_a_step_give_the_figures_of_its_checkpoint(root: Path, config: Config) -> None:
    of_step = evaluate(config, 3, QUIET)
    before = evaluations(root)
    out = io.StringIO()
    of_folder = evaluate(config, root / "exported", Console(file=out, width=1000))
    assert figures(of_folder) == figures(of_step)
    # They are filed as what they are, and nothing of a checkpoint has changed.
    weights = ExportedWeights.open(root / "exported")
    after = evaluations(root)
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {f"weights-{weights.fingerprint}.json"}
    assert f"held-out loss of exported (weights-{weights.fingerprint})" in out.getvalue()
    value = json.loads(after[f"weights-{weights.fingerprint}.json"])
    assert value["step"] is None and "checkpoint" not in value["made_with"]
    assert value["export"]["path"] == str(root / "exported")
    assert value["export"]["tokenizer"] == Checkpoints.of_run(root / "run").at(3).state()["fingerprints"]["tokenizer"]
    assert value["export"]["checkpoints"] == [
        {"step": 3, "fingerprint": Checkpoints.of_run(root / "run").at(3).fingerprint}
    ]
    same = {key: each for key, each in of_step.made_with.items() if key != "checkpoint"}
    assert of_folder.made_with == {**same, "export": weights.fingerprint}
    assert read_report(config, root / "exported") == of_folder
    # Those of steps are listed as before, and the others by themselves.
    found, damaged = read_evaluations(root / "run")
    assert [each.step for each in found] == [3] and not damaged
    (listed,), damaged = read_weights_evaluations(root / "run")
    assert listed.scores["loss"] == of_step.blended.loss and listed.measure == found[0].measure and not damaged
    code, table, _ = pipeline("eval", root / "run.yaml", "--table")
    assert code == 0 and f"{root / 'exported'} ({weights.fingerprint})" in table
    rows = json.loads(pipeline("eval", root / "run.yaml", "--table", "--json")[1])
    assert [row["step"] for row in rows["evaluations"]] == [3]
    assert [row["export"] for row in rows["exports"]] == [weights.fingerprint]


def test_averaged_weights_are_the_mean_of_the_checkpoints(root: Path, config: Config) -> None:
    """The mean is made here, with torch, of the weights that the checkpoints themselves are loaded with."""
    states = [load_decoder(config, step).model.state_dict() for step in STEPS]
    by_hand = load_decoder(config, STEPS[0]).model
    by_hand.load_state_dict(
        {name: ((states[0][name].double() + states[1][name].double()) / 2).float() for name in states[0]}
    )
    loaded = load_decoder(config, root / "averaged").model
    tokens = torch.randint(280, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = by_hand(tokens, Context())
        assert torch.equal(loaded(tokens, Context()), wanted)
        assert not torch.equal(load_decoder(config, STEPS[1]).model(tokens, Context()), wanted)
    # The held-out loss, window by window.
    report = evaluate(config, root / "averaged", QUIET, keep=False)
    nats, count = 0.0, 0
    for dataset in open_datasets(config, "heldout").values():
        ids = torch.tensor([dataset.manifest.tokenizer.end_of_document, *dataset.read(0, dataset.tokens).tolist()])
        for start in range(0, dataset.tokens, 32):
            window = ids[start : start + 33]
            with torch.no_grad():
                logits = by_hand(window[None, :-1], Context())[0]
            nats += torch.nn.functional.cross_entropy(logits.double(), window[1:], reduction="sum").item()
            count += len(window) - 1
    assert report.blended.targets == count
    assert report.blended.loss == pytest.approx(nats / count, rel=1e-5)


def test_the_moving_average(root: Path, config: Config) -> None:
    wanted = load(root / "run.yaml", ["eval.weights=ema"])
    of_step = evaluate(wanted, 3, QUIET, keep=False)
    for each in (config, wanted):  # what is in the folder is evaluated, also where the run file names nothing
        report = evaluate(each, root / "ema", QUIET, keep=False)
        assert figures(report) == figures(of_step) and report.made_with["weights"] == "ema"
    with pytest.raises(UserError, match=r"eval\.weights is ema, but .* has the weights that were trained"):
        evaluate(wanted, root / "exported", QUIET, keep=False)


def test_generated_and_served_text_is_that_of_the_checkpoint(root: Path, config: Config) -> None:
    words = ("generate", root / "run", "--json", "--logprobs", "1", "--prompt", "the sea", "--seed", "3")
    code, of_step, _ = pipeline(*words, "--step", "3")
    assert code == 0
    assert pipeline(*words, "--weights", root / "exported") == (0, of_step, "")
    assert pipeline(*words)[1] != of_step, "another step has other text"
    fingerprint = ExportedWeights.open(root / "exported").fingerprint
    code, shown, _ = pipeline("generate", root / "run.yaml", "--weights", root / "exported", "--max-tokens", "2")
    assert code == 0 and shown.startswith(f"exported (weights-{fingerprint}):")
    of_server = load(root / "run.yaml", ["serve.port=0"])
    body = {"prompt": "the sea", "max_tokens": 8, "seed": 3, "temperature": 0.8}
    answers = []
    for which in (3, root / "exported"):
        with running(of_server, step=which) as server:
            answers.append(server.post("/v1/completions", body).json())
            health = server.health()
            name = answers[-1]["model"]
            assert server.post("/v1/completions", {**body, "model": name}).status_code == 200
            assert server.post("/v1/completions", {**body, "model": "run@step-6"}).status_code == 404
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [each["model"] for each in answers] == ["run@step-3", f"run@weights-{fingerprint}"]
    assert (health["step"], health["tokens"]) == (None, 3 * 4 * 32)
    assert health["weights"] == {"folder": "exported", "fingerprint": fingerprint}
    assert f"run@weights-{fingerprint} of exported (384 tokens) on http" in server.log.getvalue()


def test_benchmarks_of_a_folder_are_kept_by_themselves(root: Path, tmp_path: Path) -> None:
    lambada = small.write_lambada(tmp_path / "lambada.jsonl", passages=4)
    tasks = f"eval.tasks=[{{type: lambada, path: {lambada}}}]"
    config = load(root / "run.yaml", [tasks])
    by_kind = {}
    for which in (3, root / "exported"):
        engine = small.open_engine(config, which, small.ALONE)
        by_kind[which] = run_tasks(engine, QUIET)
    assert by_kind[3] == by_kind[root / "exported"]
    fingerprint = ExportedWeights.open(root / "exported").fingerprint
    value = json.loads((root / f"run/eval/tasks-weights-{fingerprint}.json").read_bytes())
    assert value["step"] is None and value["export"]["fingerprint"] == fingerprint
    assert value["tasks"]["lambada"]["made_with"]["export"] == fingerprint
    assert value["tasks"]["lambada"]["results"] == by_kind[3]["lambada"]
    # The second time they are shown.
    (root / f"run/eval/tasks-weights-{fingerprint}.json").write_text(
        json.dumps(value).replace(f'"accuracy": {json.dumps(by_kind[3]["lambada"]["accuracy"])}', '"accuracy": 0.125')
    )
    assert run_tasks(small.open_engine(config, root / "exported", small.ALONE), QUIET)["lambada"]["accuracy"] == 0.125


def _loss(file: Path, folder: Path, layout: str) -> dict[str, Any]:
    world = of_environment().world_size
    values = [f"eval.parallel={json.dumps(small.LAYOUTS[layout])}", f"eval.processes={world}"]
    return asdict(evaluate(load(file, values), folder, QUIET, keep=False, ranks=of_environment()))


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize("layout", ["tp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pp2", "fsdp2"))])
def test_two_processes_give_the_figures_of_one(
    root: Path, config: Config, ranks: Callable[[int], Ranks], layout: str
) -> None:
    expected = evaluate(config, root / "averaged", QUIET, keep=False)
    for report in ranks(2).call(_loss, root / "run.yaml", root / "averaged", layout):
        assert report["made_with"] == expected.made_with
        assert math.isclose(report["blended"]["loss"], expected.blended.loss, rel_tol=1e-5)


@pytest.mark.slow
@pytest.mark.parallel
def test_processes_that_the_command_starts(root: Path) -> None:
    values = ["eval.processes=2", "eval.parallel={dp_shard: 2}", "launch.device=cpu"]
    report = stages.evaluate(load(root / "run.yaml", values), root / "averaged")
    assert report is not None and report.export is not None
    expected = evaluate(load(root / "run.yaml"), root / "averaged", QUIET, keep=False)
    assert math.isclose(report.blended.loss, expected.blended.loss, rel_tol=1e-5)


def _folder(root: Path, tmp_path: Path, kind: str) -> Path:
    if kind == "run":
        return root / "run"
    if kind == "checkpoint":
        return root / "run" / "checkpoints" / "step-00000003"
    folder = tmp_path / "folder"
    if kind != "missing":
        folder.mkdir(exist_ok=True)
    if kind == "hf":
        (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "there is no folder"),
        ("empty", "has no export.json"),
        ("hf", "`pipeline convert from-hf"),
        ("run", "is a run folder"),
        ("checkpoint", "is a checkpoint"),
    ],
)
def test_other_folders_are_refused(root: Path, tmp_path: Path, kind: str, message: str) -> None:
    for command in ("eval", "generate", "serve"):
        code, _, error = pipeline(command, root / "run", "--weights", _folder(root, tmp_path, kind))
        assert code == 2 and error.startswith("error: --weights: ") and message in error.replace("\n", " ")


def test_options_that_exclude_each_other(root: Path, config: Config) -> None:
    for command in ("eval", "generate", "serve"):
        code, _, error = pipeline(command, root / "run", "--weights", root / "exported", "--step", "3")
        assert code == 2 and "exclude each other" in error
    code, _, error = pipeline("eval", root / "run", "--weights", root / "exported", "--slurm")
    assert code == 2 and "leave out --slurm" in error
    watching = load(root / "run.yaml", ["serve.port=0", "serve.watch=true"])
    with pytest.raises(UserError, match="--watch"), opened(watching, root / "exported", Access(), None, QUIET):
        pass


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "tokenizer"])
def test_damage_is_found(root: Path, config: Config, tmp_path: Path, damage: str) -> None:
    folder = Path(shutil.copytree(root / "exported", tmp_path / "exported"))
    file = sorted(folder.glob("model-*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    if damage == "tokenizer":
        file = folder / "tokenizer.json"
        value = json.loads(file.read_bytes())
        value["normalizer"] = {"type": "Lowercase"}
        file.write_text(json.dumps(value))
    elif damage == "missing":
        file.unlink()
    else:
        content[-5] ^= 1
        file.write_bytes(content if damage == "flipped" else content[:-4])
    name = "the tokenizer in" if damage == "tokenizer" else file.name
    with pytest.raises(UserError, match=rf"{name}.*(has changed|cannot be read|bytes instead of)"):
        load_decoder(config, folder)


@pytest.mark.parametrize("change", [{"fingerprints": []}, {"fingerprints": {}}, {"files": {"../x": [1, "0"]}}])
def test_a_damaged_record_is_refused(root: Path, config: Config, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = Path(shutil.copytree(root / "exported", tmp_path / "exported"))
    file = folder / "export.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    with pytest.raises(UserError, match=r"export\.json"):
        load_decoder(config, folder)


def test_the_model_must_be_the_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def attempt(*overrides: str) -> str:
        with pytest.raises(UserError) as found:
            load_decoder(load(root / "run.yaml", overrides), root / "exported")
        return str(found.value)

    message = attempt("model.rope_theta=500")
    assert "model.rope_theta: 10000.0 -> 500.0" in message and "resume.allow=[model]" in message
    message = attempt("model.layers=3")
    assert "model.layers: 2 -> 3" in message and "layers.2" in message and "resume.allow" not in message
    message = attempt("model.ffn_dim=96", "model.head_dim=8")
    assert "model.ffn_dim: none -> 96" in message and "head_dim" not in message
    assert "model.vocab_multiple: 2 -> 64" in attempt("model.vocab_multiple=64", "resume.allow=[model]")
    # How weights are drawn, and what follows from other keys, changes nothing.
    load_decoder(load(root / "run.yaml", ["model.init.std=0.5", "model.head_dim=8"]), root / "exported")
    assert capsys.readouterr().err == ""
    load_decoder(load(root / "run.yaml", ["model.rope_theta=500", "resume.allow=[model]"]), root / "exported")
    assert "allowed: model.rope_theta: 10000.0 -> 500.0" in capsys.readouterr().err.replace("\n", " ")


def test_another_tokenizer_is_warned_of(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny.write_run(tmp_path, {**small.MODEL, "model.vocab_multiple": 2, "tokenizer.special_tokens": ["<|x|>"]})
    config = load(file)
    preprocess(config)
    capsys.readouterr()
    loaded = load_decoder(config, root / "exported")
    own = ExportedWeights.open(root / "exported").tokenizer()
    assert own is not None and loaded.tokenizer.fingerprint == own.fingerprint
    assert "were trained with another tokenizer" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(UserError, match="was tokenized with another tokenizer"):
        evaluate(config, root / "exported", QUIET)


def test_converted_weights_without_a_tokenizer(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to_hf(root / "run", tmp_path / "hf", step=3, console=QUIET)
    (tmp_path / "hf" / "tokenizer.json").unlink()
    code, _, error = pipeline("convert", "from-hf", tmp_path / "hf", tmp_path / "ours")
    assert code == 2 and "--weights-only" in error
    code, _, error = pipeline(
        "convert", "from-hf", tmp_path / "hf", "--weights-only", "--end-of-document", "x", "--dry-run"
    )
    assert code == 2 and "--end-of-document" in error
    code, shown, _ = pipeline("convert", "from-hf", tmp_path / "hf", "--weights-only", "--dry-run")
    assert code == 0 and yaml.safe_load(shown).keys() == {"model"} and "# The tokenizer was left out" in shown
    code, shown, _ = pipeline("convert", "from-hf", tmp_path / "hf", tmp_path / "ours", "--weights-only")
    assert code == 0 and "the tokenizer was left out" in shown.replace("\n", " ")
    about = json.loads((tmp_path / "ours" / "export.json").read_bytes())
    assert about["fingerprints"]["tokenizer"] is None
    section = yaml.safe_load((tmp_path / "ours" / "model.yaml").read_text())
    assert section["train"] == {"init_from": {"path": str(tmp_path / "ours")}} and "tokenizer" not in section
    before, after = (
        load_file(root / "whole" / "model.safetensors"),
        load_file(tmp_path / "ours" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    # Of embedding and head the conversion has rows that only pad them.
    assert all(torch.equal(value, after[name][: len(value)]) for name, value in before.items())

    # Evaluated with the run's own tokenizer, with a warning.
    model = [f"model.vocab_size={section['model']['vocab_size']}", "model.vocab_multiple=128"]
    config = load(root / "run.yaml", model)
    report = evaluate(config, tmp_path / "ours", QUIET)
    assert report.export is not None and report.export["tokenizer"] is None
    used = ExportedWeights.open(root / "exported").tokenizer_fingerprint
    assert report.made_with["assumed_tokenizer"] == used and read_report(config, tmp_path / "ours") == report
    assert "it is not known which tokenizer" in capsys.readouterr().err.replace("\n", " ")
    of_step = evaluate(load(root / "run.yaml"), 3, QUIET, keep=False)
    assert report.blended.loss == pytest.approx(of_step.blended.loss, rel=1e-6)
    # A run without a tokenizer has nothing to evaluate them with.
    nowhere = load(root / "run.yaml", [*model, f"data.dir={tmp_path}/no", f"run.dir={tmp_path}/new"])
    with pytest.raises(UserError, match=r"set tokenizer\.path"):
        load_decoder(nowhere, tmp_path / "ours")
    with pytest.raises(UserError, match="has no tokenizer"):
        to_hf(tmp_path / "ours", tmp_path / "again", console=QUIET)
    # One of its data that is damaged is not replaced by another.
    shutil.copytree(config.data_dir / "tokenizer", tmp_path / "damaged" / "tokenizer")
    (tmp_path / "damaged" / "tokenizer" / "tokenizer.json").write_text("{}")
    damaged = load(root / "run.yaml", [*model, f"data.dir={tmp_path}/damaged"])
    with pytest.raises(UserError, match=str(tmp_path / "damaged")):
        load_decoder(damaged, tmp_path / "ours")
    # Nor is one of a checkpoint that was edited taken.
    run = tmp_path / "edited"
    shutil.copytree(root / "run", run)
    latest = Checkpoints.of_run(run).latest()
    assert latest is not None
    file = latest.path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[:2]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    file.write_text(json.dumps(tokenizer))
    edited = load(root / "run.yaml", [*model, f"data.dir={tmp_path}/no", f"run.dir={run}"])
    with pytest.raises(UserError, match=str(latest.path)):
        load_decoder(edited, tmp_path / "ours")
    # A whole conversion has one.
    shutil.copy(root / "exported" / "tokenizer.json", tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "with", console=QUIET)
    capsys.readouterr()
    assert figures(evaluate(config, tmp_path / "with", QUIET, keep=False)) == figures(report)
    assert capsys.readouterr().err == ""
