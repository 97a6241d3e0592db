"""Readers against files written by hand, and against a plain reading of the whole file."""

import errno
import glob
import json
import os
import random
from pathlib import Path

import orjson
import pytest

from pipeline.common.errors import UserError
from pipeline.data.sources.globs import find_files
from pipeline.data.sources.jsonl import JsonlReader
from pipeline.data.sources.reader import UnitReader
from pipeline.data.sources.records import EMPTY, MAX_RECORD_BYTES, Unit, line_of
from pipeline.data.sources.text import TextReader
from pipeline.data.work.units import unit_size
from tests.data.reading import damage

TEXT = TextReader("text", "id")
JSONL = JsonlReader("text", "id")


def read(paths, reader, size=2**30, exclude=()):
    files = find_files([str(path) for path in paths], list(exclude), "data.sources.0")
    units = [Unit(i, "s", pieces) for i, pieces in enumerate(reader.cut(files, size))]
    readers = [UnitReader(unit, reader) for unit in units]
    return [list(reader) for reader in readers], readers


def documents(paths, reader, **options):
    return [document for unit in read(paths, reader, **options)[0] for document in unit]


def lines(tmp_path, *raw, name="a.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"".join(raw))
    return path


class TestFiles:
    def test_sorted_once_with_names_below_the_fixed_part(self, tmp_path):
        for name in ("b/2.txt", "a/1.txt", "a/deep/er/3.txt", "top.txt", "a/x.md"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        found = find_files([f"{tmp_path}/**/*.txt", f"{tmp_path}/a/*.txt", f"{tmp_path}/a/*"], [], "k")
        assert [file.name for file in found] == ["a/1.txt", "a/deep/er/3.txt", "b/2.txt", "top.txt", "x.md"]

    def test_one_name_twice_is_told_apart_by_path(self, tmp_path):
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "a.txt").write_text(folder)
        found = find_files([f"{tmp_path}/one/*.txt", f"{tmp_path}/two/*.txt"], [], "k")
        assert [file.name for file in found] == [f"{tmp_path}/one/a.txt", f"{tmp_path}/two/a.txt"]

    @pytest.mark.parametrize(
        ("exclude", "left"),
        [
            ("*.md", ["a/b.txt", "a/c/d.txt", "e[1].txt"]),
            ("a/**", ["e[1].txt", "x.md"]),
            ("**/c/*", ["a/b.txt", "e[1].txt", "x.md"]),
            ("{root}/a/*.txt", ["a/c/d.txt", "e[1].txt", "x.md"]),
            ("[a-e].txt", ["e[1].txt", "x.md"]),
            ("[!b].txt", ["a/b.txt", "e[1].txt", "x.md"]),
            ("nothing", ["a/b.txt", "a/c/d.txt", "e[1].txt", "x.md"]),
        ],
    )
    def test_exclude(self, tmp_path, exclude, left):
        for name in ("a/b.txt", "a/c/d.txt", "x.md", "e[1].txt"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
        found = find_files([f"{tmp_path}/**/*"], [exclude.format(root=tmp_path)], "k")
        assert [file.name for file in found] == left

    def test_a_bracket_in_a_files_own_name(self, tmp_path):
        (tmp_path / "e[1].txt").write_text("x")
        assert [file.name for file in find_files([f"{tmp_path}/e[1].txt"], [], "k")] == ["e[1].txt"]

    @pytest.mark.parametrize(
        ("pattern", "said"),
        [
            ("{root}/empty/*.txt", "empty is empty"),
            ("{root}/empty", "is a folder"),
            ("{root}/none/*.txt", "there is no folder"),
            ("{root}/full/*.txt", "nothing in it matches"),
        ],
    )
    def test_no_file_names_key_and_pattern(self, tmp_path, pattern, said):
        (tmp_path / "empty").mkdir()
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "a.md").write_text("x")
        pattern = pattern.format(root=tmp_path)
        with pytest.raises(UserError) as error:
            find_files([pattern], [], "data.sources.3")
        assert "data.sources.3.paths" in str(error.value)
        assert pattern in str(error.value)
        assert said in str(error.value)

    @pytest.mark.parametrize(
        "pattern",
        [
            *["**/*.txt", "**", "*", "**/*", "a/**", "*/b/*", "**/b/**/*.txt", "**/**/1.txt", ".*", ".h/**", "**/.h/*"],
            *["a/[ab]/?.txt", "a/b/1.txt", "**/1.txt", "e\\[1]/*", "link/*", "**/link/*", "[!a]*/*"],
        ],
    )
    def test_the_files_are_those_that_glob_finds(self, tmp_path, pattern):
        names = "1.txt a/2.txt a/b/1.txt a/b/c/b/4.txt .h/5.txt a/.h/6.txt a/b/.7.txt é/8.md"
        for name in names.split():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
        theirs = {os.path.abspath(p) for p in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if os.path.isfile(p)}
        if not theirs:
            with pytest.raises(UserError, match="matches no file"):
                find_files([f"{tmp_path}/{pattern}"], [], "k")
            return
        assert {file.path for file in find_files([f"{tmp_path}/{pattern}"], [], "k")} == theirs

    def test_links_that_go_in_circles_give_no_document_twice(self, tmp_path):
        for name in ("a/1.txt", "b/2.txt"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "a" / "up").symlink_to(tmp_path)
        (tmp_path / "a" / "self").symlink_to(tmp_path / "a" / "self")
        found = find_files([f"{tmp_path}/**/*.txt"], [], "k")
        assert [file.name for file in found] == ["a/1.txt", "b/2.txt"]
        (tmp_path / "b" / "to_a").symlink_to(tmp_path / "a")  # two ways to one file are two documents, but no more
        (tmp_path / "a" / "to_b").symlink_to(tmp_path / "b")
        found = find_files([f"{tmp_path}/**/*.txt"], [], "k")
        assert [file.name for file in found] == ["a/1.txt", "a/to_b/2.txt", "b/2.txt", "b/to_a/1.txt"]

    def test_a_folder_that_cannot_be_read_is_no_empty_folder(self, tmp_path, monkeypatch):
        for name in ("a/1.txt", "b/2.txt"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        scandir = os.scandir

        def refusing(path):
            if path == f"{tmp_path}/b":
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refusing)
        with pytest.raises(PermissionError, match="/b'"):
            find_files([f"{tmp_path}/**/*.txt"], [], "k")

    def test_a_name_that_is_not_utf8(self, tmp_path):
        path = os.fsencode(tmp_path) + b"/\xff.txt"
        with open(path, "w") as file:
            file.write("x")
        with pytest.raises(UserError, match=r"k\.paths.*\\xff\.txt.*not UTF-8"):
            find_files([f"{tmp_path}/*.txt"], [], "k")

    def test_all_excluded(self, tmp_path):
        (tmp_path / "a.txt").write_text("x")
        with pytest.raises(UserError, match=r"data\.sources\.0\.exclude"):
            find_files([f"{tmp_path}/*"], ["*.txt"], "data.sources.0")


class TestUnits:
    def test_sizes(self):
        """As large as asked for, but for small sources, which are cut evenly."""
        assert 0.99 * 2**30 < unit_size(10**15, 2**30) <= 2**30
        assert unit_size(10**9, 1000) == 1000
        assert unit_size(0, 1000) == 1
        for total in (1, 10**6, 10**8, 10**9, 10**10):
            size = unit_size(total, 2**30)
            assert min(total, 2**20) <= size <= 2**30
            assert size * -(-total // size) < total + size

    def test_small_files_are_grouped_and_large_text_files_stay_whole(self, tmp_path):
        for number, size in enumerate([10, 20, 70, 500, 5, 5]):
            (tmp_path / f"{number}.txt").write_text("x" * size)
        files = find_files([f"{tmp_path}/*"], [], "k")
        assert [[p.file.name[0] for p in unit] for unit in TEXT.cut(files, 100)] == [
            ["0", "1", "2"],
            ["3"],
            ["4", "5"],
        ]

    @pytest.mark.first(5)
    @pytest.mark.parametrize("seed", range(20))
    def test_cut_lines_are_the_lines_of_the_whole_file(self, tmp_path, seed):
        """At any unit size, with empty lines, long lines and a last line without an end."""
        chance = random.Random(seed)
        path = tmp_path / "a.jsonl"
        records = [
            {"id": str(i), "text": "é" * chance.choice([0, 1, 5, 50, 400])} for i in range(chance.randint(1, 60))
        ]
        raw = [orjson.dumps(r) + chance.choice([b"\n", b"\r\n", b"\n\n", b"\n  \n"]) for r in records]
        path.write_bytes(b"".join(raw).rstrip() if seed % 2 else b"".join(raw))
        whole = path.read_bytes()
        for size in (1, 7, 64, 300, len(whole) - 1, len(whole), 10**6):
            units, readers = read([path], JSONL, size)
            got = [document for unit in units for document in unit]
            assert [(d.id, d.text) for d in got if d.reason is None] == [
                (r["id"], r["text"]) for r in records if r["text"]
            ]
            assert [d.reason for d in got if d.reason] == [EMPTY for r in records if not r["text"]]
            assert sum(reader.bytes_read for reader in readers) == len(whole)
            assert sum(lines for reader in readers for lines, _ in reader.pieces.values()) == len(whole.splitlines())
            for unit in units:
                assert [document.row for document in unit] == list(range(len(unit)))

    def test_a_file_that_grew_after_planning(self, tmp_path):
        path = lines(tmp_path, b'{"text": "a"}\n')
        files = find_files([str(path)], [], "k")
        lines(tmp_path, b'{"text": "a"}\n{"text": "b"}\n')
        with pytest.raises(UserError, match=r"a\.jsonl changed while it was being read"):
            list(UnitReader(Unit(0, "s", next(JSONL.cut(files, 100))), JSONL))


class TestText:
    def test_text_ids_and_byte_order_mark(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\x00")
        (tmp_path / "b.txt").write_bytes("漢字".encode())
        got = documents([tmp_path / "*"], TEXT)
        assert [(d.id, d.text, d.row, d.reason) for d in got] == [
            ("a.txt", "one\r\ntwo\x00", 0, None),
            ("b.txt", "漢字", 1, None),
        ]

    @pytest.mark.parametrize(("raw", "byte"), [(b"good\xffbad", 4), (b"\xef\xbb\xbfab\xc3(", 5), (b"\xed\xa0\x80", 0)])
    def test_not_utf8_with_the_byte(self, tmp_path, raw, byte):
        (tmp_path / "a.txt").write_bytes(raw)
        (document,) = documents([tmp_path / "a.txt"], TEXT)
        assert (document.reason, document.byte, document.text) == ("not UTF-8", byte, "")
        assert f"at {byte}" in document.detail

    def test_empty_and_too_long(self, tmp_path):
        (tmp_path / "a.txt").write_bytes(b"")
        with (tmp_path / "b.txt").open("wb") as file:
            file.truncate(MAX_RECORD_BYTES + 1)
        assert [d.reason for d in documents([tmp_path / "*"], TEXT)] == [EMPTY, TEXT.too_long]


class TestJsonl:
    @pytest.mark.parametrize(
        ("raw", "reason"),
        [
            (b'{"text": "a", \n', "cut line"),
            (b'{"text": "a\x01b"}\n', "invalid JSON"),
            (b"nonsense\n", "invalid JSON"),
            (b'{"text": NaN}\n', "text is not a string"),
            (b'{"text": nan}\n', "invalid JSON"),
            (b'{"a": ' + b"[" * 5000 + b"\n", "invalid JSON"),
            (b'["text"]\n', "not a JSON object"),
            (b'"text"\n', "not a JSON object"),
            (b"null\n", "not a JSON object"),
            (b'{"content": "a"}\n', "no key 'text'"),
            (b"{}\n", "no key 'text'"),
            (b'{"text": null}\n', "text is not a string"),
            (b'{"text": ["a"]}\n', "text is not a string"),
            (b'{"text": 3}\n', "text is not a string"),
            (b'{"text": "\\ud800"}\n', "lone surrogate"),
            (b'{"text": "\xff"}\n', "not UTF-8"),
            (b'{"text": ""}\n', EMPTY),
        ],
    )
    def test_rejected_with_reason_and_line(self, tmp_path, raw, reason):
        good = [b'{"text": "before"}\n', b"\n", b'{"text": "after"}\n']
        path = lines(tmp_path, *good[:2], raw, good[2])
        before, bad, after = documents([path], JSONL)
        assert (before.text, after.text) == ("before", "after")
        assert (bad.reason, bad.line, bad.text) == (reason, 2, "")
        assert line_of(str(path), bad.byte) == 3

    def test_a_cut_last_line(self, tmp_path):
        path = lines(tmp_path, b'{"text": "whole"}\n', b'{"text": "cu')
        assert [d.reason for d in documents([path], JSONL)] == [None]
        (bad,) = damage(path, JSONL)
        assert (bad.reason, bad.lost) == ("truncated JSON lines file", 12)

    @pytest.mark.parametrize("end", [b"\n", b"\r\n"])
    @pytest.mark.parametrize(
        ("raw", "detail"),
        [
            ('{"text": "漢 cut'.encode(), 'the line ends inside a string: {"text": "漢 cut'),
            (b'{"text": "x",', 'the line ends inside the record: {"text": "x",'),
            (b'{"text": "x"', 'the line ends inside the record: {"text": "x"'),
        ],
    )
    def test_a_cut_line_in_the_middle(self, tmp_path, raw, detail, end):
        cut_line, good = documents([lines(tmp_path, raw + end, b'{"text": "whole"}\n')], JSONL)
        assert (cut_line.reason, cut_line.detail, good.text) == ("cut line", detail, "whole")

    def test_what_is_shown_of_a_record_is_one_line(self, tmp_path):
        path = lines(tmp_path, b'{"txt": "a\x1b[31m\x7fb"}\r\n', b'{"txt": 1}\n')
        assert [d.detail for d in documents([path], JSONL)] == [
            r'unexpected control character in string: line 1 column 11 (char 10): {"txt": "a\x1b[31m\x7fb"}',
            "keys: 'txt': {\"txt\": 1}",
        ]

    def test_nothing_but_a_byte_order_mark(self, tmp_path):
        assert documents([lines(tmp_path, b"\xef\xbb\xbf")], JSONL) == []

    def test_text_is_what_the_standard_library_reads(self, tmp_path):
        records = [
            {"text": "a\u2028b\x00c\\u0041 \U0001f600"},
            {"id": 7, "text": "<|endoftext|>"},
            {"text": "nested", "meta": {"x": [1, {"y": None}]}},
        ]
        path = lines(tmp_path, *(json.dumps(r).encode() + b"\n" for r in records), b'{"text": "one", "text": "two"}\n')
        expected = [json.loads(line)["text"] for line in path.read_bytes().splitlines()]
        assert [d.text for d in documents([path], JSONL)] == expected

    def test_ids(self, tmp_path):
        raw = [b'{"id": "own", "text": "a"}\n', b'{"id": 12, "text": "a"}\n', b'{"id": null, "text": "a"}\n']
        raw += [b'{"text": "a"}\n', b'{"id": true, "text": "a"}\n']
        path = lines(tmp_path, *raw)
        starts = [sum(map(len, raw[:i])) for i in range(len(raw))]
        assert [d.id for d in documents([path], JSONL)] == [
            "own",
            "12",
            f"a.jsonl@{starts[2]}",
            f"a.jsonl@{starts[3]}",
            f"a.jsonl@{starts[4]}",
        ]

    def test_other_keys(self, tmp_path):
        path = lines(tmp_path, b'{"body": "b", "url": "u"}\n')
        (document,) = documents([path], JsonlReader("body", "url"))
        assert (document.text, document.id) == ("b", "u")

    def test_byte_order_mark_and_blank_lines(self, tmp_path):
        path = lines(tmp_path, b'\xef\xbb\xbf{"text": "a"}\r\n', b"\r\n", b"   \n", b'{"text": "b"}')
        got = documents([path], JSONL)
        assert [(d.text, d.row, d.line) for d in got] == [("a", 0, 0), ("b", 1, 3)]

    def test_too_long_a_line_does_not_take_the_next_with_it(self, tmp_path):
        path = lines(tmp_path, b'{"text": "' + b"x" * (MAX_RECORD_BYTES + 5) + b'"}\n', b'{"text": "next"}\n')
        units, readers = read([path], JSONL)
        first, second = units[0]
        assert (first.reason, second.text, second.line) == (JSONL.too_long, "next", 1)
        assert readers[0].bytes_read == path.stat().st_size

    def test_input_hash_is_of_the_bytes(self, tmp_path):
        import xxhash

        path = lines(tmp_path, *(b'{"text": "%d"}\n' % i for i in range(50)), b"\n", b"bad")
        whole = path.read_bytes()
        _, (reader,) = read([path], JSONL)
        assert reader.input_hash == xxhash.xxh3_128_hexdigest(whole)


def test_memory_is_that_of_a_record(tmp_path):
    """Reading 60 MB of lines holds no more than a few of them, and what the parser takes for one."""
    import tracemalloc

    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        for _ in range(60):
            file.write(orjson.dumps({"text": "x" * 10**6}, option=orjson.OPT_APPEND_NEWLINE))
    files = find_files([str(path)], [], "k")
    unit = Unit(0, "s", next(JSONL.cut(files, 2**30)))
    tracemalloc.start()
    count = sum(1 for _ in UnitReader(unit, JSONL))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 60
    assert peak < 20 * 10**6


def test_paths_may_be_relative(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    (file,) = find_files(["*.txt"], [], "k")
    assert (file.name, Path(file.path)) == ("a.txt", tmp_path / "a.txt")
