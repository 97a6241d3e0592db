"""Texts from several keys, or from messages: the same of every format, and what has no text is rejected."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import datasets
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.common.errors import UserError
from pipeline.config.chat import MessagesConfig
from pipeline.config.data import SourceConfig
from pipeline.data.sources.arrow import ArrowReader
from pipeline.data.sources.delimited import CsvReader
from pipeline.data.sources.hub import HubReader
from pipeline.data.sources.jsonl import JsonlReader
from pipeline.data.sources.parquet import ParquetReader
from pipeline.data.sources.reader import Reader, UnitReader
from pipeline.data.sources.records import NOT_UTF8, Hub, UnusableRecord
from pipeline.data.sources.templates.record_templates import configured_template
from pipeline.data.sources.templates.template import KeysTemplate, MessagesTemplate, RecordTemplate
from tests.data.reading import check_chain, check_resume, files, read, units

RECORDS: list[dict[str, Any]] = [
    {"id": "a", "title": "Sea", "body": "Waves {and} wind", "year": 1999},
    {"id": "b", "title": "", "body": "no title", "year": 2001},
    {"id": "c", "title": None, "body": "null", "year": -3},
    {"id": "d", "title": "T", "body": None, "year": 1},
    {"id": "e", "title": "T", "body": "漢字", "year": 0},
]
TEMPLATE = KeysTemplate("{title?}\n\n{body} {{{year}}}")
TEXTS = ["Sea\n\nWaves {and} wind {1999}", "no title {2001}", "null {-3}", None, "T\n\n漢字 {0}"]
ROLES = {"system": "<s>{content}\n", "user": "U: {content}\n", "assistant": "{{A}}: {content}</s>\n"}
MESSAGES = MessagesTemplate.of(MessagesConfig(roles=ROLES))
TALKS: list[Any] = [
    [{"role": "user", "content": "hi {x}"}, {"role": "assistant", "content": "hello"}],
    [{"role": "system", "content": ""}],
    [],
    None,
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": None}],
]
SAID = ["U: hi {x}\n{A}: hello</s>\n", "<s>\n", ""]


def _write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        out = io.StringIO(newline="")
        writer = csv.DictWriter(out, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
        path.write_bytes(out.getvalue().encode())
    elif path.suffix == ".jsonl":
        path.write_bytes(b"".join(orjson.dumps(each) + b"\n" for each in records))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2)
    else:
        table = pa.Table.from_pylist(records)
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    return path


READERS: list[tuple[type[Reader], str]] = [
    (JsonlReader, "a.jsonl"),
    (ParquetReader, "a.parquet"),
    (ArrowReader, "a.arrow"),
    (CsvReader, "a.csv"),
]


@pytest.mark.parametrize(("kind", "name"), READERS)
def test_several_keys(tmp_path: Path, kind: type[Reader], name: str) -> None:
    reader = kind("text", "id", ("title",), template=TEMPLATE)
    path = _write(tmp_path / name, RECORDS)
    documents = read(path, reader)
    if kind is CsvReader:  # an empty field is empty text
        assert [d.text for d in documents] == [*TEXTS[:3], "T\n\n {1}", TEXTS[4]]
        return
    assert [d.text or None for d in documents] == TEXTS
    assert [d.id for d in documents] == ["a", "b", "c", "", "e"]
    assert documents[3].reason == "no value for 'body'"
    reader.check_columns(files(path, type=reader.type))
    for unit in units(files(path, type=reader.type), reader):
        check_resume(unit, reader)
        check_chain(unit, reader, 2)


@pytest.mark.parametrize(("kind", "name"), READERS[:3])
def test_messages(tmp_path: Path, kind: type[Reader], name: str) -> None:
    reader = kind("text", "id", (), template=MESSAGES)
    path = _write(tmp_path / name, [{"messages": talk} for talk in TALKS])
    documents = read(path, reader)
    assert [d.text for d in documents] == [*SAID, "", "", ""]
    reasons = ["empty document", "no value for 'messages'", "role without a template", "message without role and text"]
    assert [d.reason for d in documents] == [None, None, *reasons]
    for unit in units(files(path, type=reader.type), reader):
        check_resume(unit, reader)


def test_of_a_dataset_of_the_hub(tmp_path: Path) -> None:
    records = [{**record, "messages": talk} for record, talk in zip(RECORDS, TALKS, strict=False)]
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    for template, expected in ((TEMPLATE, TEXTS), (MESSAGES, [*SAID[:2], None, None, None])):
        reader, found = HubReader("text", "id", hub=Hub(str(tmp_path)), template=template).find([], [], "k", dict)
        reader.check_columns(found)
        (unit,) = units(found, reader)
        assert [d.text or None for d in UnitReader(unit, reader)] == expected


def test_one_bad_value_of_a_table_rejects_one_row(tmp_path: Path) -> None:
    """Texts and messages that are not UTF-8, which pyarrow writes if it is not told to look."""
    bad = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    roles = pa.array(["user"] * 3)
    talks = pa.ListArray.from_arrays(
        pa.array([0, 1, 2, 3]), pa.StructArray.from_arrays([roles, bad], ["role", "content"])
    )
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": bad, "messages": talks}), path)
    for template in (KeysTemplate("{body}"), MESSAGES):
        documents = read(path, ParquetReader("text", "id", template=template))
        assert [d.reason for d in documents] == [None, NOT_UTF8, None]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (KeysTemplate("{none}"), "has no column 'none'; .*: set text_template"),
        (KeysTemplate("{messages}"), "is of type .*, not text; set text_template to a column of strings"),
        (
            MessagesTemplate.of(MessagesConfig(key="body", roles=ROLES)),
            "not lists of messages; set messages.key to a column of lists",
        ),
    ],
)
def test_columns_that_give_no_text(tmp_path: Path, template: RecordTemplate, said: str) -> None:
    path = _write(tmp_path / "a.parquet", [{"body": "b", "messages": TALKS[0]}])
    with pytest.raises(UserError, match=said):
        ParquetReader("text", "id", template=template).check_columns(files(path, type="parquet"))


@pytest.mark.parametrize("value", [1.5, True, ["a"], {"a": "b"}])
def test_values_that_are_not_text(value: Any) -> None:
    with pytest.raises(UnusableRecord) as error:
        KeysTemplate("{a}").render({"a": value})
    assert error.value.reason == "value of 'a' is not text"


def test_lone_surrogates_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud800", "b": "x"}\n{"a": "y", "b": NaN}\n{"a": "z", "other": "\\ud800"}\n')
    documents = read(path, JsonlReader("text", "id", template=KeysTemplate("{a}")))
    assert [(d.text, d.reason) for d in documents] == [("", "lone surrogate"), ("y", None), ("z", None)]


@pytest.mark.parametrize("template", [TEMPLATE, MESSAGES])
def test_a_plan_has_the_same_template(template: RecordTemplate) -> None:
    reader = JsonlReader("text", "id", (), template=template)
    assert JsonlReader.from_plan({**reader.settings(), "metadata": []}) == reader
    assert "text_key" not in reader.settings()
    plain = JsonlReader("text", "id")
    assert plain.settings() == {"id_key": "id", "text_key": "text"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text_template": "no key"}, "names no key"),
        ({"text_template": "{a"}, "write braces that are text as"),
        ({"text_template": "{a!r}"}, "stands alone in its braces"),
        ({"text_template": "{a:>9}"}, "stands alone in its braces"),
        ({"text_template": "{}"}, "stands alone in its braces"),
        ({"text_template": "{a}", "text_key": "a"}, "give one of text_key and text_template"),
        ({"text_template": "{a}", "messages": {"roles": ROLES}}, "give one of text_template and messages"),
        ({"messages": {"roles": {}}}, "at least 1"),
        ({"messages": {"roles": {"user": "{text}"}}}, "needs {content} once"),
        ({"type": "text", "text_template": "{a}"}, "needs records with keys"),
        ({"type": "csv", "messages": {"roles": ROLES}}, "messages needs lists of messages"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SourceConfig.model_validate({"name": "s", "type": "jsonl", "paths": ["a"], **changes})


@pytest.mark.parametrize(
    "way",
    [
        {"text_template": "{a}"},
        {"messages": {"roles": ROLES}},
        {"chat": {"format": "openai", "template": "tokenizer"}},
    ],
)
def test_what_a_run_folder_has_is_read_again(way: dict[str, Any]) -> None:
    """Every key is written there, with its default where the run file does not have it."""
    source = SourceConfig.model_validate({"name": "s", "type": "jsonl", "paths": ["a"], **way})
    assert SourceConfig.model_validate(source.model_dump(mode="json")) == source


def test_chat_with_roles_is_messages() -> None:
    """The same settings of a plan, so the same dataset, whichever way it is spelled."""
    common = {"name": "s", "type": "jsonl", "paths": ["/x"]}
    for form, keys in (("openai", {}), ("sharegpt", {"role_key": "from", "content_key": "value"})):
        chat = {"format": form, "messages_key": "talk", "roles": ROLES, "train_on": "all"}
        new = SourceConfig.model_validate({**common, "chat": chat})
        old = SourceConfig.model_validate({**common, "messages": {"key": "talk", "roles": ROLES, **keys}})
        made = configured_template(new)
        assert made is not None and made == configured_template(old)
    for changes, says in (
        ({"train_on": "assistant"}, "roles need train_on: all"),
        ({"template": "tokenizer"}, "exactly one of template"),
        ({"max_tokens": 9}, "max_tokens is for a template"),
        ({"roles": {"user": "x"}}, "content"),
    ):
        with pytest.raises(ValueError, match=says):
            SourceConfig.model_validate({**common, "chat": {**chat, **changes}})
