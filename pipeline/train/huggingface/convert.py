"""Models to Hugging Face's format and from it, a few tensors at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor

from pipeline.common import storage
from pipeline.common.console import progress
from pipeline.common.errors import UserError
from pipeline.common.paths import StrPath
from pipeline.common.run_files import EXPORT_ORIGIN
from pipeline.common.versions import versions
from pipeline.config.eval import GenerateConfig
from pipeline.config.load import dump_values
from pipeline.data.chat.kept_template import keep_template, with_tokens
from pipeline.data.chat.template_files import has_template, read_template, template_of_tokenizer, tokens_of_tokenizer
from pipeline.data.tokenization.chat_prompts import ChatPrompts
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from pipeline.train.checkpoint.committed import Files
from pipeline.train.checkpoint.export import START_TOKEN, free_folder, made_folder
from pipeline.train.checkpoint.exported import Weights
from pipeline.train.checkpoint.exported_optimizer import OPTIMIZER
from pipeline.train.checkpoint.tensors import Stored, groups, row_ranges
from pipeline.train.checkpoint.weight_files import split_into_files, write_weight_files
from pipeline.train.checkpoint.weight_source import WeightSource, open_weights
from pipeline.train.huggingface.card import CARD_FILE, model_card
from pipeline.train.huggingface.config_source import Json
from pipeline.train.huggingface.configs import to_hf_config
from pipeline.train.huggingface.folder import (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_CONFIG_FILE,
    HuggingFaceFolder,
    read_json,
)
from pipeline.train.huggingface.foreign_model import ForeignModel
from pipeline.train.huggingface.names import TensorRule
from pipeline.train.huggingface.pooled import write_pooled
from pipeline.train.huggingface.tensors import TensorMapping, map_tensors
from pipeline.train.huggingface.untrained_tokens import untrained_note
from pipeline.train.model.decoder_spec import decoder_spec

MODEL_FILE = "model.yaml"
"""File that a run file includes to train on from a converted model."""
Dtype = Literal["fp32", "bf16", "fp16"]
_MASK_TOKENS = ("<mask>", "[MASK]")
"""Usual names of the token that stands for masked ones."""
_PADDING_TOKENS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>")
"""Usual names of the token that fills texts up."""
_MARKS = re.compile(r"<\|[^<>|\s]+\|>")
"""What looks like a special token in a chat template."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Keys of `generate:` that generation_config.json has under the same names."""
_NO_TOKENIZER = "the tokenizer was left out: set tokenizer.path to the one that the weights were trained with"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ConvertedOptimizer:
    """The optimizer of a model of another program."""

    masters: ForeignModel
    """The weights that it updates, in fp32."""
    moments: Mapping[str, ForeignModel]
    """Its moments, by the names of torch's AdamW."""
    about: Mapping[str, Any]
    """What export.json has of it: step, tokens and settings."""
    run_file: Mapping[str, Any]
    """Values of `train.optimizer`."""


