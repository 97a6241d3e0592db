"""Names of plug-ins in a run file: what is accepted, imported and refused, and how it is said."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipeline.cli.failures import report_mistake
from pipeline.common.errors import UserError
from pipeline.config.load import dump, load, load_written
from pipeline.config.plugins import BASES, KEYS, find_plugin
from pipeline.config.reference import json_schema, plugin_lines
from pipeline.data.sources.formats import source_format
from pipeline.train.checkpoint.fingerprint import fingerprints
from tests.plugins.installed import EXAMPLE, describe, installed
from tests.tiny import write_run

ALL: dict[str, Any] = {
    "data.sources": [{"name": "a", "type": "example.xml", "paths": ["a.xml"], "options": {"tag": "page"}}],
    "model.heads": None,
    "model.mixer": "example.short_conv",
    "model.mixer_options": {"taps": 4},
    "model.mlp": "example.signed_relu2",
    "train.objective": {"type": "example.some_documents", "options": {"rate": 0.5}},
    "train.metrics.loggers": [{"type": "example.lines"}],
}
ROOT = Path(__file__).parents[2]
SHOWN = ("xml_source", "some_documents", "lines_logger")
XML, SOME = "example.xml", "example.some_documents"
SOURCE = """
from pydantic import SecretStr
from pipeline.config.base import Section
from pipeline.data.sources.reader import Reader

class Named(Reader):
    type = "one.named"

    def read(self, cursor, piece):
        raise RuntimeError("read")

class Abstract(Reader):
    type = "one.abstract"

class Secret(Named):
    class Options(Section):
        key: SecretStr = SecretStr("default")

class Sets(Named):
    class Options(Section):
        names: set[str] = set()
        metadata: dict[str, list[frozenset[int | str]]] = {}
"""


@pytest.fixture
def example(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path / "installed"):
        yield


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Installs a package with a module, and entry points of the group of sources."""
    folder = tmp_path / "other"
    folder.mkdir()

    def install(name: str, module: str = "", **entries: str) -> None:
        about = folder / f"{name}-2.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.0\n")
        lines = [f"{entry.replace('_', '.')} = {at}" for entry, at in entries.items()]
        (about / "entry_points.txt").write_text("[pipeline.sources]\n" + "\n".join(lines) + "\n")
        (folder / f"{name}_module.py").write_text(module)

    with mock.patch.object(sys, "path", [str(folder), *sys.path]), mock.patch.dict(sys.modules):
        yield install


def problems(root: Path, changes: Mapping[str, Any]) -> list[str]:
    """What is wrong with a run file, without the lines."""
    with pytest.raises(UserError) as caught:
        load(write_run(root, dict(changes)))
    return [line.partition(": ")[2] for line in str(caught.value).splitlines()[1:-1]]


@pytest.mark.usefixtures("example")
def test_values_are_validated_and_read_back(tmp_path: Path) -> None:
    config = load(write_run(tmp_path, ALL))
    assert config.data.sources[0].options.tag == "page"
    assert config.model.mixer_options.taps == 4 and config.model.mlp_options.slope == 0.25
    assert config.train.metrics.loggers[0].options.names == ["loss"]  # a default
    written = tmp_path / "config.yaml"
    written.write_text(dump(config))
    assert load_written(written) == config
    assert load(tmp_path / "run.yaml", ["train.objective.options.rate=0.25"]).train.objective.options.rate == 0.25


