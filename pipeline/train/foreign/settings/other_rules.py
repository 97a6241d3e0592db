"""Rules for settings of torchtitan, nanotron, OLMo-core and NeMo."""

from __future__ import annotations

from typing import Any

from pipeline.common.format import distinct_names
from pipeline.train.foreign.settings.rows import SettingRow, SuiteName
from pipeline.train.foreign.settings.rules import Given, Left, Of, Rule, Settings, pairs, steps

_SCHEDULES = {
    **{"linear": "linear", "cosine": "cosine", "constant": "constant"},
    **{"CosWithWarmup": "cosine", "LinearWithWarmup": "linear", "WSD": "wsd", "ConstantWithWarmup": "constant"},
}
_PIPELINES = {
    **{"1f1b": "1f1b", "gpipe": "gpipe", "afab": "gpipe", "interleaved1f1b": "interleaved_1f1b"},
    **{"interleavedzerobubble": "interleaved_zero_bubble", "zbvzerobubble": "zbv", "dualpipev": "dualpipev"},
}


def _first(given: Given, row: SettingRow) -> Any:
    found = given.first(row.keys)
    return found.value if found else None


def _tokenizer_folder(given: Given, row: SettingRow) -> Settings:
    folder = _first(given, row)
    if folder is None:
        return {}
    return {"tokenizer.path": folder if str(folder).endswith(".json") else f"{folder}/tokenizer.json"}


def _schedule(given: Given, row: SettingRow) -> Settings:
    kind = _first(given, row)
    if kind is None:
        return {}
    found = _SCHEDULES.get(str(kind).rpartition(".")[2])
    if found is None:
        raise Left(f"there is no {kind} here", "train.schedule.type")
    return {"train.schedule.type": found}


def _pipeline_schedule(given: Given, row: SettingRow) -> Settings:
    name = _first(given, row)
    if name is None:
        return {}
    found = _PIPELINES.get(str(name).lower().replace("_", ""))
    if found is None:
        raise Left(f"there is no {name} here", "parallel.pipeline.schedule")
    return {"parallel.pipeline.schedule": found}


def _validation(given: Given, row: SettingRow) -> Settings:
    every, batches = (given.get(key) for key in row.keys)
    if isinstance(batches, int) and batches > 0:
        given.notes.append(f"train.validation.samples, in windows: {row.keys[1]} has {batches} batches")
    return {"train.validation.every_steps": every} if isinstance(every, int) and every > 0 else {}


# torchtitan


def _global_batch(given: Given, row: SettingRow) -> Settings:
    whole = _first(given, row)
    if isinstance(whole, int) and whole > 0:
        return {"train.batch_size": whole}
    given.notes.append("train.batch_size, in windows: there it is local_batch_size x data-parallel ranks")
    return {}


def _titan_schedule(given: Given, row: SettingRow) -> Settings:
    if given.get("lr_scheduler.decay_ratio") is not None:
        return {"train.schedule.type": "wsd"}
    return _schedule(given, row)


def _titan_decay(given: Given, row: SettingRow) -> Settings:
    share = given.number("lr_scheduler.decay_ratio")
    if share is None:
        return {}
    if given.get("lr_scheduler.decay_type") not in (None, "linear"):
        raise Left("here the decay of wsd is linear", "train.schedule.decay")
    return {"train.schedule.decay": steps(round(share * given.need("training.steps")))}


def _reshard(given: Given, row: SettingRow) -> Settings:
    value = _first(given, row)
    return {} if value in (None, "default") else {"parallel.reshard_after_forward": value == "always"}


def _async_save(given: Given, row: SettingRow) -> Settings:
    value = _first(given, row)
    return {} if value is None else {"train.checkpoint.async_save": value != "disabled"}


def _hub_source(given: Given, row: SettingRow) -> Settings:
    name, path = (given.get(key) for key in row.keys)
    if path:
        return {"data.sources": [{"name": str(name or "web").replace("/", "-"), "paths": [f"{path}/**/*"]}]}
    if name is None:
        return {}
    raise Left(f"{name!r} is a name of that suite; write its files or its dataset of the hub into data.sources")


# nanotron


