"""Scalings of rotary frequencies, which `tests/train/huggingface/test_parity.py` compares with transformers."""

from __future__ import annotations

import torch

from pipeline.train.model.decoder import Context
from tests.train.huggingface.hf_mapping import twin
from tests.train.models import FAMILIES, VOCAB


def test_every_rope_scaling_differs_from_none_and_from_the_others() -> None:
    tokens = torch.arange(40)[None]
    plain = FAMILIES["llama-linear"].config
    logits = []
    for scaling in (
        None,
        *(FAMILIES[name].config.rope_scaling for name in ("llama-linear", "llama3-scaling", "llama-yarn")),
    ):
        config = plain.model_copy(update={"rope_scaling": scaling})
        logits.append(twin(FAMILIES["llama-linear"].theirs(), config, VOCAB)(tokens, Context()))
    for index, one in enumerate(logits):
        for other in logits[:index]:
            assert not torch.allclose(one, other, rtol=1e-3)
