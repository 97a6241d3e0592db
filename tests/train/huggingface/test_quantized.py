"""Quantized weights of others' folders, against independent decoders: MXFP4 and fp8 with a scale per block."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pipeline.common.errors import UserError
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.huggingface import quantized
from pipeline.train.huggingface.config_source import ConfigSource
from pipeline.train.huggingface.convert import from_hf, to_hf
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.huggingface.quantized import FolderTensors, Quantization, read_quantization
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from tests.train.huggingface.hf_mapping import randomize
from tests.train.huggingface.parity import QUIET, close, draw, tensors_of

MXFP4 = Quantization("mxfp4")
BLOCK = (4, 3)
FP8 = Quantization("fp8", BLOCK)
FILE = "model.safetensors"
DTYPES = [torch.bfloat16, torch.float32]
EXPERTS, ROWS, GROUPS = 3, 10, 2


def mxfp4(name: str = "experts.down_proj") -> dict[str, Tensor]:
    """Every byte there is, and exponents small enough for bf16."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (EXPERTS, ROWS, GROUPS, 16), dtype=torch.uint8, generator=generator)
    blocks.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    scales = torch.randint(0, 252, (EXPERTS, ROWS, GROUPS), dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def quantize(value: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """A matrix in fp8, and the scales of its blocks."""
    rows, columns = value.shape
    scales = torch.empty(math.ceil(rows / block[0]), math.ceil(columns / block[1]))
    out = torch.empty(value.shape, dtype=torch.float8_e4m3fn)
    for i, j in product(range(scales.shape[0]), range(scales.shape[1])):
        here = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        scales[i, j] = value[here].abs().max().float() / 448
        out[here] = (value[here].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return out, scales


def decoded(weight: Tensor, scales: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """Element by element, in fp32."""
    out = torch.empty(weight.shape)
    for i, j in product(range(weight.shape[0]), range(weight.shape[1])):
        out[i, j] = weight[i, j].float() * scales[i // block[0], j // block[1]].float()
    return out


def fp8(rows: int = 11, columns: int = 8) -> dict[str, Tensor]:
    weight, scales = quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)))
    return {"w.weight": weight, "w.weight_scale_inv": scales}


def opened(folder: Path, tensors: dict[str, Tensor], quantization: Quantization, dtype: Any = None) -> FolderTensors:
    save_file(tensors, folder / FILE)
    return FolderTensors(folder, [FILE], quantization, dtype or torch.bfloat16)


def read_range(found: FolderTensors, name: str, index: tuple[slice | int, ...] = ()) -> Tensor:
    """A range of one tensor, by default all of it."""
    with found.opened() as read:
        return read(name, index)


def ranges(*sizes: int) -> Iterator[tuple[slice, ...]]:
    """The whole, and parts that begin and end within groups and blocks."""
    ends = [[(0, size), (1, size), (size // 3, size // 2 + 1)] for size in sizes]
    for found in product(*ends):
        yield tuple(slice(*each) for each in found)


@pytest.fixture(params=[2**22, 7])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_AT_ONCE", request.param)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = mxfp4()
    found = opened(tmp_path, {**tensors, "norm.weight": torch.ones(3)}, MXFP4, dtype)
    wanted = convert_moe_packed_tensors(*tensors.values(), dtype=dtype)
    assert found.tensors.keys() == {"experts.down_proj", "norm.weight"}
    assert found.tensors["experts.down_proj"].shape == wanted.shape == (EXPERTS, 32 * GROUPS, ROWS)
    assert found.tensors["experts.down_proj"].dtype == wanted.dtype
    assert torch.equal(read_range(found, "experts.down_proj"), wanted)
    for index in ranges(*wanted.shape):
        assert torch.equal(read_range(found, "experts.down_proj", index), wanted[index])
    assert torch.equal(read_range(found, "experts.down_proj", (slice(1, 2),)), wanted[1:2])
    assert torch.equal(read_range(found, "experts.down_proj", (2, slice(3, 40), slice(5, 9))), wanted[2, 3:40, 5:9])
    assert torch.equal(read_range(found, "norm.weight"), torch.ones(3))
    assert torch.equal(read_range(found, "norm.weight", (slice(1, 2),)), torch.ones(1))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_scales", DTYPES)
@pytest.mark.parametrize("shape", [(11, 8), (12, 9), (1, 1), (3, 2)])
def test_fp8_is_element_times_scale(
    tmp_path: Path, dtype: torch.dtype, of_scales: torch.dtype, shape: tuple[int, int]
) -> None:
    """Also where the last blocks are smaller."""
    tensors = fp8(*shape)
    tensors["w.weight_scale_inv"] = tensors["w.weight_scale_inv"].to(of_scales)
    found = opened(tmp_path, tensors, FP8, dtype)
    wanted = decoded(*tensors.values()).to(dtype)
    assert found.tensors.keys() == {"w.weight"} and found.tensors["w.weight"].shape == shape
    assert torch.equal(read_range(found, "w.weight"), wanted)
    for index in ranges(*shape):
        assert torch.equal(read_range(found, "w.weight", index), wanted[index])


def test_blocks_of_128(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    weight, scales = quantize(torch.randn(300, 260, generator=generator), (128, 128))
    found = opened(tmp_path, {"w.weight": weight, "w.weight_scale_inv": scales}, Quantization("fp8"))
    wanted = weight.float()
    for i, j in product(range(3), range(3)):
        wanted[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= scales[i, j]
    assert torch.equal(read_range(found, "w.weight"), wanted.bfloat16())
    piece = (slice(100, 290), slice(120, 257))
    assert torch.equal(read_range(found, "w.weight", piece), wanted[piece].bfloat16())


def test_a_block_that_is_larger_than_its_matrix(tmp_path: Path) -> None:
    """By far, as only a damaged or hostile config.json has it: the matrix is one block."""
    weight, scales = quantize(torch.randn(11, 8, generator=torch.Generator().manual_seed(4)), (11, 8))
    files = {"w.weight": weight, "w.weight_scale_inv": scales}
    found = opened(tmp_path, files, Quantization("fp8", (2**64 - 1, 2**63)), torch.float32)
    for index in ranges(11, 8):
        assert torch.equal(read_range(found, "w.weight", index), (weight.float() * scales)[index])


@pytest.mark.parametrize("kind", ["mxfp4", "fp8"])
def test_only_what_is_needed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of the values the range itself, up to a group of 32, and never more at a time than is decoded at once."""
    tensors, quantization = (mxfp4(), MXFP4) if kind == "mxfp4" else (fp8(), FP8)
    found = opened(tmp_path, tensors, quantization)
    sizes = list[int]()
    read = quantized._Parts.__call__

    def counted(self: Any, name: str, index: Any) -> Tensor:
        value = read(self, name, index)
        if name == next(iter(tensors)):
            sizes.append(value.numel())
        return value

    monkeypatch.setattr(quantized._Parts, "__call__", counted)
    monkeypatch.setattr(quantized, "_AT_ONCE", 64)
    if kind == "mxfp4":
        read_range(found, "experts.down_proj", (slice(1, 2), slice(40, 50), slice(3, 6)))
        assert sum(sizes) == 3 * 16  # bytes: three rows of one expert, one group each
        sizes.clear()
        read_range(found, "experts.down_proj")
        assert sum(sizes) == EXPERTS * ROWS * GROUPS * 16 and max(sizes) == 32
    else:
        read_range(found, "w.weight", (slice(3, 5), slice(2, 7)))
        assert sizes == [10]
        sizes.clear()
        read_range(found, "w.weight")
        assert sum(sizes) == 88 and max(sizes) == 64


# A model


SHAPES = {"vocab_size": 310, "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}


def llamas(folder: Path, tokenizer: Tokenizer) -> tuple[Path, Path]:
    """A Llama whose matrices are in fp8, as DeepSeek-V3's are, and the same in bf16."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPES, **HEADS)).to(torch.bfloat16)
    randomize(model, seed=3)
    plain, packed = folder / "plain", folder / "packed"
    model.save_pretrained(plain)
    tensors, encoded, full = tensors_of(plain), dict[str, Tensor](), dict[str, Tensor]()
    for name, value in tensors.items():
        encoded[name] = full[name] = value
        if name.endswith("_proj.weight"):
            encoded[name], encoded[f"{name}_scale_inv"] = quantize(value)
            full[name] = decoded(encoded[name], encoded[f"{name}_scale_inv"]).bfloat16()
    save_file(full, plain / FILE)
    packed.mkdir()
    values = json.loads((plain / "config.json").read_bytes())
    values["quantization_config"] = {
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "weight_block_size": list(BLOCK),
    }
    (packed / "config.json").write_text(json.dumps(values))
    scales = {name: value for name, value in encoded.items() if name.endswith("_inv")}
    save_file(scales, packed / "model-00001-of-00002.safetensors")  # scales in another file than their weights
    rest = {name: value for name, value in encoded.items() if name not in scales}
    save_file(rest, packed / "model-00002-of-00002.safetensors")
    for each in (plain, packed):
        tokenizer.save(each)
    return plain, packed


def test_a_quantized_folder_is_converted_and_read_by_pieces(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain, packed = llamas(tmp_path, tokenizer)
    options: dict[str, Any] = {"end_of_document": "<|endoftext|>", "console": QUIET}
    message = from_hf(packed, tmp_path / "ours", **options)
    assert "decoded from fp8 (exports are never quantized)" in message
    assert "decoded" not in from_hf(plain, tmp_path / "wanted", **options)
    ours, wanted = tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "wanted")
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) and value.dtype == wanted[name].dtype for name, value in ours.items())
    folders = [HuggingFaceFolder(each) for each in (packed, plain)]
    name = "layers.1.mlp.w2.weight"
    for index in ranges(*folders[0].tensors[name].shape):
        pieces = [torch.empty([each.stop - each.start for each in index]) for _ in folders]
        for each, piece in zip(folders, pieces, strict=True):
            each.read_into(piece, name, *index)
        assert torch.equal(*pieces)
    to_hf(tmp_path / "ours", tmp_path / "back", console=QUIET)
    back, full = tensors_of(tmp_path / "back"), tensors_of(plain)
    assert back.keys() == full.keys() and all(torch.equal(value, full[name]) for name, value in back.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_bytes())


def test_fp32_if_the_config_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _, packed = llamas(tmp_path, tokenizer)
    values = json.loads((packed / "config.json").read_bytes())
    values.pop("dtype", None)
    (packed / "config.json").write_text(json.dumps({**values, "torch_dtype": "float32"}))
    found = HuggingFaceFolder(packed)
    assert found.tensors["layers.0.mixer.wq.weight"].dtype == torch.float32
    assert found.tensors["embedding.weight"].dtype == torch.bfloat16


def test_gpt_oss_in_mxfp4(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """As published: blocks and scales of experts, all else in bf16; compared with what transformers decodes."""
    config = GptOssConfig(**SHAPES | {"hidden_size": 64, "intermediate_size": 32}, **HEADS, num_local_experts=3)
    config.head_dim, config.num_experts_per_tok, config.sliding_window = 16, 2, 6
    model = GptOssForCausalLM(config).to(torch.bfloat16)
    randomize(model, seed=3)
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    model.save_pretrained(plain)
    full, encoded, generator = tensors_of(plain), dict[str, Tensor](), torch.Generator().manual_seed(5)
    for name, value in tensors_of(plain).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            encoded[name] = value
            continue
        experts, columns, rows = value.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 127, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        encoded |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        full[name] = convert_moe_packed_tensors(blocks, scales)
        assert full[name].shape == value.shape
    save_file(full, plain / FILE)
    packed.mkdir()
    values = json.loads((plain / "config.json").read_bytes())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(values))
    save_file(encoded, packed / FILE)
    for each in (plain, packed):
        tokenizer.save(each)
    folders = [HuggingFaceFolder(each) for each in (packed, plain)]
    ours, wanted = (each.read(each.tensors) for each in folders)
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) and value.dtype == torch.bfloat16 for name, value in ours.items())
    for name in ("layers.1.mlp.experts.w1", "layers.0.mlp.experts.w3", "layers.1.mlp.experts.w2"):
        for index in ranges(*ours[name].shape):
            piece = torch.full([each.stop - each.start for each in index], torch.nan)
            folders[0].read_into(piece, name, *index)
            assert torch.equal(piece, wanted[name][index].float())
    message = from_hf(packed, tmp_path / "ours", end_of_document="<|endoftext|>", console=QUIET)
    assert "decoded from mxfp4" in message
    to_hf(tmp_path / "ours", tmp_path / "back", console=QUIET)
    back = tensors_of(tmp_path / "back")
    assert back.keys() == full.keys() and all(torch.equal(value, full[name]) for name, value in back.items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32, attn_implementation="eager")
    decoder = Decoder(folders[0].spec)
    decoder.load_state_dict({name: value.float() for name, value in ours.items()}, strict=False)
    tokens = draw(2, 30)
    with torch.no_grad():
        close(decoder.eval()(tokens, Context())[..., :310], loaded.eval()(tokens).logits, "logits")


# What is refused


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method: 'gptq' .*only mxfp4 and fp8.*not quantized, or write one"),
        ({"quant_method": "compressed-tensors"}, "quant_method: 'compressed-tensors'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantization_config.fmt: 'e5m2'.*only e4m3"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme: 'static'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype: 'fp4'"),
        ({"quant_method": "fp8", "weight_block_size": None}, "weight_block_size: None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: "),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size: "),
        ({"quant_method": "fp8", "weight_block_size": [True, 128]}, "weight_block_size: "),
        ("int4", "quantization_config: 'int4'.*must be an object"),
    ],
)
def test_other_quantizations_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_quantization(ConfigSource({"quantization_config": given}, "config.json"))


def test_what_is_not_said() -> None:
    assert read_quantization(ConfigSource({}, "c")) is None
    assert read_quantization(ConfigSource({"quantization_config": None}, "c")) is None
    assert read_quantization(ConfigSource({"quantization_config": {"quant_method": "fp8"}}, "c")) == Quantization("fp8")


def edited(tensors: dict[str, Tensor], **changes: Tensor | None) -> dict[str, Tensor]:
    """With other tensors by the ends of their names; None: without it."""
    found = dict(tensors)
    for end, value in changes.items():
        name = next(name for name in tensors if name.endswith(end))
        found.pop(name)
        if value is not None:
            found[name] = value
    return found


UINT8 = torch.zeros(EXPERTS, ROWS, GROUPS, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "quantization", "message"),
    [
        (edited(mxfp4(), scales=None), MXFP4, "experts.down_proj_blocks has no experts.down_proj_scales beside it"),
        (edited(mxfp4(), blocks=None), MXFP4, "experts.down_proj_scales has no experts.down_proj_blocks"),
        (
            edited(mxfp4(), scales=UINT8[:, :-1].clone()),
            MXFP4,
            "experts.down_proj_scales is 3 x 9 x 2 of uint8, but must be 3 x 10 x 2 of uint8",
        ),
        (edited(mxfp4(), scales=UINT8.float()), MXFP4, "down_proj_scales is 3 x 10 x 2 of float32, but must be"),
        (edited(mxfp4(), blocks=UINT8.clone()), MXFP4, "down_proj_blocks is 3 x 10 x 2 of uint8, but must be experts"),
        (
            edited(mxfp4(), blocks=torch.zeros(EXPERTS, ROWS, GROUPS, 8, dtype=torch.uint8)),
            MXFP4,
            "down_proj_blocks is 3 x 10 x 2 x 8",
        ),
        ({**mxfp4("w"), "w": torch.zeros(2)}, MXFP4, "w is there a second time, quantized"),
        (edited(fp8(), inv=None), FP8, "w.weight has no w.weight_scale_inv beside it"),
        (edited(fp8(), weight=None), FP8, "w.weight_scale_inv has no w.weight beside it"),
        (
            edited(fp8(), inv=torch.ones(2, 3)),
            FP8,
            "w.weight_scale_inv is 2 x 3 of float32, but must be 3 x 3 of .* each block of 4 x 3 of w.weight",
        ),
        (edited(fp8(), inv=torch.ones(3, 3, dtype=torch.uint8)), FP8, "w.weight_scale_inv is 3 x 3 of uint8"),
        (edited(fp8(), weight=torch.ones(11, 8)), FP8, "w.weight is 11 x 8 of float32, but must be a matrix of float8"),
        (edited(fp8(), weight=torch.ones(5).to(torch.float8_e4m3fn)), FP8, "w.weight is 5 of float8_e4m3fn"),
        (fp8(), MXFP4, "w.weight has dtype F8_E4M3, which is not supported"),
    ],
)
def test_tensors_that_do_not_belong_together(
    tmp_path: Path, tensors: dict[str, Tensor], quantization: Quantization, message: str
) -> None:
    with pytest.raises(UserError, match=f"{FILE}: .*{message}"):
        opened(tmp_path, tensors, quantization)


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    """Only what is read is looked at, and the message names the tensor that is at fault."""
    scales = mxfp4()["experts.down_proj_scales"]
    scales[1, 2, 1] = 255
    found = opened(tmp_path, edited(mxfp4(), scales=scales), MXFP4)
    assert read_range(found, "experts.down_proj", (slice(0, 3), slice(0, 32), slice(0, 10))).isfinite().all()
    with pytest.raises(UserError, match=f"{FILE}: experts.down_proj_scales has scales that are not finite numbers"):
        read_range(found, "experts.down_proj")
    scales[1, 2, 1] = 254
    found = opened(tmp_path, edited(mxfp4(), scales=scales), MXFP4)
    with pytest.raises(UserError, match=f"{FILE}: experts.down_proj_blocks has values that are not finite numbers"):
        read_range(found, "experts.down_proj")
    for value in (math.nan, math.inf):
        scales = fp8()["w.weight_scale_inv"]
        scales[2, 2] = value
        found = opened(tmp_path, edited(fp8(), inv=scales), FP8)
        assert read_range(found, "w.weight", (slice(0, 8), slice(0, 8))).isfinite().all()
        with pytest.raises(UserError, match=f"{FILE}: w.weight_scale_inv has scales"):
            read_range(found, "w.weight")
    weight = fp8()["w.weight"].float()
    weight[3, 3] = math.nan
    found = opened(tmp_path, edited(fp8(), weight=weight.to(torch.float8_e4m3fn)), FP8)
    with pytest.raises(UserError, match=f"{FILE}: w.weight has values"):
        read_range(found, "w.weight")


def test_a_truncated_file(tmp_path: Path) -> None:
    save_file(fp8(), tmp_path / FILE)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-3])
    with pytest.raises(UserError, match=f"{FILE} is not a valid safetensors file.*is the download complete"):
        FolderTensors(tmp_path, [FILE], FP8, torch.bfloat16)
