"""Options of a command line or a shell script; nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.common.errors import UserError

_PUNCTUATION = "();|&<>"
_END = ";"
"""The word that ends a command."""
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]{0,256}))?\}?")
_ONLY_VARIABLE = re.compile(r"\$(?:[@*]|(\w+)|\{(\w+)\})")
_ALL_OF = re.compile(r"\$\{\w+\[[@*]\]\}")
"""All entries of a list, whose words were read where it was made."""
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_HAS_OPTIONS = re.compile(r"(?:^|\s)--\w")
_NAME_OF_OPTIONS = re.compile(r".*(ARGS|OPTS|OPTIONS|FLAGS|PARAMS)", re.IGNORECASE)
_LONGEST_WORD = 2**16
_MOST_FILLED = 2**24
_FLAGS = frozenset(
    {
        "bf16",
        "fp16",
        "swiglu",
        "squared_relu",
        "qk_layernorm",
        "add_qkv_bias",
        "apply_layernorm_1p",
        "group_query_attention",
        "sequence_parallel",
        "untie_embeddings_and_output_weights",
        "async_save",
        "deterministic_mode",
        "reset_attention_mask",
        "reset_position_ids",
        "eod_mask_loss",
        "exit_signal_handler",
        "multi_latent_attention",
        "rotary_interleaved",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "override_opt_param_scheduler",
        "log_throughput",
    }
)
"""Options without a value, next to those that begin with `no-`, `disable-` or `use-`."""
_NEGATED = {"disable_bias_linear": "add_bias_linear", "no_use_distributed_optimizer": "use_distributed_optimizer"}


@dataclass
class _Command:
    """Options of a command, or of a text that a variable stands for.

    Attributes:
        script: in Python, that it starts.
        options: names with the words behind them.
    """

    script: str | None = None
    options: list[tuple[str, list[str]]] = field(default_factory=list)


def words_of(text: str, lines: bool = True) -> Iterator[str]:
    """Words of a script: an empty one where an option ends, `;` where a command does.

    Args:
        text: the script.
        lines: a command ends with its line; not so in a text that a variable stands for.

    Raises:
        ValueError: a quotation has no end.
    """
    lexer = shlex.shlex(_prepared(text, lines), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace_split, lexer.commenters = True, ""
    for word in lexer:
        if set(word) <= set(_PUNCTUATION):
            yield _END if set(word) & set(";|&") and not set(word) & set("<>") else ""
        else:
            if len(word) > _LONGEST_WORD:
                raise UserError(f"a word has more than {_LONGEST_WORD:,} letters; write the options out")
            yield word


def _prepared(text: str, lines: bool) -> str:
    """A script without comments and numbers of streams, with `;` where a line ends a command."""
    out: list[str] = []
    quote, at = "", 0
    are_lists = [False]  # for each open parenthesis
    while at < len(text):
        letter, before = text[at], out[-1] if out else "\n"
        if letter == "\\" and quote != "'":
            out.append(" " if text[at + 1 : at + 2] == "\n" else text[at : at + 2])
            at += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (before.isspace() or before in _PUNCTUATION):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        elif letter == "(":
            are_lists.append(before == "=")
        elif letter == ")" and len(are_lists) > 1:
            are_lists.pop()
        elif letter in "<>":
            _drop_number(out)
        elif letter == "\n" and lines and not are_lists[-1]:
            letter = " ; "
        out += letter
        at += 1
    return "".join(out)


def _drop_number(out: list[str]) -> None:
    """Drop the number of a stream (`2>`) at the end of a text."""
    end = len(out)
    while end and out[end - 1].isdigit():
        end -= 1
    if end and out[end - 1].isspace():
        del out[end:]


def read_options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options by name, as argparse of Megatron-LM has them.

    Returns:
        The options, and notes for the user: variables without a value, options given twice, commands left out.

    Raises:
        UserError: values of variables are too long.
        ValueError: a quotation has no end.
    """
    reader = _Reader()
    reader.read(words)
    main = _main([each for each in reader.commands if each.script])
    found: dict[str, Any] = {}
    for command in sorted(reader.commands, key=lambda each: each is main):
        if main and command.script and command is not main:
            if command.options:
                reader.notes[command.script] = f"options of another command are not read, that of {command.script}"
            continue
        own: dict[str, Any] = {}
        for name, values in command.options:
            filled = [reader.filled(value, name) for value in values]
            key, value = _argument(name, [each for each in filled if each])
            own[key] = value
        for key, value in own.items():
            if key in found and found[key] != value:
                option = f"--{key.replace('_', '-')}"
                reader.notes[option] = f"{option}: given as {str(found[key])[:80]} and as {value}, which is taken"
        found |= own
    unknown = [f"--{of}: the value of {name} is not known; write it in" for name, of in reader.unknown.items()]
    return found, [*unknown, *reader.notes.values()]


