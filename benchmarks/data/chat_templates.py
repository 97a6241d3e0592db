"""Ids and masks of chat templates of others, beside those of transformers.

    pip download --no-deps trl==1.16.0 && unzip trl-*.whl 'trl/chat_templates/*'
    python -m benchmarks.data.chat_templates trl/chat_templates

Reads the templates of a folder (`*_training.jinja` by default), makes a byte-level tokenizer whose special tokens are
those that a template writes, renders conversations of our own (turns, system, tools, thinking) with both, and compares
text, ids and mask. Prints a row for each template, with a hash of what both give; no text of a template.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import xxhash
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import chat_template_utils

from pipeline.common.errors import UserError
from pipeline.config.data import SourceConfig
from pipeline.config.tokenizer import TokenizerConfig
from pipeline.data.sources.records import UnusableRecord
from pipeline.data.sources.templates.chat_template import ChatTemplate
from pipeline.data.tokenization.chat_encoding import ChatRules, encode_chat
from pipeline.data.tokenization.tokenizer import Tokenizer

_TOKEN = re.compile(
    r"<[|\uff5c][^<>{}'\"\s]{1,60}[|\uff5c]>|<[a-z_]+of_[a-z]+>|<bos>|<eos>|\[/?[A-Z_]+\]|<[a-z_]+\|>|<\|[a-z_]+>|</s>|<s>"
)
_BYTES = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
"""Byte of each symbol of a byte-level vocabulary."""
_ENDS = ("<eos>", "<|endoftext|>")
_DAY = "2026-01-02"
_CALL = {"type": "function", "id": "a12345678", "function": {"name": "distance", "arguments": {"to": "town", "n": 2}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "distance",
        "description": "Distance to a place.",
        "parameters": {
            "type": "object",
            "properties": {"to": {"type": "string", "description": "place"}, "n": {"type": "integer"}},
            "required": ["to"],
        },
    },
}


def _says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "turn": {"messages": [_says("user", "How far?"), _says("assistant", "Two miles, don't ask.")]},
    "turns": {
        "messages": [
            _says("user", "How far is it?"),
            _says("assistant", "Zwölf Meilen 🙂"),
            _says("user", "And back?"),
            _says("assistant", "The same.\n\nAs always."),
        ]
    },
    "system": {
        "messages": [_says("system", "Be brief."), _says("user", "  How far? "), _says("assistant", " 2 ")],
    },
    "thinking": {
        "messages": [
            _says("user", "How far?"),
            _says("assistant", "Near.", reasoning_content="It is in town."),
            _says("user", "Sure?"),
            _says("assistant", "Yes.", reasoning_content="I looked."),
        ]
    },
    "tools": {
        "messages": [
            _says("user", "How far?"),
            _says("assistant", "", tool_calls=[_CALL]),
            _says("tool", "2", name="distance", tool_call_id="a12345678"),
            _says("assistant", "Two."),
        ],
        "tools": [_TOOL],
    },
}


class _Day(datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> _Day:
        return cls.fromisoformat(_DAY)


def write_tokenizer(folder: Path, template: str) -> None:
    """A tokenizer of bytes, in which the tokens that a template writes are special."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    engine = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[])
    )
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    written = sorted({*_TOKEN.findall(template), *_ENDS, "<bos>"})
    engine.add_special_tokens(written)
    engine.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    names = {"pad_token": "<eos>", "unk_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | names))
    (folder / "chat_template.jinja").write_text(template)


def _in_parts(conversation: dict[str, Any]) -> dict[str, Any]:
    """A conversation whose contents are lists of parts."""
    messages = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in conversation["messages"]
    ]
    return {**conversation, "messages": messages}


