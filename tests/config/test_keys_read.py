"""Every key of the run file is read by the program: no key is accepted and then ignored.

The evidence is dynamic. Tiny runs go through all stages while `record_reads` notes which attributes of which sections
are looked at; reading a key through `model_dump` does not count. What validation reads does not count either, since the
configs are loaded before the recording starts.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from obstore.store import MemoryStore
from rich.console import Console

from pipeline.common.objects import stores
from pipeline.common.objects.access import RemoteAccess
from pipeline.common.objects.stores import use_store
from pipeline.common.objects.urls import parse_folder
from pipeline.config import Config
from pipeline.config.base import Section, record_reads
from pipeline.config.data import HeldOutSourceConfig, SourceConfig
from pipeline.config.layers.layer import LayerKindConfig
from pipeline.config.load import load
from pipeline.config.model import ModelConfig
from pipeline.config.objective import FIM_SENTINELS, MixedObjectiveConfig, ObjectiveConfig
from pipeline.config.parsing.schema import keys
from pipeline.data.datasets.remote.push import push
from tests.data import pairs
from tests.data.curate.models.fasttext_writer import write_model
from tests.data.curate.runs import curate_config, everything, write_corpus
from tests.eval.server.running import running
from tests.plugins.installed import EXAMPLE, describe
from tests.tiny import write_run
from tests.train.poison import INF, poison

EXEMPT: dict[str, str] = {}
"""Keys that nobody reads, each with the reason why it may exist all the same. Empty, and meant to stay so."""

NOTIFY = [{"on": ["done"], "command": ["true"]}, {"on": ["done"], "webhook_env": "NOWHERE"}]
VARIANTS: list[dict[str, Any]] = [
    {
        "data.loader.packing": "best_fit",
        "model.norm": "layernorm",
        "model.mlp": "gelu",
        "model.bias": "all",
        "model.positions": "learned",
        "model.tie_embeddings": True,
        "model.dropout": 0.1,
        "model.init": {"scheme": "mup", "mup_base_dim": 16},
        "train.schedule": {"type": "wsd", "decay": "1 steps"},
        "train.ema": {"decay": 0.9},
        "train.checkpoint.every_steps": 1,
        "train.faults": {"on_nonfinite": "rewind", "on_spike": "rewind"},
    },
    {
        "model.rope_scaling": {"type": "linear", "factor": 2},
        "model.document_attention": True,
        "model.mtp": {"depth": 2},
        "train.loss.mtp": 0.2,
        "train.profile": {"steps": [1, 1]},
        "train.precision.compute": "fp16",
        "train.optimizer": {"type": "muon", "states": "bf16", "groups": [{"match": "*norm*", "weight_decay": 0.1}]},
    },
    {
        "model.rope_scaling": {"type": "llama3", "factor": 2},
        "model.sliding_window": 8,
        "model.qk_norm": True,
        "train.precision.fp8": {"min_size": 16, "emulate": True},
    },
    {
        "model.rope_scaling": {"type": "yarn", "factor": 2},
        "model.mlp": "experts",
        "model.experts": {"count": 4, "top_k": 2, "ffn_dim": 8, "activation": "clamped_swiglu", "score_bias": True},
        "model.pattern": ["full", "delta"],
        "model.kinds": {
            "full": {},
            "delta": {"mixer": "kda", "delta": {"key_heads": 2, "key_dim": 4, "value_dim": 4, "rank": 2}},
        },
        "train.metrics.wandb": {"project": "p", "mode": "offline"},
        "train.metrics.mlflow": {"experiment": "e", "tracking_uri": "http://localhost", "tags": {"team": "sea"}},
        "train.metrics.trackio": {"project": "p"},
        "train.metrics.prometheus": "/nowhere",
    },
    {
        "model.pattern": ["mamba", "delta", "kda", "mlp"],
        "model.layers": 4,
        "model.kinds": {
            "mamba": {"mixer": "mamba2", "mamba2": {"heads": 2, "head_dim": 8, "state_dim": 8}},
            "delta": {"mixer": "gated_delta", "delta": {"key_heads": 2, "key_dim": 8, "value_dim": 8}},
            "kda": {"mixer": "kda", "delta": {"key_heads": 2, "key_dim": 8, "value_dim": 8}},
            "mlp": {"mixer": "none", "mlp": "relu2"},
        },
    },
    {
        "model.encoder": {"layers": 2, "pattern": ["wide", "far"]},
        "model.pattern": ["far", "wide"],
        "model.kinds": {"wide": {"ffn_dim": 48}, "far": {"sliding_window": 8}},
        "model.positions": "relative",
        "model.relative": {"buckets": 8, "max_distance": 16},
        "model.mlp": "relu",
        "train.objective": {"type": "spans", "rate": 0.2},
        "blend": {
            "phases": [
                {"until": "1 steps"},
                {"objective": {"type": "ul2", "denoisers": [{"rate": 0.2, "mode": "[S2S]"}, {"rate": 0.5}]}},
            ]
        },
    },
    {
        "model.direction": "both",
        "model.norm": "layernorm",
        "model.token_types": 2,
        "model.embedding_norm": True,
        "model.first_norm": False,
        "model.final_norm": False,
        "model.head_transform": "gelu",
        "model.head_bias": True,
        "train.objective": {"type": "masked"},
    },
    {
        "model.heads": None,
        "model.mixer": "example.short_conv",
        "model.mlp": "example.signed_relu2",
        "train.objective": {
            "type": "example.some_documents",
            "options": {"rate": 0.1},
            "by_source": {"land": {"type": "example.some_documents", "options": {"rate": 0.2}}},
        },
        "train.metrics.loggers": [{"type": "example.lines"}],
    },
    {
        "data.loader": {"read": "pread"},
        "stage.data": "local",
        "train.batch_ramp": {"start": 2, "increment": 1, "tokens": 64},
        "train.objective": {"type": "fim"},
        "model.pattern": ["near", "far"],
        "model.kinds": {
            "near": {"sliding_window": 8},
            "far": {
                "positions": "none",
                "mixer": "mla",
                "mla": {"kv_rank": 8, "q_rank": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 4},
            },
        },
        "blend": {
            "phases": [
                {
                    "name": "a",
                    "until": "1 steps",
                    "slices": {"sea": [0, "30 documents"]},
                    "temperature": 2,
                    "loss_weights": {"sea": 2},
                },
                {"weights": {"sea": 1}, "sequence_length": 16, "batch_size": 2, "micro_batch_size": 1},
            ],
            "skip": [{"steps": 2}, {"samples": "0-1"}, {"source": "sea", "documents": ["3-4"], "from_step": 1}],
        },
    },
]


def test_recording() -> None:
    class Inner(Section):
        used: int = 1
        unused: int = 2

    inner = Inner()
    assert inner.unused == 2
    with record_reads() as reads:
        assert inner.used == 1
        assert Inner() == inner
        inner.model_dump()
        Inner.model_validate({"unused": 3})
    assert inner.unused == 2
    assert reads == {(Inner, "used")}


@pytest.mark.guard
def test_every_key_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.data.curate.stage import curate
    from pipeline.data.preprocess.stage import preprocess
    from pipeline.data.provenance.excerpts import ExcerptReader
    from pipeline.eval.importance import measure_importance
    from pipeline.eval.text import continue_prompt
    from pipeline.train.loop.trainer import train
    from slurm.local.stages import run

    # These packages are extras; what is tested is that the keys get there.
    for name in ("wandb", "mlflow", "mlflow.entities", "mlflow.exceptions", "trackio"):
        monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=ModuleSpec(name, None), MlflowException=Exception))

    describe(tmp_path / "installed")
    for path in EXAMPLE, tmp_path / "installed":
        monkeypatch.syspath_prepend(path)

    first = load(_with_jsonl(tmp_path))
    longer = load(tmp_path / "both.yaml", ["train.duration=3 steps"])
    chained = load(tmp_path / "both.yaml", ["slurm.chain=singleton"])
    warm = load(
        tmp_path / "both.yaml",
        [
            f"run.dir={tmp_path / 'warm'}",
            f"train.init_from.path={first.run.dir}",
            f"train.distill.teacher.path={first.run.dir}",
            "train.duration=2 steps",
            "train.checkpoint.export={every_steps: 1, keep: 1}",
        ],
    )
    memory = MemoryStore()
    monkeypatch.setattr(stores, "_open", lambda url, access, writes: memory)
    mirror = "train.checkpoint.mirror={to: 's3://bucket/run', every_steps: 1, keep_every: 2}"
    mirrored = load(tmp_path / "both.yaml", [f"run.dir={tmp_path / 'mirrored'}", "train.duration=2 steps", mirror])
    common = {
        "train.duration": "2 steps",
        "tokenizer.special_tokens": [*FIM_SENTINELS, "[MASK]", "[S2S]", *(f"<extra_id_{n}>" for n in range(8))],
        "stage.dir": str(tmp_path / "local"),
    }
    variants = [
        load(write_run(tmp_path, {**common, "run.dir": str(tmp_path / str(n)), **changes}, f"{n}.yaml"))
        for n, changes in enumerate(VARIANTS)
    ]
    served = load(tmp_path / "both.yaml", ["serve.port=0"])
    (tmp_path / "pairs").mkdir()
    on_pairs = load(pairs.write(tmp_path / "pairs"), ["train.duration=1 steps"])
    pairs.make(tmp_path / "pairs" / "pairs.yaml")
    pairs.base(tmp_path / "pairs")
    curated, after = (_curated(tmp_path / name, against) for name, against in (("a", []), ("b", ["a"])))
    with record_reads() as reads:
        run(first)
        for config in curated, after:
            curate(config, read_texts=ExcerptReader(config.data.curate))
            preprocess(config)
        continue_prompt(first)
        train(longer)
        train(warm)
        train(mirrored)
        preprocess(variants[0])  # all of them have the same data
        for variant in variants[2:]:
            train(variant)
        poison(monkeypatch, {2: INF})
        for variant in variants[:2]:
            train(variant)
        train(_from_a_bucket(tmp_path, variants[0].data_dir))
        train(on_pairs)
        measure_importance(first, console=Console(quiet=True))
        _on_paper(chained)
        with running(served) as server:
            assert server.post("/api", {"prompts": ["the"]}).status_code == 200

    # Keys of a kind of layers take the place of those of `model:`, and are read as such.
    read = reads | {(LayerKindConfig, name) for section, name in reads if section is ModelConfig}
    # A source that is never trained on is read as the others, and the objective of a source as that of all.
    read |= {(HeldOutSourceConfig, name) for section, name in reads if section is SourceConfig}
    read |= {(ObjectiveConfig, name) for section, name in reads if section is MixedObjectiveConfig}
    unread = [key.path for key in keys(Config) if (key.section, key.name) not in read]
    assert unread == sorted(EXEMPT)


def _from_a_bucket(root: Path, data: Path) -> Config:
    """A run whose datasets are in a bucket, in memory."""
    store, url = MemoryStore(), parse_folder("s3://bucket/data")
    for access in (RemoteAccess(), RemoteAccess(request_bytes=2**24)):
        use_store(url, access, store)
    push(data, url, RemoteAccess(), Console(quiet=True))
    keys = {"run.dir": str(root / "bucket"), "data.dir": str(url), "stage.data": "local", "train.duration": "2 steps"}
    return load(write_run(root, {**keys, "stage.dir": str(root / "local")}, "bucket.yaml"))


def _curated(root: Path, against: list[str]) -> Config:
    """A run with all parts of a curation."""
    corpus = write_corpus(root)
    model = root / "model.bin"
    write_model(model, {"the": [1.0]}, {"__label__en": [1.0], "__label__fr": [-1.0]})
    settings = everything(corpus)
    settings["rules"] = {
        "gopher_quality": {"min_words": 5},
        "c4": {"min_sentences": 1},
        "fineweb": {"max_duplicate_line_characters": None},
    }
    settings["clean"] |= {"mojibake": True, "lines": ["c4"]}
    settings["language"] = {"model": str(model), "keep": ["en"]}
    settings["by_source"]["a"] = {"gopher_repetition": {"max_top_4_grams": None}}
    settings["classifiers"] = [{"name": "quality", "model": str(model), "label": "__label__fr", "max_score": 0.9}]
    settings["duplicates"] |= {"paragraphs": {"min_count": 20, "max_share": 0.9}}
    (root / "list.txt").write_text("s1.org\n")
    settings["url_lists"] = {"lists": [str(root / "list.txt")]}
    settings["mode"] = "observe" if against else "apply"
    settings["against"] = [str(root.parent / name / "run" / "data" / "c" / "curate") for name in against]
    return curate_config(root, corpus, settings)


def _on_paper(config: Config) -> None:
    """What jobs of a run would be, up to the files that they read: this needs no scheduler."""
    from slurm.site.site_profile import site_of
    from slurm.submit import permissions, submitit_backend
    from slurm.submit.job_plan import plan
    from slurm.submit.submit import write_submission

    site = site_of(config)
    permissions.apply_permissions(config)
    for job in plan(config, site, ["preprocess", "train", "eval"], "slurm"):
        assert (
            "sbatch"
            in submitit_backend.script(config.run.dir, job, site, (config.run.dir, "0"), config, "slurm").lower()
        )
        write_submission(config.run.dir, config, site, job, "slurm", None)


def _with_jsonl(root: Path) -> Path:
    """A run file with a source of each type."""
    records = root / "records.jsonl"
    records.write_text("".join(json.dumps({"id": n, "text": f"wind and sea {n} " * 20}) + "\n" for n in range(20)))
    path = write_run(root, {"train.duration": "2 steps"})
    limits = {"slice": [0, 0.9], "max_epochs": 3, "on_exhausted": "stop"}
    sources = [
        {"name": "sea", "type": "text", "paths": [str(root / "sea" / "*.txt")], **limits},
        {"name": "records", "type": "jsonl", "paths": [str(records)]},
        {"name": "hub", "type": "hub", "hub": {"path": "json", "data_files": [str(records)]}},
        {"name": "table", "type": "csv", "paths": [str(root / "a.csv")], "csv": {"columns": ["id", "text"]}},
        {
            "name": "chats",
            "type": "jsonl",
            "paths": [str(root / "c.jsonl")],
            "messages": {"roles": {"user": "{content}"}},
        },
        {
            "name": "talks",
            "type": "jsonl",
            "paths": [str(root / "c.jsonl")],
            "chat": {"format": "openai", "template": str(root / "chat.jinja"), "train_on": "all"},
        },
        {"name": "crawl", "type": "warc", "paths": [str(root / "a.warc")], "warc": {"html": "skip"}},
    ]
    tale = {"name": "tale", "paths": [str(root / "land" / "00*.txt")]}
    sets = {"tales": {"sources": ["tale", "sea"], "sequence_length": 16, "every_steps": 2, "objective": {}}}
    best = {"keep_best": 1, "best_of": "tales", "every_steps": 2}
    (root / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (root / "a.csv").write_text("".join(f"{n},wind and sea {n}\n" for n in range(20)))
    chats = [json.dumps({"messages": [{"role": "user", "content": f"wind and sea {n}"}]}) for n in range(20)]
    (root / "c.jsonl").write_text("\n".join(chats))
    head = "WARC/1.0\r\nWARC-Type: conversion\r\nContent-Type: text/plain\r\nContent-Length: 15\r\n\r\n"
    (root / "a.warc").write_text("".join(f"{head}wind and sea {n:02d}\r\n\r\n" for n in range(20)))
    extra = root / "both.yaml"
    evaluation = {
        "tasks": [{"type": "wikitext", "path": str(records)}],
        "continuations": {"prompts": ["the sea"], "max_tokens": 2},
        "harness": {"tasks": ["choice"], "include_path": str(root / "tasks"), "limit": 1},
    }
    (root / "tasks").mkdir()
    (root / "tasks" / "choice.yaml").write_text(json.dumps(_choice(records)))
    extra.write_text(
        f"include: {path.name}\ndata: {{dir: {root / 'both'}, sources: {json.dumps(sources)}, "
        f"heldout_sources: {json.dumps([tale])}}}\nheldout_sets: {json.dumps(sets)}\n"
        f"train: {{checkpoint: {json.dumps(best)}}}\n"
        f"eval: {json.dumps(evaluation)}\n"
        f"notify: {json.dumps(NOTIFY)}\n"
    )
    return extra


def _choice(records: Path) -> dict[str, Any]:
    """A task of lm-evaluation-harness."""
    return {
        "task": "choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(records)}, "cache_dir": str(records.parent / "cache")},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": 0,
        "doc_to_choice": ["sea", "wind"],
    }
