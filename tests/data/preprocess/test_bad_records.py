"""Bad records in the input of the stage: kept with their places, counted, and what they end in."""

import gzip
import re

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.common.errors import UserError
from pipeline.data.preprocess.stage import preprocess
from tests.data.runs import make_config, write_text
from tests.data.stage import left_behind
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write


@pytest.fixture
def tokenizer(tmp_path):
    return {"path": str(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]))}


GOOD = [b'{"text": "some words number %d"}\n' % i for i in range(200)]


class TestBadInput:
    def jsonl(self, tmp_path, *lines, **options):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"".join(lines))
        return make_config(tmp_path, [{"name": "s", "type": "jsonl", "paths": [str(path)]}], **options)

    def test_rejected_records_are_kept_with_file_and_line(self, tmp_path):
        lines = list(GOOD)
        bad = {3: b'{"text": "cut\n', 77: b'{"no": 1}\n', 150: b'{"text": ""}\n', 199: b"end of f"}
        for number, line in bad.items():
            lines[number] = line
        config = self.jsonl(tmp_path, *lines, preprocess={"max_error_rate": 0.1, "unit_bytes": 500})
        report = preprocess(config)
        expected = {"cut line": 1, "invalid JSON": 1, "no key 'text'": 1, "empty document": 1}
        assert report.rejected == {"s": expected}
        assert report.documents == 196
        kept = [orjson.loads(line) for line in (config.data_dir / "s" / "rejected.jsonl").open()]
        assert [k["where"] for k in kept] == [f"{tmp_path}/a.jsonl:{number + 1}" for number in bad]
        assert [k["reason"] for k in kept] == ["cut line", "no key 'text'", "empty document", "invalid JSON"]
        whole = (tmp_path / "a.jsonl").read_bytes()
        assert all(whole[k["byte"] :].startswith(line) for k, line in zip(kept, bad.values(), strict=True))
        assert orjson.loads((config.data_dir / "s" / "report.json").read_bytes())["rejected"] == expected

    def test_too_many(self, tmp_path):
        config = self.jsonl(tmp_path, *GOOD, b"bad\n" * 3, preprocess={"max_error_rate": 0.01})
        with pytest.raises(UserError) as error:
            preprocess(config)
        for word in (
            "3 of 203",
            "data.preprocess.max_error_rate 0.01",
            "3 invalid JSON",
            "a.jsonl:201",
            "rejected.jsonl",
        ):
            assert word in str(error.value)
        assert not (config.data_dir / "s" / "train" / "manifest.json").exists()
        # What was tokenized is kept: only the limit stands between it and its manifest.
        assert preprocess(self.jsonl(tmp_path, *GOOD, b"bad\n" * 3, preprocess={"max_error_rate": 0.5})).units_done == 0

    def test_what_is_counted_agrees_with_the_file(self, tmp_path):
        config = self.jsonl(tmp_path, *GOOD[:5], b"bad\n" * 4, b'{"text": ""}\n', preprocess={"max_error_rate": 0.01})
        with pytest.raises(UserError) as error:
            preprocess(config)
        file = config.data_dir / "s" / "rejected.jsonl"
        first, _, *ways = str(error.value).splitlines()
        assert len(file.read_bytes().splitlines()) == 5
        assert "4 of 10 records" in first
        assert first.endswith(f"all are in {file} (with 1 empty document, not counted here)")
        assert [way[:5] for way in ways] == ["  1. ", "  2. ", "  3. "], "one action each"
        assert ways[-1].endswith("raise data.preprocess.max_error_rate")

    def test_no_limit_helps_a_source_without_a_good_record(self, tmp_path, tokenizer):
        lines = [b'{"body": "x"}\n'] * 9 + [b'{"text": ""}\n']
        config = self.jsonl(tmp_path, *lines, tokenizer=tokenizer)
        with pytest.raises(UserError) as error:
            preprocess(config)
        assert [line[:4] for line in str(error.value).splitlines() if line.startswith("  ")] == ["  1.", "  2."]

    def test_empty_documents_are_no_errors(self, tmp_path):
        config = self.jsonl(tmp_path, *GOOD, b'{"text": ""}\n' * 50, preprocess={"on_error": "fail"})
        assert preprocess(config).rejected == {"s": {"empty document": 50}}

    def test_fail_names_the_line(self, tmp_path):
        lines = [*GOOD[:120], b'{"body": "x"}\n', *GOOD[120:]]
        config = self.jsonl(tmp_path, *lines, preprocess={"on_error": "fail", "unit_bytes": 700})
        with pytest.raises(UserError, match=r"a\.jsonl:121: no key 'text'.*keys: 'body'"):
            preprocess(config)

    def test_a_file_that_is_not_utf8(self, tmp_path):
        write_text(tmp_path / "t", 20)
        (tmp_path / "t" / "0" / "bad.txt").write_bytes(b"fine until \xe9 here")
        config = make_config(
            tmp_path, [{"name": "s", "paths": [f"{tmp_path}/t/**/*.txt"]}], preprocess={"on_error": "fail"}
        )
        with pytest.raises(UserError, match=r"bad\.txt: byte 11: not UTF-8 \(byte 0xe9 at 11"):
            preprocess(config)

    def test_an_empty_folder(self, tmp_path):
        (tmp_path / "t").mkdir()
        config = make_config(tmp_path, [{"name": "s", "paths": [f"{tmp_path}/t/**/*.txt"]}])
        with pytest.raises(UserError, match=r"data\.sources\.0\.paths: .*t/\*\*/\*\.txt.*is empty"):
            preprocess(config)
        assert not config.data_dir.exists()

    @pytest.mark.parametrize("lines", [[b'{"text": ""}\n'] * 3, [b"\n"], [b""]])
    def test_nothing_to_train_a_tokenizer_on(self, tmp_path, lines):
        with pytest.raises(UserError, match=r"tokenizer\.train: none of the 1 files"):
            preprocess(self.jsonl(tmp_path, *lines))

    @pytest.mark.parametrize("lines", [[b'{"text": ""}\n'] * 3, [b"\n"], [b""]])
    def test_nothing_to_train_on(self, tmp_path, tokenizer, lines):
        config = self.jsonl(tmp_path, *lines, tokenizer=tokenizer)
        with pytest.raises(UserError, match=r"source 's' has no document to train on"):
            preprocess(config)

    def test_a_text_key_that_no_record_has(self, tmp_path, tokenizer):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b"".join(GOOD))
        source = {"name": "s", "type": "jsonl", "paths": [str(path)], "text_key": "txt"}
        config = make_config(tmp_path, [source], tokenizer=tokenizer)
        with pytest.raises(UserError, match=r"200 of 200 records are bad.*no key 'txt'.*a\.jsonl:1 "):
            preprocess(config)

    def test_places_in_compressed_files_and_tables_over_links(self, tmp_path, tokenizer):
        bad = {0: b"x\n", 37: b'{"text": 1}\n', 38: b"\n", 111: b"{}\n", 199: b"nonsense"}
        lines = [bad.get(number, line) for number, line in enumerate(GOOD)]
        whole = b"".join(lines)
        (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(whole[:3000]) + zstandard.compress(whole[3000:]))
        (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(whole))
        (tmp_path / "c.jsonl").write_bytes(whole)
        texts = [None if number in (0, 77, 149) else f"text {number} " * 3 for number in range(150)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet", row_group_size=20)
        sources = [
            {"name": "lines", "type": "jsonl", "paths": [f"{tmp_path}/*.jsonl*"]},
            {"name": "table", "type": "parquet", "paths": [f"{tmp_path}/d.parquet"]},
        ]
        settings = {"max_error_rate": 0.1, "unit_bytes": 700}
        config = make_config(tmp_path, sources, tokenizer=tokenizer, preprocess=settings)
        report = preprocess(config)
        places = {
            name: [orjson.loads(line)["where"] for line in (config.data_dir / name / "rejected.jsonl").open("rb")]
            for name in ("lines", "table")
        }
        assert places["lines"] == [
            f"{tmp_path}/{name}:{number + 1}"
            for name in ("a.jsonl.zst", "b.jsonl.gz", "c.jsonl")
            for number in bad
            if number != 38
        ]
        assert places["table"] == [f"{tmp_path}/d.parquet: row {number}" for number in (0, 77, 149)]
        assert len(list((config.data_dir / "lines").glob("receipts/*/*-*.json"))) > 10
        assert report.rejected["lines"] == {
            "invalid JSON": 6,
            "no key 'text'": 3,
            "text is not a string": 3,
        }

    def test_on_error_fail_names_the_line_of_a_later_link(self, tmp_path, tokenizer):
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join([*GOOD[:150], b"x\n", *GOOD[150:]])))
        source = {"name": "s", "type": "jsonl", "paths": [f"{tmp_path}/a.jsonl.gz"]}
        settings = {"on_error": "fail", "unit_bytes": 700}
        config = make_config(tmp_path, [source], tokenizer=tokenizer, preprocess=settings)
        with pytest.raises(UserError, match=r"a\.jsonl\.gz:151: invalid JSON"):
            preprocess(config)
        assert left_behind(config) == []

    def test_a_warning_while_there_is_time_to_stop(self, tmp_path, tokenizer, capsys):
        lines = [b"x\n" if number % 10 == 0 else GOOD[number % 200] for number in range(4000)]
        config = self.jsonl(tmp_path, *lines, tokenizer=tokenizer, preprocess={"max_error_rate": 0.05})
        with pytest.raises(UserError, match="400 of 4,?000 records are bad"):
            preprocess(config)
        shown = capsys.readouterr().out.replace("\n", " ")
        found = re.findall(r"warning: (\d+) of the first (\d+) records of s are bad", shown)
        assert len(found) == 1
        bad, seen = map(int, found[0])
        assert 1000 <= seen < 2000
        assert abs(bad / seen - 0.1) < 0.01
        assert "more than data.preprocess.max_error_rate 0.05 allows over all records (in unit " in shown

    def test_no_warning_where_they_are_allowed(self, tmp_path, tokenizer, capsys):
        lines = [b"x\n" if number % 100 == 0 else GOOD[number % 200] for number in range(3000)]
        preprocess(self.jsonl(tmp_path, *lines, tokenizer=tokenizer, preprocess={"max_error_rate": 0.05}))
        assert "warning:" not in capsys.readouterr().out
