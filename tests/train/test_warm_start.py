"""A new run from the weights of another one, and from nothing else of it."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.train.checkpoint import export
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.loop import trainer
from tests import tiny
from tests.train.distributed.ranks import run as run_ranks
from tests.train.runs import column, exact, start, train, weights_hash

COMMON = ("train.precision.compute=fp32", "train.validation.every_steps=1")


@pytest.fixture(scope="module")
def donor(root: Path) -> Path:
    """A run with checkpoints of steps 3, 6 and 8 and an average of its weights."""
    return train(root, "donor", *COMMON, "train.checkpoint.keep=9", "train.ema.decay=0.5")


@pytest.fixture(scope="module")
def exported(root: Path, donor: Path) -> Path:
    """The trained weights of its last step, in several files."""
    return _export(donor, root / "exported", "model", 2**16)


def _export(donor: Path, to: Path, weights: Any, max_shard: int | None) -> Path:
    export.export(
        Checkpoints.of_run(donor),
        to,
        step=None,
        weights=weights,
        max_shard=max_shard,
        console=Console(file=io.StringIO()),
    )
    return to


def initial(root: Path, name: str, *overrides: str) -> dict[str, torch.Tensor]:
    """The weights that a run starts with: those of a checkpoint of step 1 whose learning rate was 0."""
    settings = (*COMMON, "train.duration=1 steps", "train.optimizer.lr=1e-30", "train.schedule.warmup=0 steps")
    run = train(root, name, *settings, *overrides)
    return load_file(_export(run, root / f"{name}-weights", "model", None) / "model.safetensors")


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def weights(root: Path, donor: Path) -> dict[str, torch.Tensor]:
    return load_file(_export(donor, root / "whole", "model", None) / "model.safetensors")


def test_the_weights_and_nothing_else(root: Path, donor: Path, weights: dict[str, torch.Tensor]) -> None:
    assert equal(initial(root, "from-run", f"train.init_from.path={donor}"), weights)
    code, out = start(root, "warm", *COMMON, f"train.init_from.path={donor}")
    assert code == 0, out
    assert f"train: warm start from the weights in {donor}" in out and "warning" not in out
    fresh = train(root, "fresh", *COMMON)
    # The same samples and learning rates as a run from random weights, from step 1.
    for key in ("step", "lr", "data_hash", "tokens"):
        assert column(root / "warm", key) == column(fresh, key)
    assert column(root / "warm", "loss")[0] < column(fresh, "loss")[0] - 0.5
    checkpoint = Checkpoints.of_run(donor).at(8)
    origin = orjson.loads((root / "warm/checkpoints/step-00000008/state.json").read_bytes())["origin"]
    assert {key: origin[key] for key in ("kind", "path", "step", "fingerprint", "weights")} == {
        "kind": "init_from",
        "path": str(checkpoint.path),
        "step": 8,
        "fingerprint": checkpoint.fingerprint,
        "weights": "model",
    }
    assert orjson.loads((fresh / "checkpoints/step-00000008/state.json").read_bytes())["origin"] == {}


@pytest.mark.guard
def test_a_run_that_goes_on_loads_nothing_twice_and_remembers(root: Path, donor: Path) -> None:
    init = f"train.init_from.path={donor}"
    whole = train(root, "whole-run", *COMMON, init)
    # Stopped after step 6, and the donor is gone meanwhile.
    shutil.copytree(whole, root / "part-run")
    shutil.rmtree(root / "part-run/checkpoints/step-00000008")
    (root / "part-run/checkpoints/latest").write_text("step-00000006\n")
    code, out = start(root, "part-run", *COMMON, f"train.init_from.path={root / 'nowhere'}")
    assert code == 0, out
    assert "warm start" not in out and "train.init_from.path:" in out
    assert exact(root / "part-run") == exact(whole)
    assert weights_hash(root / "part-run") == weights_hash(whole)
    state = orjson.loads((root / "part-run/checkpoints/step-00000008/state.json").read_bytes())
    assert state["origin"]["path"] == str(donor / "checkpoints/step-00000008")


@pytest.mark.slow
def test_of_a_step_and_of_a_checkpoints_folder(root: Path, donor: Path) -> None:
    by_step = initial(root, "by-step", f"train.init_from.path={donor}", "train.init_from.step=3")
    folder = donor / "checkpoints/step-00000003"
    assert equal(by_step, initial(root, "by-folder", f"train.init_from.path={folder}"))
    stored = load_file(_export_step(donor, root / "step-3", 3) / "model.safetensors")
    assert equal(by_step, stored)


def _export_step(donor: Path, to: Path, step: int) -> Path:
    console = Console(file=io.StringIO())
    export.export(Checkpoints.of_run(donor), to, step=step, weights="model", max_shard=None, console=console)
    return to


def test_from_exported_weights_in_several_files(root: Path, exported: Path, weights: dict[str, torch.Tensor]) -> None:
    assert len(list(exported.glob("*.safetensors"))) > 1
    assert equal(initial(root, "from-export", f"train.init_from.path={exported}"), weights)


@pytest.mark.slow
def test_from_the_average_of_the_weights(root: Path, donor: Path, weights: dict[str, torch.Tensor]) -> None:
    average = load_file(_export(donor, root / "average", "ema", None) / "model.safetensors")
    assert not equal(average, weights)
    wanted = "train.init_from.weights=ema"
    assert equal(initial(root, "from-ema", f"train.init_from.path={donor}", wanted), average)
    assert equal(initial(root, "from-ema-export", f"train.init_from.path={root / 'average'}"), average)


LAYOUTS = {
    "tp2": {"parallel.tp": 2},
    "pp2": {"parallel.pp": 2},
    "dp2": {"parallel.dp_shard": 2},
}


def first_weights(file: Path, overrides: list[str]) -> dict[str, torch.Tensor]:
    """In a rank: start a run, and return the parameters of this rank, whole, as they are before the first step."""
    found: dict[str, torch.Tensor] = {}
    begin = trainer.Trainer.begin

    def watched(self: trainer.Trainer, checkpoint: Any) -> None:
        begin(self, checkpoint)
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            found[name] = parameter.full_tensor().detach().clone()

    trainer.Trainer.begin = watched  # type: ignore[method-assign]
    try:
        trainer.train(load(file, overrides))
    finally:
        trainer.Trainer.begin = begin  # type: ignore[method-assign]
    return found


@pytest.mark.first(1)
@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize("layout", ["tp2", "pp2", pytest.param("dp2", marks=pytest.mark.slow)])
def test_into_any_layout(
    root: Path, donor: Path, exported: Path, weights: dict[str, torch.Tensor], layout: str
) -> None:
    for kind, path in (("run", donor), ("export", exported)):
        keys = [f"{key}={value}" for key, value in LAYOUTS[layout].items()]
        run = f"run.dir={root / f'{layout}-{kind}'}"
        overrides = [*COMMON, *keys, run, f"train.init_from.path={path}", "train.duration=1 steps", "model.heads=2"]
        overrides += ["train.schedule.warmup=0 steps", "parallel.pipeline.schedule=gpipe"][
            : 2 if layout == "pp2" else 1
        ]
        by_rank = run_ranks(2, first_weights, root / "run.yaml", overrides, connect=False)
        found = {name: tensor for part in by_rank for name, tensor in part.items()}
        assert equal(found, weights)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("path={root}/nowhere",), "there is no folder"),
        (("path={root}/sea",), "has no weights: .*`checkpoints`.*COMMIT.*export.json"),
        (("path={donor}", "step=5"), r"does not have a checkpoint of step 5 \(steps there: 3, 6, 8\)"),
        (("path={exported}", "step=5"), r"init_from.step: 5 needs a run folder"),
        (("path={exported}", "weights=ema"), "init_from.weights is ema, .*export the average"),
        (("path={fresh}", "weights=ema"), "whose run had no train.ema then"),
    ],
)
def test_weights_that_are_not_there(
    root: Path, donor: Path, exported: Path, fresh: Path, overrides: tuple[str, ...], message: str
) -> None:
    values = [value.format(root=root, donor=donor, exported=exported, fresh=fresh) for value in overrides]
    code, out = start(root, "not-there", *COMMON, *(f"train.init_from.{value}" for value in values))
    assert code == 2
    assert re.search(message, out), out
    assert not list((root / "not-there").glob("checkpoints/step-*"))


@pytest.fixture(scope="module")
def fresh(root: Path) -> Path:
    """A run without an average."""
    return train(root, "without-average", *COMMON, "train.duration=3 steps")


@pytest.mark.parametrize("kind", ["donor", "exported"])
def test_a_flipped_byte_is_found_before_anything_is_loaded(
    root: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(request.getfixturevalue(kind), copy)
    path = next(copy.rglob("*.safetensors" if kind == "exported" else "step-00000008/*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, out = start(root, f"flipped-{kind}", *COMMON, f"train.init_from.path={copy}")
    assert code == 2
    assert f"{path} has changed" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.dim=16", r"embedding.weight is \d+ x 32 in .* and \d+ x 16 in this model"),
        ("model.layers=3", r"has no layers.2.mixer.*weight, which this model has"),
        ("model.layers=1", r"has layers.1.*, which this model does not have"),
        ("model.ffn_dim=24", r"layers.0.mlp.w1.weight is \d+ x 32 in .* and 24 x 32 in this model"),
    ],
)
@pytest.mark.parametrize("kind", ["donor", "exported"])
def test_a_model_that_the_weights_do_not_fit(
    root: Path, kind: str, change: str, message: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    code, out = start(root, f"misfit-{kind}", *COMMON, f"train.init_from.path={path}", change)
    assert code == 2
    assert re.search(message, out), out


@pytest.mark.slow
def test_weights_that_fit_and_mean_something_else_are_told(root: Path, donor: Path) -> None:
    other = ("model.rope_theta=500", "train.duration=1 steps", "train.schedule.warmup=0 steps")
    code, out = start(root, "theta", *COMMON, f"train.init_from.path={donor}", *other)
    assert code == 0
    assert "warning: model.rope_theta: 10000.0 where the weights were trained -> 500.0 here" in out
    # muP scales attention and logits by the width; how else the new run would draw its weights is no matter.
    scaled = ("model.init.scheme=mup", "model.init.mup_base_dim=16", "train.duration=1 steps")
    code, out = start(root, "mup", *COMMON, f"train.init_from.path={donor}", *scaled, "train.schedule.warmup=0 steps")
    assert code == 0
    assert re.findall("warning: (.*?) where the weights were", out) == ["model.init.mup_base_dim: None"]


@pytest.fixture(scope="module")
def other(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data with another tokenizer of the same size."""
    folder = tmp_path_factory.mktemp("other")
    file = tiny.write_run(folder, {"tokenizer.special_tokens": ["<|other|>"]})
    preprocess(load(file))
    yield folder


