"""The words of docs, help and docstrings are those of the field: a list of what readers stumbled over stays out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

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
IN_MESSAGES = {
    r"\bmend(s|ed|ing)?\b": "fix, repair",
    r"\b(goes|go|going|went) on\b": "resume, continue",
}
"""What messages avoid besides."""
OPENERS = ("What", "Whether", "How", "Of", "Which", "Where", "When", "That", "The same ")
"""Beginnings of a docstring that does not name its thing."""
NAMES = {
    "insist": "retry",
    "bury": "reap",
    "condemned": "rejected",
    "stands": "is_valid",
    "withdraw": "remove",
    "lap": "epoch",
    "doomed": "hopeless",
    "honour": "follow",
}
"""Parts of names of functions, classes and arguments, with what to call them."""


def _docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("slurm/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", text


def _messages(folders: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Strings that are not docstrings: what is raised, printed and shown as help, with `{}` for each value."""
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        # A docstring, also one below an attribute, is a statement; the parts of an f-string are seen as a whole.
        skipped = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        skipped |= {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
            if isinstance(node, ast.JoinedStr):
                yield place, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
                yield place, node.value


def _folders() -> list[str]:
    """Folders whose messages are checked."""
    return ["slurm", *(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("pipeline/*/__init__.py"))]


def _pages() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        prose, fenced = "", False
        for line in path.read_text().splitlines():
            fenced ^= line.startswith("```")
            prose += "" if fenced or line.startswith("    ") else f"{line} "
        yield str(path.relative_to(ROOT)), prose


def _found(texts: Iterable[tuple[str, str]], avoid: Mapping[str, str]) -> list[str]:
    return [
        f"{place}: {match[0]!r} ({instead})"
        for place, text in texts
        for pattern, instead in avoid.items()
        for match in re.finditer(pattern, " ".join(text.split()))
    ]


@pytest.mark.guard
def test_words() -> None:
    found = _found([*_docstrings(), *_pages()], AVOID)
    assert not found, "\n".join(found)


@pytest.mark.guard
def test_words_of_messages() -> None:
    folders = _folders()
    assert "pipeline/cli" in folders
    found = _found(_messages(folders), AVOID | IN_MESSAGES)
    assert not found, "\n".join(found)


@pytest.mark.guard
def test_the_first_line_of_a_docstring_names_the_thing() -> None:
    opened = re.compile(rf"({'|'.join(OPENERS)})\b")
    found = [f"{place}: {text.splitlines()[0]}" for place, text in _docstrings() if opened.match(text)]
    assert not found, "\n".join(found)


@pytest.mark.guard
def test_names() -> None:
    found = []
    for path in sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("slurm/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.arg)):
                name = node.arg if isinstance(node, ast.arg) else node.name
                parts = [part.lower() for part in re.findall("[A-Z]?[a-z]+", name)]
                found += [
                    f"{path.relative_to(ROOT)}:{node.lineno}: {name} ({NAMES[part]})" for part in parts if part in NAMES
                ]
    assert not found, "\n".join(found)


if __name__ == "__main__":  # `make words`
    for check in (test_words, test_words_of_messages, test_the_first_line_of_a_docstring_names_the_thing, test_names):
        try:
            check()
        except AssertionError as error:
            print(error)
