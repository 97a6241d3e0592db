"""`${...}` in run files: what is resolved, for whom, and at what cost."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config.load import dump, load, load_run, load_written
from pipeline.config.parsing.interpolation import Interpolation, InterpolationError, escaped, is_plain
from tests import bounded
from tests.config.runfile import MINIMAL, refused, write


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def resolve(value: str, **others: object) -> object:
    return Interpolation({"value": value, **others}, {}).resolve(("value",))


# What is understood


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("${a}", 3),
        ("x${a}y${ a }", "x3y3"),
        ("${list.1}${list[0]}", "two1"),
        ("${section}", {"b": 3, "c": [3]}),
        ("${again.c.0}", 3),
        ("${${name}}", 3),
        ("${section.${letter}}", 3),
        ("${oc.env:HERE}", "there"),
        ("${oc.env:${variable}}", "there"),
        ("${oc.env:GONE,${a}}", "3"),
        ("${oc.env:GONE, 'a, b}'}", "a, b}"),
        ("${oc.env:GONE,${oc.env:GONE,last}}", "last"),
        ("${oc.env:GONE,}", ""),
        ("${oc.env:GONE,null}", None),
        ("\\${a}", "${a}"),
        ("\\\\${a}", "\\3"),
        ("\\\\\\${a}", "\\${a}"),
        ("a\\b $a $${a} {}", "a\\b $a $3 {}"),
    ],
)
def test_what_is_resolved(value: str, wanted: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "there")
    others: dict[str, object] = {
        "a": 3,
        "list": [1, "two"],
        "section": {"b": "${a}", "c": ["${a}"]},
        "again": "${section}",
        **{"name": "a", "letter": "b", "variable": "HERE"},
    }
    assert resolve(value, **others) == wanted


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${", "not readable"),
        ("${}", "not readable"),
        ("${a", "not readable"),
        ("${oc.env:}", "not readable"),
        ("${oc.env:A,'b}", "not readable"),
        ("${a.b}", "'a.b' not found"),
        ("${list.7}", "'list.7' not found"),
        ("${.a}", "not found"),
        ("${value}", "Recursive interpolation: value -> value"),
        ("${other}", "Recursive interpolation: value -> other -> value"),
        ("x ${list}", "cannot stand inside a text"),
        ("${oc.env:A,b,c}", "takes a name and a default"),
        ("${oc.create:'{a: 1}'}", "Unsupported interpolation type oc.create"),
        ("${oc.decode:'1'}", "Unsupported interpolation type oc.decode"),
        ("${oc.dict.keys:list}", "Unsupported interpolation type oc.dict.keys"),
        ("${oc.deprecated:list}", "Unsupported interpolation type oc.deprecated"),
        ("${sysconfig:stdlib,1}", "sysconfig knows the paths"),
    ],
)
def test_what_is_not(value: str, reason: str) -> None:
    with pytest.raises(InterpolationError, match=reason.replace("(", r"\(")):
        resolve(value, a=3, list=[1, "two"], other="${value}")


# Secrets


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:HF_TOKEN}",
        "${oc.env:hf_token,nothing}",
        "${oc.env:${generate.also}}",
        "${oc.env:HF_${generate.kind}}",
        "${oc.env:GONE,${oc.env:HF_TOKEN}}",
        "${oc.env:'HF_TOKEN'}",
        "a ${oc.env:HF_TOKEN} b",
    ],
)
def test_a_secret_never_gets_into_a_run_file(tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "hf_token"):
        monkeypatch.setenv(name, "HIDDEN")
    value = value.replace("${generate.also}", "${data.dir}").replace("${generate.kind}", "${data.dir}")
    folder = "TOKEN" if "HF_${" in value else "HF_TOKEN"
    text = MINIMAL.replace("data:\n", f"data:\n  dir: {folder}\n")
    for message in (
        refused(write(tmp_path, text + f'generate:\n  prompt: "{value}"\n')),
        refused(write(tmp_path, text), f"generate.prompt={value}"),
    ):
        assert "may be a secret" in message
        assert "export it under another name" in message
        assert "HIDDEN" not in message


def test_of_a_run_folder_nothing_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is somebody else's: what their file names is the reader's."""
    monkeypatch.setenv("HOMEPAGE", "HIDDEN")
    (tmp_path / "own.yaml").write_text("generate: {prompt: HIDDEN}\n")
    write(tmp_path, MINIMAL + "generate:\n  prompt: '${oc.env:HOMEPAGE}'\n", "run/config.yaml")
    for call in (lambda: load_run(Path("run")), lambda: load_written(Path("run/config.yaml"))):
        with pytest.raises(UserError, match=r"config.yaml:16: generate.prompt = .*nothing in its files is resolved"):
            call()
    # By its own name, and included, it is known by what lies beside it.
    (tmp_path / "run/metrics.jsonl").touch()
    write(tmp_path, "include: run/config.yaml\n", "mine.yaml")
    for name in ("run/config.yaml", "mine.yaml"):
        assert 'generate.prompt = "${oc.env:HOMEPAGE}"' in refused(tmp_path / name)
    write(tmp_path, "include: ../own.yaml\n" + MINIMAL, "run/config.yaml")
    assert "must not include others" in refused(tmp_path / "run/config.yaml")
    # What the reader adds is the reader's own, and may refer to the file.
    write(tmp_path, MINIMAL + "generate:\n  prompt: '\\${oc.env:HOMEPAGE}'\n", "run/config.yaml")
    config = load_run(Path("run"), ["serve.host=${oc.env:HOMEPAGE}", "data.dir=${run.dir}/${generate.prompt}"])
    assert config.generate.prompt == "${oc.env:HOMEPAGE}"
    assert config.serve.host == "HIDDEN"
    assert str(config.data.dir).endswith("runs/small/${oc.env:HOMEPAGE}")


