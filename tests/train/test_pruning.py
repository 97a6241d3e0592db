"""A run that begins with a part of a larger model: against transformers by hand, on layouts, across stops, refused."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.config.load import load
from pipeline.data.preprocess.stage import preprocess
from pipeline.eval.importance import measure_importance
from pipeline.train.checkpoint import export
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.huggingface.convert import from_hf, to_hf
from pipeline.train.loop import trainer
from pipeline.train.start import pruned_source
from pipeline.train.start.importance_file import INFLUENCE, Importance
from tests.tiers import first
from tests.train.distributed.ranks import Ranks
from tests.train.runs import exact, start, train, weights_hash
from tests.train.test_distillation import llama

QUIET = Console(file=io.StringIO())
FP32 = "train.precision.compute=fp32"
FIRST = (
    FP32,
    "train.duration=1 steps",
    "train.optimizer.lr=1e-30",
    "train.schedule.warmup=0 steps",
    "train.balance.bias_rate=0",
)
LARGE = {"layers": 4, "dim": 48, "heads": 4, "kv_heads": 2, "head_dim": 12, "ffn_dim": 96}
SMALL = {"layers": 2, "dim": 32, "heads": 2, "kv_heads": 1, "head_dim": 12, "ffn_dim": 64}
MIXED = {
    "layers": 3, "dim": 32, "heads": 4, "kv_heads": 4, "pattern": ["dense", "routed", "routed"], "qk_norm": "full",
    "kinds": {"dense": {"mlp": "gelu", "ffn_dim": 64}, "routed": {"mlp": "experts"}}, "tie_embeddings": True,
    "experts": {
        "count": 8, "top_k": 2, "ffn_dim": 16, "shared_ffn_dim": 48, "shared_gate": True, "score": "sigmoid",
        "groups": 2, "top_groups": 1, "score_bias": True, "router_bias": True, "bias": True,
    },
}  # fmt: skip
"""Experts in groups with all that they can have besides, beside a layer without a gate; a norm over all heads."""
PART = {
    **MIXED, "layers": 2, "dim": 24, "heads": 2, "kv_heads": 2, "head_dim": 8, "pattern": ["dense", "routed"],
    "kinds": {"dense": {"mlp": "gelu", "ffn_dim": 40}, "routed": {"mlp": "experts"}},
    "experts": {**MIXED["experts"], "count": 4, "shared_ffn_dim": 32},
}  # fmt: skip
SIZES = {"llama": (LARGE, SMALL, [0, 3]), "mixed": (MIXED, PART, [0, 2])}


def model(values: dict[str, Any]) -> str:
    """The keys of a `model:` section as an override."""
    return f"model={orjson.dumps({**values, 'vocab_multiple': 16}).decode()}"


@pytest.fixture(scope="module")
def sources(root: Path) -> dict[str, Path]:
    """Runs of the large models, by family, with the importance of their parts."""
    found = {}
    for family, (large, _, _) in SIZES.items():
        keys = (FP32, model(large), "train.duration=3 steps", "eval.importance_samples=16")
        found[family] = train(root, family, *keys)
        assert measure_importance(load(root / "run.yaml", [f"run.dir={root / family}", *keys]), None, QUIET) is not None
    return found


def importance_of(run: Path) -> Path:
    return run / "eval" / "importance-step-00000003.safetensors"


def part_of(run: Path, family: str) -> list[str]:
    """Overrides of a run that begins with a part of another one."""
    _, small, layers = SIZES[family]
    dims = f"train.init_from.dims={importance_of(run)}"
    return [FP32, model(small), f"train.init_from.path={run}", f"train.init_from.layers={layers}", dims]


def exported(run: Path) -> dict[str, Tensor]:
    """The weights of the last step, read by another library."""
    folder = run.with_name(f"{run.name}-exported")
    if not folder.exists():
        export.export(Checkpoints.of_run(run), folder, step=None, weights="model", max_shard=None, console=QUIET)
    return load_file(folder / "model.safetensors")


def best(values: Tensor, count: int) -> list[int]:
    return sorted(sorted(range(len(values)), key=lambda place: (-float(values[place]), place))[:count])


def test_weights_are_those_of_transformers_pruned_by_hand(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importance of hooks on transformers' own modules, and its own tensors indexed by hand."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    folder = llama(root, "large", **sizes, num_key_value_heads=2)
    from_hf(folder, root / "converted", console=QUIET)
    theirs = LlamaForCausalLM.from_pretrained(folder).float().eval()
    vocabulary = [f"tokenizer={{path: {folder}}}", f"data.dir={root / 'of-llama'}"]
    large = [FP32, f"model={orjson.dumps({**LARGE, 'vocab_size': 310}).decode()}", *vocabulary]
    config = load(root / "run.yaml", [f"run.dir={root / 'measured'}", *large, "eval.importance_samples=12"])
    preprocess(config)
    config.run.dir.mkdir()
    path = measure_importance(config, root / "converted", QUIET)
    assert path is not None and path.name.startswith("importance-weights-")
    found = Importance.read(path, "dims").values
    expected = by_hooks(theirs, windows(config))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)

    small = f"model={orjson.dumps({**SMALL, 'vocab_size': 310}).decode()}"
    keys = [
        f"train.init_from.path={root / 'converted'}",
        f"train.init_from.dims={path}",
        "train.init_from.layers=[1,3]",
    ]
    # Rows are read a few at a time, as those of a large model are.
    monkeypatch.setattr(pruned_source, "AT_ONCE", 100)
    run = train(root, "pruned", *FIRST, small, *vocabulary, *keys)
    to_hf(run, root / "pruned-hf", console=QUIET)
    ours = LlamaForCausalLM.from_pretrained(root / "pruned-hf").state_dict()
    by_them = by_hand(theirs, expected, [1, 3]).state_dict()
    assert ours.keys() == by_them.keys()
    for name, tensor in by_them.items():
        assert torch.equal(ours[name].float(), tensor), name


def windows(config: Any) -> Tensor:
    """The windows that are read, all of full length."""
    from pipeline.data.loading.heldout import sample
    from pipeline.eval.heldout_data import heldout_splits

    splits = heldout_splits(config)
    chosen = sample(splits, config.eval.importance_samples)
    rows = [splits[name].batch([window]) for name, numbers in chosen.items() for window in numbers]
    assert all(bool((row.weight > 0).all()) for row in rows)
    return torch.cat([row.tokens for row in rows])


def by_hooks(theirs: LlamaForCausalLM, tokens: Tensor) -> dict[str, Tensor]:
    """Importance of a Llama, from the inputs of its modules."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            seen[name] = (args[0] if args else kwargs["hidden_states"]).detach().flatten(0, 1).double()

        return hook

    modules = {"head": theirs.lm_head, "end": theirs.model.norm}
    for index, layer in enumerate(theirs.model.layers):
        modules |= {f"in.{index}": layer, f"mixer.{index}": layer.self_attn, f"mlp.{index}": layer.mlp}
        modules |= {f"heads.{index}": layer.self_attn.o_proj, f"ffn.{index}": layer.mlp.down_proj}
    for name, module in modules.items():
        module.register_forward_pre_hook(keep(name), with_kwargs=True)
    with torch.no_grad():
        theirs(tokens)
    streams = [
        seen[name].abs().mean(0) for name in seen if name.startswith(("head", "mixer", "mlp")) and "s." not in name
    ]
    found = {"dim": torch.stack([each / each.mean() for each in streams]).sum(0)}
    influence = []
    for index in range(4):
        found[f"layers.{index}.heads"] = seen[f"heads.{index}"].unflatten(-1, (4, -1)).norm(dim=-1).mean(0)
        found[f"layers.{index}.ffn_dim"] = seen[f"ffn.{index}"].abs().mean(0)
        ends = seen[f"in.{index}"], seen["end" if index == 3 else f"in.{index + 1}"]
        influence.append((1 - torch.nn.functional.cosine_similarity(*ends)).mean())
    return {**found, INFLUENCE: torch.stack(influence)}


