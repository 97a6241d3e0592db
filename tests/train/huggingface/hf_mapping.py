"""Names of this package's parameters in transformers' models, and models of both with the same random weights."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline.config.model import ModelConfig
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec

_LLAMA = {
    "embedding.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "head.": "lm_head.",
    "mixer_norm.": "input_layernorm.",
    "mixer.wq.": "self_attn.q_proj.",
    "mixer.wk.": "self_attn.k_proj.",
    "mixer.wv.": "self_attn.v_proj.",
    "mixer.wo.": "self_attn.o_proj.",
    "mixer.q_norm.": "self_attn.q_norm.",
    "mixer.k_norm.": "self_attn.k_norm.",
    "mlp_norm.": "post_attention_layernorm.",
    "mlp.w1.": "mlp.gate_proj.",
    "mlp.w3.": "mlp.up_proj.",
    "mlp.w2.": "mlp.down_proj.",
}
_GPT2 = {
    "embedding.": "transformer.wte.",
    "position_embedding.": "transformer.wpe.",
    "norm.": "transformer.ln_f.",
    "mixer_norm.": "ln_1.",
    "mixer.wo.": "attn.c_proj.",
    "mlp_norm.": "ln_2.",
    "mlp.w1.": "mlp.c_fc.",
    "mlp.w2.": "mlp.c_proj.",
}


def hf_tensor(tensors: dict[str, Tensor], name: str, dim: int) -> Tensor:
    """What transformers' `tensors` (parameters or gradients by their names) hold for our parameter `name`."""
    found = re.fullmatch(r"(layers\.\d+\.)?(.+\.)(weight|bias)", name)
    assert found is not None, name
    layer, part, kind = found[1] or "", found[2], found[3]
    if any(".wte." in key for key in tensors):
        if qkv := re.fullmatch(r"mixer\.w([qkv])\.", part):
            # One matrix for the three, stored [in, out] as all of GPT-2's.
            whole = tensors[layer.replace("layers.", "transformer.h.") + f"attn.c_attn.{kind}"]
            return whole.split(dim, dim=-1)["qkv".index(qkv[1])].t()
        tensor = tensors[layer.replace("layers.", "transformer.h.") + _GPT2[part] + kind]
        return tensor.t() if re.fullmatch(r"(mixer|mlp)\.w\w\.", part) else tensor
    return tensors[layer.replace("layers.", "model.layers.") + _LLAMA[part] + kind]


def randomize(model: nn.Module, seed: int, norms: float = 1.0, gain: float = 1.5) -> None:
    """Every parameter random, norms (around `norms`) and biases too, so that none can be left out unnoticed.

    Args:
        model: whose parameters change.
        seed: of the numbers.
        norms: mean of the weights of norms.
        gain: root mean square of what a matrix makes of numbers of 1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(
                std=0.2 if parameter.ndim == 1 or name.endswith("A_log") else gain * parameter.shape[-1] ** -0.5,
                generator=generator,
            )
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter.add_(norms)


def twin(theirs: PreTrainedModel, config: ModelConfig, vocab_size: int, max_positions: int = 64) -> Decoder:
    """A decoder with the weights of transformers' model, which get random here; rows of padding are 9."""
    randomize(theirs, seed=1)
    ours = Decoder(decoder_spec(config, vocab_size, max_positions))
    tensors = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            source = hf_tensor(tensors, name, config.dim)
            if parameter.shape != source.shape:
                assert name in ("embedding.weight", "head.weight")
                parameter.fill_(9.0)
            parameter[: len(source)].copy_(source)
    return ours
