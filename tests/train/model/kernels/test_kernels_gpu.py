"""Every kernel that is installed on a GPU, against a mask that is counted out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.common.errors import UserError
from pipeline.config.train import AttentionConfig
from pipeline.train.model.kernels.choice import KernelRequirements, choose_on
from tests.train.model.kernels.cases import SOME, Case, differences

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flex", "varlen", "flash", "te"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("case", SOME)
def test_a_gpu_kernel_is_that_of_its_mask(case: Case, compute: str, backend: str) -> None:
    device, size = torch.device("cuda"), 64
    need = KernelRequirements(case.documents, case.window is not None, size, compute)
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
