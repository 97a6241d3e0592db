"""A small curated source: documents of which a few are removed, each for a reason that is known."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import orjson
import yaml

from pipeline.config.load import load
from pipeline.config.root import Config
from tests import tiny

WORDS = (
    "the of and to that with have be harbour lantern winter river stone garden letter market silver morning window "
    "teacher journey village mountain captain whisper feather copper orchard shadow bridge basket thunder candle"
).split()


def sentence(chance: random.Random, words: int) -> str:
    """A sentence with stop words."""
    return " ".join(["the", "of", *chance.choices(WORDS, k=words - 2)]).capitalize() + "."


def text(seed: int, sentences: int = 12) -> str:
    """A text that no rule removes."""
    chance = random.Random(seed)
    return "\n".join(sentence(chance, chance.randint(9, 16)) for _ in range(sentences))


def records() -> list[dict[str, Any]]:
    """Documents by their reason, which is the beginning of their ids."""
    found = [{"id": f"good-{number}", "text": text(number)} for number in range(30)]
    found.append({"id": "short", "text": "The sea of words is short."})
    found.append({"id": "exact", "text": text(3)})
    found.append({"id": "near", "text": text(5, 40).replace(" harbour", " port", 5)})
    found.insert(7, {"id": "long-5", "text": text(5, 40)})
    found.append({"id": "brackets", "text": text(90) + "\nThe end of { that }."})
    found.append({"id": "masked", "text": text(91) + "\nWrite to the editor of it: someone@mail.example.org now."})
    found.append({"id": "hostile", "text": "\x1b[31m\u202e short </script>"})
    return found


def run_file(root: Path, lines: list[bytes], changes: dict[str, Any] | None = None) -> Path:
    """A run file whose source `web` has these lines."""
    (root / "web").mkdir(parents=True, exist_ok=True)
    half = len(lines) // 2
    for number, part in enumerate((lines[:half], lines[half:])):
        (root / f"web/part-{number}.jsonl").write_bytes(b"".join(line + b"\n" for line in part))
    values = tiny.values(root)
    curate = {
        "mode": "apply",
        "rules": {"gopher_quality": {"min_words": 20}, "c4": {"min_sentences": None}},
        "duplicates": {"exact": "text", "near": {}},
        "clean": {"pii": {"email": "mask"}},
        "engine": "python",
    }
    source = {"name": "web", "type": "jsonl", "paths": [str(root / "web/*.jsonl")], "metadata": ["url"]}
    values["data"] |= {"sources": [source], "curate": curate | (changes or {})}
    values["data"]["preprocess"] |= {"max_error_rate": 0.5}
    file = root / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def records_with(words: str, id: str) -> list[dict[str, Any]]:
    """`records`, one of them with more words."""
    return [each | {"text": f"{each['text']}\nThe {words}."} if each["id"] == id else each for each in records()]


def curated_config(
    root: Path,
    changes: dict[str, Any] | None = None,
    footer: str = "",
    documents: list[dict[str, Any]] | None = None,
) -> Config:
    """A run whose source has `records` or others, the good ones with a footer, a blank line and a broken one."""
    chosen = records() if documents is None else documents
    found = [each | {"text": each["text"] + footer * each["id"].startswith("good")} for each in chosen]
    lines = [
        orjson.dumps(record | {"url": f"https://www.{number % 3}.example/x"}) for number, record in enumerate(found)
    ]
    lines.insert(4, b"")
    lines.insert(9, b'{"id": "broken", "text": ')
    return load(run_file(root, lines, changes))