def _run_folder(given: Given, row: SettingRow) -> Settings:
    parts = [str(part) for key in row.keys if (part := given.get(key))]
    return {"run.dir": "/".join(["runs", *parts])} if parts else {}


def _stages(given: Given, row: SettingRow) -> Settings:
    stages = given.get("data_stages")
    if not isinstance(stages, list) or not stages:
        return {}
    if len(stages) > 1:
        given.notes.append(f"blend.phases: there are {len(stages)} data_stages, of which the first is translated")
    dataset = stages[0].get("data", {}).get("dataset") or {} if isinstance(stages[0], dict) else {}
    folders, weights = dataset.get("dataset_folder"), dataset.get("dataset_weights")
    if folders is None:
        raise Left(f"write the documents of {dataset.get('hf_dataset_or_datasets')} into data.sources")
    places = [str(folder).rstrip("/") for folder in (folders if isinstance(folders, list) else [folders])]
    sources: list[Settings] = []
    for name, place in zip(distinct_names(each.rpartition("/")[2] for each in places), places, strict=True):
        sources.append({"name": name, "dataset": f"{place}-adopted"})
        given.notes.append(
            f"adopt the token files: pipeline data adopt {place} --format ds --to {place}-adopted "
            "--tokenizer tokenizer.json"
        )
    if isinstance(weights, list) and len(weights) == len(sources):
        sources = [source | {"weight": weight} for source, weight in zip(sources, weights, strict=True)]
    return {"data.sources": sources}


def _batch_product(given: Given, row: SettingRow) -> Settings:
    factors = [given.need(key) for key in ("tokens.micro_batch_size", *row.keys, "parallelism.dp")]
    return {"train.batch_size": factors[0] * factors[1] * factors[2]}


def _nanotron_decay(given: Given, row: SettingRow) -> Settings:
    start, length = (given.number(key) for key in row.keys)
    whole, warmup = given.number("tokens.train_steps"), given.number("lr_warmup_steps") or 0
    if start is None and length is None:
        return {}
    start = warmup if start is None else start
    length = (whole or start) - warmup if length is None else length
    if whole and start + length != whole:
        raise Left(
            f"it ends at step {start + length} and the run at {whole}; here it ends with the run", "train.schedule.type"
        )
    if start > warmup:
        if given.get("lr_decay_style") != "linear":
            raise Left("here the decay of wsd is linear", "train.schedule.type")
        return {"train.schedule.type": "wsd", "train.schedule.decay": steps(length)}
    return {}


def _zero_stage(given: Given, row: SettingRow) -> Settings:
    return {"parallel.reshard_after_forward": False} if given.get(row.keys[0]) in (0, 1) else {}


def _recompute(given: Given, row: SettingRow) -> Settings:
    value = _first(given, row)
    if value in ("selected_blocks", "selected_modules", "selected_ops"):
        raise Left(f"there is no {value} here; choose train.recompute.mode")
    if isinstance(value, bool):
        value = "full" if value else "none"
    return {} if value is None else {"train.recompute.mode": value}


# OLMo-core


def _olmo_duration(given: Given, row: SettingRow) -> Settings:
    value, unit = given.number("trainer.max_duration.value"), given.get("trainer.max_duration.unit")
    if value is None:
        return {}
    if unit not in ("steps", "tokens"):
        raise Left(f"{value} {unit}; write it in steps or tokens")
    return {"train.duration": f"{int(value)} {unit}"}


