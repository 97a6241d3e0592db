"""Chat templates of our own, a tokenizer with their special tokens, and records of conversations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL = ["<|endoftext|>", "<|start|>", "<|end|>", "<|call|>", "<bos>"]
_HEAD = "{%- for message in messages %}<|start|>{{ message.role }}\n"
_BODY = "{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
_OTHER = "{{ message.content }}<|end|>"
_TURNS = (
    _HEAD
    + "{%- if message.role == 'assistant' %}"
    + _BODY
    + "{%- else %}"
    + _OTHER
    + "{%- endif %}{{ '\n' }}{%- endfor %}"
)
TEMPLATES = {
    "plain": _TURNS,
    "tools": """{%- if tools %}<|start|>system
Tools:
{% for tool in tools %}{{ tool | tojson(indent=1) }}
{% endfor %}<|end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'tool' %}<|start|>tool {{ message.name }}
{{ message.content }}<|end|>
{% elif message.role == 'assistant' %}<|start|>assistant
{% generation %}{{ message.content }}{% for call in message.tool_calls or [] %}<|call|>{{ call.function.name }}
{{- call.function.arguments | tojson }}{% endfor %}<|end|>{% endgeneration %}

{% else %}<|start|>{{ message.role }}
{{ message.content | trim }}<|end|>
{% endif %}{%- endfor %}""",
    "thinking": """{%- set ns = namespace(last=-1) %}{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{%- endfor %}
{%- for message in messages %}<|start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}
{%- if loop.index0 > ns.last and message.reasoning_content %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content.split('</think>')[-1] | trim }}<|end|>{% endgeneration %}
{% else %}{{ message.content }}<|end|>{% endif %}
{% endfor %}""",
    "no markers": _TURNS.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "date": "<|start|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|end|>\n" + _TURNS,
    "double bos": "{{ bos_token }}" + _TURNS,
    "untrained stop": _TURNS.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>"),
}
_WORDS = ["far", "ünï", "漢字", "🙂", "42", "don't", "\n", "  two", "e\u0301", "<think>", "mile"]


def write_tokenizer(folder: Path, *, template: str | None = None, end: str = "<|endoftext|>") -> Path:
    """A folder with a byte-level tokenizer whose template adds a token, as that of many families does."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    merges = [("f", "a"), ("fa", "r"), ("m", "i"), ("Ġ", "t"), ("e", "r"), ("\u010a", "\u010a")]
    vocab |= {"".join(pair): len(alphabet) + number for number, pair in enumerate(merges)}
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    engine.add_special_tokens(SPECIAL)
    bos = engine.token_to_id("<bos>")
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", bos)]
    )
    engine.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": end, "special": True},
        "pad_token": end,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Records in the format of OpenAI: of several turns, some with tools or thinking."""
    chance = random.Random(seed)

    def words() -> str:
        # A line end at the start would be one token with the one before, which is rejected.
        return " ".join(chance.choices(_WORDS, k=chance.randint(1, 12))).lstrip("\n")

    records = []
    for number in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": words()}] if chance.random() < 0.4 else []
        tools = None
        for _ in range(chance.randint(1, 3)):
            messages.append({"role": "user", "content": words()})
            if chance.random() < 0.3:
                tools = [{"type": "function", "function": {"name": "far", "parameters": {"to": words()}}}]
                call = {"type": "function", "function": {"name": "far", "arguments": {"to": words(), "n": [1, None]}}}
                messages.append({"role": "assistant", "content": words(), "tool_calls": [call]})
                messages.append({"role": "tool", "name": "far", "content": words()})
            answer = {"role": "assistant", "content": words()}
            if chance.random() < 0.4:
                answer["reasoning_content"] = words()
            messages.append(answer)
        records.append({"id": f"c{number}", "messages": messages, "tools": tools})
    return records
