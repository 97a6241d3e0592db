"""Which keys the files have that the suite writes, and which fields the classes that are written by field name.

`keys.json` lists both. `python -m tests.formats.keys` adds to it what is new in the files that are kept and in the code
of today, and `python -m tests.formats.keys FOLDER` also what is new in a folder that `KEPT_ROOT=FOLDER python -m
tests.formats.make` has made. It never takes anything away. What is to go is taken out by hand, by whoever has made sure
that the files of before are read all the same.
"""

from __future__ import annotations

import ast
import csv
import io
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import orjson

from tests.formats import make

LISTING = make.HERE / "keys.json"

KINDS = {
    "dataset: manifest.json": r"/manifest\.json$",
    "dataset: plan.json": r"^(?!outputs/).*/plan\.json$",
    "dataset: report.json": r"^[^/]+/[^/]+/report\.json$",
    "dataset: rejected.jsonl": r"rejected\.jsonl$",
    "dataset: failures.jsonl": r"/failures\.jsonl$",
    "dataset: packs.json": r"/packs\.json$",
    "dataset: receipt": r"^(?!.*/packs/).*/receipts/\d+/\d+(-\d+)?\.json$",
    "dataset: receipt of packs": r"/packs/\d+/receipts/.*\.json$",
    "dataset: receipt of a bucket": r"/receipts/shuffle/.*\.json$",
    "dataset: runs.json": r"/unshuffled/runs\.json$",
    "dataset: lease": r"/leases/.*\.json$",
    "dataset: checked.jsonl": r"/checked\.jsonl$",
    "tokenizer: origin.json": r"/origin\.json$",
    "tokenizer: special_tokens.json": r"/special_tokens\.json$",
    "tokenizer: proof of an engine": r"^cache/.*/engines/.*\.json$",
    "run: ledger.jsonl": r"/ledger\.jsonl$",
    "run: metrics.jsonl": r"/metrics\.jsonl$",
    "run: faults.jsonl": r"/faults\.jsonl$",
    "run: journal.json": r"/journal\.json$",
    "run: exit.json": r"/exit\.json$",
    "run: saves.json": r"/saves\.json$",
    "run: summary.json": r"/summary\.json$",
    "run: lock": r"^runs/[^/]+/lock$",
    "run: heartbeat": r"/heartbeats/",
    "run: error of a rank": r"\.error\.json$",
    "checkpoint: COMMIT": r"/COMMIT$",
    "checkpoint: state.json": r"/state\.json$",
    "checkpoint: resumed-from.json": r"/resumed-from\.json$",
    "eval: step.json": r"/eval/step-\d+\.json$",
    "eval: tasks.json": r"/eval/tasks-step-\d+\.json$",
    "eval: harness.json": r"/eval/harness-step-\d+\.json$",
    "eval: table.csv": r"/eval/table\.csv$",
    "export: export.json": r"/export\.json$",
    "export: index.json": r"\.safetensors\.index\.json$",
    "export: config.json": r"^exports/hf/config\.json$",
    "export: generation_config.json": r"/generation_config\.json$",
    "export: tokenizer_config.json": r"/tokenizer_config\.json$",
    "jobs: jobs.jsonl": r"/slurm/jobs\.jsonl$",
    "jobs: submission": r"/submissions/.*\.json$",
    "jobs: environment": r"/slurm/environment-.*\.json$",
    "jobs: cancelled": r"/slurm/cancelled$",
    "sweep: sweep.json": r"/sweep\.json$",
    "sweep: table.csv": r"/sweeps/[^/]+/table\.csv$",
    **{
        f"--json: {name}": rf"^outputs/{name}\.json$"
        for name in (
            *("status", "checkpoint-list", "checkpoint-show", "data-plan", "data-where", "data-when", "eval-table"),
            *("generate", "plan", "sweep-table"),
        )
    },
}
"""Files by their paths, relative to the folder of runs and datasets."""
_IGNORED = re.compile(r"^corpus/|^expected\.json$|/tokenizer\.json$|\.tmp(/|$)|\.reserved$|/staged/.*/lock$")
"""What has a format of others, or is a part of a file."""