def to_hf(
    source: StrPath,
    to: StrPath,
    *,
    step: int | None = None,
    weights: Weights = "model",
    dtype: Dtype | None = None,
    max_shard: int | None = 5 * 10**9,
    pooled: bool = False,
    chat_template: Path | None = None,
    full: bool = True,
    console: Console,
) -> str:
    """Write a folder that transformers loads, a model and its `AutoTokenizer`; says what it wrote.

    Args:
        source: a run folder, a checkpoint's, or an exported one.
        to: the folder that is made.
        step: of a run folder; by default the latest.
        weights: those that were trained, or their moving average.
        dtype: of the weights; by default as they are stored.
        max_shard: bytes of tensors in a file at most.
        pooled: add the files with which sentence-transformers makes a vector of a text.
        chat_template: a file in Jinja, by which `AutoTokenizer` makes a text of a conversation.
        full: as for `open_weights`.
        console: for the progress bar.

    Raises:
        UserError: there are no such weights, they are damaged, no supported family computes this model, or `to` is
            there already.
        MachineError: `to` cannot be written.
    """
    to = Path(to)
    free_folder(to)
    found = open_weights(source, step, weights, full=full)
    template = found.chat_template if chat_template is None else read_template(chat_template, "--chat-template")
    ends_of_turns, unusable = _ends_of_turns(template, chat_template, found)
    if pooled and found.model.direction == "causal":
        raise UserError(
            "--pooled is for encoders, and model.direction is causal: of a text its last token alone has seen all; "
            "leave the option out"
        )
    vocab_size = found.model.vocab_size or found.tokenizer.vocab_size
    family, values = to_hf_config(found.model, vocab_size, found.positions)
    mtp = None if family.names.mtp else found.model.mtp
    model = found.model if mtp is None else found.model.model_copy(update={"mtp": None})
    mapping = map_tensors(family, decoder_spec(model, vocab_size, model.max_positions or found.positions))
    kinds = {name: found.tensors[rule.ours[0]].dtype for name, rule in mapping.theirs.items()}
    uncast = mapping.uncast
    tensors = {
        name: Stored(shape, kinds[name] if not dtype else torch.float32 if name in uncast else _DTYPES[dtype])
        for name, shape in mapping.their_shapes.items()
    }
    total = sum(each.bytes for each in tensors.values())
    shards = split_into_files(tensors, max_shard)
    name = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with storage.writing(f"{to}"), made_folder(Path(os.path.abspath(to))) as tmp:
        with progress(console, "to-hf (bytes)", total) as advance:
            write_weight_files(tmp, shards, lambda wanted: _their_tensors(found, mapping, wanted), advance)
        ends = {"bos_token_id": found.tokenizer.end_of_document, "eos_token_id": found.tokenizer.end_of_document}
        if found.model.encoder is not None:
            start = ends["eos_token_id"] if found.start_token is None else found.start_token
            # transformers fills decoders' inputs up with a token, too, where it makes them of targets.
            ends |= {"decoder_start_token_id": start, "pad_token_id": start}
        storage.put_json(tmp / CONFIG_FILE, {**values, **ends, "torch_dtype": name})
        padding = _padding(found, ends.get("decoder_start_token_id"))
        if found.model.direction == "causal":
            fills = ends["eos_token_id"] if padding is None else padding[1]
            stops = {"eos_token_id": [*ends_of_turns, ends["eos_token_id"]]} if ends_of_turns else {}
            settings = {**ends, **stops, "pad_token_id": fills, **_sampling(found.config or {})}
            storage.put_json(tmp / GENERATION_FILE, settings)
        found.tokenizer.save(tmp)
        keep_template(tmp, template)
        _add_nothing(tmp / TOKENIZER_FILE)
        about_tokens = _tokenizer_config(found, None if padding is None else padding[0], pooled)
        storage.put_json(tmp / TOKENIZER_CONFIG_FILE, about_tokens)
        if pooled:
            write_pooled(tmp, model.dim, found.positions)
        facts = {
            "parameters": f"{sum(each.numel for each in tensors.values()):,}, {name}",
            "context": f"{found.positions:,} tokens, the longest of its training",
        }
        storage.put(tmp / CARD_FILE, model_card(to.name, found, family, facts, template is not None).encode())
    left_out = "" if mtp is None else f"\nleft out: the {mtp.depth} layers of multi-token prediction (model.mtp)"
    warning = ""
    if family.splits_alike is not None and not family.splits_alike(found.tokenizer.definition):
        warning = (
            f"\nwarning: AutoTokenizer of transformers 5 splits text in the same way for every {family.title}, which "
            f"differs from this tokenizer; use PreTrainedTokenizerFast.from_pretrained({str(to)!r})"
        )
    if family.padding is not None:
        warning += (
            f"\nwarning: transformers takes token {family.padding} for padding in every {family.title}; texts that "
            "have it are computed otherwise there"
        )
    warning += f"\nwarning: {unusable}" if unusable else ""
    if unknown := sorted(set(_MARKS.findall(template or "")) - set(found.tokenizer.added_tokens)):
        warning += (
            f"\nwarning: {chat_template} has {', '.join(unknown)}, which the tokenizer splits as ordinary text; a "
            "token of its own must be in tokenizer.special_tokens before the data is tokenized"
        )
    return (
        f"{to}: {family.architecture} from {found.name}, {len(tensors)} tensors, "
        f"{sum(each.numel for each in tensors.values()):,} parameters in {name}, {total:,} bytes in {len(shards)} "
        f"file{'s' if len(shards) > 1 else ''}{left_out}{warning}"
    )


