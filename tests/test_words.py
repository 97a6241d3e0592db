"""The words of docs, help and docstrings are those of the field: a list of what readers stumbled over stays out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_COUNTED = "(tokens|steps|bytes|bits|[KMGT]i?B|samples|windows|documents|GPUs?|processes)"
_PER = "(second|hour|day|step|token|rank|node|process|document|line|device|GPU|unit)"
AVOID = {
    r"\bso many\b": "say the number, or `N`",
    r"\bpass(ed|es|ing)? over (?!SSH)": "skip",
    r"\b(goes|go|going|went) on (where|from)\b": "resume",
    r"\bby themselves\b": "automatically",
    r"\bas it comes\b": "as is",
    r"\bwhole way\b": "full pipeline",
    rf"\b{_COUNTED} an? {_PER}\b": "per",
    r"(?<!there )(?<!There )\b(is|are) no (?!longer\b|more\b|less\b|other\b|different\b)\w": "is not a",
}
OPENERS = ("What", "Whether", "How", "Of", "Which", "Where", "When")
"""First words of a docstring that does not name its thing."""


def _docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("slurm/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def _help() -> Iterator[tuple[str, str]]:
    """Strings of the modules of the command line, which are help and messages."""
    for path in sorted(ROOT.glob("pipeline/cli/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def _pages() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]:
        prose, fenced = "", False
        for line in path.read_text().splitlines():
            fenced ^= line.startswith("```")
            prose += "" if fenced or line.startswith("    ") else f"{line} "
        yield str(path.relative_to(ROOT)), prose


def test_words() -> None:
    found = [
        f"{place}: {match[0]!r} ({instead})"
        for place, text in (*_docstrings(), *_help(), *_pages())
        for pattern, instead in AVOID.items()
        for match in re.finditer(pattern, " ".join(text.split()))
    ]
    assert not found, "\n".join(found)


def test_the_first_line_of_a_docstring_names_the_thing() -> None:
    found = [f"{place}: {text.splitlines()[0]}" for place, text in _docstrings() if text.split()[0] in OPENERS]
    assert not found, "\n".join(found)
