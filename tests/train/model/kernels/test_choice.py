"""Which kernel is taken for which GPU, packages and model, and what is refused."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.common.console import VERBOSE
from pipeline.common.errors import UserError
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.train import AttentionConfig, TrainConfig
from pipeline.train.model.kernels.choice import DeviceCaps, KernelRequirements, choose, choose_on
from pipeline.train.model.kernels.sdpa import Sdpa
from pipeline.train.model.part_spec import KernelUse, Reach
from pipeline.train.rules.layout import check_layout, layout_warnings
from tests.train.runs import start

STEPS = {"duration": "1 steps", "sequence_length": 8, "batch_size": 1}
ALL = frozenset({2, 3, 4})
NEED = KernelRequirements(documents=True, windows=False, head_size=128, compute="bf16")
CPU = DeviceCaps("cpu")
VOLTA, AMPERE, HOPPER, BLACKWELL = (DeviceCaps("cuda", capability) for capability in ((7, 0), (8, 0), (9, 0), (10, 0)))


def auto(need: KernelRequirements, machine: DeviceCaps) -> tuple[str, int | None]:
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
        (replace(HOPPER, flash=frozenset({2, 4})), {}, ("flash", 2)),
        (replace(HOPPER, flash=frozenset({4})), {}, ("flash", 4)),
        (replace(HOPPER, flash=frozenset({4})), {"compiled": True}, ("varlen", None)),
        (replace(HOPPER, flash=ALL), {"compiled": True, "deterministic": True}, ("flash", 3)),
        (replace(BLACKWELL, flash=ALL), {}, ("flash", 2)),
        (replace(BLACKWELL, flash=frozenset({3, 4})), {}, ("flash", 4)),
        (replace(BLACKWELL, flash=frozenset({3, 4})), {"deterministic": True}, ("varlen", None)),
        (replace(BLACKWELL, flash=frozenset({3, 4})), {"head_size": 192}, ("varlen", None)),
        (replace(BLACKWELL, flash=frozenset({3})), {}, ("varlen", None)),
        (CPU, {"soft_cap": True, "sinks": True, "both": True, "prefixes": True}, ("sdpa", None)),
        (AMPERE, {"documents": False, "both": True}, ("sdpa", None)),
        (AMPERE, {"documents": False, "sinks": True}, ("sdpa", None)),
        (AMPERE, {"sinks": True}, ("varlen", None)),
        (AMPERE, {"soft_cap": True}, ("flex", None)),
        (AMPERE, {"documents": False, "soft_cap": True}, ("flex", None)),
        (AMPERE, {"soft_cap": True, "compute": "fp32"}, ("flex", None)),
        (AMPERE, {"documents": False, "prefixes": True}, ("flex", None)),
        (AMPERE, {"windows": True, "both": True}, ("varlen", None)),
        (AMPERE, {"windows": True, "both": True, "pieces": True}, ("flex", None)),
        (replace(HOPPER, flash=ALL), {"soft_cap": True, "sinks": True}, ("flash", 3)),
        (replace(HOPPER, flash=ALL), {"prefixes": True}, ("flex", None)),
        (replace(HOPPER, flash=frozenset({4})), {"soft_cap": True}, ("flex", None)),
        (replace(HOPPER, flash=frozenset({4})), {"sinks": True}, ("varlen", None)),
    ],
)
def test_auto(machine: DeviceCaps, changes: dict[str, object], expected: tuple[str, int | None]) -> None:
    assert auto(replace(NEED, **changes), machine) == expected  # type: ignore[arg-type]


def test_soft_caps_without_a_kernel_are_refused() -> None:
    """Not computed without them, and not with all scores in memory."""
    with pytest.raises(UserError, match=r"no kernel for the soft caps.*capability 7.0: use one from 8.0 on"):
        choose(AttentionConfig(), replace(NEED, soft_cap=True), VOLTA)


def test_all_layers_count() -> None:
    """What any layer needs, the kernel has to have."""

    def need(*uses: KernelUse, cut: bool = False) -> KernelRequirements:
        layers = [SimpleNamespace(mixer=SimpleNamespace(kernel=use), cross=None) for use in uses]
        spec: Any = SimpleNamespace(different_layers=layers)
        return KernelRequirements.of(
            ModelConfig(layers=1, dim=8, heads=1), spec, TrainConfig.model_validate(STEPS), compiled=False, cut=cut
        )

    plain = KernelUse(Reach(), 64, 64)
    found = need(plain, KernelUse(Reach(), 64, 64, 50.0), KernelUse(Reach.window(8), 64, 64, sinks=True))
    assert found.windows and found.soft_cap and found.sinks and not found.both
    assert not need(plain).windows and need(plain, KernelUse(Reach(None, None), 64, 64)).both
    assert need(KernelUse(Reach(), 192, 128), KernelUse(Reach(), 12, 12)).head_size == 12, "no multiple of 8"
    assert need(KernelUse(Reach(), 64, 96), plain).head_size == 96
    assert need(KernelUse(Reach(4, 4), 64, 64), cut=True).pieces
    assert not need(KernelUse(Reach(None, None), 64, 64), KernelUse(Reach(4), 64, 64), cut=True).pieces
    biased = need(plain, KernelUse(Reach(None, None), 12, 12, bias=True))
    assert biased.biased and biased.head_size == 64 and not biased.both, "no backend computes it"


def test_masks_in_memory_are_warned_of() -> None:
    choice = choose(AttentionConfig(), NEED, VOLTA)
    assert choice.slow and choice.reason.startswith("documents as masks of sequence x sequence in memory")
    assert not choose(AttentionConfig(), NEED, HOPPER).slow


@pytest.mark.parametrize(
    ("backend", "machine", "changes", "message"),
    [
        ("sdpa", AMPERE, {"soft_cap": True}, "has no soft caps on a GPU.* set train.attention.backend=flex"),
        ("varlen", AMPERE, {"soft_cap": True}, "has no soft caps on a GPU.* set train.attention.backend=flex"),
        ("te", replace(AMPERE, te=True), {"soft_cap": True}, "has no soft caps on a GPU"),
        ("te", replace(AMPERE, te=True), {"sinks": True}, "has no sinks on a GPU.* set train.attention.backend=flex"),
        ("flash", replace(AMPERE, flash=ALL), {"prefixes": True}, "has no prefixes on a GPU"),
        ("varlen", AMPERE, {"pieces": True}, "parallel.cp_method=all_gather cuts them: set train.attention"),
        ("flash", replace(HOPPER, flash=frozenset({4})), {"sinks": True}, "only 4: install version 2"),
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
    backend: str, machine: DeviceCaps, changes: dict[str, object], message: str
) -> None:
    config = AttentionConfig.model_validate({"backend": backend})
    with pytest.raises(UserError, match=f"train.attention.backend={backend} .*{message}"):
        choose(config, replace(NEED, **changes), machine)  # type: ignore[arg-type]


def test_what_is_named_and_possible() -> None:
    for backend, machine in (("te", replace(AMPERE, te=True)), ("flex", AMPERE), ("sdpa", CPU), ("sdpa", HOPPER)):
        config = AttentionConfig.model_validate({"backend": backend})
        assert choose(config, NEED, machine).backend == backend


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of packages on what seems a Hopper."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    importlib.invalidate_caches()


FUNCTION = "def flash_attn_varlen_func(): ..."
FLASH2 = {"flash_attn/__init__.py": "", "flash_attn/flash_attn_interface.py": FUNCTION}
CUTE = {"flash_attn/cute/__init__.py": "from cutlass import anything"}
FLASH3 = {"flash_attn_interface.py": FUNCTION}
FLASH4 = {"flash_attn/cute/__init__.py": FUNCTION, "cutlass/__init__.py": ""}
FLASH4 |= {"flash_attn_4-4.0.0.dist-info/METADATA": "Name: flash-attn-4\nVersion: 4.0.0"}
BROKEN = {"flash_attn/flash_attn_interface.py": "raise OSError('no such library')"}


@pytest.mark.parametrize(
    ("files", "compiled", "expected", "reason"),
    [
        (FLASH2 | CUTE, False, ("flash", 2), ""),
        (CUTE, False, ("varlen", None), ""),
        (FLASH4, False, ("flash", 4), ""),
        (FLASH2 | BROKEN, False, ("varlen", None), "; flash-attn 2 cannot be imported (OSError: no such library)"),
        (FLASH2 | BROKEN | FLASH4, False, ("flash", 4), "; flash-attn 2 cannot be imported (OSError: no such library)"),
        (FLASH2 | FLASH3, False, ("flash", 3), ""),
        (FLASH2 | FLASH3, True, ("flash", 2), "; flash-attn 3 is a build that torch.compile cannot follow"),
    ],
)
def test_packages_as_they_are_found(
    packages: Path, files: dict[str, str], compiled: bool, expected: tuple[str, int | None], reason: str
) -> None:
    write(packages, files)
    choice = choose_on(AttentionConfig(), replace(NEED, compiled=compiled), torch.device("cuda"))
    assert (choice.backend, choice.version) == expected
    assert choice.reason == f"documents without a mask in memory{reason}"


@pytest.mark.parametrize(
    ("changes", "function", "reason"),
    [
        ({"soft_cap": True}, FUNCTION, "flash-attn 2 has no soft caps"),
        ({"soft_cap": True}, "def flash_attn_varlen_func(softcap=0.0): ...", None),
        ({"sinks": True}, FUNCTION, "flash-attn 2 has no passes that sinks can be added to"),
        ({"sinks": True}, FUNCTION + "\n_wrapped_flash_attn_varlen_backward = None", None),
    ],
)
def test_what_a_version_takes_is_asked_of_it(
    packages: Path, changes: dict[str, Any], function: str, reason: str | None
) -> None:
    write(packages, FLASH2 | {"flash_attn/flash_attn_interface.py": function})
    choice = choose_on(AttentionConfig(), replace(NEED, **changes), torch.device("cuda"))
    assert (choice.backend == "flash") == (reason is None)
    assert reason is None or reason in choice.reason


def test_a_named_package_that_cannot_be_imported(packages: Path) -> None:
    raises = {"__init__.py": "", "pytorch/__init__.py": "raise RuntimeError('found two of me')"}
    write(packages, FLASH2 | BROKEN | {f"transformer_engine/{name}": text for name, text in raises.items()})
    cuda = torch.device("cuda")
    assert choose_on(AttentionConfig(), NEED, cuda).backend == "varlen", "what is not asked for is not imported"
    assert "transformer_engine" not in sys.modules
    with pytest.raises(UserError, match="only 2, which cannot be imported .*no such library"):
        choose_on(AttentionConfig(backend="flash"), NEED, cuda)
    with pytest.raises(UserError, match=r"which cannot be imported \(RuntimeError: found two of me\)"):
        choose_on(AttentionConfig(backend="te"), NEED, cuda).build(deterministic=False)


def test_this_machine() -> None:
    choice = choose(AttentionConfig(), NEED, DeviceCaps.of(torch.device("cpu")))
    assert isinstance(choice.build(deterministic=True), Sdpa)
    assert str(choice) == "sdpa (the device is a CPU)"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["backend=flex", "cpu"], "needs a CUDA device, but launch.device=cpu"),
        (["backend=flash", "fp32"], "computes in 16 bits only, but train.precision.compute=fp32"),
        (["backend=varlen", "model.head_dim=12"], "but this model's is 12: set model.head_dim=8"),
        (["backend=te"], "train.compile=null, which compiles on a GPU: torch.compile cannot follow"),
        (["backend=te", "train.compile=false", "train.recompute.mode=selective"], "recompute.mode=full or none"),
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


@pytest.mark.guard
def test_a_run_says_what_it_takes_and_refuses_what_is_not_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out = start(root, "quiet", "train.duration=3 steps")
    assert code == 0 and "attention:" not in out and "threads, " not in out.split("parameters")[0]
    monkeypatch.setenv(VERBOSE, "1")
    code, out = start(root, "says", "train.duration=3 steps")
    assert code == 0 and "attention: sdpa (the device is a CPU)" in out
    code, out = start(root, "refuses", "train.attention.backend=flex", "launch.device=cpu")
    assert code == 2 and "train.attention.backend=flex needs a CUDA device" in out
    values = ("train.attention.backend=varlen", "launch.device=auto", "train.precision.compute=fp32")
    code, out = start(root, "never", *values)
    assert code == 2 and "train.precision.compute=fp32" in out


def test_what_keep_names_and_cannot_be_kept_is_warned_of(root: Path) -> None:
    values = ["launch.device=cuda", "train.attention.backend=flex", "train.recompute.mode=selective"]
    for more, warned in ((["train.compile=false"], True), ([], False), (["train.recompute.keep=[matmul]"], False)):
        config = load(root / "run.yaml", ["train.compile=null", *values, *more])
        lines = [line for line in layout_warnings(config, check_layout(config, 1)) if "computed again" in line]
        assert bool(lines) == warned, more
