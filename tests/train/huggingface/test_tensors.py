"""Rules of tensors on synthetic ones: both ways, whole and by the pieces that a rank reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.common.errors import UserError
from pipeline.train.huggingface.llama_like import LLAMA_NAMES
from pipeline.train.huggingface.names import TensorRule
from pipeline.train.huggingface.tensors import TensorMapping, map_rules
from pipeline.train.model.mixers.attention.spec import AttentionSpec
from pipeline.train.model.mlps.dense.spec import MlpSpec
from pipeline.train.model.part_spec import Reach
from pipeline.train.model.tensor_names import RowOrder, TensorNames, by_group, rope_pairs

HEADS, KEY_HEADS, HEAD_DIM, WIDTH = 6, 3, 4, 5
ATTENTION = AttentionSpec(WIDTH, HEADS, KEY_HEADS, HEAD_DIM, True, True, None, Reach(), 1.0)
MLP = MlpSpec("swiglu", WIDTH, 7, bias=False)


@dataclass(frozen=True)
class Rule:
    """A rule, shapes of ours, and theirs made of ours in another way than the package's."""

    rule: TensorRule
    shapes: dict[str, tuple[int, ...]]
    theirs: Any


def gpt_neox(parts: Mapping[str, Tensor]) -> Tensor:
    heads = [parts[name].view(HEADS, HEAD_DIM, *parts[name].shape[1:]) for name in "qkv"]
    return torch.stack(heads, 1).reshape(3 * HEADS * HEAD_DIM, *parts["q"].shape[1:])


def by_key_head(parts: Mapping[str, Tensor]) -> Tensor:
    """Blocks of unequal sizes for each key head: q and k of one head, v and z of two."""
    return torch.cat([parts[name].view(KEY_HEADS, -1, WIDTH) for name in "qkvz"], 1).reshape(-1, WIDTH)


def interleaved(parts: Mapping[str, Tensor]) -> Tensor:
    """Of each head the first rows of both halves, then the second ones, and so on."""
    return parts["q"].view(HEADS, 2, HEAD_DIM // 2, WIDTH).transpose(1, 2).reshape(-1, WIDTH)


def partly_interleaved(parts: Mapping[str, Tensor]) -> Tensor:
    heads = parts["q"].view(HEADS, 6, WIDTH)
    return torch.cat((heads[:, [0, 2, 1, 3]], heads[:, 4:]), 1).reshape(-1, WIDTH)


def square(names: str, rows: int) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names, (rows, WIDTH))


NEOX = RowOrder("head by head", lambda part: by_group(part.heads, *[part.head_dim] * 3))
PAIRS = RowOrder("of rotary pairs together", lambda part: rope_pairs(part.heads, part.head_dim))
PARTLY = RowOrder("of rotary pairs together", lambda part: rope_pairs(part.heads, 6, 4))
BY_KEY_HEAD = RowOrder(
    "by key head", lambda part: by_group(part.kv_heads, part.head_dim, part.head_dim, 2 * part.head_dim, 8)
)
IN_TURN = RowOrder("in turn", lambda part: by_group(part.ffn_dim, 1, 1))
ROWS = HEADS * HEAD_DIM
EXPERTS = 12  # more than have one digit
RULES = {
    "one": Rule(TensorRule("t", ("q",)), square("q", ROWS), lambda parts: parts["q"]),
    "transposed": Rule(
        TensorRule("t", ("q", "k"), transposed=True),
        {"q": (8, WIDTH), "k": (4, WIDTH)},
        lambda parts: torch.cat((parts["q"], parts["k"])).t(),
    ),
    "head by head": Rule(TensorRule("t", tuple("qkv"), False, NEOX, ATTENTION), square("qkv", ROWS), gpt_neox),
    "biases head by head": Rule(
        TensorRule("t", tuple("qkv"), False, NEOX, ATTENTION), dict.fromkeys("qkv", (ROWS,)), gpt_neox
    ),
    "head by head, transposed": Rule(
        TensorRule("t", tuple("qkv"), True, NEOX, ATTENTION), square("qkv", ROWS), lambda parts: gpt_neox(parts).t()
    ),
    "rotary pairs": Rule(TensorRule("t", ("q",), False, PAIRS, ATTENTION), square("q", ROWS), interleaved),
    "some rotary pairs": Rule(
        TensorRule("t", ("q",), False, PARTLY, ATTENTION), square("q", HEADS * 6), partly_interleaved
    ),
    "by key head": Rule(
        TensorRule("t", tuple("qkvz"), False, BY_KEY_HEAD, ATTENTION),
        square("qk", KEY_HEADS * HEAD_DIM) | square("vz", KEY_HEADS * 8),
        by_key_head,
    ),
    "of numbered experts": Rule(
        TensorRule("t.{e}.gate", ("w1",), experts="numbered"),
        {"w1": (EXPERTS, 4, WIDTH)},
        lambda parts: {f"t.{expert}.gate": parts["w1"][expert] for expert in range(EXPERTS)},
    ),
    "of numbered experts, two in one and transposed": Rule(
        TensorRule("t.{e}.gate_up", ("w1", "w3"), transposed=True, experts="numbered"),
        dict.fromkeys(("w1", "w3"), (EXPERTS, 4, WIDTH)),
        lambda parts: {
            f"t.{expert}.gate_up": torch.cat((parts["w1"][expert], parts["w3"][expert])).t()
            for expert in range(EXPERTS)
        },
    ),
    "of stacked experts": Rule(
        TensorRule("t", ("w2",), experts="stacked"), {"w2": (EXPERTS, WIDTH, 4)}, lambda parts: parts["w2"]
    ),
    "of stacked experts, in turn and transposed": Rule(
        TensorRule("t", ("w1", "w3"), True, IN_TURN, MLP, experts="stacked"),
        dict.fromkeys(("w1", "w3"), (EXPERTS, 7, WIDTH)),
        lambda parts: torch.stack((parts["w1"], parts["w3"]), 2).flatten(1, 2).mT,
    ),
    "biases of stacked experts, in turn": Rule(
        TensorRule("t", ("b1", "b3"), False, IN_TURN, MLP, experts="stacked"),
        dict.fromkeys(("b1", "b3"), (EXPERTS, 7)),
        lambda parts: torch.stack((parts["b1"], parts["b3"]), 2).flatten(1),
    ),
    "taps": Rule(
        TensorRule("t", ("conv",), unit_dims=(1,)), {"conv": (10, 4)}, lambda parts: parts["conv"].view(10, 1, 4)
    ),
    "a vector with other dimensions": Rule(
        TensorRule("t", ("a_log",), unit_dims=(0, 1, 3)),
        {"a_log": (10,)},
        lambda parts: parts["a_log"].view(1, 1, 10, 1),
    ),
}


