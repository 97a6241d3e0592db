"""All families of Hugging Face's models, by `model_type`.

Their order decides two things. On export the first that computes a model wins, so a family whose layers are those of an
earlier one under other names is read only. And of families that fit a model equally badly the last is named, so that
special ones stand behind general ones.
"""

from __future__ import annotations

from pipeline.train.huggingface.families.gpt2 import GPT2
from pipeline.train.huggingface.families.llama import LLAMA
from pipeline.train.huggingface.families.mistral import MISTRAL
from pipeline.train.huggingface.families.qwen import QWEN2, QWEN3
from pipeline.train.huggingface.families.starcoder2 import STARCODER2
from pipeline.train.huggingface.family import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, STARCODER2, LLAMA, MISTRAL, QWEN2, QWEN3)}
