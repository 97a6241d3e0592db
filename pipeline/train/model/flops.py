"""Floating-point operations and parameters of a decoder, counted from its layers."""

from __future__ import annotations

from pipeline.train.model.config import DecoderSpec
from pipeline.train.model.part_spec import LayerSpec, MtpSpec


def flops_per_token(spec: DecoderSpec, sequence_length: int, *, causal: bool, predicted: float = 1.0) -> float:
    """Model FLOPs of training on one token: forward and backward of all matrix products.

    With S = `sequence_length`, D = dim, H and K query and key heads of size E, F = ffn_dim, V = vocab_size (without
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

    Args:
        spec: The model.
        sequence_length: Positions of a sequence.
        causal: See above.
        predicted: Share of the positions that the head scores.

    Returns:
        FLOPs of one token. FLOP/s is this times tokens/s; divided by the device's peak it is the MFU.
    """
    layers = sum(layer_flops(layer, sequence_length, causal=causal) for layer in spec.layers)
    head = head_flops(spec) if predicted == 1 else predicted * head_flops(spec)
    return 3.0 * (head + layers + mtp_flops(spec, sequence_length, causal=causal))


def layer_flops(layer: LayerSpec, sequence_length: int, *, causal: bool) -> float:
    """FLOPs of one token in the forward pass of a layer; conventions as in `flops_per_token`."""
    products = 2.0 * sum(matrix.elements for matrix in layer.matrices.values())
    return products + expert_flops(layer) + extra_flops(layer, sequence_length, causal=causal)


def expert_flops(layer: LayerSpec) -> float:
    """Those of them that are products of experts."""
    return 2.0 * sum(stack.used_elements for stack in layer.stacks.values())


def extra_flops(layer: LayerSpec, sequence_length: int, *, causal: bool) -> float:
    """Those of them that are not products with weights, as scores of attention and their sum over values."""
    return sum(part.extra_flops(sequence_length, causal=causal) for part in layer.parts.values())


def head_flops(spec: DecoderSpec) -> float:
    """FLOPs of one token that is predicted in the forward pass of the head."""
    return 2.0 * spec.dim * (spec.vocab_size + (0 if spec.head_transform is None else spec.dim))


def mtp_flops(spec: DecoderSpec, sequence_length: int, *, causal: bool) -> float:
    """FLOPs of one token in the forward pass of multi-token prediction, with its uses of the head."""
    return sum(
        head_flops(spec) + input_flops(each) + layer_flops(each.layer, sequence_length, causal=causal)
        for each in spec.mtp
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
    """Those of them that are not in the block: two matrices and three norms, whole on each rank of the tp axis."""
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
    """Those of `layer_parameters` that Muon may have: in matrices, those of experts among them."""
    experts = sum(stack.elements for stack in layer.stacks.values()) // tp
    return sum(matrix.parameters(tp) for matrix in layer.matrices.values() if matrix.muon) + experts


def orthogonal_flops(layer: LayerSpec, steps: int) -> list[float]:
    """FLOPs of Newton-Schulz iterations, for each matrix of a layer that Muon may have, besides those of experts."""
    matrices = (matrix for matrix in layer.matrices.values() if matrix.muon)
    return [_orthogonal_flops(matrix.rows, matrix.columns, steps) for matrix in matrices]


def expert_orthogonal_flops(layer: LayerSpec, steps: int, shards: int) -> float:
    """FLOPs of the same for experts, on the process with the most of them, if they are dealt to N = `shards`."""
    stacks = layer.stacks.values()
    return sum(-(-each.count // shards) * _orthogonal_flops(each.rows, each.columns, steps) for each in stacks)


def _orthogonal_flops(rows: int, columns: int, steps: int) -> float:
    """FLOPs for one matrix: three products in each iteration."""
    short, long = sorted((rows, columns))
    return steps * 2.0 * short**2 * (2 * long + short)