_NAMES = {
    # The keys of these objects are names that users or inputs have given.
    "dataset: manifest.json": ("settings.data.splits", "settings.ends of splits", "tokenizer.special_tokens"),
    "dataset: plan.json": ("settings.data.splits", "settings.ends of splits"),
    "dataset: report.json": ("splits", "engines", "rejected", "condemned"),
    "dataset: receipt": ("splits", "rejected", "pieces"),
    "dataset: receipt of a bucket": ("splits",),
    "tokenizer: origin.json": ("train.data.splits", "train.the files of data.sources"),
    "run: metrics.jsonl": ("*_by_source",),
    "run: journal.json": ("segments[].sources",),
    "run: summary.json": ("seconds",),
    "checkpoint: COMMIT": ("files",),
    "checkpoint: state.json": (
        *("fingerprints.data", "journal.segments[].sources", "origin.journal.segments[].sources"),
        "targets.by_source",
    ),
    "eval: step.json": ("sources", "made_with.data"),
    "eval: tasks.json": ("tasks",),
    "export: index.json": ("weight_map",),
    "export: export.json": ("fingerprints.data", "files"),
    "jobs: submission": ("sha256",),
    "jobs: environment": ("distributions", "environment"),
    "sweep: sweep.json": ("members", "members.*.values"),
    "--json: checkpoint-show": (
        *("state.fingerprints.data", "state.journal.segments[].sources", "state.origin.journal.segments[].sources"),
        *("state.targets.by_source", "tensors", "tensors.*"),
    ),
    "--json: data-plan": ("sources[].weights", "sources[].shares", "sources[].loss_weights"),
    "--json: sweep-table": ("members[].values",),
    "--json: eval-table": ("evaluations[].sources",),
}
_ELSEWHERE = {
    # What is in these objects is the run file, which has its own reference, or somebody else's.
    "checkpoint: state.json": ("config", "fingerprints.model", "fingerprints.objective"),
    "--json: checkpoint-show": ("state.config", "state.fingerprints.model", "state.fingerprints.objective"),
    "export: export.json": ("fingerprints.model", "fingerprints.objective", "config"),
    "eval: harness.json": ("results", "others", "made_with", "n-samples", "n-shot", "versions", "higher_is_better"),
    "jobs: submission": ("resources.options",),
}
_VARIANTS = {
    "run: ledger.jsonl": lambda line: line["event"],
    "run: faults.jsonl": lambda line: line["action"],
    "run: metrics.jsonl": lambda line: next((each for each in ("loss", "validation_loss") if each in line), "other"),
}
"""Which keys there are is told by one of them, or its value."""

