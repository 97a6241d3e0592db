"""Keys are marked as data or code, and what is executed comes from nobody else."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic.fields import FieldInfo

from pipeline.cli.main import main
from pipeline.common.errors import UserError
from pipeline.common.trust import OPTION, TRUSTED, Writer
from pipeline.config import Config
from pipeline.config.base import CODE, DATA, Section
from pipeline.config.load import dump, load, load_run
from pipeline.config.parsing.code_keys import REMOTE_KEYS, code_values, refuse_code_of_others, vouch_for
from pipeline.config.parsing.schema import dotted, keys, mark_of, written_keys
from pipeline.config.parsing.task_files import files_of_folder, files_of_tasks
from pipeline.config.slurm import SiteConfig
from slurm.site.site_profile import site_of
from tests import tiny
from tests.tiers import first

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user, which only root may")


def sections(of: type[Section] = Section) -> Iterator[type[Section]]:
    for each in of.__subclasses__():
        yield from sections(each)
        if each.__module__.partition(".")[0] in ("pipeline", "slurm"):
            yield each


def texts(annotation: Any) -> bool:
    """True of a type whose values are texts or paths, or have some in them; names of entries do not count."""
    if get_origin(annotation) is Literal:
        return False
    parts = get_args(annotation)
    parts = parts[1:] if get_origin(annotation) is dict else parts
    return annotation in (str, Path, bytes, Any, object) or any(map(texts, parts))


def test_every_text_and_path_is_marked_as_data_or_code() -> None:
    fields = {f"{each.__name__}.{name}": field for each in sections() for name, field in each.model_fields.items()}
    assert len(fields) > 500 and {"SiteConfig.setup", "NotifyConfig.command"} <= set(fields)
    marks = {name: mark_of(field) for name, field in fields.items()}
    assert [name for name, field in fields.items() if texts(field.annotation) and marks[name] is None] == []
    with pytest.raises(ValueError, match="both"):
        mark_of(FieldInfo.from_annotation(Annotated[str, DATA, CODE]))


class Values:
    """A value of each key of run files that is marked as code, with the files that it names in a folder."""

    def __init__(self, folder: Path, left: Path) -> None:
        self.run, self.folder, self.left = folder, folder / "files", left
        self.folder.mkdir()
        for name, text in {
            "helper.py": f"open({str(left)!r}, 'w').close()\n\n\ndef text(document):\n    return ''\n",
            "task.yaml": "task: theirs\ndataset_path: json\ndoc_to_text: !function helper.text\n",
            "site.yaml": yaml.safe_dump({"setup": [f"touch {left}"]}),
        }.items():
            (self.folder / name).write_text(text)
        task = [str(self.folder / "task.yaml")]
        self.by_key: dict[str, Any] = {
            "data.curate.decontaminate.tasks": task,
            "eval.harness.tasks": task,
            "eval.harness.include_path": str(self.folder),
            "notify.N.command": ["touch", str(left)],
            "slurm.profile": str(self.folder / "site.yaml"),
            **{f"slurm.{stage}.options": {"bb": "x"} for stage in ("preprocess", "train", "eval")},
        }

    def changes(self, key: str) -> dict[str, Any]:
        """Changes of a run file that set a key, and what has to be beside it."""
        if key == "notify.N.command":
            return {"notify": [{"on": ["done"], "command": self.by_key[key]}]}
        beside = {"eval.harness.tasks": ["theirs"]} if key == "eval.harness.include_path" else {}
        return {**beside, key: self.by_key[key]}


def code_keys(root: type[Section]) -> list[str]:
    found = [key.path for key in keys(root) if (mark := mark_of(key.field)) is not None and mark.kind == "code"]
    assert found
    return found


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Values]:
    monkeypatch.delenv(TRUSTED, raising=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name, "theirs")
        folder.mkdir()
        yield Values(folder, tmp_path / "left")


def given(*paths: Path) -> None:
    for path in paths:
        os.chown(path, OTHER, -1)


def run_of(values: Values, changes: dict[str, Any], root: Path) -> Path:
    """A run folder with such a config."""
    config = load(tiny.write_run(root, {"run.dir": str(values.run), **changes}))
    (values.run / "config.yaml").write_text(dump(config))
    (values.run / "metrics.jsonl").touch()
    return values.run


@pytest.mark.first(4)
@as_root
@pytest.mark.parametrize("key", code_keys(Config))
def test_code_of_another_user_is_refused(key: str, values: Values, tmp_path: Path) -> None:
    """Where the run file is theirs, and where the file is that it names."""
    shown = key.replace(".N.", ".0.")
    run = run_of(values, values.changes(key), tmp_path)
    mine = tiny.write_run(tmp_path, values.changes(key))
    refuse_code_of_others(load_run(run))
    refuse_code_of_others(load(mine))
    given(run / "config.yaml")
    with pytest.raises(UserError) as refused:
        refuse_code_of_others(load_run(run))
    name = Writer("user", OTHER).name
    for text in (shown, f"{run / 'config.yaml'} belongs to {name}", f"{OPTION} {name}"):
        assert text in str(refused.value)
    (without,) = {found.without for found in code_values(load_run(run)) if dotted(found.path) == shown}
    assert without in str(refused.value)
    refuse_code_of_others(load_run(run, [without]))
    value = yaml.safe_dump(values.by_key[key], default_flow_style=True).strip().removesuffix("...").strip()
    refuse_code_of_others(load_run(run, [f"{shown}={value}"]))  # now the user names it, and the files are the user's
    named = str(values.by_key[key])
    for file in [] if str(run) not in named else ["site.yaml"] if "site" in named else ["task.yaml", "helper.py"]:
        given(values.folder / file)
        with pytest.raises(UserError, match=file):
            refuse_code_of_others(load(mine))
        os.chown(values.folder / file, 0, -1)
    run.chmod(0o777)
    if str(run) in named:
        with pytest.raises(UserError, match="chmod"):
            refuse_code_of_others(load(mine))


@as_root
@pytest.mark.parametrize(
    "key",
    [path for path, mark in ((k.path, mark_of(k.field)) for k in keys(SiteConfig)) if mark and mark.kind == "code"],
)
def test_each_key_of_a_profile_that_is_code_is_read_from_nobody_else(key: str, values: Values, tmp_path: Path) -> None:
    *above, last = key.split(".")
    kind = written_keys(SiteConfig)[last][1].annotation if not above else dict
    value: Any = {"A": "b"} if get_origin(kind) is dict or kind is dict else ["x"] if get_origin(kind) is list else "x"
    for part in (last, *reversed(above)):
        value = {part: value}
    file = values.folder / "site.yaml"
    file.write_text(yaml.safe_dump(value))
    config = load(tiny.write_run(tmp_path, {"slurm.profile": str(file)}))
    site_of(config)
    given(file)
    with pytest.raises(UserError, match=r"slurm.profile .*site.yaml belongs to"):
        site_of(config)


REMOTE = {
    "data.remote.endpoint": "https://theirs.example.org",
    "data.sources.0.paths": "[s3://theirs/*.txt]",
    "data.dir": "s3://theirs/data",
}


@as_root
@pytest.mark.parametrize("key", REMOTE)
def test_an_address_of_another_user_gets_no_credentials(key: str, values: Values, tmp_path: Path) -> None:
    values.run.mkdir(exist_ok=True)
    mine = load(tiny.write_run(tmp_path, {"run.dir": str(values.run)}), [f"{key}={REMOTE[key]}"])
    (values.run / "config.yaml").write_text(dump(mine))
    run = values.run
    refuse_code_of_others(load_run(run), *REMOTE_KEYS)
    given(run / "config.yaml")
    with pytest.raises(UserError, match="would be used with your credentials") as refused:
        refuse_code_of_others(load_run(run), *REMOTE_KEYS)
    assert key in str(refused.value) and f"{OPTION} {Writer('user', OTHER).name}" in str(refused.value)
    for harmless in ("/data/*.txt", "https://host/x.txt"):  # nothing of this user's is used there
        refuse_code_of_others(
            load_run(run, ["data.remote.endpoint=null", "data.dir=null", f"data.sources.0.paths=[{harmless}]"])
        )


ATTACKS = [
    ("eval", "eval.harness.tasks"),
    ("train --slurm", "slurm.profile"),
    ("train --slurm --dry-run", "slurm.profile"),
    ("train", "notify.N.command"),
    ("curate --dry-run", "data.curate.decontaminate.tasks"),
    ("config show", "eval.harness.include_path"),
    ("curate", "data.curate.decontaminate.tasks"),
    ("curate --dry-run", "eval.harness.include_path"),
    ("doctor --notify", "notify.N.command"),
    ("plan", "slurm.profile"),
    ("run", "eval.harness.tasks"),
    ("run", "notify.N.command"),
    ("train --check", "notify.N.command"),
    ("train --local --dry-run", "notify.N.command"),
    ("train --local --dry-run", "slurm.profile"),
    ("train --slurm --dry-run", "slurm.train.options"),
]
"""Commands with a key of code that they would execute, or whose execution they are a preview of."""


@as_root
@pytest.mark.parametrize(("command", "key"), first(6, ATTACKS, rest="guard"))
def test_a_command_in_a_folder_of_another_user_executes_nothing(
    command: str,
    key: str,
    values: Values,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changes = values.changes(key)
    if command.startswith("curate") and not key.startswith("data"):
        changes |= {"data.curate.decontaminate.tasks": ["theirs"]}
    run = run_of(values, changes, tmp_path)
    given(run, *run.rglob("*"))
    before = sorted(run.rglob("*"))
    words, *options = command.split(" --")
    monkeypatch.setattr(sys, "argv", ["pipeline", *words.split(), str(run), *(f"--{each}" for each in options)])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capfd.readouterr().err
    assert ended.value.code == 2, error
    assert key.replace(".N.", ".0.") in error and str(run) in error and OPTION in error
    assert not values.left.exists() and sorted(run.rglob("*")) == before


@as_root
def test_consent_is_an_option_and_never_a_file_of_the_run(
    values: Values, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TRUSTED, "")  # the command changes it
    run = run_of(values, values.changes("slurm.profile"), tmp_path)
    given(run, *run.rglob("*"))
    name = Writer("user", OTHER).name
    for options, code in ([], 2), ([OPTION, "0"], 2), ([OPTION, name], 0):
        monkeypatch.setattr(sys, "argv", ["pipeline", "config", "show", str(run), *options])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capfd.readouterr()
        assert ended.value.code == code and "profile:" in said.out and name in said.err
    assert "slurm.profile" in said.err and "error" not in said.err
    site = values.folder / "site.yaml"
    site.write_text(yaml.safe_dump({"environment": {TRUSTED: name}, "setup": ["x"]}))
    monkeypatch.setenv(TRUSTED, "")
    with pytest.raises(UserError, match=name):
        site_of(load_run(run))


@as_root
def test_what_was_checked_is_not_checked_again_in_processes_that_are_started(values: Values, tmp_path: Path) -> None:
    """A copy of the config may lie where a group may write; another value in it is refused."""
    key = "eval.harness.tasks"
    run = run_of(values, values.changes(key), tmp_path)
    checked = load_run(run)
    given(run / "config.yaml")
    with vouch_for(checked, "eval.harness"):
        refuse_code_of_others(load_run(run))
        (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("task.yaml", "other.yaml"))
        with pytest.raises(UserError, match=key):
            refuse_code_of_others(load_run(run))
    with pytest.raises(UserError, match=key):
        refuse_code_of_others(load_run(run))


@as_root
def test_the_file_that_names_a_value_is_the_one_that_counts(values: Values, tmp_path: Path) -> None:
    """Of several files that are included; a value that is put together may come from any of them."""
    theirs = values.folder / "base.yaml"
    theirs.write_text(yaml.safe_dump({"generate": {"prompt": "touch"}, "notify": [{"on": ["done"], "command": ["x"]}]}))
    given(theirs)
    commands: dict[str, Callable[[], Any]] = {
        "theirs": lambda: {},
        "mine": lambda: {"notify": [{"on": ["done"], "command": ["y"]}]},
        "put together": lambda: {"notify": [{"on": ["done"], "command": ["${generate.prompt}", "y"]}]},
    }
    for whose, changes in commands.items():
        config = load(tiny.write_run(tmp_path, {"include": [str(theirs)], **changes()}))
        if whose == "mine":
            refuse_code_of_others(config)
        else:
            with pytest.raises(UserError, match=str(theirs)):
                refuse_code_of_others(config)


@pytest.mark.parametrize(
    "text", ["include:\ttheirs.yaml\n", "<<: {include: theirs.yaml}\n", "a: " + "[" * 300 + "]" * 300]
)
def test_what_the_harness_can_read_hides_no_include(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert ("include" in text) == (tmp_path / "theirs.yaml" in set(files_of_tasks([str(file)])))
    file.write_text(text + "b: [")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        list(files_of_tasks([str(file)]))


def test_files_that_tasks_execute(tmp_path: Path) -> None:
    """As the harness finds them: files that are included, modules beside them, and what a module may import."""
    inside, outside = tmp_path / "tasks" / "inner", tmp_path / "shared"
    for folder in (inside, outside / "__pycache__"):
        folder.mkdir(parents=True)
    (inside / "a.yaml").write_text("include: [../base.yaml]\ntask: a\ndoc_to_text: !function one.text\n")
    (inside.parent / "base.yaml").write_text(f"include: {outside / 'c.yaml'}\nmetric_list: [{{x: !function two.y}}]\n")
    (outside / "c.yaml").write_text("class: !function pkg.three.C\ndescription: &a [*a]\n")
    for name in ("one.py", "../not_executed.txt"):
        (inside / name).touch()
    (outside / "beside.py").touch()
    (outside / "__pycache__" / "beside.pyc").touch()
    (outside / "pkg").mkdir()
    found = {path.resolve() for path in files_of_tasks([str(inside / "a.yaml"), "a_name"])}
    modules = {inside / "one.py", inside.parent / "two.py", outside / "pkg" / "three.py"}
    assert found == {inside / "a.yaml", inside.parent / "base.yaml", outside / "c.yaml", *modules}
    (outside / "d.yaml").write_text("class: !function beside.C\n")
    assert {outside / "beside.py", outside / "__pycache__" / "beside.pyc"} <= set(files_of_tasks([f"{outside}/d.yaml"]))
    folders = {path.resolve() for path in files_of_folder(tmp_path / "tasks")}
    assert {inside, inside.parent} <= folders and found <= folders
