"""Input that may not be read: the message names the key and the file, and what to do about them."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.runs import make_config, write_jsonl, write_text
from tests.data.tokenization.test_tokenizer import byte_vocabulary, write

WITHOUT_RIGHTS = """
import ctypes, json, sys
libc = ctypes.CDLL(None)
for capability in (1, 2):  # to read whatever is there: capabilities(7), CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP, for the workers
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
libc.capget(header, data)
data[0] &= ~0b110
libc.capset(header, data)
from pipeline.config import Config
from pipeline.data.preprocess.stage import preprocess
said = {}
for name, (config, dry_run) in json.load(sys.stdin).items():
    try:
        preprocess(Config.model_validate(config), dry_run=dry_run)
    except Exception as error:
        said[name] = [type(error).__name__, str(error)]
print(json.dumps(said))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="as root, to have no trouble with pytest's folders")
def test_the_key_and_the_file_are_named(tmp_path):
    loaded = {"path": str(write(tmp_path / "t.json", byte_vocabulary(), special=["<|endoftext|>"]))}
    (tmp_path / "secret").mkdir()
    secret = write(tmp_path / "secret" / "t.json", byte_vocabulary(), special=["<|endoftext|>"])
    write_text(tmp_path / "texts", 10)
    write_jsonl(tmp_path / "lines" / "a.jsonl", 10)
    write_jsonl(tmp_path / "lines" / "b.jsonl", 10)
    (tmp_path / "tables").mkdir()
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "tables" / "a.parquet")
    texts = {"name": "t", "paths": [f"{tmp_path}/texts/**/*.txt"]}
    lines = {"name": "j", "type": "jsonl", "paths": [f"{tmp_path}/lines/*.jsonl"]}
    tables = {"name": "p", "type": "parquet", "paths": [f"{tmp_path}/tables/*.parquet"]}
    cases = {
        "worker": ([texts, lines], loaded, False),
        "sample": ([texts, lines], None, False),
        "dry run": ([texts, lines], loaded, True),
        "schema": ([tables], loaded, False),
        "folder": ([texts, texts | {"name": "f", "paths": [f"{tmp_path}/closed/**/*.txt"]}], loaded, False),
        "beyond a folder": ([texts | {"paths": [f"{tmp_path}/closed/in/a.txt"]}], loaded, False),
        "tokenizer": ([texts], {"path": str(secret)}, False),
    }
    configs = {
        name: (
            make_config(tmp_path / name, sources, **({"tokenizer": tokenizer} if tokenizer else {})).model_dump(
                mode="json"
            ),
            dry_run,
        )
        for name, (sources, tokenizer, dry_run) in cases.items()
    }
    (tmp_path / "closed" / "in").mkdir(parents=True)
    (tmp_path / "closed" / "in" / "a.txt").write_text("a")
    for path in (tmp_path / "lines" / "b.jsonl", tmp_path / "tables" / "a.parquet", tmp_path / "closed", secret):
        path.chmod(0)
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS], input=json.dumps(configs), capture_output=True, text=True, check=True
    )
    said = json.loads(process.stdout.splitlines()[-1])
    expected = {
        "worker": ("data.sources.1.paths", "lines/b.jsonl"),
        "sample": ("data.sources.1.paths", "lines/b.jsonl"),
        "dry run": ("data.sources.1.paths", "lines/b.jsonl"),
        "schema": ("data.sources.0.paths", "tables/a.parquet"),
        "folder": ("data.sources.1.paths", "closed"),
        "beyond a folder": ("data.sources.0.paths", "closed/in/a.txt"),
        "tokenizer": ("tokenizer.path", "secret/t.json"),
    }
    assert {name: (kind, message[: message.index(" cannot be read")]) for name, (kind, message) in said.items()} == {
        name: ("MachineError", f"{key}: {tmp_path}/{file}") for name, (key, file) in expected.items()
    }
    for name, (_, message) in said.items():
        assert "make it readable" in message and "run.dir" not in message
        assert ("exclude" in message) == (name != "tokenizer"), message