def by_hand(theirs: LlamaForCausalLM, values: dict[str, Tensor], layers: list[int]) -> LlamaForCausalLM:
    """A smaller Llama of transformers with chosen rows and columns."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    small = LlamaForCausalLM(
        LlamaConfig(**{**theirs.config.to_dict(), **sizes, "num_key_value_heads": 1, "head_dim": 12})
    )
    stream, old = best(values["dim"], 32), theirs.state_dict()
    new = {
        name: old[name][..., stream] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    }
    for index, layer in enumerate(layers):
        heads = values[f"layers.{layer}.heads"]
        group = 0 if heads[:2].sum() >= heads[2:].sum() else 1
        queries, keys = slice(group * 24, group * 24 + 24), slice(group * 12, group * 12 + 12)
        hidden = best(values[f"layers.{layer}.ffn_dim"], 64)
        here, there = f"model.layers.{index}.", f"model.layers.{layer}."
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            new[f"{here}self_attn.{name}.weight"] = old[f"{there}self_attn.{name}.weight"][rows][:, stream]
        new[f"{here}self_attn.o_proj.weight"] = old[f"{there}self_attn.o_proj.weight"][stream][:, queries]
        for name in ("gate_proj", "up_proj"):
            new[f"{here}mlp.{name}.weight"] = old[f"{there}mlp.{name}.weight"][hidden][:, stream]
        new[f"{here}mlp.down_proj.weight"] = old[f"{there}mlp.down_proj.weight"][stream][:, hidden]
        for name in ("input_layernorm", "post_attention_layernorm"):
            new[f"{here}{name}.weight"] = old[f"{there}{name}.weight"][stream]
    small.load_state_dict(new)
    return small


def test_experts_their_routers_and_their_groups(root: Path, sources: dict[str, Path]) -> None:
    """The best two of each group, with their rows of the router, biases and the shared mlp's channels."""
    values = Importance.read(importance_of(sources["mixed"]), "dims").values
    old, new = exported(sources["mixed"]), exported(train(root, "fewer", *part_of(sources["mixed"], "mixed"), *FIRST))
    stream, load_E = best(values["dim"], 24), values["layers.2.experts.count"]
    kept = best(load_E[:4], 2) + [4 + place for place in best(load_E[4:], 2)]
    hidden, here, there = best(values["layers.2.experts.shared_ffn_dim"], 32), "layers.1.mlp.", "layers.2.mlp."
    heads = [row for head in best(values["layers.2.heads"], 2) for row in range(head * 8, head * 8 + 8)]
    expected = {
        "router.weight": old[f"{there}router.weight"][kept][:, stream],
        "router.bias": old[f"{there}router.bias"][kept],
        "router.score_bias": old[f"{there}router.score_bias"][kept],
        "experts.w1": old[f"{there}experts.w1"][kept][:, :, stream],
        "experts.w2": old[f"{there}experts.w2"][kept][:, stream],
        "experts.b1": old[f"{there}experts.b1"][kept],
        "experts.b2": old[f"{there}experts.b2"][kept][:, stream],
        "shared.w3.weight": old[f"{there}shared.w3.weight"][hidden][:, stream],
        "shared.w2.weight": old[f"{there}shared.w2.weight"][stream][:, hidden],
        "shared_gate.weight": old[f"{there}shared_gate.weight"][:, stream],
    }
    for name, value in expected.items():
        assert torch.equal(new[f"{here}{name}"], value), name
    assert torch.equal(new["layers.1.mixer.q_norm.weight"], old["layers.2.mixer.q_norm.weight"][heads])
    assert torch.equal(new["layers.1.mixer.wo.weight"], old["layers.2.mixer.wo.weight"][stream][:, heads])
    assert torch.equal(new["embedding.weight"], old["embedding.weight"][:, stream]) and "head.weight" not in new
    assert "layers.0.mlp.w3.weight" not in new
    # The weights of all experts that a token chose are those of a token.
    assert load_E.sum() == pytest.approx(1, rel=1e-5)


