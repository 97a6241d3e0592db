"""Files that tasks of lm-evaluation-harness execute: task files, those that they include, and Python beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import yaml

from pipeline.common import storage
from pipeline.common.errors import UserError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""As lm-evaluation-harness: what one of the two takes the other may refuse, like tabs."""


def files_of_tasks(names: Iterable[str]) -> Iterator[Path]:
    """Files of tasks that are named by their files; what is installed and named by a name alone is left out.

    Args:
        names: of tasks, or paths of task files, relative to the working directory.
    """
    yield from _executed(Path(os.path.abspath(name)) for name in names if name.endswith((".yaml", ".yml")))


def files_of_folder(folder: Path) -> Iterator[Path]:
    """Files of all tasks of a folder, with the folders in which a task file would be found."""
    yield folder
    yield from (path for path in folder.glob("**/") if path.is_dir())
    yield from _executed(sorted(folder.glob("**/*.yaml")))


def _executed(files: Iterable[Path]) -> Iterator[Path]:
    """Task files, the files that they include, and the modules whose functions they name, with what is beside these.

    As lm-evaluation-harness does it: paths are relative to the file, links resolved.
    """
    todo, seen = list(files), set[Path]()
    ours = _installed()
    while todo:
        file = todo.pop()
        yield file  # as it is named, since a link on the way may be somebody else's
        real = file.resolve()
        if real in seen or any(real.is_relative_to(folder) for folder in ours):
            continue
        seen.add(real)
        includes, functions = _named(real)
        todo += [real.parent / name for name in includes]
        for name in functions:
            module = real.parent / f"{name.rpartition('.')[0].replace('.', '/')}.py"
            yield module  # one that is missing could be added
            yield from _beside(module.resolve().parent)


def _beside(folder: Path) -> Iterator[Path]:
    """Python in a folder, which a module there may import, and its bytecode."""
    yield from folder.glob("*.py")
    yield from folder.glob("__pycache__")
    yield from folder.glob("__pycache__/*")


def _named(file: Path) -> tuple[list[str], list[str]]:
    """Files that a task file includes, and functions (`!function`) that it names; none of one that is not there.

    Includes are looked for in every mapping, since another one may be merged into the file's (`<<`).

    Raises:
        UserError: it cannot be read, so nobody can say what it executes.
    """
    try:
        root = yaml.compose(storage.read_bytes(file, storage.SMALL_BYTES), Loader=_LOADER)
    except OSError:
        return [], []
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{file} cannot be read as YAML ({reason}), so what it executes is not known") from None
    nodes = list(_nodes(root))
    includes: list[str] = []
    for key, value in (pair for node in nodes if isinstance(node, yaml.MappingNode) for pair in node.value):
        if key.value == "include":
            found = value.value if isinstance(value, yaml.SequenceNode) else [value]
            includes += [each.value for each in found if isinstance(each, yaml.ScalarNode)]
    scalars = [node for node in nodes if isinstance(node, yaml.ScalarNode)]
    return includes, [node.value for node in scalars if node.tag == "!function"]


def _nodes(root: yaml.Node | None) -> Iterator[yaml.Node]:
    todo, seen = [root] if root else [], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            todo += [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            todo += node.value


def _installed() -> list[Path]:
    """Folders of the harness itself, which is installed as all packages are."""
    spec = find_spec("lm_eval")
    return [Path(folder).resolve() for folder in (spec.submodule_search_locations or ()) if spec] if spec else []
