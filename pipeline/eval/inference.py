"""A model as generation wants it: whole, in one process, without anything that only training needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.eval.encoders import refuse_encoder
from pipeline.train.checkpoint.exported import Evaluated, WeightsOf
from pipeline.train.checkpoint.state_shapes import is_buffer, is_count
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.meta import on_meta
from pipeline.train.model.mixers.fp32_vectors import fp32_parameters
from pipeline.train.parallel.parallelize import COMPUTE_DTYPE
from pipeline.train.start.setup import load_for_inference


@dataclass(frozen=True)
class Loaded:
    """A model that continues texts."""

    model: Decoder
    tokenizer: Tokenizer
    source: Evaluated


def load_decoder(config: Config, which: WeightsOf) -> Loaded:
    """The model of verified weights, whatever layout it was trained on, in the type that training computes in.

    Raises:
        UserError: The model is an encoder, or as `load_for_inference`.
    """
    refuse_encoder(config.model, "generation")
    found = load_for_inference(config, which)
    return Loaded(decoder_of(config, found.model.whole, found.tokenizer), found.tokenizer, found.source)


def decoder_of(config: Config, whole: Decoder, tokenizer: Tokenizer) -> Decoder:
    """A model of one process as generation wants it."""
    # cuDNN's attention makes a plan for every number of keys, which here is one a token, and keeps them all.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = unwrapped(whole, COMPUTE_DTYPE[config.train.precision.compute])
    if model.spec.sided:
        model.start_token = start_token(config, tokenizer)
    return model


def start_token(config: Config, tokenizer: Tokenizer) -> int:
    """Id of the token that the decoder of an encoder-decoder began each document with in training."""
    token = config.train.objective.start_token
    if token in (None, tokenizer.end_of_document_token):
        return tokenizer.end_of_document
    if token not in tokenizer.special_tokens:
        raise UserError(
            f"train.objective.start_token={token} is not among the special tokens of the model's tokenizer "
            f"({', '.join(tokenizer.special_tokens) or 'none'}): set the one that the model was trained with"
        )
    return tokenizer.special_tokens[token]


def unwrapped(model: Decoder, dtype: torch.dtype) -> Decoder:
    """A model of one process without FSDP, which wraps it in training and which `dtype` is the compute dtype of.

    The hooks of every layer would take as long as the layers of a small model, and the fp32 weights twice the memory.
    In fp32 it computes the same bits. Otherwise FSDP rounds the rotary tables, too, and here they stay fp32, as where
    an exported model is run. Rates of decay stay fp32, as in training.
    """
    weights = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
    return plain_decoder(model.spec, weights, dtype)


def plain_decoder(
    spec: DecoderSpec, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, *, trained: bool = False
) -> Decoder:
    """A whole model of one process, in evaluation mode.

    Args:
        spec: Of the model.
        weights: Of all parameters and buffers; the choices of the last step are 0 where they are left out.
        dtype: Of the parameters, but for those that stay in fp32.
        trained: Parameters get gradients.
    """
    with on_meta():
        plain = Decoder(spec)
    fp32 = fp32_parameters(plain)
    counts = {name: each for name, each in plain.named_buffers() if is_count(name) and name not in weights}
    plain.load_state_dict(
        {
            name: value
            if is_buffer(name)
            else nn.Parameter(value.to(torch.float32 if name in fp32 else dtype), requires_grad=trained)
            for name, value in weights.items()
        }
        | {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in counts.items()},
        assign=True,
    )
    return plain.train(False)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    whole: torch.Tensor = tensor.full_tensor()
    return whole
