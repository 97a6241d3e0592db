"""Floating-point operations and parameters of a decoder, counted from its layers."""

from __future__ import annotations

from pipeline.data.loading.stream_shape import StreamShape
from pipeline.train.model.decoder_spec import DecoderSpec
from pipeline.train.model.part_spec import LayerSpec, MtpSpec

Length = int | StreamShape
"""Positions of a sequence: of a decoder that scores all of them, or as an objective makes them of a window."""


def flops_per_token(spec: DecoderSpec, length: Length, *, causal: bool) -> float:
    """Model FLOPs of training on one token of the data: forward and backward of all matrix products.

    With S positions of a sequence, D = dim, H and K query and key heads of size E, F = ffn_dim, V = vocab_size (without
    padding), the forward pass of one token is, a multiply-add counted as 2:

    - queries, keys, values: 2 * D * E * (H + 2 * K) a layer,
    - attention's output:    2 * H * E * D a layer,
    - scores and their sum over values: 2 * (2 * H * E * keys) a layer, `keys` being the keys a query meets,
    - mlp:                   2 * 3 * D * F a layer (swiglu), 2 * 2 * D * F (gelu),
    - recurrences:           those of a scan by chunks of Q positions, see `extra_flops` of the mixers,
    - experts:               2 * 3 * D * F for each expert that a token goes to, 2 * D * E for a router of E experts,
    - head:                  2 * D * V, tied or not, and 2 * D * D with a transform, for tokens that are predicted,
    - multi-token prediction, for each depth: a layer, the head, and 2 * 2 * D * D.

    The backward pass computes two products for each of these, the gradients of both factors: in all 3 * forward.
    Lookups of embeddings, norms, activations, softmax and recomputation are not counted.

    `keys` follows one of two conventions. `causal=True`, as Megatron-LM counts: the mean over the triangle, S / 2; with
    a sliding window of W < S tokens W - W^2 / (2 * S), the area of the band; within a chunk Q / 2. A query that sees
    both sides has that of each, S without a window. `causal=False`, as PaLM (Chowdhery et al. 2022, appendix B) and
    torchtitan count: all S, or W with a window; within a chunk Q, as the scan computes it. Neither makes attention
    cheaper for document bounds.

    Of an encoder-decoder a layer counts for the positions of its side, and attention to the encoder for its keys. What
    an objective makes of L tokens may have more than L positions; their FLOPs are those of the L tokens.

    Args:
        spec: The model.
        length: Of a sequence.
        causal: See above.

    Returns:
        FLOPs of one token. FLOP/s is this times tokens/s; divided by the device's peak it is the MFU.
    """
    shape = shape_of(length)
    layers = sum(layer_flops(layer, length, causal=causal) for layer in spec.layers)
    head = head_flops(spec) if shape.predicted == shape.length else shape.predicted_share * head_flops(spec)
    total = 3.0 * (head + layers + mtp_flops(spec, length, causal=causal))
    return total if shape.raw == shape.length else total * shape.length / shape.raw


def shape_of(length: Length) -> StreamShape:
    """A length in one form."""
    return length if isinstance(length, StreamShape) else StreamShape(length, 0, length, length)


def side_length(layer: LayerSpec, length: Length) -> int:
    """Positions that a layer changes."""
    shape = shape_of(length)
    return {None: shape.length, "encoder": shape.encoder, "decoder": shape.decoder}[layer.side]


def side_share(layer: LayerSpec, length: Length) -> float:
    """Share of the positions that a layer changes."""
    return 1.0 if layer.side is None else side_length(layer, length) / shape_of(length).length


def layer_flops(layer: LayerSpec, length: Length, *, causal: bool) -> float:
    """FLOPs of a position in the forward pass of a layer, the mean over all; conventions as in `flops_per_token`."""
    products = 2.0 * sum(matrix.elements for matrix in layer.matrices.values())
    if layer.side is not None:
        products = product_flops(layer, length)
    return products + expert_flops(layer) + extra_flops(layer, length, causal=causal)


def product_flops(layer: LayerSpec, length: Length) -> float:
    """FLOPs of a position in products with matrices, of a layer of an encoder-decoder; see `layer_flops`."""
    shape = shape_of(length)
    own = side_length(layer, length)
    total = sum(matrix.elements * (shape.encoder if matrix.of_encoder else own) for matrix in layer.matrices.values())
    return 2.0 * total / shape.length


def expert_flops(layer: LayerSpec) -> float:
    """FLOPs of a position in products of experts, see `layer_flops`."""
    return 2.0 * sum(stack.used_elements for stack in layer.stacks.values())


