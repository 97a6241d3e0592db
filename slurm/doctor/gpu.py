"""Checks of the GPUs of a node: presence, health, correct and fast enough results."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeline.train.host.nvidia_smi import PATIENCE, query_gpus
from slurm.doctor.report import NodeCheck, failed

_COLUMNS = ("index", "driver_version", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending")
_GPU_SIZE, _CPU_SIZE = 6144, 384
"""Rows of the matrices of the product: 3 times a power of 2, so that the result has an exact value in bf16."""
_WARM_UP, _TIMED = 3, 50


@dataclass(frozen=True)
class DriverView:
    """Fields of nvidia-smi about a GPU."""

    index: str
    driver: str
    uncorrected: int
    """Memory errors since the driver was loaded that ECC could not mend."""
    retiring: bool
    """Memory pages wait for a reset of the GPU to be retired."""


def driver_views() -> tuple[list[DriverView], list[NodeCheck]]:
    """GPUs by nvidia-smi, and checks of its answer; nothing where there is neither nvidia-smi nor a GPU."""
    if shutil.which("nvidia-smi") is None:
        return [], [_unasked("it is not in PATH")] if torch.cuda.device_count() else []
    try:
        answer = query_gpus(_COLUMNS)
    except subprocess.TimeoutExpired:
        return [], [failed("nvidia-smi", "no answer", f"nvidia-smi does not answer within {PATIENCE:g} s")]
    except OSError as error:
        return [], [failed("nvidia-smi", "not run", f"nvidia-smi cannot be run: {error.strerror}")]
    if answer.is_unknown_field:
        return [], [_unasked("this version does not know these fields")]
    if answer.code != 0:
        return [], [failed("nvidia-smi", f"code {answer.code}", f"nvidia-smi failed: {answer.text[:300]}")]
    views = parse_driver_views(answer.rows)
    return views, judge_driver_views(views)


def _unasked(why: str) -> NodeCheck:
    """Memory errors and the driver's version are not known, which is nothing wrong with the GPUs."""
    if torch.version.hip is not None:
        why += ", and AMD's tools (amd-smi) are not used"
    text = f"nvidia-smi: {why}; memory errors (ECC) and the driver's version were not checked"
    return NodeCheck("nvidia-smi", False, "not asked", text, "warning")


def parse_driver_views(rows: Sequence[Sequence[str]]) -> list[DriverView]:
    """GPUs by rows of nvidia-smi; what a GPU does not have counts as none."""
    views = []
    for row in rows:
        if len(row) == len(_COLUMNS):
            index, driver, errors, pending = (value.strip() for value in row)
            views.append(DriverView(index, driver, int(errors) if errors.isdecimal() else 0, pending == "Yes"))
    return views


def judge_driver_views(views: list[DriverView]) -> list[NodeCheck]:
    """Checks of what the driver says."""
    checks = []
    broken = [f"GPU {view.index}: {view.uncorrected}" for view in views if view.uncorrected]
    retiring = [f"GPU {view.index}" for view in views if view.retiring]
    if broken:
        found = "; ".join(broken)
        text = f"ECC: memory errors that could not be corrected ({found}); reset or replace these GPUs"
        checks.append(failed("ECC", found, text))
    if retiring:
        found = ", ".join(retiring)
        text = f"ECC: memory pages of {found} wait to be retired; a reset of the GPU does that"
        checks.append(NodeCheck("ECC", False, found, text, "warning"))
    if views and not checks:
        checks.append(NodeCheck("ECC", True, "no uncorrected errors"))
    return checks


