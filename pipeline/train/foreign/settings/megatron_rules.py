"""Rules for arguments of Megatron-LM."""

from __future__ import annotations

import math

from pipeline.common.errors import UserError
from pipeline.common.format import distinct_names
from pipeline.train.foreign.megatron_arguments import ArgumentSource, read_model
from pipeline.train.foreign.settings.rows import SettingRow
from pipeline.train.foreign.settings.rules import Given, Left, Rule, Settings, pairs, steps


def _of_samples(given: Given, count: float) -> str:
    """A duration of samples: in tokens while the batch grows, since no number of steps is so long."""
    if given.get("rampup_batch_size"):
        return f"{int(count) * given.need('seq_length')} tokens"
    return steps(math.ceil(count / given.need("global_batch_size")))


def _duration(given: Given, row: SettingRow) -> Settings:
    if count := given.number("train_iters"):
        return {"train.duration": steps(count)}
    if samples := given.number("train_samples"):
        return {"train.duration": _of_samples(given, samples)}
    return {}


def _warmup(given: Given, row: SettingRow) -> Settings:
    if count := given.number("lr_warmup_iters"):
        return {"train.schedule.warmup": steps(count)}
    if samples := given.number("lr_warmup_samples"):
        return {"train.schedule.warmup": _of_samples(given, samples)}
    if share := given.number("lr_warmup_fraction"):
        if all_samples := given.number("lr_decay_samples") or given.number("train_samples"):
            return {"train.schedule.warmup": _of_samples(given, int(share * all_samples))}
        whole = given.number("lr_decay_iters") or given.need("train_iters")
        return {"train.schedule.warmup": steps(int(share * whole))}
    return {}


_SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd", "wsd": "wsd"}


def _schedule(given: Given, row: SettingRow) -> Settings:
    style = given.get("lr_decay_style")
    if style is None:
        return {}
    for unit in ("iters", "samples"):
        length, whole = given.number(f"lr_decay_{unit}"), given.number(f"train_{unit}")
        if length and whole and length != whole:
            raise Left(
                f"by --lr-decay-{unit} it ends after {length}, and the run has {whole}; here it ends with the run",
                "train.schedule.type",
            )
    found = _SCHEDULES.get(style)
    if found is None:
        raise Left(f"there is no {style} here", "train.schedule.type")
    return {"train.schedule.type": found}


def _decay(given: Given, row: SettingRow) -> Settings:
    if given.get("lr_decay_style") not in ("WSD", "wsd"):
        return {}
    count, style = given.number("lr_wsd_decay_iters"), given.get("lr_wsd_decay_style")
    length = None if count is None else steps(count)
    if samples := given.number("lr_wsd_decay_samples"):
        length = _of_samples(given, samples)
    if style != "linear":
        raise Left(f"the decay ({length}) is {style} there, and linear here", "train.schedule.decay")
    return {} if length is None else {"train.schedule.decay": length}


def _precision(given: Given, row: SettingRow) -> Settings:
    kind = "bf16" if given.get("bf16") else "fp16" if given.get("fp16") else "fp32"
    return {"train.precision.compute": kind}


def _loss_scale(given: Given, row: SettingRow) -> Settings:
    if not given.get("fp16"):
        return {}
    return pairs("train.precision.loss_scale.initial", "train.precision.loss_scale.growth_steps")(given, row)


def _validation_samples(given: Given, row: SettingRow) -> Settings:
    batches = given.number("eval_iters")
    if batches is None or not given.get("global_batch_size"):
        return {}
    return {"train.validation.samples": batches * given.need("global_batch_size")}


def _batch_ramp(given: Given, row: SettingRow) -> Settings:
    ramp = given.get("rampup_batch_size")
    if ramp is None:
        return {}
    if not isinstance(ramp, list) or len(ramp) != 3 or not all(isinstance(each, int) for each in ramp):
        raise Left(f"{ramp!r} is not START INCREMENT SAMPLES")
    tokens = ramp[2] * given.need("seq_length")
    return {
        "train.batch_ramp.start": ramp[0],
        "train.batch_ramp.increment": ramp[1],
        "train.batch_ramp.tokens": tokens,
    }


def _sources(given: Given, row: SettingRow) -> Settings:
    words = given.get("data_path")
    if words is None:
        return {}
    words = words if isinstance(words, list) else [words]
    pairs: list[tuple[float | None, str]] = []
    if len(words) > 1 and len(words) % 2 == 0 and all(isinstance(word, int | float) for word in words[::2]):
        pairs = list(zip(words[::2], map(str, words[1::2]), strict=True))
    else:
        pairs = [(None, str(word)) for word in words]  # by their sizes, here as there
    sources = []
    for name, (weight, prefix) in zip(distinct_names(each.rpartition("/")[2] for _, each in pairs), pairs, strict=True):
        source: Settings = {"name": name, "dataset": f"{prefix}-adopted"}
        sources.append(source | ({"weight": weight} if len(pairs) > 1 and weight is not None else {}))
        given.notes.append(
            f"adopt the token files: pipeline data adopt {prefix} --to {prefix}-adopted --tokenizer tokenizer.json"
        )
    return {"data.sources": sources}


def _tokenizer(given: Given, row: SettingRow) -> Settings:
    kind, model = given.get("tokenizer_type"), given.get("tokenizer_model")
    if model is None:
        return {}
    if kind == "HuggingFaceTokenizer":
        return {"tokenizer.path": f"{model}/tokenizer.json"}
    raise Left(f"{kind}: make a tokenizer.json of it with `pipeline convert tokenizer`, and set tokenizer.path")


