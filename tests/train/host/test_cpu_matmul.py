"""Who multiplies fp32 matrices on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pipeline.train.host import cpu_matmul


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_the_choice_multiplies_in_fp32() -> None:
    said = cpu_matmul.choose_products()
    assert said.startswith("fp32 products by ")
    a, b = torch.randn(300, 700), torch.randn(700, 500)
    rounded = a.bfloat16().double() @ b.bfloat16().double()
    error = ((a @ b) - a.double() @ b.double()).abs().max()
    assert error < (rounded - a.double() @ b.double()).abs().max() / 500


@pytest.mark.parametrize(
    ("exact", "other", "precision"), [(2e-6, 4e-6, "medium"), (2e-6, 2e-6, "medium"), (2e-6, 3e-3, "highest")]
)
def test_what_rounds_is_not_taken(monkeypatch: pytest.MonkeyPatch, exact: float, other: float, precision: str) -> None:
    monkeypatch.setattr(cpu_matmul, "error_of", {"highest": exact, "medium": other}.__getitem__)
    said = cpu_matmul.choose_products()
    assert torch.get_float32_matmul_precision() == precision
    assert ("rounds here" in said) == (precision == "highest")


@pytest.mark.parametrize(
    ("compute", "capability", "slow"), [("bf16", "AVX2", True), ("fp32", "AVX2", False), ("bf16", "AVX512", False)]
)
def test_bf16_is_warned_of_where_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, compute: str, capability: str, slow: bool
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert bool(cpu_matmul.slow_bf16(compute)) == slow


def test_looking_changes_nothing() -> None:
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        cpu_matmul.error_of("highest")
        cpu_matmul.error_of("medium")
        assert torch.get_float32_matmul_precision() == precision