def first_weights(file: Path, overrides: list[str]) -> dict[str, Tensor]:
    """In a rank: whole parameters as they are before the first step."""
    found: dict[str, Tensor] = {}
    begin = trainer.Trainer.begin

    def watched(self: trainer.Trainer, checkpoint: Any) -> None:
        begin(self, checkpoint)
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            found[name] = parameter.full_tensor().detach().clone()

    trainer.Trainer.begin = watched  # type: ignore[method-assign]
    try:
        trainer.train(load(file, overrides))
    finally:
        trainer.Trainer.begin = begin  # type: ignore[method-assign]
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "fsdp2-ep2": {"dp_shard": 2, "ep": 2},
    "pp2": {"pp": 2, "pipeline": {"schedule": "gpipe"}},
    "fsdp2": {"dp_shard": 2},
    "cp2": {"cp": 2},
    "fsdp2-tp2": {"dp_shard": 2, "tp": 2},
}
CASES = [("mixed", "fsdp2-ep2"), ("llama", "tp2"), ("llama", "pp2"), ("mixed", "fsdp2"), ("llama", "fsdp2-tp2")]


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(("family", "name"), first(1, CASES, rest="slow"))
def test_every_layout_begins_with_the_weights_of_one_process(
    root: Path, sources: dict[str, Path], processes: Callable[[int], Ranks], family: str, name: str
) -> None:
    """From a checkpoint and from an export."""
    run, parallel = sources[family], f"parallel={orjson.dumps(LAYOUTS[name]).decode()}"
    whole = exported(train(root, f"one-{family}-{name}", *part_of(run, family), *FIRST))
    places = {"run": run, "export": run.with_name(f"{run.name}-exported")}
    exported(run)
    for kind, path in places.items():
        keys = [*part_of(run, family), *FIRST, f"train.init_from.path={path}", parallel]
        run_dir = f"run.dir={root / f'{family}-{name}-{kind}'}"
        world = 4 if name == "fsdp2-tp2" else 2
        by_rank = processes(world).call(first_weights, root / "run.yaml", [*keys, run_dir], timeout=300)
        found = {key: value for part in by_rank for key, value in part.items()}
        for key, value in found.items():
            assert torch.equal(value, whole[key]), key
        assert len(found) == len([key for key in whole if not key.endswith("score_bias")])


