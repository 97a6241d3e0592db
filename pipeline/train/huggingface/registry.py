"""All families of Hugging Face's models, by `model_type`.

Their order decides two things. On export the first that computes a model wins, so a family whose layers are those of an
earlier one under other names is read only. And of families that fit a model equally badly the last is named, so that
special ones stand after general ones.
"""

from __future__ import annotations

from pipeline.train.huggingface.families.cohere2 import COHERE2
from pipeline.train.huggingface.families.encoders.bert import BERT, ROBERTA
from pipeline.train.huggingface.families.encoders.modernbert import MODERNBERT
from pipeline.train.huggingface.families.experts.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from pipeline.train.huggingface.families.experts.glm4_moe import GLM4_MOE
from pipeline.train.huggingface.families.experts.gpt_oss import GPT_OSS
from pipeline.train.huggingface.families.experts.mixtral import MIXTRAL
from pipeline.train.huggingface.families.experts.olmoe import OLMOE
from pipeline.train.huggingface.families.experts.qwen_moe import QWEN2_MOE, QWEN3_MOE
from pipeline.train.huggingface.families.gemma import GEMMA2, GEMMA3
from pipeline.train.huggingface.families.gpt2 import GPT2
from pipeline.train.huggingface.families.gpt_neox import GPT_NEOX
from pipeline.train.huggingface.families.granite import GRANITE
from pipeline.train.huggingface.families.hybrid.bamba import BAMBA
from pipeline.train.huggingface.families.hybrid.granite_hybrid import GRANITE_HYBRID
from pipeline.train.huggingface.families.hybrid.kimi_linear import KIMI_LINEAR
from pipeline.train.huggingface.families.hybrid.mamba2 import MAMBA2
from pipeline.train.huggingface.families.hybrid.nemotron_h import NEMOTRON_H
from pipeline.train.huggingface.families.hybrid.olmo_hybrid import OLMO_HYBRID
from pipeline.train.huggingface.families.hybrid.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from pipeline.train.huggingface.families.llama import LLAMA
from pipeline.train.huggingface.families.mistral import MISTRAL
from pipeline.train.huggingface.families.olmo2 import OLMO2
from pipeline.train.huggingface.families.olmo3 import OLMO3
from pipeline.train.huggingface.families.phi3 import PHI3
from pipeline.train.huggingface.families.qwen import QWEN2, QWEN3
from pipeline.train.huggingface.families.smollm3 import SMOLLM3
from pipeline.train.huggingface.families.starcoder2 import STARCODER2
from pipeline.train.huggingface.families.t5 import T5
from pipeline.train.huggingface.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(GPT2, STARCODER2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, SMOLLM3),
        *(PHI3, GRANITE, GPT_NEOX, COHERE2, GEMMA2, GEMMA3),
        *(DEEPSEEK_V2, DEEPSEEK_V3),
        *(GPT_OSS, GLM4_MOE, QWEN2_MOE, QWEN3_MOE, OLMOE, MIXTRAL),
        T5,
        *(MAMBA2, BAMBA, GRANITE_HYBRID, NEMOTRON_H),
        *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, OLMO_HYBRID, KIMI_LINEAR),
        *(BERT, ROBERTA, MODERNBERT),
    )
}

READ_AS: dict[str, str] = {"kimi_k2": "deepseek_v3"}
"""By `model_type` of files whose architecture is that of a family, its `model_type`, which is written then."""

REFUSED: dict[str, str] = {
    "gemma3": "it reads images, too; its text model alone is a gemma3_text",
    "falcon_h1": "its layers have Mamba-2 and attention beside each other",
    "zamba2": "its layers share the weights of a few with attention",
    "qwen3_5": "it reads images, too; its text model alone is a qwen3_5_text",
    "qwen3_5_moe": "it reads images, too; its text model alone is a qwen3_5_moe_text",
}
"""Reason why a family is missing, by its `model_type`, where there is more to say than that."""