@pytest.fixture(params=RULES)
def case(request: pytest.FixtureRequest) -> tuple[TensorMapping, dict[str, Tensor], dict[str, Tensor]]:
    """The mapping of a rule, tensors of ours, and those of theirs."""
    rule: Rule = RULES[request.param]
    generator = torch.Generator().manual_seed(1)
    ours = {name: torch.randn(shape, generator=generator) for name, shape in rule.shapes.items()}
    theirs = rule.theirs(ours)
    return map_rules([rule.rule], rule.shapes, 0), ours, theirs if isinstance(theirs, dict) else {"t": theirs}


def test_whole_tensors(case: tuple[TensorMapping, dict[str, Tensor], dict[str, Tensor]]) -> None:
    mapping, ours, theirs = case
    assert mapping.their_shapes == {name: value.shape for name, value in theirs.items()}
    for name, value in theirs.items():
        assert torch.equal(mapping.to_theirs(name, ours), value)
    for name, value in ours.items():
        assert torch.equal(mapping.to_ours(name, theirs), value)


def test_pieces(case: tuple[TensorMapping, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path) -> None:
    """From a file, as a rank reads them: any rows, and of these any columns."""
    mapping, ours, theirs = case
    save_file({name: value.contiguous() for name, value in theirs.items()}, tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", framework="pt") as opened:
        for name, value in ours.items():
            rows = [slice(*ends) for ends in pairwise((0, 1, value.shape[0] // 2, value.shape[0]))]
            every = tuple(slice(0, size) for size in value.shape[1:])
            for others in (every, *([(slice(1, 3), *every[1:]), (*every[:-1], slice(1, 3))] if every else [])):
                for each in rows:
                    wanted = value[(each, *others)]
                    found = torch.full_like(wanted, torch.nan)
                    for tensor, piece, here in mapping.ours[name].pieces(each, *others):
                        found[here] = piece.of(opened.get_slice(tensor)[piece.source])
                    assert torch.equal(found, wanted)


def test_a_piece_reads_the_rows_that_cover_it() -> None:
    rule = RULES["head by head"]
    piece = map_rules([rule.rule], rule.shapes, 0).ours["k"].cut(slice(HEAD_DIM, 3 * HEAD_DIM))
    assert piece is not None
    # Heads 1 and 2 of k, which begin behind q of head 1, and between which are v and q.
    assert piece.source == (slice(4 * HEAD_DIM, 8 * HEAD_DIM),)


def test_orders_are_computed_when_they_are_needed() -> None:
    def fail(part: Any) -> Any:
        raise AssertionError("nothing was converted yet")

    rule = replace(RULES["head by head"].rule, order=RowOrder("never", fail))
    assert map_rules([rule], RULES["head by head"].shapes, 0).their_shapes == {"t": (3 * ROWS, WIDTH)}


def test_padding_of_the_vocabulary_is_not_theirs() -> None:
    name = "embedding.weight"
    mapping = map_rules([TensorRule("t", (name,))], {name: (8, WIDTH)}, 6)
    ours = {name: torch.randn(8, WIDTH)}
    theirs = mapping.to_theirs("t", ours)
    assert torch.equal(theirs, ours[name][:6])
    assert torch.equal(mapping.to_ours(name, {"t": theirs}), torch.cat((theirs, torch.zeros(2, WIDTH))))
    assert mapping.ours[name].cut(slice(6, 8)) is None
    assert not list(mapping.ours[name].pieces(slice(6, 8), slice(0, 2)))
    piece = mapping.ours[name].cut(slice(4, 8), slice(0, 2))
    assert piece is not None and piece.source == (slice(4, 6), slice(0, 2))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("sizes", [(4,), (2, 4), (1, 3, 5)])
def test_orders_are_permutations(groups: int, sizes: tuple[int, ...]) -> None:
    numbers = by_group(groups, *sizes)
    assert sorted(numbers.tolist()) == list(range(groups * sum(sizes)))
    order = RowOrder("some", lambda part: numbers)
    assert np.array_equal(order.of(groups)[order.back(groups)], np.arange(len(numbers)))


# Names


def test_norms_by_their_places() -> None:
    """As Gemma has them, and as models with fewer have: rules follow the order of the forward pass."""
    sandwich = {
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mixer_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    }
    rules = replace(LLAMA_NAMES, norms=sandwich).of_layer("3", {"mixer": ATTENTION, "mlp": MLP})
    names = [rule.theirs.removeprefix("model.layers.3.").split(".")[0] for rule in rules]
    assert list(dict.fromkeys(names)) == [
        *("input_layernorm", "self_attn", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ]
    assert {rule.ours for rule in rules} >= {(f"layers.3.{ours}.weight",) for ours in sandwich.values()}

    parallel = replace(LLAMA_NAMES, norms={"input_layernorm": "mixer_norm"}, norm_bias=True)
    rules = parallel.of_layer("0", {"mixer": ATTENTION, "mlp": MLP})
    norms = [(rule.theirs, rule.ours) for rule in rules if "norm" in rule.theirs and "self_attn" not in rule.theirs]
    assert norms == [
        (f"model.layers.0.input_layernorm.{kind}", (f"layers.0.mixer_norm.{kind}",)) for kind in ("weight", "bias")
    ]


@dataclass(frozen=True)
class Recurrence(MlpSpec):
    """A kind of part with a parameter of its own and a convolution."""

    label: ClassVar = "recurrence"
    huggingface: ClassVar = {
        "other": (
            TensorNames("mixer.A_log", ("decay",), parameter=True),
            TensorNames("mixer.conv1d", ("conv",), unit_dims=(1,)),
            ("mixer.out_proj", ("w2",)),
        )
    }


def test_a_kind_of_part_says_its_own_names() -> None:
    part = Recurrence("swiglu", WIDTH, 7, bias=False)
    with pytest.raises(UserError, match="layer 1 has recurrence: no family"):
        LLAMA_NAMES.of_layer("1", {"mixer": part})
    rules = replace(LLAMA_NAMES, style="other", norms={}).of_layer("1", {"mixer": part})
    assert [(rule.theirs, *rule.ours, rule.unit_dims) for rule in rules] == [
        ("model.layers.1.mixer.A_log", "layers.1.mixer.decay", ()),
        ("model.layers.1.mixer.conv1d.weight", "layers.1.mixer.conv.weight", (1,)),
        ("model.layers.1.mixer.conv1d.bias", "layers.1.mixer.conv.bias", ()),
        ("model.layers.1.mixer.out_proj.weight", "layers.1.mixer.w2.weight", ()),
        ("model.layers.1.mixer.out_proj.bias", "layers.1.mixer.w2.bias", ()),
    ]


def test_a_family_has_other_names_for_a_kind() -> None:
    fused = replace(LLAMA_NAMES, tables={MlpSpec: [("mlp.gate_up", ("w1", "w3")), ("mlp.down", ("w2",))]})
    rules = {rule.theirs: rule.ours for rule in fused.of_layer("0", {"mixer": ATTENTION, "mlp": MLP})}
    assert rules["model.layers.0.mlp.gate_up.weight"] == ("layers.0.mlp.w1.weight", "layers.0.mlp.w3.weight")
    assert "model.layers.0.self_attn.q_proj.weight" in rules and "model.layers.0.mlp.up_proj.weight" not in rules