def devices(expected: int, driver: int) -> NodeCheck:
    """Check that torch sees as many GPUs as the run needs, all of one kind.

    Args:
        expected: minimum number of GPUs.
        driver: how many nvidia-smi sees.
    """
    kinds = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    value = f"{len(kinds)} x {kinds[0]}" if kinds else "none"
    if len(kinds) < expected:
        text = f"GPUs: torch sees {len(kinds)}, {expected} are expected"
        if torch.version.cuda is None and torch.version.hip is None:
            text += f"; this torch ({torch.__version__}) was built without CUDA and without ROCm"
        elif driver >= expected:
            text += f", and nvidia-smi sees {driver}; look at CUDA_VISIBLE_DEVICES and at the driver's version"
        return failed("GPUs", value, text)
    if len(set(kinds)) > 1:
        found = ", ".join(sorted(set(kinds)))
        return failed("GPUs", found, f"GPUs: they are of several kinds ({found}); name one in CUDA_VISIBLE_DEVICES")
    return NodeCheck("GPUs", True, value)


def kind() -> str:
    """Name of the first GPU; "none" without one."""
    return torch.cuda.get_device_name(0) if torch.cuda.device_count() else "none"


def products() -> tuple[list[NodeCheck], dict[str, float]]:
    """A matrix product on each GPU in bf16, or on a core of the CPU in fp32: is it right, and seconds by device."""
    checks: list[NodeCheck] = []
    times: dict[str, float] = {}
    names = {f"GPU {number}": torch.device("cuda", number) for number in range(torch.cuda.device_count())}
    for name, device in (names or {"CPU": torch.device("cpu")}).items():
        try:
            seconds, wrong = _product(device)
        except RuntimeError as error:
            first = str(error).strip().split("\n", maxsplit=1)[0]
            checks.append(failed("matrix product", name, f"matrix product: it failed on {name}: {first}"))
            break  # after an error of one GPU no other one can be used by this process
        times[name] = seconds
        if wrong:
            checks.append(failed("matrix product", name, f"matrix product: {name} gives wrong results: {wrong}"))
    if not checks:
        shown = [f"{seconds * 1e3:.2f} ms" for seconds in (min(times.values()), max(times.values()))]
        checks.append(NodeCheck("matrix product", True, shown[0] if len(times) == 1 else " to ".join(shown)))
    return checks, times


def _product(device: torch.device) -> tuple[float, str]:
    """Seconds of a product, and what is wrong with its result."""
    gpu = device.type == "cuda"
    size, dtype = (_GPU_SIZE, torch.bfloat16) if gpu else (_CPU_SIZE, torch.float32)
    with _exact_arithmetic():
        i = torch.arange(size, device=device)
        pattern = ((i[:, None] + i) % 3 - 1).to(dtype)
        result = pattern @ pattern
        seconds = _seconds_of(lambda: torch.mm(pattern, pattern, out=result), device)
        return seconds, wrong_elements(result)


def wrong_elements(result: torch.Tensor) -> str:
    """Description of errors in the square of the matrix that has ((i + j) mod 3) - 1 at i, j; empty without any.

    A row times a column is the sum over k of f(i + k) f(k + j), where f has the values -1, 0, 1 again and again: each
    three terms add up to 2 where i and j are equal modulo 3, else to -1.
    """
    size = len(result)
    i = torch.arange(size, device=result.device)
    equal = (i[:, None] - i) % 3 == 0
    wanted = torch.where(equal, 2 * size // 3, -(size // 3)).to(result.dtype)
    wrong = (result != wanted).nonzero()
    if not len(wrong):
        return ""
    row, column = wrong[0].tolist()
    return (
        f"{len(wrong)} of {size * size} elements, like {result[row, column].item():g} instead of "
        f"{wanted[row, column].item():g}"
    )


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of several, which tells a slow device from a moment in which something else ran."""
    found = []
    for turn in range(_WARM_UP + _TIMED):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if turn >= _WARM_UP:
            found.append(time.perf_counter() - start)
    return min(found)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU has been given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """Sums of bf16 in fp32, in which they are exact; and one core of the CPU, as nodes are shared."""
    matmul, threads = torch.backends.cuda.matmul, torch.get_num_threads()
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_num_threads(1)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        torch.set_num_threads(threads)
