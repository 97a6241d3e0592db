"""Every kernel that is installed on a GPU, against a mask that is counted out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.train import AttentionConfig
from pipeline.train.model.kernels.choice import KernelRequirements, choose_on
from tests.train.model.kernels.cases import BOTH, SOME, Case, differences

pytestmark = pytest.mark.gpu

PREFIXED = replace(SOME[0], prefixed=True)
CHANGES: tuple[dict[str, Any], ...] = (
    {"sinks": True},
    {"soft_cap": 2.0},
    {"soft_cap": 2.0, "sinks": True},
    {"value": 32},
    {"value": 96, "sinks": True},
)
TERMED = [replace(case, **changes) for case in (SOME[1], SOME[3], SOME[6], BOTH[2]) for changes in CHANGES]
"""Documents and a window; all before; the last queries; windows to both sides."""


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex", "varlen", "flash", "te"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("case", (*SOME, *BOTH, PREFIXED, *TERMED))
def test_a_gpu_kernel_is_that_of_its_mask(case: Case, compute: str, backend: str) -> None:
    device, size = torch.device("cuda"), 64
    windows = case.window is not None or bool(case.ahead)
    terms = {"soft_cap": case.soft_cap is not None, "sinks": case.sinks, "prefixes": case.prefixed}
    both = case.ahead != 0 or bool(case.others)
    need = KernelRequirements(case.documents, windows, size, compute, both=both, **terms)
    config = AttentionConfig.model_validate({"backend": backend})
    try:
        choice = choose_on(config, need, device)
    except UserError as error:
        pytest.skip(str(error))
    dtype, limit = (torch.float32, 1e-3) if compute == "fp32" else (torch.bfloat16, 3e-2)
    inputs = case.draw(dtype, device, size)
    assert max(differences(case, choice.build(deterministic=False), inputs).values()) < limit
    uneven = replace(case, heads=(6, 2))
    inputs = uneven.draw(dtype, device, size)
    assert max(differences(uneven, choice.build(deterministic=True), inputs).values()) < limit