def measured(file: Path, overrides: list[str], folder: Path) -> dict[str, Tensor]:
    """In a rank: importance on a layout."""
    from pipeline.train.distributed.process_group import of_environment

    ranks = of_environment()
    path = measure_importance(load(file, overrides), None, QUIET, ranks=ranks)
    if path is None:
        return {}
    shutil.move(path, folder)
    return dict(Importance.read(folder, "dims").values)


@pytest.mark.guard
@pytest.mark.parallel
@pytest.mark.parametrize(
    ("family", "name"),
    first(1, [("llama", "tp2"), ("mixed", "fsdp2-ep2"), ("llama", "cp2"), ("mixed", "tp2"), ("llama", "tp2-no_sp"),
              ("mixed", "tp2-no_sp"), ("mixed", "cp2"), ("llama", "fsdp2-tp2"), ("llama", "ddp2")], rest="slow"),
)  # fmt: skip
def test_importance_is_that_of_one_process_on_every_layout(
    root: Path, sources: dict[str, Path], processes: Callable[[int], Ranks], tmp_path: Path, family: str, name: str
) -> None:
    run = sources[family]
    layouts = LAYOUTS | {"tp2-no_sp": {"tp": 2, "sequence_parallel": False}, "ddp2": {"dp_replicate": 2}}
    parallel = layouts[name]
    keys = [f"run.dir={run}", FP32, model(SIZES[family][0]), "train.duration=3 steps", "eval.importance_samples=13"]
    one = tmp_path / "one.safetensors"
    world = 4 if name == "fsdp2-tp2" else 2
    values = [*keys, f"eval.parallel={orjson.dumps(parallel).decode()}", f"eval.processes={world}", "eval.batch_size=3"]
    shutil.copytree(run, tmp_path / "copy")
    moved = f"run.dir={tmp_path / 'copy'}"
    (alone,) = processes(1).call(measured, root / "run.yaml", [*keys, moved], one)
    found, *_ = processes(world).call(measured, root / "run.yaml", [*values, moved], tmp_path / "all.safetensors")
    assert found.keys() == alone.keys()
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.guard
def test_a_resumed_run_is_the_straight_one_and_keeps_its_origin(root: Path, sources: dict[str, Path]) -> None:
    """With a teacher, and without what the run began with."""
    run = sources["llama"]
    keys = [*part_of(run, "llama"), f"train.distill.teacher.path={run}", "train.schedule.type=constant"]
    keys.append("train.validation.samples=0")
    straight = train(root, "straight", *keys, "train.duration=4 steps")
    train(root, "split", *keys, "train.duration=2 steps")
    without = [key for key in keys if not key.startswith("train.init_from")]
    split = train(root, "split", *without, "train.duration=4 steps")
    assert exact(straight) == exact(split) and weights_hash(straight) == weights_hash(split)
    origin = orjson.loads((split / "checkpoints/step-00000004/state.json").read_bytes())["origin"]
    assert origin["layers"] == [0, 3] and origin["step"] == 3 and origin["kind"] == "init_from"
    assert origin["dims"]["path"] == str(importance_of(run)) and len(origin["dims"]["hash"]) == 16


def test_layers_alone_from_transformers_files(root: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 2}
    folder = llama(root, "deep", **sizes)
    values = {"layers": 3, "dim": 32, "heads": 2, "kv_heads": 1, "ffn_dim": 64, "vocab_size": 310}
    keys = [f"model={orjson.dumps(values).decode()}", f"train.init_from.hf={folder}", "train.init_from.layers=[0,2,4]"]
    found = exported(train(root, "shallow", *FIRST, *keys))
    old = LlamaForCausalLM.from_pretrained(folder).state_dict()
    for index, layer in enumerate((0, 2, 4)):
        for name, other in (
            ("mixer.wv", "self_attn.v_proj"),
            ("mlp.w3", "mlp.up_proj"),
            ("mixer_norm", "input_layernorm"),
        ):
            value = old[f"model.layers.{layer}.{other}.weight"]
            assert torch.equal(found[f"layers.{index}.{name}.weight"], value.float())


