"""FlexAttention against the mask; on a CPU its forward pass, which runs without a compiler there."""

from __future__ import annotations

import pytest
import torch

from pipeline.train.model.kernels.flex import Flex
from tests.train.kernels.cases import SOME, Case, differences


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", SOME)
def test_outputs_are_those_of_the_mask(case: Case) -> None:
    assert max(differences(case, Flex(), case.draw(torch.float32), backward=False).values()) < 1e-5