def from_hf(
    folder: StrPath,
    to: StrPath,
    *,
    end_of_document: str | None = None,
    weights_only: bool = False,
    max_shard: int | None = 5 * 10**9,
    ignore: Collection[str] = (),
    console: Console,
) -> str:
    """Write a folder that `train.init_from.path` takes, with the `model:` section that goes with it.

    Args:
        folder: a downloaded model.
        to: the folder that is made.
        end_of_document: token; by default the one that ends a text for the model.
        weights_only: leave the tokenizer out, which then need not be there; it counts as unknown from then on.
        max_shard: bytes of tensors in a file at most.
        ignore: keys of config.json that the user says do not matter.
        console: for the progress bar.

    Returns:
        What was written, in words.

    Raises:
        UserError: it is not a model, or not one that is computed here, or `to` is there already.
        MachineError: `to` cannot be written.
    """
    to = Path(to)
    free_folder(to)
    found = HuggingFaceFolder(folder, ignore)
    tokenizer = _tokenizer_of(found, end_of_document, weights_only)
    template = None if weights_only else _template_of(found.folder)
    quantized = (
        f"; decoded from {found.quantization.method} (exports are never quantized)" if found.quantization else ""
    )
    done = write_converted(
        found, tokenizer, to, kind="from-hf", max_shard=max_shard, console=console, chat_template=template
    )
    if tokenizer is not None and template is not None:
        done += untrained_note(found, tokenizer, template)
    return done + quantized


def write_converted(
    found: ForeignModel,
    tokenizer: Tokenizer | None,
    to: Path,
    *,
    kind: str,
    max_shard: int | None,
    console: Console,
    chat_template: str | None = None,
    optimizer: ConvertedOptimizer | None = None,
) -> str:
    """Write a folder that `train.init_from.path` takes; says what it wrote.

    Args:
        found: the model.
        tokenizer: its own; None: it is unknown.
        to: the folder that is made.
        kind: of conversion, which the folder records.
        max_shard: bytes of tensors in a file at most.
        console: for the progress bar.
        chat_template: of the model.
        optimizer: its optimizer, whose weights are taken; None: it is left out.
    """
    weights = found if optimizer is None else optimizer.masters
    moments = {} if optimizer is None else optimizer.moments
    total = sum(each.bytes for source in (weights, *moments.values()) for each in source.tensors.values())
    with storage.writing(f"{to}"), made_folder(Path(os.path.abspath(to))) as tmp:
        with progress(console, f"{kind} (bytes)", total) as advance:
            files = _write_tensors(weights, tmp, max_shard, advance)
            of_moments: dict[str, Files] = {}
            for name, source in moments.items():
                storage.make_below(tmp, tmp / OPTIMIZER / name)
                of_moments[name] = _write_tensors(source, tmp / OPTIMIZER / name, max_shard, advance)
        if tokenizer is not None:
            tokenizer.save(tmp)
            keep_template(tmp, chat_template)
        section = run_file_section(found, tokenizer, Path(os.path.abspath(to)), optimizer)
        storage.put(tmp / MODEL_FILE, section.encode())
        storage.put_json(
            tmp / EXPORT_ORIGIN,
            {
                "kind": kind,
                "run": str(found.folder),
                "checkpoints": [],
                "weights": "model",
                "tokens": None,
                "positions": found.positions,
                "fingerprints": {
                    "model": found.model.model_dump(mode="json"),
                    "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
                },
                "versions": versions(),
                "files": files,
                **({} if found.start_token is None else {START_TOKEN: found.start_token}),
                **({} if optimizer is None else {OPTIMIZER: {**optimizer.about, "files": of_moments}}),
            },
        )
    return (
        f"{to}: {found.title}{'' if optimizer is None else ' with its optimizer'}, {len(found.tensors)} tensors, "
        f"{sum(each.numel for each in found.tensors.values()):,} parameters, {total:,} bytes; a run file that includes "
        f"{to / MODEL_FILE} continues training from there" + ("" if tokenizer else f"; {_NO_TOKENIZER}")
    )