def extra_flops(layer: LayerSpec, length: Length, *, causal: bool) -> float:
    """FLOPs of a position in products without weights, as scores of attention and their sum over values."""
    own = side_length(layer, length)
    if layer.side is None:
        return sum(part.extra_flops(own, causal=causal) for part in layer.parts.values())
    keys = {"cross": shape_of(length).encoder}
    extra = sum(part.extra_flops(keys.get(place, own), causal=causal) for place, part in layer.parts.items())
    return extra * side_share(layer, length)


def head_flops(spec: DecoderSpec) -> float:
    """FLOPs of one token that is predicted in the forward pass of the head."""
    return 2.0 * spec.dim * (spec.vocab_size + (0 if spec.head_transform is None else spec.dim))


def mtp_flops(spec: DecoderSpec, length: Length, *, causal: bool) -> float:
    """FLOPs of one token in the forward pass of multi-token prediction, with its uses of the head."""
    return sum(
        head_flops(spec) + input_flops(each) + layer_flops(each.layer, length, causal=causal) for each in spec.mtp
    )


def input_flops(mtp: MtpSpec) -> float:
    """FLOPs of one token in the forward pass of the matrices before the block of a depth."""
    return 2.0 * sum(matrix.elements for matrix in mtp.inputs)


def num_parameters(spec: DecoderSpec) -> int:
    """Parameters as stored: a tied head once, the vocabulary with its padding."""
    tables = spec.vocab_padded * spec.dim * (1 if spec.tie_embeddings else 2) + spec.vocab_padded * spec.head_bias
    ends = sum(spec.first_sizes) + sum(spec.last_norm_sizes) + sum(spec.transform_sizes)
    layers = sum(map(layer_parameters, spec.layers)) + sum(map(mtp_parameters, spec.mtp))
    relative = sum(each.buckets * each.heads for each in spec.relatives.values())
    return tables + ends + layers + relative


def mtp_parameters(mtp: MtpSpec, tp: int = 1) -> int:
    """Parameters of a depth of multi-token prediction on one rank of the tp axis."""
    return input_parameters(mtp) + layer_parameters(mtp.layer, tp)


def input_parameters(mtp: MtpSpec) -> int:
    """Parameters of a depth outside of its block: two matrices and three norms, whole on each rank of the tp axis."""
    return sum(matrix.elements for matrix in mtp.inputs) + sum(mtp.norm_sizes)


def active_parameters(spec: DecoderSpec) -> int:
    """Parameters that a token meets: all, but of experts those that it goes to."""
    mixtures = spec.expert_layers.values()
    idle = sum(stack.parameters - stack.used_parameters for mixture in mixtures for stack in mixture.stacks)
    return num_parameters(spec) - idle


def layer_parameters(layer: LayerSpec, tp: int = 1) -> int:
    """Parameters of a layer on one rank of the tp axis; norms and the biases of outputs are whole on each."""
    return sum(layer.norm_sizes) + sum(part.parameters(tp) for part in layer.parts.values())


def expert_parameters(layer: LayerSpec, ranks: int = 1) -> int:
    """Parameters of a layer's experts, or those that each of some ranks has of them."""
    return sum(part.stack_parameters(ranks) for part in layer.parts.values())


def muon_parameters(layer: LayerSpec, tp: int = 1) -> int:
    """Parameters of a layer, see `layer_parameters`, that Muon may have: those in matrices, also of experts."""
    experts = sum(stack.elements for stack in layer.stacks.values()) // tp
    return sum(matrix.parameters(tp) for matrix in layer.matrices.values() if matrix.takes_muon) + experts


def orthogonal_flops(layer: LayerSpec, steps: int) -> list[float]:
    """FLOPs of Newton-Schulz iterations, for each matrix of a layer that Muon may have, besides those of experts."""
    matrices = (matrix for matrix in layer.matrices.values() if matrix.takes_muon)
    return [_orthogonal_flops(matrix.rows, matrix.columns, steps) for matrix in matrices]


def expert_orthogonal_flops(layer: LayerSpec, steps: int, shards: int) -> float:
    """FLOPs of Newton-Schulz iterations for experts, on the process with the most experts of N = `shards`."""
    stacks = layer.stacks.values()
    return sum(-(-each.count // shards) * _orthogonal_flops(each.rows, each.columns, steps) for each in stacks)


def _orthogonal_flops(rows: int, columns: int, steps: int) -> float:
    """FLOPs for one matrix: three products in each iteration."""
    short, long = sorted((rows, columns))
    return steps * 2.0 * short**2 * (2 * long + short)