@pytest.mark.usefixtures("example")
def test_mistakes_are_named_with_their_keys(tmp_path: Path) -> None:
    def source(**keys: Any) -> dict[str, Any]:
        return {"name": "a", "paths": ["a.xml"], **keys}

    changes = {
        "data.sources": [
            source(type="example.xml", options={"tga": "x"}),
            source(type="example.xmk", name="b"),
            source(type="xml", name="c"),
            source(type="jsonl", name="d", options={"tag": "x"}),
            source(type="example.xml", name="e", options={"tag": "<"}),
        ],
        "train.objective": {"type": SOME, "options": {"rte": 0.5}},
        "train.metrics.loggers": [{"type": "lines"}, {"type": "example.lines", "options": {"names": []}}],
        "model.kinds": {"a": {"mlp": "example.signed_relu2", "mlp_options": {"x": 1}}},
        "model.pattern": ["a"],
    }
    found = "\n".join(problems(tmp_path, changes))
    for expected in (
        "data.sources.0.options.tga: unknown key; did you mean data.sources.0.options.tag?",
        'data.sources.1.type = "example.xmk": no installed package has this plug-in (entry points pipeline.sources); '
        "installed are example.xml (example-plugins 1.0).",
        "data.sources.2.type = \"xml\": must be one of 'text', 'html', 'jsonl', ",
        "data.sources.3.options: is for plug-ins, and type is jsonl;",
        'data.sources.4.options.tag = "<": ',
        "train.objective.options.rte: unknown key; did you mean train.objective.options.rate?",
        'train.metrics.loggers.0.type = "lines": must be the name of an installed plug-in',
        "train.metrics.loggers.1.options.names",
        "model.kinds.a.mlp_options.x: unknown key; model.kinds.a.mlp_options has the keys slope",
    ):
        assert expected in found
    assert len(found.splitlines()) == 9
    assert "required key is missing (Share of the documents that do not count.)" in "\n".join(
        problems(tmp_path, {"train.objective": {"type": SOME}})
    )


def test_nothing_that_is_not_named_is_imported(tmp_path: Path, other: Callable[..., None]) -> None:
    other("one", SOURCE, one_named="one_module:Named", one_other="two_module:Missing")
    other("two", "raise RuntimeError('imported')", two_named="two_module:Named")
    assert "one.other" in "\n".join(plugin_lines())
    assert not {"one_module", "two_module"} & sys.modules.keys()
    sources = [{"name": "a", "type": "one.named", "paths": ["x"]}]
    assert load(write_run(tmp_path, {"data.sources": sources})).data.sources[0].type == "one.named"
    assert "one_module" in sys.modules and "two_module" not in sys.modules
    (found,) = problems(tmp_path, {"data.sources": [sources[0] | {"options": {"a": 1}}]})
    assert found == "data.sources.0.options: the plug-in one.named has no options; remove the key"
    del sys.modules["one_module"]
    sources[0]["type"] = "two.named"
    (found,) = problems(tmp_path, {"data.sources": sources})
    assert "two.named (two 2.0)" in found and "two_module:Named: RuntimeError: imported" in found


@pytest.mark.usefixtures("example")
def test_two_packages_with_one_name_are_refused(tmp_path: Path) -> None:
    describe(tmp_path / "installed", distribution="fork-of-example")
    describe(tmp_path / "older", version="0.9")
    with pytest.raises(UserError, match=r"several .* have this plug-in: example-plugins 1.0 and fork-of-example 1.0"):
        find_plugin("sources", XML)
    shutil.rmtree(tmp_path / "installed" / "fork_of_example-1.0.dist-info")
    # An older version of the same package, further behind on the path, is not another one.
    with mock.patch.object(sys, "path", [*sys.path, str(tmp_path / "older")]):
        assert find_plugin("sources", XML).version == "1.0"


def test_a_class_of_another_kind_is_refused(tmp_path: Path, other: Callable[..., None]) -> None:
    other("wrong", "class Reader: pass", wrong_kind="wrong_module:Reader")
    (found,) = problems(tmp_path, {"data.sources": [{"name": "a", "type": "wrong.kind", "paths": ["x"]}]})
    assert f"must be a subclass of {BASES['sources']}" in found
    for name in BASES.values():
        module, _, cls = name.rpartition(".")
        assert getattr(import_module(module), cls).__name__ == cls
    assert KEYS.keys() == BASES.keys()


