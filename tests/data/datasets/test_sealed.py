"""Any changed byte of what `data verify` covers is found, and of files of earlier versions it is said what is not."""

import gzip

import orjson
import pytest
from rich.console import Console

from pipeline.common import storage
from pipeline.common.errors import UserError
from pipeline.common.hashing import SEAL, check_seal, sealed_bytes
from pipeline.data.datasets.files import MANIFEST_FILE
from pipeline.data.datasets.manifest import Manifest, read_manifest
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.verify.command import verify_all
from tests.data.runs import make_config, tree

NOT_COVERED = {
    "report.json": "counts for people, of no use to a reader of the dataset",
    "rejected.jsonl": "a list for people",
    "00000000.rejected.jsonl": "what that list is made from",
    "origin.json": "of the run's tokenizer, which is compared with its fingerprint at each use",
}
"""Names of files that `verify` does not look at, and why."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A dataset with metadata, weights, two splits, and a rejected record."""
    root = tmp_path_factory.mktemp("sealed")
    lines = [{"text": f"some words {number}", "kind": "a", "w": 1 / (1 + number % 3)} for number in range(40)]
    with gzip.open(root / "a.jsonl.gz", "wb") as file:
        file.write(b"".join(orjson.dumps(line) + b"\n" for line in lines) + b'{"text": "", "w": 1}\n')
    source = {"name": "s", "type": "jsonl", "paths": [str(root / "*.gz")], "metadata": ["kind"], "weight_key": "w"}
    config = make_config(root, [source])
    preprocess(config)
    assert not verify(config.data_dir).problems
    return config.data_dir


def flipped(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    return bytes(data)


class Changed:
    """A file with other bytes, for a while."""

    def __init__(self, path, data):
        self.path, self.before = path, path.read_bytes()
        path.write_bytes(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.path.write_bytes(self.before)


def test_one_bit_of_each_file(made):
    uncovered = set()
    for path in sorted(path for path in made.rglob("*") if path.is_file()):
        if path.parent == made / "tokenizer":
            continue  # the run's own copy: as `origin.json`
        for place in {0, path.stat().st_size // 2, path.stat().st_size - 1}:
            with Changed(path, flipped(path, place)):
                if not verify(made).problems:
                    uncovered.add(path.name)
    assert uncovered <= NOT_COVERED.keys()


@pytest.mark.parametrize("name", ["s/train/manifest.json", "s/plan.json", "s/receipts/00000/00000000.json"])
def test_each_byte_of_files_with_a_seal(made, name):
    path = made / name
    data = (made / name).read_bytes()
    keys = orjson.loads(data).keys() - {SEAL}
    for place in range(len(data)):
        with pytest.raises(UserError):
            check_seal(path, data[:place] + bytes([data[place] ^ 1 << place % 7]) + data[place + 1 :], keys)
    assert check_seal(path, data, keys)


@pytest.mark.parametrize("key", ["code_version", "config_hash", "text_bytes", "source", "split", "documents", "files"])
def test_each_value_of_a_manifest(made, key):
    path = made / "s" / "train" / MANIFEST_FILE
    value = orjson.loads(path.read_bytes())
    other = {str: "x", int: 1, dict: {}}[type(value[key])]
    with Changed(path, storage.json_bytes(value | {key: other})):
        assert any(str(path) in problem for problem in verify(made).problems)


def test_a_manifest_of_an_earlier_version(made, capsys):
    before = tree(made)
    paths = [*made.rglob(MANIFEST_FILE), made / "s" / "plan.json", *(made / "s" / "receipts").rglob("0*0.json")]
    for path in paths:
        value = orjson.loads(path.read_bytes())
        later = {SEAL, "files"} if path.name == MANIFEST_FILE else {SEAL}
        storage.put_json(path, {key: each for key, each in value.items() if key not in later})
    assert not verify(made).problems
    assert sorted(verify(made).unsealed) == sorted(paths)
    assert verify_all(made, (), Console())
    assert "--seal" in capsys.readouterr().out
    assert read_manifest(made / "s" / "train").files == {}
    assert verify_all(made, (), Console(), seals=True)
    assert not verify(made).unsealed
    for name, data in before.items():
        (made / name).write_bytes(data)


def test_an_unsealed_file_has_no_further_keys(tmp_path):
    data = sealed_bytes({"source": "s"}).replace(b"seal", b"sead")
    with pytest.raises(UserError, match="sead"):
        check_seal(tmp_path / MANIFEST_FILE, data, Manifest.model_fields)


def test_a_changed_receipt_is_made_again(made, tmp_path):
    path = made / "s" / "receipts" / "00000" / "00000000.json"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"records": 4', b'"records": 5'))
    assert path.read_bytes() != before
    assert verify_all(made, (), Console(), repairs=True)
    assert path.read_bytes() == before