def _windows(given: Given, key: str) -> int:
    tokens, length = given.need(key), given.number("dataset.sequence_length") or given.need("max_sequence_length")
    if tokens % length:
        raise Left(f"{tokens} tokens are not a number of windows of {length}")
    return int(tokens // length)


def _batch_size(given: Given, row: SettingRow) -> Settings:
    return {"train.batch_size": _windows(given, row.keys[0])}


def _micro_batch_size(given: Given, row: SettingRow) -> Settings:
    return {"train.micro_batch_size": _windows(given, row.keys[0])}


def _length(of: str) -> Rule:
    """A rule for a part of the run in steps, in a unit beside it, or as a share."""

    def rule(given: Given, row: SettingRow) -> Settings:
        *lengths, share = row.keys
        for key in lengths:
            if (count := given.number(key)) is not None:
                unit = given.get(f"{row.keys[0].rpartition('.')[0]}.units", "steps")
                return {of: f"{int(count)} {unit}"}
        if (part := given.number(share)) is None:
            return {}
        whole = given.need("trainer.max_duration.value")
        return {of: f"{round(part * whole)} {given.get('trainer.max_duration.unit')}"}

    return rule


def _is_wsd(given: Given) -> bool:
    return str(given.get("train_module.scheduler._CLASS_")).endswith("WSD")


def _olmo_min_ratio(given: Given, row: SettingRow) -> Settings:
    share, least = (given.number(key) for key in row.keys)
    if not _is_wsd(given):
        return {"train.schedule.min_ratio": Of(share, row.keys[0])}
    ratio = least / given.need("train_module.optim.lr") if least else 0.0
    return {"train.schedule.min_ratio": float(f"{ratio:.12g}")}


def _olmo_decay(given: Given, row: SettingRow) -> Settings:
    if not _is_wsd(given):
        return {}
    found = _length("train.schedule.decay")(given, row)
    if found:
        return found
    whole = given.need("trainer.max_duration.value")
    return {"train.schedule.decay": f"{round(0.1 * whole)} {given.get('trainer.max_duration.unit')}"}


def _data_parallel(given: Given, row: SettingRow) -> Settings:
    kind = _first(given, row)
    if kind == "ddp":
        raise Left("weights whole on each rank: set parallel.dp_shard: 1 and parallel.dp_replicate to the ranks")
    found = {"parallel.dp_shard": given.get("dp_config.shard_degree")}
    found["parallel.dp_replicate"] = given.get("dp_config.num_replicas")
    return {key: value for key, value in found.items() if value is not None}


def _save_interval(given: Given, row: SettingRow) -> Settings:
    every = _first(given, row) or given.get("trainer.callbacks.checkpointer.save_interval")
    return {} if every is None else {"train.checkpoint.every_steps": every}


OTHERS: dict[SuiteName, dict[str, Rule]] = {
    "torchtitan": {
        "tokenizer_folder": _tokenizer_folder,
        "global_batch": _global_batch,
        "schedule": _titan_schedule,
        "decay": _titan_decay,
        "reshard": _reshard,
        "pipeline_schedule": _pipeline_schedule,
        "async_save": _async_save,
        "validation": _validation,
        "hub_source": _hub_source,
    },
    "nanotron": {
        "run_folder": _run_folder,
        "tokenizer_folder": _tokenizer_folder,
        "stages": _stages,
        "batch_product": _batch_product,
        "validation": _validation,
        "schedule": _schedule,
        "decay": _nanotron_decay,
        "zero_stage": _zero_stage,
        "sizes": pairs("model.dim", "model.layers", "model.ffn_dim"),
        "heads": pairs("model.heads", "model.kv_heads"),
        "layout": pairs("parallel.tp", "parallel.pp"),
        "more_layout": pairs("parallel.cp", "parallel.ep"),
        "pipeline_schedule": _pipeline_schedule,
        "recompute": _recompute,
        "constants": pairs("model.norm_eps", "model.rope_theta", "model.vocab_size"),
    },
    "olmo": {
        "sizes": pairs("model.dim", "model.layers", "model.vocab_size"),
        "block": pairs("model.heads", "model.kv_heads", "model.ffn_dim", "model.rope_theta"),
        "duration": _olmo_duration,
        "batch_size": _batch_size,
        "micro_batch_size": _micro_batch_size,
        "schedule": _schedule,
        "warmup": _length("train.schedule.warmup"),
        "decay": _olmo_decay,
        "min_ratio_of_class": _olmo_min_ratio,
        "data_parallel": _data_parallel,
        "layout": pairs("parallel.tp", "parallel.ep"),
        "recompute": _recompute,
        "save_interval": _save_interval,
    },
    "nemo": {
        "batches": pairs("train.batch_size", "train.micro_batch_size"),
        "sizes": pairs("model.layers", "model.dim", "model.ffn_dim"),
        "block": pairs("model.heads", "model.kv_heads", "model.rope_theta", "model.norm_eps", "model.tie_embeddings"),
    },
}
"""Rules by suite, and by the name that rows have for them."""
