"""Which kernel is taken for which GPU, packages and model, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.config.load import load
from pipeline.config.train import AttentionConfig
from pipeline.errors import UserError
from pipeline.train.model.kernels.choice import Machine, Need, choose
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.parallel.rules import check_layout
from tests.train.runs import start

ALL = frozenset({2, 3, 4})
NEED = Need(documents=True, windows=False, head_size=128, compute="bf16")
CPU = Machine("cpu")
VOLTA, AMPERE, HOPPER, BLACKWELL = (Machine("cuda", capability) for capability in ((7, 0), (8, 0), (9, 0), (10, 0)))


def auto(need: Need, machine: Machine) -> tuple[str, int | None]:
    choice = choose(AttentionConfig(), need, machine)
    assert choice.reason
    return choice.backend, choice.version


@pytest.mark.parametrize(
    ("machine", "changes", "expected"),
    [
        (CPU, {}, ("sdpa", None)),
        (AMPERE, {}, ("varlen", None)),
        (AMPERE, {"compute": "fp32"}, ("sdpa", None)),
        (AMPERE, {"documents": False}, ("sdpa", None)),
        (AMPERE, {"documents": False, "windows": True}, ("varlen", None)),
        (AMPERE, {"head_size": 100}, ("flex", None)),
        (AMPERE, {"head_size": 512}, ("flex", None)),
        (VOLTA, {}, ("sdpa", None)),
        (replace(AMPERE, flash=ALL), {}, ("flash", 2)),
        (replace(AMPERE, flash=frozenset({3, 4})), {}, ("varlen", None)),
        (replace(AMPERE, flash=ALL, te=True), {"documents": False}, ("sdpa", None)),
        (replace(AMPERE, te=True), {}, ("varlen", None)),
        (replace(HOPPER, flash=ALL), {}, ("flash", 3)),
        (replace(HOPPER, flash=frozenset({2, 4})), {}, ("flash", 4)),
        (replace(HOPPER, flash=frozenset({2, 4})), {"compiled": True}, ("flash", 2)),
        (replace(HOPPER, flash=ALL), {"compiled": True, "deterministic": True}, ("flash", 3)),
        (replace(BLACKWELL, flash=ALL), {}, ("flash", 4)),
        (replace(BLACKWELL, flash=ALL), {"deterministic": True}, ("flash", 2)),
        (replace(BLACKWELL, flash=ALL), {"head_size": 192}, ("flash", 2)),
        (replace(BLACKWELL, flash=frozenset({3})), {}, ("varlen", None)),
    ],
)
def test_auto(machine: Machine, changes: dict[str, object], expected: tuple[str, int | None]) -> None:
    assert auto(replace(NEED, **changes), machine) == expected  # type: ignore[arg-type]


def test_masks_in_memory_are_warned_of() -> None:
    reason = choose(AttentionConfig(), NEED, VOLTA).reason
    assert reason.startswith("warning: documents as masks of sequence x sequence in memory")


@pytest.mark.parametrize(
    ("backend", "machine", "changes", "message"),
    [
        ("flex", CPU, {}, "needs a CUDA device, but this run is on a CPU: set train.attention.backend=sdpa"),
        ("flash", AMPERE, {}, r"needs the package flash-attn: install the extra flash"),
        ("te", AMPERE, {}, r"needs the package transformer-engine: install the extra te"),
        ("flash", replace(AMPERE, flash=frozenset({3})), {}, r"only 3: install version 2"),
        ("varlen", AMPERE, {"compute": "fp32"}, "set train.precision.compute=bf16"),
        ("varlen", AMPERE, {"head_size": 100}, "set train.attention.backend=flex"),
        ("flex", VOLTA, {}, "needs compute capability 8.0, but this GPU has 7.0"),
        ("te", replace(AMPERE, te=True), {"compiled": True}, "set train.compile=false"),
    ],
)
def test_what_is_named_and_not_possible(
    backend: str, machine: Machine, changes: dict[str, object], message: str
) -> None:
    config = AttentionConfig.model_validate({"backend": backend})
    with pytest.raises(UserError, match=f"train.attention.backend={backend} .*{message}"):
        choose(config, replace(NEED, **changes), machine)  # type: ignore[arg-type]


def test_what_is_named_and_possible() -> None:
    for backend, machine in (("te", replace(AMPERE, te=True)), ("flex", AMPERE), ("sdpa", CPU), ("sdpa", HOPPER)):
        config = AttentionConfig.model_validate({"backend": backend})
        assert choose(config, NEED, machine).backend == backend


def test_this_machine() -> None:
    choice = choose(AttentionConfig(), NEED, Machine.of(torch.device("cpu")))
    assert isinstance(choice.build(deterministic=True), Sdpa)
    assert str(choice) == "sdpa (the device is a CPU)"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["backend=flex", "cpu"], "needs a CUDA device, but launch.device=cpu"),
        (["backend=flash", "fp32"], "computes in 16 bits alone, but train.precision.compute=fp32"),
        (["backend=varlen", "model.head_dim=12"], "but this model's is 12: set model.head_dim=8"),
        (["backend=te"], "train.compile=null, which compiles on a GPU: torch.compile cannot follow"),
    ],
)
def test_what_can_never_be_is_refused_without_the_device(root: Path, values: list[str], message: str) -> None:
    """By rules, as `train --check` on a login node has them; what it may have is not."""
    given = ["launch.device=cuda", "train.precision.compute=bf16", "model.head_dim=8"]
    names = {"cpu": "launch.device=cpu", "fp32": "train.precision.compute=fp32"}
    names |= {value: f"train.attention.{value}" for value in values if value.startswith("backend")}
    with pytest.raises(UserError, match=message):
        check_layout(load(root / "run.yaml", [*given, *(names.get(value, value) for value in values)]), 1)
    check_layout(load(root / "run.yaml", [*given, "train.attention.backend=flash"]), 1)


def test_a_run_says_what_it_takes_and_refuses_what_is_not_there(root: Path) -> None:
    code, out = start(root, "says", "train.duration=3 steps")
    assert code == 0 and "attention: sdpa (the device is a CPU)" in out
    code, out = start(root, "refuses", "train.attention.backend=flex", "launch.device=cpu")
    assert code == 2 and "train.attention.backend=flex needs a CUDA device" in out
    values = ("train.attention.backend=varlen", "launch.device=auto", "train.precision.compute=fp32")
    code, out = start(root, "never", *values)
    assert code == 2 and "computes in 16 bits alone" in out
