"""Tables of the documentation, written from the rules, the schedules and the other data that they show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from pipeline.common.format import table, with_tables
from pipeline.common.storage import put
from pipeline.config.reference import table as keys
from pipeline.config.slurm import ResourcesConfig, SiteConfig
from pipeline.data.curate.rules.doc_table import tables as curation
from pipeline.data.loading.objectives.pictures import pictures
from pipeline.train.feature_table import features
from pipeline.train.foreign.settings.rows import SuiteName, read_suite
from pipeline.train.huggingface.names import LAYER, Names, TensorRule
from pipeline.train.huggingface.registry import FAMILIES
from pipeline.train.model.tensor_names import EXPERT
from pipeline.train.parallel.pipeline_schedules import SCHEDULES, play
from pipeline.train.parallel.tested import OF_EXPERTS, TESTED, Combination
from pipeline.train.rules.base import Rule
from pipeline.train.rules.layout import RULES, WARNINGS
from pipeline.train.start.resume import table as winners

_P, _FEW, _MANY = 4, 8, 32
"""Ranks and micro-batches of the figures in the table of schedules."""


def rules(all_of: Sequence[Rule]) -> str:
    """A table of rules."""
    return table(("keys", "rule"), ((", ".join(f"`{key}`" for key in rule.keys), rule.text) for rule in all_of))


def schedules() -> str:
    """A table of schedules with their formulas, and figures for a pipeline."""
    rows = []
    for name, facts in SCHEDULES.items():
        few, many = (play(name, _P, facts.default_stages, m) for m in (_FEW, _MANY))
        kept = max(many.activations) / facts.default_stages
        rows.append(
            (
                f"`{name}`",
                facts.what,
                facts.stages,
                facts.demand,
                facts.bubble,
                f"{100 * few.bubble:.1f} %, {100 * many.bubble:.1f} %",
                facts.kept,
                f"{kept:g}",
            )
        )
    head = ("schedule", "what it does", "stages per rank (v)", "micro-batches (m)", "bubble")
    return table((*head, f"p={_P}, m={_FEW} and {_MANY}", "kept", f"p={_P}, m={_MANY}"), rows)


def tested() -> str:
    """A table of the tested combinations, those that differ in the schedule alone in one row."""
    groups: dict[tuple[str, str, str, str], list[Combination]] = {}
    dealt = [row for row in OF_EXPERTS if row.kind.ep and row.recompute.mode == "none" and not row.compile]
    for row in (*TESTED, *dealt):
        kind, degrees = row.kind, {axis: degree for axis, degree in row.layout.settings.items() if degree > 1}
        key = (
            " x ".join(f"{axis} {degree}" for axis, degree in degrees.items()),
            {None: "", True: "yes", False: "no"}[kind.sequence_parallel],
            {None: "", True: "resharded", False: "kept"}[kind.reshard],
            "" if kind.cp_method is None else f"`{kind.cp_method}`",
        )
        groups.setdefault(key, []).append(row)
    head = ("layout", "sequence_parallel", "weights after forward", "cp_method", "schedules")
    return table(head, ((*key, _schedules_of(rows)) for key, rows in groups.items()))


def families() -> str:
    """A table of the families of Hugging Face's models."""
    rows = ((f"`{each.model_type}`", f"`{each.architecture}`", each.what) for each in FAMILIES.values())
    return table(("model_type", "class in transformers", "in `model:`"), rows)


def tensors() -> str:
    """A table of the tensors of each family and ours; families with the same names have one together."""
    groups: list[tuple[Names, list[str]]] = []
    for family in FAMILIES.values():
        group = next((types for names, types in groups if names == family.names), None)
        if group is None:
            groups.append((family.names, [family.model_type]))
        else:
            group.append(family.model_type)
    blocks = (f"**{', '.join(types)}**\n\n{_tensors_of(names)}" for names, types in groups)
    return "\n\n".join(blocks)


def _tensors_of(names: Names) -> str:
    def ours(rule: TensorRule) -> str:
        text = ", ".join(f"`{name}`" for name in rule.ours)
        text = (
            f"{text}, {'beside each other' if rule.beside else 'one below the other'}" if len(rule.ours) > 1 else text
        )
        text = f"{text}, again" if rule.copy else text
        text = f"{text}, rows {rule.order.text}" if rule.order else text
        text = f"{text}, with other dimensions of 1" if rule.unit_dims else text
        text = {"numbered": f"{text}, of expert {EXPERT}", "stacked": f"{text}, of each expert", None: text}[
            rule.experts
        ]
        return f"{text}, transposed" if rule.transposed else text

    layers = [rule for kinds in names.layers for rule in names.of_layer(LAYER, kinds)]
    for side, own in names.sides.items():
        # Layers are counted over both sides here.
        prefix = f"layers.{'{i}' if side == 'encoder' else '{e + i}'}."
        layers += [rule for kinds in own.layers for rule in own.of_layer(LAYER, kinds, prefix)]
    if names.encoder_norm is not None:
        layers.append(TensorRule(names.encoder_norm, ("layers.{e - 1}.encoder_norm.weight",)))
    if names.mtp:
        layers += names.of_depth("{n}", "{d}", names.layers[0])
    unlike = {(rule.theirs, rule.ours): rule for rule in layers}  # kinds of layers share parts
    rows = ((f"`{rule.theirs}`", ours(rule)) for rule in (*names.before, *unlike.values(), *names.after))
    return table(("there", "here"), rows)


def _schedules_of(rows: Sequence[Combination]) -> str:
    if rows[0].layout.pp == 1:
        return ""
    even = [row.schedule for row in rows if row.layers_per_stage is None]
    words = ["all"] if set(even) == SCHEDULES.keys() else [f"`{name}`" for name in even]
    for row in rows:
        if row.layers_per_stage is not None:
            words.append(f"`{row.schedule}` with stages of {', '.join(map(str, row.layers_per_stage))} layers")
    return "; ".join(words)


def page(name: str, text: str) -> str:
    """A page of `docs/` with its tables replaced.

    Args:
        name: Of its file, below `docs/`.
        text: As it is now.
    """
    return with_tables(text, PAGES[name]())


PAGES: dict[str, Callable[[], dict[str, str]]] = {
    "parallelism.md": lambda: {
        "rules": rules(RULES),
        "warnings": rules(WARNINGS),
        "schedules": schedules(),
        "tested": tested(),
    },
    **{f"coming-from/{read_suite(name).page}": read_suite(name).written for name in get_args(SuiteName)},
    "model.md": lambda: {"features": features()},
    "objectives.md": pictures,
    "curation-rules.md": curation,
    "checkpoints.md": lambda: {"winners": winners()},
    "huggingface.md": lambda: {"families": families(), "tensors": tensors()},
    "slurm.md": lambda: {"profile": keys(SiteConfig), "resources": keys(ResourcesConfig)},
}
"""File below `docs/` -> its tables by the name of their place."""


if __name__ == "__main__":
    for target in map(Path, sys.argv[1:]):
        name = next(each for each in PAGES if target.absolute().as_posix().endswith(f"/{each}"))
        put(target, page(name, target.read_text(encoding="utf-8")).encode())
