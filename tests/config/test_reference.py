from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.load import dump, load
from pipeline.config.parsing.schema import keys, meaning
from pipeline.config.reference import json_schema, key_lines, markdown, page
from pipeline.config.starter import write as write_starter
from tests.config.runfile import write

ROOT = Path(__file__).parents[2]


def test_docs_are_current() -> None:
    path = ROOT / "docs/config.md"
    assert page(path.read_text()) == path.read_text(), "run `make docs`"


def test_every_key_has_a_meaning() -> None:
    undocumented = [key.path for key in keys(Config) if not meaning(key.section, key.name)]
    assert not undocumented
    text = markdown()
    assert all(f"| `{key.path.split('.')[-1]}` |" in text for key in keys(Config) if "." in key.path)


def test_keys_are_shown_by_path_section_and_last_part() -> None:
    assert [line for line in key_lines("lr") if not line.startswith(" ")] == [
        "train.optimizer.lr: number, > 0; default 0.0003"
    ]
    section = [line.split(":")[0] for line in key_lines("train.optimizer") if not line.startswith(" ")]
    assert section == [key.path for key in keys(Config) if f"{key.path}.".startswith("train.optimizer.")]
    assert any(line.startswith("model.kinds.NAME.sinks: ") for line in key_lines("kinds"))
    assert any(line.startswith("train: section") for line in key_lines())
    assert all(len(line) <= 100 for line in key_lines("model") if line.startswith(" "))
    assert [line for line in key_lines("learning_rate") if line.startswith("train.optimizer.lr: ")]
    words = [line.split(":")[0] for line in key_lines("Batch") if not line.startswith(" ")]
    assert {"train.batch_size", "train.batch_ramp", "eval.batch_size"} <= set(words) and "train.seed" not in words
    with pytest.raises(UserError, match=r"no key train.bach_size; did you mean train\.batch_size"):
        list(key_lines("train.bach_size"))


def test_schema_describes_what_is_written(tmp_path: Path) -> None:
    """Walks the schema by hand along a dumped config: every key and every scalar's type must be allowed."""
    schema = json.loads(json_schema())

    def check(value: object, node: dict[str, object], where: str) -> None:
        if "$ref" in node:
            node = schema["$defs"][str(node["$ref"]).removeprefix("#/$defs/")]
        choices = node.get("anyOf") or [node]
        assert isinstance(choices, list)
        names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
        if isinstance(value, dict):
            inner = next((schema["$defs"][c["$ref"].split("/")[-1]] if "$ref" in c else c) for c in choices)
            for key, below in value.items():
                # What is named freely, like splits, has one schema for all names.
                check(below, inner.get("properties", {}).get(key, inner["additionalProperties"]), f"{where}.{key}")
        elif isinstance(value, list):
            for below in value:
                check(below, next(c for c in choices if c.get("type") == "array").get("items", {}) or {}, where)
        elif node:
            kinds = {"string" if "enum" in c or "const" in c else c.get("type") for c in choices}
            kinds |= {schema["$defs"][c["$ref"].split("/")[-1]].get("type") for c in choices if "$ref" in c}
            wanted = names[type(value)]
            assert wanted in kinds or (wanted == "integer" and "number" in kinds), f"{where}: {value!r} is no {kinds}"

    config = load(write(tmp_path))
    check(config.model_dump(mode="json"), schema, "")
    assert "include" in schema["properties"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("source", ["starter", "starter-small"])
def test_starter_needs_paths_only(source: str, tmp_path: Path) -> None:
    path = write_starter(tmp_path / "new", source)
    assert path == tmp_path / "new/run.yaml"
    with pytest.raises(UserError) as caught:
        load(path)
    line = next(n for n, text in enumerate(path.read_text().splitlines(), start=1) if "paths: ???" in text)
    assert f"run.yaml:{line}: data.sources.0.paths = ???: fill in a value here" in str(caught.value)
    assert "has a problem:" in str(caught.value)
    config = load(path, ["data.sources.0.paths=[a.txt]"])
    assert config.run.dir == Path("runs/new").absolute()
    assert load(write(tmp_path, dump(config), "dumped.yaml")) == config


def test_starter_with_its_comments_taken_away(tmp_path: Path) -> None:
    """What the starter shows in comments is valid too."""
    text = write_starter(tmp_path).read_text().replace("???", "[a.txt]")
    for commented in (
        "# dir:",
        "# exclude:",
        "# - name: web",
        "#   type:",
        "#   paths:",
        "#   text_key:",
        "#   id_key:",
        "# slurm:",
        "#   profile:",
        "#   nodes:",
        "#   train: {",
    ):
        assert commented in text
        text = text.replace(commented, commented[2:])
    text = text.replace("# wandb:", "wandb:")
    config = load(write(tmp_path, text, "all.yaml"))
    assert [source.name for source in config.data.sources] == ["books", "web"]
    assert config.data.sources[0].exclude == ["**/drafts/**"]
    assert config.train.metrics.wandb is not None
    assert config.slurm.train.time == 12 * 60


def test_starter_in_a_folder_whose_name_needs_quotes(tmp_path: Path) -> None:
    path = write_starter(tmp_path / "my: run")
    assert path.read_bytes() == (ROOT / "configs/starter.yaml").read_bytes()


def test_starter_overwrites_nothing(tmp_path: Path) -> None:
    path = write_starter(tmp_path)
    path.write_text("mine")
    with pytest.raises(UserError, match="exists and is not overwritten"):
        write_starter(tmp_path)
    assert path.read_text() == "mine"
    with pytest.raises(UserError, match=r"^--from nothing: no run file .*, models/llama3-8b, .*, starter$") as caught:
        write_starter(tmp_path / "other", "nothing")
    assert "configs/" not in str(caught.value) and "corpora/" not in str(caught.value)
    with pytest.raises(UserError, match=r"did you mean quickstart\?"):
        write_starter(tmp_path / "other", "quikstart.yaml")
    assert not (tmp_path / "other").exists()


def test_starter_from_a_shipped_file(tmp_path: Path) -> None:
    path = write_starter(tmp_path / "new", "quickstart")
    assert write_starter(tmp_path / "deep", "configs/models/gpt2-124m.yaml").is_file()
    assert path.read_bytes() == (ROOT / "configs/quickstart.yaml").read_bytes()
