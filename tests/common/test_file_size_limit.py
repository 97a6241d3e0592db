"""A write that the system refuses names its file: beyond a file-size limit (`ulimit -f`), as on a full disk."""

import subprocess
import sys

import pytest

LIMIT = 100_000
WRITES = {
    "put": "storage.put(path, data)",
    "put_json": "storage.put_json(path, {'a': 'x' * 300_000})",
    "new_file": "file = storage.NewFile(path); file.file.write(data); file.commit()",
    "flushed_new_file": "file = storage.NewFile(path); file.file.write(data); file.file.flush()",
    "read_back": "file = storage.NewFile(path, 'w+b'); file.file.write(data); file.file.seek(0)",
    "json_lines": "storage.JsonLines(path).write({'a': 'x' * 300_000})",
    "json_line": "storage.add_json_line(path, {'a': 'x' * 300_000})",
    "line": "storage.append_line(path, data)",
    "part": "storage.write_at(path, 90_000, data)",
    "reserved": "storage.Reserved(path, 300_000).write(data)",
    "hashed": "file = HashedFile(path); file.write(data); file.commit()",
}
CODE = """
import resource, sys
from pathlib import Path
from pipeline.common import storage
from pipeline.data.datasets.indexed import HashedFile
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
data = bytes(300_000)
for name, code in {writes!r}.items():
    path = Path(sys.argv[1]) / name
    try:
        for _ in range(2):  # a part of a line may have been written: the next one says so
            exec(code)
        print(name, "no error")
    except OSError as error:
        print(name, error.errno, Path(str(error.filename)).name)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By kind of write: number of the error, and name of the file in it."""
    code = CODE.format(limit=LIMIT, writes=WRITES)
    folder = str(tmp_path_factory.mktemp("limit"))
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", WRITES)
def test_named(found, name):
    assert found[name] == f"27 {name}"  # EFBIG