CLASSES = {
    "pipeline.train.distributed.layout": ("Layout",),
    "pipeline.train.planning.experts": ("ExpertPlan",),
    "pipeline.train.host.shares": ("Shares", "MeasuredShares"),
    "pipeline.train.planning.show": (),  # MeasuredShares
    "pipeline.train.run.goodput": ("Goodput",),
    "pipeline.train.monitor.hardware": ("Rise",),
    "pipeline.train.start.schedule_seam": (),  # a config
    "pipeline.train.start.reference": (),  # a config
    "pipeline.train.start.teacher": (),  # a config
    "pipeline.data.sources.templates.chat_template": ("ChatTemplate",),
    "pipeline.train.planning.stage_memory": (),  # fields of a spec, none of which is written
    "pipeline.train.run.unsaved": ("Saves",),
    "pipeline.train.run.mirror_state": ("MirrorState",),
    "pipeline.train.checkpoint.mirror.owner": ("Owner",),
    "pipeline.train.checkpoint.mirror.commits": ("MirrorCommit",),
    "pipeline.train.run.heartbeat": ("Beat",),
    "pipeline.train.export.commands": ("Row",),
    "pipeline.data.work.leases": ("LeaseRecord",),
    "pipeline.data.datasets.packing.files": ("FileListing", "PackIndex"),
    "pipeline.data.packing.job": ("BlockReceipt",),
    "pipeline.data.packing.make": (),  # PackIndex
    "pipeline.data.loading.loader": (),  # Span
    "pipeline.data.order.windows": ("Span",),
    "pipeline.data.order.journal": ("Journal",),
    "pipeline.data.order.segments": ("Segment", "SourceState", "Skip"),
    "pipeline.data.order.consumption": ("SliceAccount",),
    "pipeline.config.objective": (),  # the run file's keys, by which fingerprints and reports are compared
    "pipeline.data.plan.rows": ("DataPlan", "SliceRow", "SegmentRow", "ObjectiveRow", "PreviewRow"),
    "pipeline.data.datasets.manifest": ("Generation", "Manifest", "TokenizerInfo"),
    "pipeline.data.work.unit_chunks": (),  # Damage
    "pipeline.data.curate.results.differences": ("Changed",),
    "pipeline.data.provenance.export_dataset": ("ShardCounts",),
    "pipeline.data.provenance.why_show": ("FiredRule", "ClusterMember", "FoundNgram", "Recheck"),
    "pipeline.data.sources.records": ("Damage",),
    "pipeline.data.preprocess.report": (),  # Counts
    "pipeline.data.work.receipt_totals": ("Counts",),
    "pipeline.data.preprocess.run_tokenizer": (),  # TokenizerTrainConfig
    "pipeline.data.tokenization.coverage": ("RoundTrip",),
    "pipeline.data.tokenization.engine_check": ("Proof",),
    "pipeline.data.provenance.document_to_steps": ("Occurrence", "Gap", "Without"),
    "pipeline.eval.perplexity": ("EvalReport", "Score"),
    "pipeline.eval.continuations": ("Continuations",),
    "pipeline.eval.table": (),  # Evaluation and WeightsEvaluation
    "pipeline.eval.reports": ("Evaluation", "WeightsEvaluation"),
    "pipeline.eval.summary": (),  # GenerateConfig
    "pipeline.train.checkpoint.fingerprint": (),  # ModelConfig and the objectives
    "pipeline.train.huggingface.convert": (),  # ModelConfig
    "pipeline.train.loop.saving": (),  # Config
    "slurm.job.folder_watch": ("LostFolderNote",),
    "slurm.jobs": ("Job", "Cancelled"),
    "slurm.record.launch_log": ("Launch", "LaunchEnd"),
    "slurm.notify.notice": ("Notice",),
    "slurm.notify.notices": ("Notified",),
    "slurm.record.submission": ("Submission",),
    "slurm.status.run": ("RunStatus", "AttemptRow", "ExpertLoads", "RankBeat"),
    "slurm.status.queued": ("QueuedJob",),
    "slurm.record.drill_record": ("DrillRecord",),
    "slurm.doctor.command": (),  # of the report
    "slurm.doctor.report": ("Report", "NodeCheck", "Network", "NodeVerdict"),
    "slurm.sweep.table": ("Result",),
    "pipeline.config.slurm": ("SiteConfig", "ResourcesConfig"),
}
"""Classes whose instances are written by the names of their fields, to a file or by `--json`, where they are defined;
and the modules that write them, with a word on which."""
WRITE_NOTHING = (
    "pipeline.api.evaluation",  # compares keys of run files
    "pipeline.api.model",
    "pipeline.api.run",
    "pipeline.config.load",  # the run file
    "pipeline.config.plugins",  # compares options
    "pipeline.config.reference",
    "pipeline.data.curate.duplicates.choose",  # hashes of settings, as the next three
    "pipeline.data.curate.duplicates.compared",
    "pipeline.data.curate.passes.scope_passes",
    "pipeline.data.curate.results.apply",
    "pipeline.data.loading.batch",
    "pipeline.config.parsing.code_keys",
    "pipeline.data.sources.web.budget",  # keys of the run file
    "pipeline.data.sources.reader",  # options of plug-ins, whose names are theirs
    "pipeline.eval.report.facts",
    "pipeline.train.checkpoint.dcp_metadata",
    "pipeline.train.start.exported_model",
    "pipeline.train.distributed.process_group",
    "pipeline.train.monitor.loggers.open",  # the run file, for trackers
    "pipeline.train.start.open_run",
    "pipeline.train.start.pruned_source",
    "pipeline.train.parallel.tested",
    "pipeline.train.planning.memory",
    "pipeline.train.start.resume",
    "pipeline.train.start.from_mirror",  # to other ranks
    "pipeline.train.start.warm_start",
    "slurm.submit.job_plan",
    "slurm.sweep.members",
    "slurm.sweep.send",
)
"""Modules that go by field names, too, but compare or show what they find, or write the run file."""
_BY_NAME = {"asdict", "_asdict", "vars", "fields", "model_dump", "model_dump_json"}


def kind_of(name: str) -> str | None:
    """The kind of a file by its path; None of what has a format of others.

    Raises:
        AssertionError: nobody has said what it is.
    """
    if _IGNORED.search(name):
        return None
    kinds = [kind for kind, pattern in KINDS.items() if re.search(pattern, name)]
    structured = name.endswith((".json", ".jsonl", ".csv"))
    assert len(kinds) == 1 or not (kinds or structured), f"{name} is a file of {kinds or 'no kind'}: see KINDS"
    return kinds[0] if kinds else None