def test_classes_and_options_that_cannot_be_used_are_refused(tmp_path: Path, other: Callable[..., None]) -> None:
    entries = {f"one_{name.lower()}": f"one_module:{name}" for name in ("Named", "Abstract", "Secret")}
    other("one", SOURCE, **entries)
    source = {"name": "a", "paths": ["x"]}
    for changes, message in (
        ({"type": "one.abstract"}, "Abstract does not define read; see docs/plugins.md"),
        ({"type": "one.secret"}, "key of the plug-in one.secret changes where the files of a run keep it"),
        ({"type": "one.secret", "options": {"key": "mine"}}, "a secret comes from the environment instead"),
    ):
        (found,) = problems(tmp_path, {"data.sources": [source | changes]})
        assert message in found and "mine" not in found
    with pytest.raises(UserError, match="numbering of the class is None, and must be one of text, line, row"):
        source_format("one.named")


def test_errors_of_plugins_name_them(
    tmp_path: Path, other: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    other("one", SOURCE, one_named="one_module:Named")
    reader = find_plugin("sources", "one.named").load()
    for call, named in ((lambda: reader("", "").read(None, None), True), (reader, False)):
        with pytest.raises((RuntimeError, TypeError)) as caught:
            call()
        assert report_mistake(caught.value) == 1
        shown = " ".join(capsys.readouterr().err.split())
        assert ("likely an error of the plug-in one.named (one 2.0)" in shown) is named, shown
        assert ("this is a bug in the program" in shown) is not named


@pytest.mark.usefixtures("example")
def test_fingerprints_have_package_and_version(tmp_path: Path) -> None:
    assert XML not in json_schema()
    plain = fingerprints(load(write_run(tmp_path)), {}, "")
    assert "plugin" not in repr(plain) and "options" not in repr(plain)
    file, identity = write_run(tmp_path, ALL), {"distribution": "example-plugins", "version": "1.0"}
    found = fingerprints(load(file), {}, "")
    assert found["model"]["plugins"] == {
        "mixers": {"example.short_conv": identity},
        "mlps": {"example.signed_relu2": identity},
    }
    assert found["model"]["mixer_options"] == {"channels": None, "taps": 4}
    assert found["objective"] == {"type": SOME, "options": {"rate": 0.5}, "plugin": identity}
    kinds = {
        "model.pattern": ["same", "own"],
        "model.kinds": {"same": {}, "own": {"mixer": "example.short_conv"}},
    }
    config = load(write_run(tmp_path, ALL | kinds))
    assert [config.model.layer(kind).mixer_options.taps for kind in config.model.layer_kinds] == [4, 3]
    assert fingerprints(config, {}, "")["model"]["kinds"] == {
        "same": {},
        "own": {"mixer_options": {"channels": None, "taps": 3}},
    }


def test_the_page_has_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    for name in ("pyproject.toml", *(f"example_plugins/{name}.py" for name in SHOWN)):
        assert (EXAMPLE / name).read_text() in page, f"{name} differs from docs/plugins.md"


def test_sets_in_options_have_one_order(other: Callable[..., None], tmp_path: Path) -> None:
    """Of text it would be another in each process, and hashes and files with it."""
    other("one", SOURCE, one_sets="one_module:Sets")
    names = [f"name-{number:02d}" for number in range(20)]
    options = {"names": names[::-1], "metadata": {"b": [["y", 10, 9, "x"]]}}
    sources = [{"name": "a", "type": "one.sets", "paths": ["a.x"], "options": options}]
    config = load(write_run(tmp_path, {"data.sources": sources}))
    (found,) = config.model_dump(mode="json")["data"]["sources"]
    assert found["options"]["names"] == names
    assert found["options"]["metadata"] == {"b": [["x", "y", 10, 9]]}
    assert config.data.sources[0].options.names == set(names)
