"""Kernels of recurrences: which are taken, and what is said where one is not possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.train import TrainConfig
from pipeline.train.model.kernels.choice import DeviceCaps
from pipeline.train.model.kernels.recurrence import choice as recurrent_choice
from pipeline.train.model.kernels.recurrence.base import PLAIN
from pipeline.train.model.kernels.recurrence.choice import choose_recurrent, choose_recurrent_on
from pipeline.train.rules.layout import check_layout

GPU = DeviceCaps("cuda", (9, 0), fla=True)
CPU, BARE = DeviceCaps("cpu"), DeviceCaps("cuda", (9, 0))


def train_of(backend: str = "auto", compute: str = "bf16", **keys: Any) -> TrainConfig:
    given = {"duration": "10 steps", "recurrence": {"backend": backend}, "precision": {"compute": compute}}
    return TrainConfig.model_validate(given | keys)


@pytest.mark.parametrize(
    ("machine", "keys", "backend", "reason", "slow"),
    [
        (GPU, {}, "fla", "fla-core is installed", False),
        (CPU, {}, "plain", "the device is a CPU", False),
        (GPU, {"compute": "fp32"}, "plain", "fp32", False),
        (GPU, {"deterministic": True}, "plain", "train.deterministic", False),
        (BARE, {}, "plain", "fla-core is not installed: pip install", True),
        (GPU, {"backend": "plain"}, "plain", "as the run file says", False),
        (GPU, {"backend": "fla"}, "fla", "as the run file says", False),
    ],
)
def test_the_fastest_that_is_possible(
    machine: DeviceCaps, keys: dict[str, Any], backend: str, reason: str, slow: bool
) -> None:
    choice = choose_recurrent(train_of(**keys), machine)
    assert (choice.backend, choice.slow) == (backend, slow)
    assert str(choice).startswith(f"{backend} ({reason}")


@pytest.mark.parametrize(
    ("machine", "keys", "message"),
    [
        (CPU, {}, "needs a CUDA device, but this run is on a CPU: set train.recurrence.backend=plain"),
        (GPU, {"compute": "fp32"}, "computes in 16 bits only.* set train.precision.compute=bf16"),
        (GPU, {"deterministic": True}, "does not give the same bits each time.* set train.deterministic=false"),
        (BARE, {}, "needs the package fla-core: install the extra linear"),
    ],
)
def test_a_named_one_that_is_not_possible(machine: DeviceCaps, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"train.recurrence.backend=fla {message}.*, or train.recurrence.backend=auto"):
        choose_recurrent(train_of("fla", **keys), machine)


def test_a_package_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent_choice.DeviceCaps, "of", lambda device: GPU)
    choice = choose_recurrent_on(train_of(), torch.device("cuda"))
    assert (choice.backend, choice.slow) == ("plain", True)
    assert "cannot be imported: No module named 'fla'" in choice.reason
    with pytest.raises(UserError, match="train.recurrence.backend=fla needs the package fla-core"):
        choose_recurrent_on(train_of("fla"), torch.device("cuda")).build()


def test_plain_ones_on_this_cpu() -> None:
    assert choose_recurrent_on(train_of(), torch.device("cpu")).build() is PLAIN


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["launch.device=cpu"], "needs a CUDA device, but launch.device=cpu: set train.recurrence.backend=plain"),
        (["train.precision.compute=fp32"], "computes in 16 bits only, but train.precision.compute=fp32"),
        (["train.deterministic=true"], "does not give the same bits each time, but train.deterministic=true"),
    ],
)
def test_what_can_never_be_is_refused_without_the_device(root: Path, values: list[str], message: str) -> None:
    given = ["launch.device=cuda", "train.precision.compute=bf16", "train.recurrence.backend=fla"]
    check_layout(load(root / "run.yaml", given), 1)
    with pytest.raises(UserError, match=f"train.recurrence.backend=fla {message}"):
        check_layout(load(root / "run.yaml", [*given, *values]), 1)