def _folders(given: Given, row: SettingRow) -> Settings:
    save, load = given.get("save"), given.get("load")
    if save and load and save != load:
        given.notes.append(
            f"train.init_from: --load {load} is another folder than --save; make weights of it with "
            "`pipeline convert from-megatron --optimizer`, and give their place"
        )
    return {"run.dir": save or load} if save or load else {}


def _documents(given: Given, row: SettingRow) -> Settings:
    mask, positions = given.get("reset_attention_mask"), given.get("reset_position_ids")
    if positions and not mask:
        raise Left("here positions begin anew only together with attention, by model.document_attention")
    return {} if mask is None else {"model.document_attention": bool(mask)}


def _read_by(given: Given, row: SettingRow) -> Settings:
    return {} if given.get("mmap_bin_files", True) else {"data.loader.read": "pread"}


def _wandb(given: Given, row: SettingRow) -> Settings:
    if not given.get("wandb_project"):
        return {}
    place = "train.metrics.wandb"
    return pairs(f"{place}.project", f"{place}.name", f"{place}.entity")(given, row)


def _model(given: Given, row: SettingRow) -> Settings:
    """`model:` as a whole, which `convert from-megatron` makes by the same function."""
    values = given.everything()
    if not given.get("num_layers"):
        return {}
    hidden, gated = given.get("hidden_size", 0), given.get("swiglu", False)
    for key in ("vocab_size", "padded_vocab_size"):
        given.get(key)
    if values.pop("use_rotary_position_embeddings", False):
        values["position_embedding_type"] = "rope"
    if isinstance(hidden, int):
        values.setdefault("ffn_hidden_size", int(hidden * 8 / 3) // 64 * 64 if gated else 4 * hidden)
    if "padded_vocab_size" not in values and isinstance(values.get("vocab_size"), int):
        multiple = values["make_vocab_size_divisible_by"] * values["tensor_model_parallel_size"]
        values["padded_vocab_size"] = -(-values["vocab_size"] // multiple) * multiple
    has_vocabulary = "padded_vocab_size" in values
    source = ArgumentSource({"padded_vocab_size": 1, **values}, "the arguments")
    try:
        found = read_model(source)
        source.finish(())
    except UserError as error:
        raise Left(f"{error}") from None
    if not has_vocabulary:
        del found["vocab_size"]
    if found["heads"] and found["head_dim"] == hidden // found["heads"]:
        del found["head_dim"]
    if found["kv_heads"] == found["heads"]:
        del found["kv_heads"]
    return {f"model.{key}": value for key, value in found.items() if value is not None}


def _of_model(given: Given, row: SettingRow) -> Settings:
    for key in row.keys:
        given.get(key)
    return {}


def _balance(given: Given, row: SettingRow) -> Settings:
    if not given.get("num_experts"):
        return {}
    return pairs("train.balance.loss", "train.balance.z_loss")(given, row)


def _sequence_parallel(given: Given, row: SettingRow) -> Settings:
    if given.get("tensor_model_parallel_size") == 1:
        return {}
    return {"parallel.sequence_parallel": bool(given.get("sequence_parallel"))}


def _virtual_stages(given: Given, row: SettingRow) -> Settings:
    layers = given.number(row.keys[0])
    if not layers:
        return {}
    return {
        "parallel.pipeline.schedule": "interleaved_1f1b",
        "parallel.pipeline.virtual_stages": given.need("num_layers")
        // given.need("pipeline_model_parallel_size")
        // layers,
    }


def _cp_method(given: Given, row: SettingRow) -> Settings:
    kind = given.get("cp_comm_type")
    if kind is None or given.get("context_parallel_size") == 1:
        return {}
    if kind not in ("a2a", "all_gather"):
        raise Left(f"there is no {kind} here; parallel.cp_method is all_gather (the default) or ulysses")
    return {"parallel.cp_method": "ulysses" if kind == "a2a" else "all_gather"}


def _attention_dropout(given: Given, row: SettingRow) -> Settings:
    if share := given.get("attention_dropout"):
        raise Left(f"it is {share} there, also where it is not given; no kernel here does it")
    return {}


def _distributed_optimizer(given: Given, row: SettingRow) -> Settings:
    # Weights whole during a step, as there; without the option, everything is sharded here all the same.
    return {"parallel.reshard_after_forward": False} if given.get("use_distributed_optimizer") else {}


MEGATRON: dict[str, Rule] = {
    "duration": _duration,
    "warmup": _warmup,
    "schedule": _schedule,
    "decay": _decay,
    "precision": _precision,
    "loss_scale": _loss_scale,
    "validation_samples": _validation_samples,
    "batch_ramp": _batch_ramp,
    "sources": _sources,
    "tokenizer": _tokenizer,
    "folders": _folders,
    "documents": _documents,
    "read_by": _read_by,
    "wandb": _wandb,
    "model": _model,
    "of_model": _of_model,
    "balance": _balance,
    "sequence_parallel": _sequence_parallel,
    "virtual_stages": _virtual_stages,
    "cp_method": _cp_method,
    "attention_dropout": _attention_dropout,
    "distributed_optimizer": _distributed_optimizer,
}
"""Rules by the name that rows have for them."""