@pytest.mark.parametrize("kind", ["donor", "exported"])
def test_another_tokenizer_is_refused_unless_it_is_named(
    root: Path, other: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    values = (*COMMON, f"train.init_from.path={path}")
    code, out = start(other, f"tokenizer-{kind}", *values)
    assert code == 2
    assert "were trained with another tokenizer" in out and "resume.allow=[tokenizer]" in out
    code, out = start(other, f"tokenizer-{kind}", *values, "resume.allow=[tokenizer]")
    assert code == 0, out
    assert "warning: allowed: the weights in" in out


@pytest.mark.slow
def test_an_unknown_tokenizer_is_warned_of(root: Path, exported: Path) -> None:
    """As `pipeline convert from-hf --weights-only` leaves a folder."""
    folder = Path(shutil.copytree(exported, root / "weights-only"))
    about = orjson.loads((folder / "export.json").read_bytes())
    about["fingerprints"]["tokenizer"] = None
    (folder / "export.json").write_bytes(orjson.dumps(about))
    for name in ("tokenizer.json", "special_tokens.json"):
        (folder / name).unlink()
    code, out = start(root, "unknown", *COMMON, f"train.init_from.path={folder}")
    assert code == 0, out
    assert "warning: it is not known which tokenizer the weights in" in out