def _write_tensors(source: ForeignModel, to: Path, max_shard: int | None, advance: Callable[[int], None]) -> Files:
    shards = split_into_files(source.tensors, max_shard)
    return write_weight_files(to, shards, lambda wanted: _our_tensors(source, wanted), advance)


def describe(
    folder: Path, *, end_of_document: str | None = None, weights_only: bool = False, ignore: Collection[str] = ()
) -> str:
    """The part of a run file that goes with a downloaded model; every name and shape of its files is checked."""
    found = HuggingFaceFolder(folder, ignore)
    _ = found.tensors
    return run_file_section(found, _tokenizer_of(found, end_of_document, weights_only), None)


def run_file_section(
    found: ForeignModel,
    tokenizer: Tokenizer | None,
    converted: Path | None,
    optimizer: ConvertedOptimizer | None = None,
) -> str:
    """`model:`, `tokenizer:` and `train.init_from` as YAML.

    Args:
        found: the model.
        tokenizer: its own; None: it is unknown, and the section leaves it to the run file.
        converted: the folder of its weights by our names; None: they are read where they are.
        optimizer: its optimizer, if that is converted, too.
    """
    model = found.model.model_dump(mode="json", exclude_defaults=True)
    init_from: dict[str, Any] | None = {"path": str(converted)} if converted else found.in_place
    if init_from is not None and optimizer is not None:
        init_from |= {"optimizer": True}
    value: dict[str, Any] = {"model": model}
    head = f"# {found.family.architecture}; contexts of up to {found.positions:,} tokens (train.sequence_length).\n"
    if hint := found.hint:
        head += f"# {hint}.\n"
    if left_out := found.left_out:
        head += f"# {len(left_out)} tensors for tokens further ahead are left out, such as {left_out[0]}.\n"
    if found.start_token is not None:
        token = "" if tokenizer is None else f", {tokenizer.decode([found.start_token])!r}"
        head += (
            f"# The decoder begins with token {found.start_token}{token}: to train on, name it as "
            "train.objective.start_token and in tokenizer.special_tokens, with the sentinels.\n"
        )
    if found.missing_mtp:
        head += "# The files have no layers of multi-token prediction (num_nextn_predict_layers).\n"
    if tokenizer is None:
        head += f"# {_NO_TOKENIZER[0].upper()}{_NO_TOKENIZER[1:]}.\n"
    else:
        value["tokenizer"] = {
            "path": str(converted or found.tokenizer_path.absolute()),
            "end_of_document": tokenizer.end_of_document_token,
        }
    if init_from and (tokenizer is not None or converted):  # `init_from.hf` compares tokenizers
        value["train"] = {"init_from": init_from}
    if optimizer is not None:
        value.setdefault("train", {})["optimizer"] = optimizer.run_file
    return head + dump_values(value)


def _tokenizer_of(found: HuggingFaceFolder, end_of_document: str | None, weights_only: bool) -> Tokenizer | None:
    if weights_only:
        if end_of_document is not None:
            raise UserError(
                f"--end-of-document {end_of_document!r} is for the tokenizer, which --weights-only leaves out; set "
                "tokenizer.end_of_document in the run file"
            )
        return None
    from pipeline.config.tokenizer import TokenizerConfig

    given = TokenizerConfig(path=found.folder, end_of_document=end_of_document) if end_of_document else None
    tokenizer = found.tokenizer(given)
    rows = found.spec.vocab_size
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"{found.folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but the model has {rows} rows "
            "for them; do the files belong together?"
        )
    return tokenizer


