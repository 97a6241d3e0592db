"""The chat template beside the weights of a model, from a dataset to checkpoints, exports and servers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.common import storage
from pipeline.data.chat.template_files import TEMPLATE_FILE, TOKEN_NAMES, read_template


def with_tokens(template: str, tokens: Mapping[str, str]) -> str:
    """A template that sets the tokens that it names, as programs differ in what they know of them.

    Args:
        template: as it was written.
        tokens: texts of tokens, by name.
    """
    used = [name for name in TOKEN_NAMES if name in tokens and name in template]
    sets = "".join(f"{{% set {name} = {json.dumps(tokens[name], ensure_ascii=False)} %}}" for name in used)
    # Programs trim the line end behind a block, so the rest begins a line, as it does alone.
    return f"{sets}\n{template}" if sets else template


def keep_template(folder: Path, template: str | None) -> None:
    """Write the template of a model beside its tokenizer, if there is one."""
    if template is not None:
        storage.put(folder / TEMPLATE_FILE, template.encode())


def find_template(folder: Path) -> str | None:
    """The template beside the weights of a model; None if there is none."""
    file = folder / TEMPLATE_FILE
    return read_template(file, str(file)) if file.is_file() else None