def records(kind: str, name: str, data: bytes) -> Iterator[Any]:
    """The objects in a file."""
    if name.endswith(".csv"):
        for row in csv.DictReader(io.StringIO(data.decode())):
            yield {re.sub(" of .*", " of *", key): value for key, value in row.items()}
    elif name.endswith(".jsonl") or kind == "--json: generate":
        yield from (orjson.loads(line) for line in data.split(b"\n") if line.strip())
    else:
        yield orjson.loads(data)


def paths(kind: str, value: Any, path: str = "") -> Iterator[str]:
    """The keys of an object and of what is in it, like `splits.*.files.bin`; `[]` stands for the entries of a list."""
    if isinstance(value, list):
        for each in value:
            yield from paths(kind, each, f"{path}[]")
    elif isinstance(value, dict) and not _listed(_ELSEWHERE, kind, path):
        for key, each in value.items():
            name = "*" if _listed(_NAMES, kind, path) else key
            below = f"{path}.{name}" if path else name
            yield below
            yield from paths(kind, each, below)


def _listed(table: Mapping[str, tuple[str, ...]], kind: str, path: str) -> bool:
    return any(path == each or (each[0] == "*" and path.endswith(each[1:])) for each in table.get(kind, ()))


def found_in(contents: Mapping[str, bytes | None]) -> dict[str, list[tuple[str, set[str]]]]:
    """The keys of each object by its kind, with the file that it is in.

    Args:
        contents: of files by their paths.
    """
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for name, data in contents.items():
        kind = None if data is None else kind_of(name)
        if kind is None or data is None:
            continue
        for record in records(kind, name, data):
            variant = f" ({_VARIANTS[kind](record)})" if kind in _VARIANTS else ""
            found.setdefault(kind + variant, []).append((name, set(paths(kind, record))))
    return found


def fields_of(cls: Any) -> list[str]:
    """The names under which a class is written: of a dataclass, a named tuple or a pydantic model."""
    for attribute in ("model_fields", "__dataclass_fields__", "_fields"):
        if hasattr(cls, attribute):
            return sorted(getattr(cls, attribute))
    raise TypeError(f"{cls} has no fields")


def fields() -> dict[str, list[str]]:
    """The fields of all classes of `CLASSES`, by their names."""
    found: dict[str, list[str]] = {}
    for module, names in CLASSES.items():
        for name in names:
            assert name not in found, f"two classes that are written have the name {name}"
            found[name] = fields_of(getattr(import_module(module), name))
    return dict(sorted(found.items()))


def modules_by_name() -> set[str]:
    """Modules that ask for the names of fields."""
    top = make.HERE.parents[1]
    found = set()
    for file in [*top.glob("pipeline/**/*.py"), *top.glob("slurm/**/*.py")]:
        text = file.read_text()
        if not any(f"{name}(" in text for name in _BY_NAME):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in _BY_NAME:
                    found.add(".".join(file.relative_to(top).with_suffix("").parts))
    return found


def gathered(found: Mapping[str, list[tuple[str, set[str]]]]) -> dict[str, dict[str, list[str]]]:
    """By kind, the keys that all objects have and those that some have."""
    listing = {}
    for kind, objects in sorted(found.items()):
        every = set.intersection(*(keys for _, keys in objects))
        some = set.union(*(keys for _, keys in objects)) - every
        listing[kind] = {"always": sorted(every), "sometimes": sorted(some)}
    return listing


def listing() -> dict[str, Any]:
    """What `keys.json` has."""
    found: dict[str, Any] = orjson.loads(LISTING.read_bytes())
    return found


def main() -> None:
    """Add what is new to the listing."""
    old = listing() if LISTING.exists() else {"files": {}, "fields": {}}
    with tempfile.TemporaryDirectory() as folder:
        found = found_in(make.files(make.unpack(make.PACKED, Path(folder))))
    for place in sys.argv[1:]:
        for kind, objects in found_in(make.files(Path(place))).items():
            found.setdefault(kind, []).extend(objects)
    new = gathered(found)
    for kind, keys in old["files"].items():
        now = new.setdefault(kind, keys)
        union = {each for keys_of in (keys, now) for part in keys_of.values() for each in part}
        always = set(keys["always"]) & set(now["always"])
        new[kind] = {"always": sorted(always), "sometimes": sorted(union - always)}
    classes = {**old["fields"], **{name: sorted({*old["fields"].get(name, ()), *v}) for name, v in fields().items()}}
    value = {"files": dict(sorted(new.items())), "fields": dict(sorted(classes.items()))}
    LISTING.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    print(f"{LISTING}: {len(new)} kinds of objects, {len(classes)} classes", file=sys.stderr)


if __name__ == "__main__":
    main()