def _their_tensors(
    source: WeightSource, mapping: TensorMapping, wanted: Mapping[str, Stored]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of theirs in order; a group of them at a time is in memory, of stacked experts some."""
    for group in groups(wanted):
        rules = {name: mapping.theirs[name] for name in group}
        whole = {ours: source.tensors[ours] for rule in rules.values() if rule.expert is None for ours in rule.ours}
        experts = _Experts(source, rules.values())
        stacked = any(rule.experts == "stacked" for rule in rules.values())
        for rows in row_ranges(group) if stacked else (None,):
            values = source.read(whole, rows)
            for name, each in group.items():
                rule = rules[name]
                parts = [values[ours] if rule.expert is None else experts.of(ours, rule.expert) for ours in rule.ours]
                yield name, mapping.joined(name, parts).to(each.dtype)


class _Experts:
    """Matrices of experts that are numbered in a group of tensors, which is what is read of ours."""

    def __init__(self, source: WeightSource, rules: Iterable[TensorRule]) -> None:
        numbers: dict[str, list[int]] = {}
        for rule in rules:
            if rule.expert is not None:
                for ours in rule.ours:
                    numbers.setdefault(ours, []).append(rule.expert)
        self._first = {ours: min(experts) for ours, experts in numbers.items()}
        self._values = {
            ours: source.read({ours: source.tensors[ours]}, slice(min(experts), max(experts) + 1))[ours]
            for ours, experts in numbers.items()
        }

    def of(self, ours: str, expert: int) -> Tensor:
        """Tensor of one expert."""
        return self._values[ours][expert - self._first[ours]]


def _our_tensors(source: ForeignModel, wanted: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    for group in groups(wanted):
        for rows in row_ranges(group):
            yield from source.read(group, rows).items()


def _add_nothing(file: Path) -> None:
    """Let an exported tokenizer add nothing before or after a text, like a token for its beginning, as in training."""
    state = read_json(file)
    found = state.get("post_processor")
    parts = (found.get("processors") or [found]) if found else []
    kept = [part for part in parts if part["type"] == "ByteLevel"]  # which only says where a token lies in the text
    if len(kept) != len(parts):
        storage.put_json(file, {**state, "post_processor": kept[0] if kept else None})


def _tokenizer_config(found: WeightSource, padding: str | None, pooled: bool) -> Json:
    tokenizer, more = found.tokenizer, dict[str, str]()
    if found.model.direction == "both":
        masks = [token for token in _MASK_TOKENS if token in tokenizer.special_tokens]
        more |= {"mask_token": masks[0]} if masks else {}
    if padding is None and pooled:  # texts of a batch are filled up
        padding = tokenizer.end_of_document_token
    more |= {} if padding is None else {"pad_token": padding}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.end_of_document_token,
        "eos_token": tokenizer.end_of_document_token,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": found.positions,
        **more,
    }


def _padding(found: WeightSource, start: int | None) -> tuple[str, int] | None:
    """The token that fills texts up, and its id: a declared one by its name, or that with which a decoder begins."""
    if start is not None:
        return found.tokenizer.decode([start]), start
    tokens = found.tokenizer.special_tokens
    return next(((token, tokens[token]) for token in _PADDING_TOKENS if token in tokens), None)


def _sampling(config: Mapping[str, Any]) -> Json:
    """Values of `generate:` in a run file that are not its defaults, as generation_config.json says them."""
    section = config.get("generate") or {}
    values = {
        key: section[key]
        for key in _SAMPLING
        if section.get(key) not in (None, GenerateConfig.model_fields[key].default)
    }
    if values.get("temperature") == 0:
        del values["temperature"]
        return {**values, "do_sample": False}
    return {**values, "do_sample": True} if values else {}


def _ends_of_turns(template: str | None, file: Path | None, found: WeightSource) -> tuple[tuple[int, ...], str | None]:
    """Ids of tokens that end a turn by a template, and why a template beside the weights cannot be used."""
    if template is None:
        return (), None
    place = found.name if file is None else f"--chat-template {file}"
    try:
        chat = ChatPrompts(template, found.tokenizer, place)
    except UserError as error:
        if file is not None:
            raise
        return (), str(error)
    chat.close()
    return chat.end_tokens, None


def _template_of(folder: Path) -> str | None:
    """The chat template of a downloaded model; None if it has none."""
    if not has_template(folder):
        return None
    return with_tokens(template_of_tokenizer(folder, str(folder)), tokens_of_tokenizer(folder))
