"""`benchmarks/eval/handover.py`: other programs continue prompts with our tokens, wherever they are installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.eval import handover

FAMILIES = ("llama", "gpt2", "qwen3_moe")
PYTHONS = {"vLLM": "HANDOVER_VLLM", "llama.cpp": "HANDOVER_LLAMA"}
"""By program, the variable of the environment that names a Python with it."""
CONVERTER = "HANDOVER_CONVERTER"


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Trained and exported models with their own continuations."""
    work = tmp_path_factory.mktemp("handover")
    return work, list(handover.prepared(work, FAMILIES))


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["transformers", *PYTHONS])
def test_tokens_are_ours(tool: str, jobs: tuple[Path, list[dict[str, Any]]]) -> None:
    python, more = sys.executable, list[str]()
    if tool in PYTHONS:
        python = os.environ.get(PYTHONS[tool], "")
        if not python:
            pytest.skip(f"no {tool}: {PYTHONS[tool]} names no Python that has it")
    if tool == "llama.cpp":
        if CONVERTER not in os.environ:
            pytest.skip(f"no converter: {CONVERTER} names no folder with convert_hf_to_gguf.py")
        more += [os.environ[CONVERTER], "f32"]
    work, ours = jobs
    found = list(handover.asked(tool, python, ours, work, *more))
    lines = [handover.result(tool, job, each) for job, each in zip(ours, found, strict=True)]
    assert [line["family"] for line in lines] == list(FAMILIES)
    assert all(line["loads"] and line["tokens_equal"] and line["texts_equal"] for line in lines), lines


def test_the_table() -> None:
    job = {"family": "llama", "exported_as": "llama", "prompts": [[1]], "tokens": [[2, 3]], "ids": [[4]]}
    same = {"version": "1", "loads": True, "tokens": [[2, 3]], "ids": [[4]]}
    lines = [handover.result("a", job, same), handover.result("b", job, {"loads": False, "why": "no such model"})]
    assert lines[0]["tokens_equal"] and lines[0]["texts_equal"]
    assert handover.summary(lines).splitlines()[2] == "| `llama` | equal | no: no such model |"
