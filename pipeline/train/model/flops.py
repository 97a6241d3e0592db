"""Floating-point operations and parameters of a decoder, counted from its layers."""

from __future__ import annotations

from pipeline.train.model.config import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec


def flops_per_token(spec: DecoderSpec, sequence_length: int, *, causal: bool) -> float:
    """Model FLOPs of training on one token: forward and backward of all matrix products.

    With S = `sequence_length`, D = dim, H and K query and key heads of size E, F = ffn_dim, V = vocab_size (without
    padding), the forward pass of one token is, a multiply-add counted as 2:

    - queries, keys, values: 2 * D * E * (H + 2 * K) a layer,
    - attention's output:    2 * H * E * D a layer,
    - scores and their sum over values: 2 * (2 * H * E * keys) a layer, `keys` being the keys a query meets,
    - mlp:                   2 * 3 * D * F a layer (swiglu), 2 * 2 * D * F (gelu),
    - head:                  2 * D * V, tied or not.

    The backward pass computes two products for each of these, the gradients of both factors: in all 3 * forward.
    Lookups of embeddings, norms, activations, softmax and recomputation are not counted.

    `keys` follows one of two conventions. `causal=True`, as Megatron-LM counts: the mean over the triangle, S / 2; with
    a sliding window of W < S tokens W - W^2 / (2 * S), the area of the band. `causal=False`, as PaLM (Chowdhery et al.
    2022, appendix B) and torchtitan count: all S, or W with a window. Neither makes attention cheaper for document
    bounds.

    Returns:
        FLOPs of one token. FLOP/s is this times tokens/s; divided by the device's peak it is the MFU.
    """
    return 3.0 * (head_flops(spec) + sum(layer_flops(layer, sequence_length, causal=causal) for layer in spec.layers))


def layer_flops(layer: LayerSpec, sequence_length: int, *, causal: bool) -> float:
    """FLOPs of one token in the forward pass of a layer; conventions as in `flops_per_token`."""
    products = 2.0 * (_attention_weights(layer.mixer) + _mlp_weights(layer.mlp))
    return products + attention_flops(layer.mixer, sequence_length, causal=causal)


def attention_flops(mixer: AttentionSpec, sequence_length: int, *, causal: bool) -> float:
    """Those of them that scores and their sum over values take."""
    return 4.0 * mixer.heads * mixer.head_dim * _keys(mixer, sequence_length, causal)


def head_flops(spec: DecoderSpec) -> float:
    """FLOPs of one token in the forward pass of the head."""
    return 2.0 * spec.dim * spec.vocab_size


def num_parameters(spec: DecoderSpec) -> int:
    """Parameters as stored: a tied head once, the vocabulary with its padding."""
    tables = spec.vocab_padded * (1 if spec.tie_embeddings else 2) + (spec.learned_positions or 0)
    return spec.dim * tables + norm_parameters(spec.norm, spec.dim) + sum(map(layer_parameters, spec.layers))


def layer_parameters(layer: LayerSpec, tp: int = 1) -> int:
    """Parameters of a layer on one rank of the tp axis; norms and the biases of outputs are whole on each."""
    mixer, mlp = layer.mixer, layer.mlp
    heads, kv_heads = _heads(mixer, tp)
    total = layer_matrices(layer, tp)
    total += norm_parameters(layer.norm, mixer.dim) + norm_parameters(layer.norm, mlp.dim)
    if mixer.qkv_bias:
        total += mixer.head_dim * (heads + 2 * kv_heads)
    if mixer.output_bias:
        total += mixer.dim
    if mixer.qk_norm is not None:
        total += 2 * norm_parameters(mixer.qk_norm, mixer.head_dim)
    if mlp.bias:
        total += mlp.dim + (2 if mlp.kind == "swiglu" else 1) * mlp.ffn_dim // tp
    return total


def layer_matrices(layer: LayerSpec, tp: int = 1) -> int:
    """Those of `layer_parameters` that are in matrices."""
    mixer, mlp = layer.mixer, layer.mlp
    of_mlp = (3 if mlp.kind == "swiglu" else 2) * mlp.dim * mlp.ffn_dim // tp
    return 2 * mixer.dim * mixer.head_dim * sum(_heads(mixer, tp)) + of_mlp


def orthogonal_flops(layer: LayerSpec, steps: int) -> list[float]:
    """FLOPs of so many Newton-Schulz iterations, for each matrix of a layer: three products in each."""
    mixer, mlp = layer.mixer, layer.mlp
    queries, keys = ((mixer.head_dim * heads, mixer.dim) for heads in (mixer.heads, mixer.kv_heads))
    shapes = [queries, keys, keys, queries, *[(mlp.ffn_dim, mlp.dim)] * (3 if mlp.kind == "swiglu" else 2)]
    return [steps * 2.0 * min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]


def _heads(mixer: AttentionSpec, tp: int) -> tuple[int, int]:
    """Query heads and key heads whose weights a rank has. Fewer key heads than ranks: all of them, and it uses one."""
    return mixer.heads // tp, mixer.kv_heads // tp if mixer.kv_heads % tp == 0 else mixer.kv_heads


def norm_parameters(spec: NormSpec, dim: int) -> int:
    """Parameters of a normalization of `dim` elements."""
    return 2 * dim if spec.kind == "layernorm" else dim


def _keys(spec: AttentionSpec, sequence_length: int, causal: bool) -> float:
    window = min(spec.window or sequence_length, sequence_length)
    return window - window**2 / (2 * sequence_length) if causal else window


def _attention_weights(spec: AttentionSpec) -> int:
    return spec.dim * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)


def _mlp_weights(spec: MlpSpec) -> int:
    return (3 if spec.kind == "swiglu" else 2) * spec.dim * spec.ffn_dim