REFUSED: dict[str, tuple[list[str], str]] = {
    "layers that are not there": (["train.init_from.layers=[0,7]"], "has layers 0 to 3, and no layer 7"),
    "another number of layers": (["train.init_from.layers=[0,1,2]"], "has 3 layers, and model.layers is 2"),
    "descending": (["train.init_from.layers=[3,0]"], "in ascending order"),
    "all layers": (["train.init_from.layers=null"], "has 4 layers, and model.layers is 2"),
    "no importance": (["train.init_from.dims=null"], "is 32, and 48 in .*name the importance"),
    "a missing file": (["train.init_from.dims=/nowhere"], "/nowhere cannot be read"),
    "a cut file": (["train.init_from.dims={root}/cut.safetensors"], "cut.safetensors is damaged"),
    "a flipped byte": (["train.init_from.dims={root}/flipped.safetensors"], "flipped.safetensors is damaged: its hash"),
    "another file": (["train.init_from.dims={root}/llama-exported/model.safetensors"], "has no importance, but other"),
    "of other weights": (["train.init_from.dims={other}"], "was measured on other weights"),
    "of the average": (["train.init_from.weights=ema"], "weights: ema is not in"),
    "too many channels": (["model.dim=64"], "model.dim is 64, and .* has only 48"),
    "too many heads": (["model.heads=3", "model.kv_heads=1"], "3 query heads share a key head"),
    "heads of another size": (["model.head_dim=16"], "neither head_dim"),
    "as many rows of other heads": (["model.head_dim=24", "model.heads=1"], "neither head_dim"),
    "another vocabulary": (["model.vocab_multiple=512"], "embedding.weight is "),
    "another kind of mlp": (["model.mlp=gelu"], "which this model has no place for"),
    "a tied head": (["model.tie_embeddings=true"], "has head.weight, which this model has no place for"),
    "biases": (["model.bias=all"], "has no layers.0.mixer"),
    "moments": (["train.init_from.optimizer=true"], "needs the whole model"),
    "files of transformers": (["train.init_from.path=null", "train.init_from.hf=/m"], "pipeline convert from-hf"),
    "muP": (["model.init={{scheme: mup, mup_base_dim: 16}}"], "mup_base_dim scales logits"),
    "more layers ahead": (["model.mtp.depth=1"], "has no mtp.0"),
}  # fmt: skip


def test_what_is_no_part_of_the_source_is_refused_by_name(root: Path, sources: dict[str, Path]) -> None:
    exported(sources["llama"])
    data = importance_of(sources["llama"]).read_bytes()
    (root / "cut.safetensors").write_bytes(data[:-9])
    (root / "flipped.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    names = {"root": root, "other": importance_of(sources["mixed"])}
    for what, (changes, words) in REFUSED.items():
        keys = [*part_of(sources["llama"], "llama"), *(each.format(**names) for each in changes)]
        code, out = refused(root, keys)
        assert code == 2 and re.search(words, out), (what, out)


def refused(root: Path, keys: list[str]) -> tuple[int, str]:
    from pipeline.common.errors import UserError

    try:
        return start(root, "refused", *keys)
    except UserError as error:  # of the run file
        return error.exit_code, str(error)


def test_a_key_that_computes_something_else_is_a_warning(root: Path, sources: dict[str, Path]) -> None:
    keys = [*part_of(sources["llama"], "llama"), *FIRST, "model.rope_theta=77"]
    code, out = start(root, "turned", *keys)
    assert code == 0 and out.count("warning: model.rope_theta (layer 0): ") == 1, out
    assert "model.dim" not in out and "model.heads" not in out


@pytest.mark.slow
def test_multi_token_prediction_is_left_out_or_taken_whole(root: Path) -> None:
    run = train(root, "ahead", FP32, model({**LARGE, "mtp": {"depth": 1}}), "train.duration=1 steps", *FIRST[2:])
    keys = [*FIRST, f"train.init_from.path={run}", "train.init_from.layers=[1,2]"]
    old = exported(run)
    without = exported(train(root, "behind", *keys, model({**LARGE, "layers": 2})))
    assert not any(name.startswith("mtp.") for name in without)
    taken = exported(train(root, "still-ahead", *keys, model({**LARGE, "layers": 2, "mtp": {"depth": 1}})))
    for name in (each for each in old if each.startswith("mtp.")):
        assert torch.equal(taken[name], old[name])
    assert torch.equal(taken["layers.1.mlp.w1.weight"], old["layers.2.mlp.w1.weight"])
