"""Texts that the evaluations of a run have generated for fixed prompts, side by side by step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import storage
from pipeline.common.page.html import escaped
from pipeline.common.redaction import masked
from pipeline.common.run_files import RunFiles
from pipeline.eval.reports import report_files

_MOST_PROMPTS = 12
_MOST_STEPS = 12
_LONGEST = 2_000
"""Characters of a text or a prompt that are shown."""
_CELL = "min-width:16rem;max-width:26rem;text-align:left;white-space:pre-wrap;overflow-wrap:anywhere"


@dataclass(frozen=True)
class SampleText:
    """A prompt that a checkpoint has continued."""

    step: int
    weights: str
    prompt: str
    text: str
    """Without the prompt."""
    finish: str
    how: tuple[tuple[str, Any], ...]
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


def _how(made_with: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, made_with[key]) for key in ("max_tokens", "temperature", "seed"))


def texts_section(runs: Sequence[tuple[str, SampleTexts]]) -> str:
    """HTML of the texts of runs by their names: a table for each prompt, a column for each step; empty without."""
    every = [text for _, found in runs for text in found.texts]
    errors = [(name, step, error) for name, found in runs for step, error in found.errors]
    if not every and not errors:
        return ""
    prompts = list(dict.fromkeys(text.prompt for text in every))
    notes = [
        "What the model wrote at each evaluation. Texts of a model may be wrong, offensive, or copies of what it read."
    ]
    if len(prompts) > _MOST_PROMPTS:
        notes.append(f"The first {_MOST_PROMPTS} of {len(prompts):,} prompts; the reports in eval/ have all.")
    notes += [f"{f'{name}, ' if len(runs) > 1 else ''}step {step:,}: {error}" for name, step, error in errors[:10]]
    body = "".join(f"<p class='note'>{escaped(note)}</p>" for note in notes)
    body += "".join(_prompt(prompt, runs) for prompt in prompts[:_MOST_PROMPTS])
    return f"<section class='wide'><h3>Samples of text</h3>{body}</section>"


def _prompt(prompt: str, runs: Sequence[tuple[str, SampleTexts]]) -> str:
    mine = [(name, [text for text in found.texts if text.prompt == prompt]) for name, found in runs]
    settings = {text.how for _, texts in mine for text in texts}
    columns = sorted({(text.step, text.weights) for _, texts in mine for text in texts})
    every = len(columns)
    if every > _MOST_STEPS:
        columns = [columns[k] for k in np.unique(np.linspace(0, every - 1, _MOST_STEPS).round().astype(int))]
    several = len(runs) > 1
    head = "<th class='w'>run</th>" * several + "".join(
        f"<th style='text-align:left'>step {step:,}{_of(weights)}</th>" for step, weights in columns
    )
    rows = ""
    for name, texts in mine:
        if not texts:
            continue
        # Of a step that was evaluated twice in different ways, the last one.
        by_column = {(text.step, text.weights): text for text in texts}
        cells = (_cell(by_column.get(column), len(settings) > 1) for column in columns)
        rows += f"<tr>{f'<td class=w>{escaped(name)}</td>' * several}{''.join(cells)}</tr>"
    how = next(iter(settings), ())
    words = "" if len(settings) != 1 else ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in how)
    left = f"{'; ' if words else ''}{len(columns)} of {every:,} steps" if every > len(columns) else ""
    shown = _cut(prompt) if prompt.strip() else "(empty)" if not prompt else repr(prompt)
    return (
        f"<p class='note' style='white-space:pre-wrap' dir='auto'><b>{escaped(shown)}</b></p>"
        f"<p class='note'>{escaped(words + left)}</p>"
        "<div class='scroll' tabindex='0' role='region' aria-label='Texts by step'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(text: SampleText | None, settings_differ: bool) -> str:
    if text is None:
        return "<td>–</td>"
    end = "" if text.finish == "length" else "<small>end of the document</small>"
    how = f"<small>{escaped(', '.join(f'{key} {value}' for key, value in text.how))}</small>" if settings_differ else ""
    return f"<td style='{_CELL}' dir='auto'>{escaped(_cut(text.text)) or '<small>no text</small>'}{end}{how}</td>"


def _of(weights: str) -> str:
    return ", average of weights" if weights == "ema" else ""


def _cut(text: str) -> str:
    text = masked(text)  # before it is cut: half an address would not be known as one
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