@settings(max_examples=200)
@given(text=st.text(alphabet="ab$\\{}:.,'\" \n", max_size=16))
def test_any_text_is_written_so_that_nothing_in_it_is_resolved(text: str) -> None:
    assert is_plain(escaped(text))
    assert resolve(escaped(text)) == text


def test_what_a_run_writes_is_read_back_by_both_readers(tmp_path: Path) -> None:
    config = load(write(tmp_path), (), {"generate.prompt": "\\\\${oc.env:HF_TOKEN} ${run.dir} \\"})
    write(tmp_path, dump(config), "again.yaml")
    assert load(Path("again.yaml")) == load_written(Path("again.yaml")) == config


# Cost


def bomb(tmp_path: Path, text: str) -> str:
    return bounded.refused(
        "load(Path(sys.argv[1]))",
        "from pathlib import Path\nfrom pipeline.config.load import load",
        write(tmp_path, text, "bomb.yaml"),
    )


@pytest.mark.slow
def test_references_that_double(tmp_path: Path) -> None:
    levels = "".join(f"  a{n}: '${{x.a{n + 1}}}${{x.a{n + 1}}}'\n" for n in range(40))
    assert "interpolation makes more than" in bomb(tmp_path, f"{MINIMAL}x:\n{levels}  a40: text\n")
    levels = "".join(f"  a{n}: ['${{x.a{n + 1}}}', '${{x.a{n + 1}}}']\n" for n in range(40))
    assert "interpolation makes more than" in bomb(tmp_path, f"{MINIMAL}x:\n{levels}  a40: text\n")


@pytest.mark.slow
def test_references_inside_each_other(tmp_path: Path) -> None:
    chain = "".join(f"  a{n}: '${{x.a{n + 1}}}'\n" for n in range(5000))
    assert "more than 100 levels" in bomb(tmp_path, f"{MINIMAL}x:\n{chain}  a5000: text\n")
    deep = "${oc.env:" * 20_000 + "}" * 20_000
    assert "more than 50 levels" in bomb(tmp_path, f"{MINIMAL}generate:\n  prompt: '{deep}'\n")


def test_doubling_within_the_limits_is_resolved_once_a_key(tmp_path: Path) -> None:
    levels = {f"a{n}": f"${{a{n + 1}}}${{a{n + 1}}}" for n in range(16)}
    assert resolve("${a0}", **levels, a16="x") == "x" * 2**16