def _complete(mask: list[int], theirs: Any, ids: list[int]) -> int:
    """Mark all tokens of a character whose first one is: transformers marks the first of the last one of a span alone.

    Returns how many were added.
    """
    text, added = [theirs.decode([number]) for number in ids], 0
    for place in range(1, len(mask)):
        is_inside = text[place] == "\ufffd" and _BYTES.get(theirs.convert_ids_to_tokens(ids[place]), 0) & 0xC0 == 0x80
        if is_inside and mask[place - 1] and not mask[place]:
            mask[place], added = 1, added + 1
    return added


def compare(template: str, folder: Path) -> dict[str, Any]:
    """Compare what both make of each conversation; a row of results."""
    write_tokenizer(folder, template)
    section = {"format": "openai", "tools_key": "tools", "template": "tokenizer", "date": _DAY}
    source = {"name": "s", "type": "jsonl", "paths": ["/x"], "chat": section}
    tokenizer_config = TokenizerConfig(path=folder, end_of_document="<|endoftext|>")
    ours = ChatTemplate.of(SourceConfig.model_validate(source), tokenizer_config)
    tokenizer = Tokenizer.load(folder, tokenizer_config)
    theirs = AutoTokenizer.from_pretrained(folder)
    row: dict[str, Any] = {"equal": [], "different": [], "refused": [], "rejected": [], "tokens": 0, "trained": 0}
    row |= {"completed": 0, "parts": False}
    try:
        ours.check("s")
        row["check"] = "ok"
    except UserError as error:
        row["check"] = str(error).partition("chat.template: ")[2][:90]
    digest = xxhash.xxh3_64()
    try:
        theirs.apply_chat_template(CONVERSATIONS["turn"]["messages"], tokenize=False)
    except Exception:  # a template that wants contents as parts
        row["parts"] = True
    for name, plain in CONVERSATIONS.items():
        conversation, expected = _in_parts(plain) if row["parts"] else plain, None
        try:
            expected = theirs.apply_chat_template(
                conversation["messages"],
                tools=conversation.get("tools"),
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids, mask = expected["input_ids"], expected["assistant_masks"]
        except Exception:  # whatever a template raises
            ids, mask = [], []
        try:
            found = encode_chat(tokenizer, *ours.render(conversation), ChatRules(masks=True))
        except UnusableRecord as error:
            row["refused" if expected is None else "rejected"].append(f"{name} ({error.reason})")
            continue
        own = (found.ids.tolist(), list(found.mask)[:-1])
        if len(ids) == len(own[0]) + 1:  # it ends with the end-of-document token
            own = ([*own[0], tokenizer.end_of_document], list(found.mask))
        if expected is not None and own[0] == ids:
            row["completed"] += _complete(mask, theirs, ids)
        is_equal = expected is not None and own == (ids, mask)
        row["equal" if is_equal else "different"].append(name)
        row["tokens"], row["trained"] = row["tokens"] + len(own[0]), row["trained"] + sum(own[1])
        digest.update(json.dumps(own).encode())
    return row | {"hash": digest.hexdigest()}


def main() -> None:
    """Print a row for each template."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pattern", default="*_training.jinja")
    options = parser.parse_args()
    different = 0
    print(f"{'template':44} equal of  tokens trained  hash              check; rejected or refused")
    for path in sorted(options.folder.glob(options.pattern)):
        with tempfile.TemporaryDirectory() as place, mock.patch.object(chat_template_utils, "datetime", _Day):
            row = compare(path.read_text(), Path(place))
        different += len(row["different"])
        compared = len(row["equal"]) + len(row["different"])
        rest = "; ".join([row["check"], *row["rejected"], *(f"both refuse {name}" for name in row["refused"])])
        more = f"; DIFFERENT: {', '.join(row['different'])}" if row["different"] else ""
        counts = f"{len(row['equal']):5} {compared:2} {row['tokens']:7,} {row['trained']:7,}"
        rest += f"; {row['completed']} later bytes of characters completed in theirs" if row["completed"] else ""
        rest += "; contents as parts" if row["parts"] else ""
        print(f"{path.name:44} {counts}  {row['hash']}  {rest}{more}", flush=True)
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
