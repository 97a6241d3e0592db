"""The model card of an export (README.md): what is known of the model. Its licence is the user's to choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from pipeline.common.format import percent, table
from pipeline.common.hashing import value_hash
from pipeline.data.order.blend import UNIT
from pipeline.data.tokenization.definition import SPLIT
from pipeline.data.tokenization.tokenizer import Tokenizer
from pipeline.train.checkpoint.weight_source import WeightSource
from pipeline.train.huggingface.family import Family

CARD_FILE = "README.md"
_LICENCE = """## Licence

None is set. Choose one that agrees with the licences of the data, name it as `license:` at the top of this file, and
say here for what the model is meant, and for what not.
"""


def model_card(title: str, found: WeightSource, family: Family, facts: Mapping[str, str], chat: bool) -> str:
    """README.md of an export. It has names of the run and its sources, and no paths, as the folder may be published.

    Args:
        title: Name of the model.
        found: Its weights and their origin.
        family: The family that it is exported as.
        facts: Further rows of its first table.
        chat: The export has a chat template.
    """
    masked = found.model.direction != "causal"
    task = "fill-mask" if masked else "text-generation" if found.model.encoder is None else "text2text-generation"
    rows = {"architecture": f"`{family.architecture}`", **facts, **dict(_origin(found)), **dict(_tokenizer(found))}
    parts = [f"---\nlibrary_name: transformers\npipeline_tag: {task}\n---\n\n# {title}\n", _table(rows)]
    if data := _data(found.origin):
        parts.append(f"## Data\n\n{data}")
    if not masked:
        what = (
            "`chat_template.jinja` is the template of its conversations."
            if chat
            else "This is a base model: it continues texts, and has no chat template."
        )
        parts.append(f"## Use\n\n{what}\n{_for_llama_cpp(found.tokenizer)}")
    return "\n".join([*parts, _LICENCE])


def llama_cpp_pre_tokenizer(definition: str) -> str | None:
    """llama.cpp's name for how a tokenizer splits text (`tokenizer.ggml.pre`), where it is known to be the same.

    Args:
        definition: Its `tokenizer.json`.
    """
    state = orjson.loads(definition)
    pre, model = state.get("pre_tokenizer") or {}, state["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback") or state.get("normalizer"):
        return None
    steps = [
        (each.get("type"), each.get("pattern"), each.get("behavior"), each.get("invert"), each.get("add_prefix_space"))
        for each in pre.get("pretokenizers") or [pre]
    ]
    regex = (pre.get("pretokenizers") or [pre])[-1].get("use_regex")
    if steps == [("ByteLevel", None, None, None, False)] and regex is not False and not model.get("ignore_merges"):
        return "gpt-2"
    of_llama_3 = ("Split", {"Regex": SPLIT}, "Isolated", False, None)
    if steps == [of_llama_3, ("ByteLevel", None, None, None, False)] and regex is False:
        return "llama-bpe" if model.get("ignore_merges") else "smaug-bpe"
    return None


def _for_llama_cpp(tokenizer: Tokenizer) -> str:
    name = llama_cpp_pre_tokenizer(tokenizer.definition)
    if name is None:
        return ""
    return f"Where llama.cpp's converter does not know the tokenizer, its `tokenizer.ggml.pre` is `{name}`.\n"


def _table(rows: Mapping[str, str]) -> str:
    return table(["", ""], rows.items()) + "\n"


def _origin(found: WeightSource) -> Iterator[tuple[str, str]]:
    origin, config = found.origin, found.config or {}
    converted = origin.get("kind") == "from-hf"
    if name := Path(str(origin["run"])).name:  # it may be relative to a folder that nobody knows any more
        yield "converted from" if converted else "run", f"`{name}`"
    if converted:
        return
    checkpoints = [f"step {each['step']:,} (`{each['fingerprint']}`)" for each in origin["checkpoints"]]
    average = "moving average of the weights at " if origin["weights"] == "ema" else ""
    yield "checkpoint" if len(checkpoints) == 1 else "mean of", average + ", ".join(checkpoints)
    if isinstance(origin.get("tokens"), int):
        yield "trained on", f"{origin['tokens']:,} tokens"
    train = config.get("train") or {}
    begin = train.get("init_from") or {}
    if start := begin.get("path") or begin.get("hf"):
        yield "began from", f"the weights of `{Path(start).name}`"
    yield "objective", f"`{(train.get('objective') or {}).get('type', 'causal')}`"
    if "journal" in origin:
        yield "order of the data", f"journal `{value_hash(origin['journal'])}`"
    names = ("pipeline", "torch", "python")
    yield "software", ", ".join(f"{name} {origin['versions'][name]}" for name in names if name in origin["versions"])


def _tokenizer(found: WeightSource) -> Iterator[tuple[str, str]]:
    tokenizer = found.tokenizer
    yield "tokenizer", f"{tokenizer.vocab_size:,} ids, fingerprint `{tokenizer.fingerprint}`"
    yield (
        "end of a document",
        f"`{tokenizer.end_of_document_token}`, also as `bos_token`; nothing is put before or after a text",
    )


def _data(origin: Mapping[str, Any]) -> str:
    """The sources of the latest part of a run; empty where they are not known."""
    hashes = origin["fingerprints"].get("data") or {}
    segments = (origin.get("journal") or {}).get("segments") or []
    if not hashes or not segments:
        return ""
    sources = segments[-1]["sources"]
    rows = [
        [
            f"`{name}`",
            percent(sources[name]["weight"] / UNIT, 2) if name in sources else "none",
            f"{sources[name]['tokens']:,}" if name in sources else "",
            f"`{digest}`",
        ]
        for name, digest in sorted(hashes.items())
    ]
    more = "" if len(segments) == 1 else f"\n\nThe blend is that of the last of {len(segments)} parts of the run."
    return table(["source", "of the blend", "tokens in it", "hash"], rows) + more + "\n"
