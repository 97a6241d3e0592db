"""Texts that the evaluations of a run have generated for fixed prompts, side by side by step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from pipeline.common import storage
from pipeline.common.page.render import render
from pipeline.common.redaction import masked
from pipeline.common.run_files import RunFiles
from pipeline.eval.reports import report_files

_MOST_PROMPTS = 12
_MOST_STEPS = 12
_LONGEST = 2_000
"""Characters of a text or a prompt that are shown."""


@dataclass(frozen=True)
class SampleText:
    """A prompt that a checkpoint has continued."""

    step: int
    weights: str
    prompt: str
    text: str
    """Without the prompt."""
    finish: str
    how: tuple[tuple[str, str], ...]
    """Settings, such as the temperature."""


@dataclass(frozen=True)
class SampleTexts:
    """Texts of a run, in the order of steps."""

    texts: list[SampleText] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    """Steps that have no text, and why."""

    def without(self, evaluations: set[tuple[int, str]]) -> SampleTexts:
        """Without those of evaluations, by step and weights."""
        return SampleTexts([each for each in self.texts if (each.step, each.weights) not in evaluations], self.errors)


def read_texts(run: Path) -> SampleTexts:
    """Texts in the evaluations of a run folder; where these have none, the one in the summary of `pipeline run`.

    Reports that are damaged, or from before there were texts, have none.
    """
    found = SampleTexts()
    for path in report_files(run):
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            value = storage.read_object(path)
            if (kept := value.get("continuations")) is None:
                continue
            step, weights = int(value["step"]), str(value["made_with"]["weights"])
            if kept["error"] is not None:
                found.errors.append((step, str(kept["error"])))
            how = _how(kept["made_with"])
            for each in kept["texts"]:
                prompt, text, finish = (str(each[key]) for key in ("prompt", "text", "finish"))
                found.texts.append(SampleText(step, weights, prompt, text, finish, how))
    if not found.texts:
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
            value = storage.read_object(RunFiles(run).summary)
            if isinstance(text := value["continuation"], str):
                asked, step = value["generate"], int(value["steps"])
                prompt, weights = str(asked["prompt"]), str(value["weights"])
                found.texts.append(SampleText(step, weights, prompt, text, "length", _how(asked)))
    found.texts.sort(key=lambda each: (each.step, each.weights != "model"))
    return found


def _how(made_with: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((key, str(made_with[key])) for key in ("max_tokens", "temperature", "seed"))


def texts_section(runs: Sequence[tuple[str, SampleTexts]]) -> Markup:
    """Texts of runs by their names: a table for each prompt, a column for each step; empty without texts."""
    every = [text for _, found in runs for text in found.texts]
    errors = [(name, step, error) for name, found in runs for step, error in found.errors]
    if not every and not errors:
        return Markup()
    prompts = list(dict.fromkeys(text.prompt for text in every))
    notes = ["What the model wrote at each evaluation. It may be wrong, offensive, or a copy of what the model read."]
    if len(prompts) > _MOST_PROMPTS:
        notes.append(f"The first {_MOST_PROMPTS} of {len(prompts):,} prompts; the reports in eval/ have all.")
    for name, step, error in errors[:_MOST_STEPS]:
        notes.append(f"{f'{name}, ' if len(runs) > 1 else ''}step {step:,}: {masked(error)}")
    tables = [_prompt(prompt, runs) for prompt in prompts[:_MOST_PROMPTS]]
    return render("texts.html", "pipeline.eval.report", notes=notes, prompts=tables, several=len(runs) > 1)


def _prompt(prompt: str, runs: Sequence[tuple[str, SampleTexts]]) -> dict[str, Any]:
    mine = [(name, [text for text in found.texts if text.prompt == prompt]) for name, found in runs]
    settings = list(dict.fromkeys(text.how for _, texts in mine for text in texts))
    columns = sorted({(text.step, text.weights) for _, texts in mine for text in texts})
    every = len(columns)
    if every > _MOST_STEPS:
        columns = [columns[k] for k in np.unique(np.linspace(0, every - 1, _MOST_STEPS).round().astype(int))]
    rows = []
    for name, texts in mine:
        # Of a step that was evaluated in two ways, the last one.
        by_column = {(text.step, text.weights): text for text in texts}
        if texts:
            cells = [_cell(by_column.get(column), len(settings) > 1) for column in columns]
            rows.append({"name": name, "cells": cells})
    words = [_words(settings[0])] if len(settings) == 1 else []
    if every > len(columns):
        words.append(f"{len(columns)} of {every:,} steps")
    return {
        "shown": _cut(prompt) if prompt.strip() else repr(prompt),
        "words": "; ".join(words),
        "columns": [f"step {step:,}{', average of weights' * (weights == 'ema')}" for step, weights in columns],
        "rows": rows,
    }


def _cell(text: SampleText | None, settings_differ: bool) -> dict[str, Any] | None:
    if text is None:
        return None
    about = ["end of the document"] * (text.finish == "stop") + [_words(text.how)] * settings_differ
    return {"text": _cut(text.text), "about": about}


def _words(how: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in how)


def _cut(text: str) -> str:
    text = masked(text)  # before it is cut: half an address would not be known as one
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