def _main(commands: list[_Command]) -> _Command | None:
    """The first command that trains; the first one if no name says so."""
    training = (each for each in commands if each.script and "train" in each.script.rpartition("/")[2])
    return next(training, commands[0] if commands else None)


class _Reader:
    """Commands and variables of a script."""

    def __init__(self) -> None:
        self.commands: list[_Command] = []
        self.notes: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self._variables: dict[str, str] = {}
        self._of_options: set[str] = set()
        self._filled = 0

    def read(self, words: Sequence[str], depth: int = 0) -> None:
        """Take in the words of commands."""
        command = _Command()
        self.commands.append(command)
        is_open = False
        for word in words:
            if word.startswith("--") and len(word) > 2:
                name, has_value, value = word[2:].partition("=")
                command.options.append((name, [value] if value else []))
                is_open = not (has_value or _is_flag(name))
            elif assigned := _ASSIGNMENT.fullmatch(word):
                self._assign(assigned[1], assigned[3], bool(assigned[2]), depth)
                is_open = False
            elif word == _END:
                command, is_open = _Command(), False
                self.commands.append(command)
            elif self._are_options(word, command, is_open) or not word or re.fullmatch(r"-[A-Za-z]\w*", word):
                is_open = False
            elif word.endswith(".py"):
                command.script, is_open = command.script or word, False
            elif is_open:
                command.options[-1][1].append(word)

    def _are_options(self, word: str, command: _Command, is_open: bool) -> bool:
        """True for a variable whose value are options, read elsewhere or not known."""
        if _ALL_OF.fullmatch(word):
            return True
        variable = _ONLY_VARIABLE.fullmatch(word)
        name = variable and (variable[1] or variable[2] or "")
        if variable is None or name in self._of_options:
            return variable is not None
        is_last = bool(command.options or command.script) and not is_open
        if name and (name in self._variables or not (is_last or _NAME_OF_OPTIONS.fullmatch(name))):
            return False
        self.notes[word] = f"the options in {word} are not known; write them in"
        return True

    def _assign(self, name: str, value: str, is_more: bool, depth: int) -> None:
        if _HAS_OPTIONS.search(value) and depth == 0:
            self._of_options.add(name)
            self.read(list(words_of(value, lines=False)), depth + 1)  # NAME="--lr 1e-4 --bf16"
            return
        before = self._variables.get(name)
        follows = is_more or any(found[1] == name for found in _VARIABLE.finditer(value))
        value = self.filled(value)
        if is_more:
            value = (before or "") + value
        elif before and before != value and not follows:
            self.notes[f"{name}="] = f"{name} is set to {before[:80]} and to {value[:80]}, which is taken"
        self._count(len(value))
        self._variables[name] = value

    def filled(self, text: str, option: str | None = None) -> str:
        """A text with the values of variables that are known; those that are not are kept with the option."""

        def value(found: re.Match[str]) -> str:
            variable, otherwise = found[1], found[2]
            known = self._variables.get(variable)
            known = otherwise if known is None or "$" in known else known
            if known is None:
                if option is not None:
                    self.unknown[found[0]] = option
                return found[0]
            self._count(len(known))
            return known

        if text.endswith("$") and option is not None:
            self.unknown["$(...)"] = option
        return _VARIABLE.sub(value, text)

    def _count(self, letters: int) -> None:
        self._filled += letters
        if self._filled > _MOST_FILLED:
            raise UserError(f"the values of variables have more than {_MOST_FILLED:,} letters; write the options out")


def _is_flag(name: str) -> bool:
    """True for an option that takes no value."""
    key = name.replace("-", "_")
    return key in _FLAGS or key.startswith(("no_", "disable_", "use_"))


def _argument(name: str, values: list[str]) -> tuple[str, Any]:
    key = name.replace("-", "_")
    if not values:
        if key in _NEGATED:
            return _NEGATED[key], False
        return (key.removeprefix("no_"), False) if key.startswith("no_") else (key, True)
    many = [_value(value) for value in values]
    return key, many[0] if len(many) == 1 else many


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)
