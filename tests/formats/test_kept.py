"""What version 0.1 wrote is read by the code of today: opened, checked, resumed, shown.

`tests.formats.make` says how it was made. Runs of that version resume as long as `NUMERICS_VERSION` is "0.1.0"; once it
is raised, the resumes here get `resume.allow=[code]`, as a user's would.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from tokenizers import Tokenizer

from pipeline.common import storage
from pipeline.data.datasets.dataset import Dataset
from slurm.record.submission import read_submission
from tests.formats import keys, make
from tests.formats.conftest import Call

SAME = ("tokens", "tokens_by_source", "order_hash", "data_hash", "lr", "skipped")
"""What another processor computes alike."""
CLOSE = {"rel": 1e-3}
"""What it may round otherwise: fp32, a few steps."""

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was kept. Tests write where no other one reads: each folder that is resumed belongs to one of them."""
    return make.unpack(make.PACKED, tmp_path_factory.mktemp("kept"))


@pytest.fixture(scope="module", autouse=True)
def before(root: Path) -> dict[str, bytes | None]:
    """The same as it was before any test."""
    return make.files(root)


def read(path: Path, words: dict[str, str] | None = None) -> Any:
    """Content of a file, with words that messages have now in the place of those that they had."""
    text = path.read_text()
    for before, now in (words or {}).items():
        text = text.replace(before, now)
    return orjson.loads(text)


def lines(path: Path) -> list[Any]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def by_hand(folder: Path) -> tuple[list[int], list[int]]:
    """Tokens of a dataset and where its documents begin, by NumPy alone."""
    tokens: list[int] = []
    starts: list[int] = []
    for part in np.fromfile(folder / "parts.bin", [("counts", "<u8", 2), ("name", "<u4", 2), ("hashes", "<u8", 4)]):
        unit, link = part["name"].tolist()
        file = folder / "parts" / "00000" / (f"{unit:08d}-{link:05d}.idx" if link else f"{unit:08d}.idx")
        index = file.read_bytes()
        assert index[:9] == b"MMIDIDX\0\0"
        sequences, documents = np.frombuffer(index, "<u8", 2, 18).tolist()
        lengths = np.frombuffer(index, "<i4", sequences, 34)
        first = np.frombuffer(index, "<i8", documents, 34 + 12 * sequences)
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        starts += (len(tokens) + ends[first[:-1]]).tolist()
        tokens += np.frombuffer(file.with_suffix(".bin").read_bytes(), "<u2").tolist()
    return tokens, starts


def corpus(root: Path, source: str) -> list[str]:
    """The texts of a source, read by other means."""
    found = []
    for file in sorted((root / "corpus").glob(f"{source}*.jsonl*")):
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for line in data.splitlines():
            if line != b"{bad" and (text := json.loads(line)["text"]):
                found.append(text)
    return found


def garble(root: Path, source: str, data: Path, *, all_of_it: bool = False) -> int:
    """Make the input of units that are done unreadable, at the same size and time; how many units are done.

    Args:
        root: of what was kept.
        source: name.
        data: folder of datasets that has the plan and the receipts.
        all_of_it: all units are done, and it is to be so.
    """
    plan = read(data / source / "plan.json")
    receipts = [read(file) for file in data.glob(f"{source}/receipts/[0-9]*/*.json")]
    done = {receipt["unit"] for receipt in receipts if receipt["last"] or receipt["next"] is None}
    assert not all_of_it or done == set(range(len(plan["units"])))
    for unit in done:
        for number, start, end in plan["units"][unit]:
            path = root / "corpus" / Path(plan["files"][number][1]).name
            place, content = 0, b""
            for line in path.read_bytes().splitlines(keepends=True):
                # A line is of the unit in which it begins.
                content += b"x" * (len(line) - 1) + line[-1:] if start <= place < end else line
                place += len(line)
            path.write_bytes(content)
            os.utime(path, (0, 0))
    return len(done)


@pytest.fixture
def whole_corpus(root: Path, tmp_path: Path) -> Iterator[None]:
    """The corpus is put back at the end."""
    shutil.copytree(root / "corpus", tmp_path / "corpus")
    yield
    shutil.rmtree(root / "corpus")
    shutil.copytree(tmp_path / "corpus", root / "corpus")


def datasets(data: Path) -> dict[str, bytes]:
    """The files of all datasets below a folder."""
    names = [name for source in ("land", "sea") for split in ("train", "heldout") for name in [f"{source}/{split}"]]
    files = [file for name in names for file in (data / name).rglob("*") if file.is_file()]
    return {file.relative_to(data).as_posix(): file.read_bytes() for file in files}


def test_every_token(root: Path) -> None:
    tokenizer = Tokenizer.from_file(str(root / "data" / "tokenizer" / "tokenizer.json"))
    for source in ("sea", "land"):
        texts = []
        for split in ("train", "heldout"):
            folder = root / "data" / source / split
            dataset = Dataset.open(folder)
            tokens, starts = by_hand(folder)
            assert dataset.read(0, dataset.tokens).tolist() == tokens
            assert [dataset.document_start(number) for number in range(dataset.documents)] == starts
            ends = [*starts[1:], len(tokens)]
            assert all(tokens[end - 1] == 0 for end in ends)
            texts += [tokenizer.decode(tokens[a : b - 1]) for a, b in zip(starts, ends, strict=True)]
            dataset.metadata(0), dataset.provenance(0)
        assert sorted(texts) == sorted(corpus(root, source))
    adopted = Dataset.open(root / "adopted" / "train")
    assert adopted.read(0, adopted.tokens).tolist() == by_hand(root / "data" / "land" / "train")[0]


def test_hashes(call: Call) -> None:
    call("data", "verify", "data")
    call("data", "verify", "adopted")
    for run in ("done", "stopped"):
        call("checkpoint", "verify", f"runs/{run}")


@pytest.mark.usefixtures("whole_corpus")
def test_what_is_preprocessed_is_not_made_again(root: Path, call: Call, before: dict[str, bytes | None]) -> None:
    for source in ("sea", "land"):
        garble(root, source, root / "data", all_of_it=True)
    assert "preprocess: complete; " in call("preprocess", "run.yaml", "run.dir=runs/again")
    now = make.files(root)
    assert {name: data for name, data in now.items() if name.startswith("data/")} == {
        name: data for name, data in before.items() if name.startswith("data/")
    }


@pytest.mark.usefixtures("whole_corpus")
def test_preprocessing_resumes_from_receipts(root: Path, call: Call) -> None:
    done = {source: garble(root, source, root / "half") for source in ("sea", "land")}
    assert done == {"sea": 2, "land": 1}
    kept = {file: file.read_bytes() for file in (root / "half").glob("*/receipts/[0-9]*/0*.json")}
    call("preprocess", "run.yaml", "run.dir=runs/half", "data.dir=half")
    assert {file: hashed(file, data) for file, data in datasets(root / "half").items()} == datasets(root / "data")
    assert {file: file.read_bytes() for file in kept} == kept
    assert not list((root / "half").glob("*/leases/*/*.json"))


def hashed(file: str, data: bytes) -> bytes:
    """A file of a dataset without the hashes that manifests of version 0.1 do not have."""
    if not file.endswith("manifest.json"):
        return data
    return storage.json_bytes({key: value for key, value in orjson.loads(data).items() if key not in ("files", "seal")})


@pytest.mark.usefixtures("whole_corpus")
def test_a_shuffle_resumes_from_units_and_buckets(root: Path, call: Call) -> None:
    for source in ("sea", "land"):
        garble(root, source, root / "shuffled", all_of_it=True)
    call("preprocess", "run.yaml", *make.SHUFFLED)
    for name, parts_hash in read(root / "expected.json")["shuffled"].items():
        assert read(root / "shuffled" / name / "manifest.json")["parts_hash"] == parts_hash


@pytest.fixture(scope="module")
def whole(root: Path) -> list[dict[str, Any]]:
    """The metrics of the run that was stopped and went on then."""
    return steps(root / "runs" / "done")


def steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in lines(run / "metrics.jsonl") if "loss" in row]


def test_training_resumes(root: Path, call: Call, whole: list[dict[str, Any]]) -> None:
    """From a checkpoint of one process, to what two made of it then."""
    run = root / "runs" / "stopped"
    order = read(run / "journal.json")
    call("train", "run.yaml", "run.dir=runs/stopped")
    found = steps(run)
    assert [row["step"] for row in found] == [row["step"] for row in whole] == list(range(1, 9))
    for now, then in zip(found, whole, strict=True):
        assert {key: now[key] for key in SAME} == {key: then[key] for key in SAME}
        for key in ("loss", "grad_norm", "loss_by_source"):
            assert now[key] == pytest.approx(then[key], **CLOSE), (key, now["step"])
    assert found[:5] == whole[:5] and {row["attempt"] for row in found[5:]} == {2}
    assert read(run / "journal.json") == order == read(root / "runs" / "done" / "journal.json")
    assert read(run / "exit.json")["code"] == 0
    call("eval", "run.yaml", "run.dir=runs/stopped")
    for name in ("step-00000008.json", "tasks-step-00000008.json"):
        now, then = (flat(read(root / "runs" / each / "eval" / name)) for each in ("stopped", "done"))
        assert now.keys() >= then.keys()
        for key, value in then.items():
            if not key.endswith(".checkpoint"):
                assert now[key] == (pytest.approx(value, **CLOSE) if isinstance(value, float) else value), key


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The values of nested objects by their dotted keys."""
    if not isinstance(value, dict):
        return {path: value}
    return {key: each for name in value for key, each in flat(value[name], f"{path}.{name}").items()}


def test_a_run_that_was_killed_resumes(root: Path, call: Call) -> None:
    """It has a lock, a checkpoint that is not whole, and no end; it is a fork of another run."""
    run = root / "runs" / "killed"
    then = steps(run)
    assert len(then) == 4 and (run / "lock").exists() and list(run.glob("checkpoints/*.tmp"))
    call("train", "run.yaml", *make.FORK)
    now = steps(run)
    assert [row["step"] for row in now] == [5, 6, 7, 8, 5, 6, 7, 8]
    for one, two in zip(now[4:], then, strict=True):
        assert {key: one[key] for key in SAME} == {key: two[key] for key in SAME}
        assert one["loss"] == pytest.approx(two["loss"], **CLOSE)
    assert not (run / "lock").exists() and not list(run.glob("checkpoints/*.tmp"))
    assert read(run / "exit.json")["step"] == 8


@pytest.mark.guard
def test_a_fork_and_a_warm_start(root: Path, call: Call, whole: list[dict[str, Any]]) -> None:
    """From a checkpoint of two processes, and from exported weights: the first validation is that of the checkpoint."""
    call("fork", "runs/done", "run.yaml", "--step", "8", "run.dir=runs/forked", "train.duration=9 steps")
    call("train", "run.yaml", "run.dir=runs/forked", "train.duration=9 steps")
    assert [row["step"] for row in steps(root / "runs" / "forked")] == [9]
    (then,) = (
        row for row in lines(root / "runs" / "done" / "metrics.jsonl") if row["step"] == 8 and "validation_loss" in row
    )
    for number, weights in enumerate(("path=runs/done", "path=exports/own", "hf=exports/hf")):
        run = root / "runs" / f"warm-{number}"
        words = ["train.duration=1 steps", "train.validation.every_steps=1", "train.optimizer.lr=1e-12"]
        words += ["train.schedule.warmup=0 steps"]
        call("train", "run.yaml", f"run.dir={run}", f"train.init_from.{weights}", *words)
        (now,) = (row for row in lines(run / "metrics.jsonl") if "validation_loss" in row)
        assert now["validation_loss"] == pytest.approx(then["validation_loss"], **CLOSE)


def test_exports_are_the_same(root: Path, call: Call, tmp_path: Path) -> None:
    """Weights of a checkpoint, and of an export, byte for byte; and a model of Hugging Face's is read.

    An export may say more of its tokenizer, and samples as the run file does: 0.1.0 wrote `do_sample` into all.
    """
    call("convert", "to-hf", "runs/done", str(tmp_path / "hf"))
    call("checkpoint", "export", "runs/done", "--to", str(tmp_path / "own"), "--max-shard", "16KB")
    call("convert", "from-hf", "exports/hf", str(tmp_path / "from-hf"))
    for kept in (root / "exports").rglob("*"):
        now = tmp_path / kept.relative_to(root / "exports")
        if kept.name in ("tokenizer_config.json", "generation_config.json"):
            values = json.loads(kept.read_text())
            assert values.pop("do_sample", True) is True
            assert values.items() <= json.loads(now.read_text()).items(), now
        elif kept.suffix == ".safetensors" or kept.parent.name == "hf":
            assert now.read_bytes() == kept.read_bytes(), now
    call("convert", "to-hf", "exports/own", str(tmp_path / "hf-2"))
    assert (tmp_path / "hf-2" / "model.safetensors").read_bytes() == (
        tmp_path / "hf" / "model.safetensors"
    ).read_bytes()


PRINTED = {
    "checkpoint-list": ("checkpoint", "list", "runs/done", "--json"),
    "checkpoint-show": ("checkpoint", "show", "runs/done", "--json"),
    "data-plan": ("data", "plan", "run.yaml", "--json"),
    "data-where": ("data", "where", "runs/done", "--step", "5", "--json"),
    "data-when": ("data", "when", "runs/done", "--source", "land", "--document", "0", "--json"),
    "eval-table": ("eval", "run.yaml", "--table", "--json"),
    "sweep-table": ("sweep", "run.yaml", *make.SWEEP, "--table", "--json"),
}


def test_what_is_shown(root: Path, call: Call) -> None:
    """Of what is kept, as it was shown then."""
    for name, words in PRINTED.items():
        # Where a checkpoint was made is in it.
        text = call(*words).replace(str(root), str(make.PLACE))
        printed(name, text)
        now = json.loads(text)
        then = read(root / "outputs" / f"{name}.json", {"the lap": "the epoch"})
        if name == "eval-table":  # the time is that of the file
            assert [each.pop("time") for each in now["evaluations"]] == [0]
            del then["evaluations"][0]["time"]
            assert [each.pop("lossy") for each in now["evaluations"]] == [[]]  # came later
        if name == "checkpoint-list":  # came later
            assert {row.pop("best") for row in now} == {False}
        if name == "data-plan":  # came later
            assert {row["objective"] for row in now.pop("objectives")} == {"causal"}
            assert {row.pop("packing") for row in now["segments"]} == {"windows"}
            accounts = [row[when] for row in now["sources"] for when in ("end", "so_far")]
            assert all(account.pop("slots") == account["drawn"] for account in accounts)
        assert now == then, name
    text = call("generate", "run.yaml", "--greedy", "--json", "--logprobs", "2")
    printed("generate", text)
    now = json.loads(text)
    then = read(root / "outputs" / "generate.json")
    assert flat({str(n): each for n, each in enumerate(now["tokens"])}) == flat(
        {
            str(n): {
                **each,
                "logprob": pytest.approx(each["logprob"], **CLOSE),
                "top": [{**top, "logprob": pytest.approx(top["logprob"], **CLOSE)} for top in each["top"]],
            }
            for n, each in enumerate(then["tokens"])
        }
    )


def test_plan(call: Call) -> None:
    printed("plan", call("plan", "run.yaml", "--json", "--device", "h100"))


def printed(name: str, text: str) -> None:
    """What `--json` prints has the keys that it had."""
    check_keys(keys.found_in({f"outputs/{name}.json": text.encode()}))


def known(now: Any, then: Any) -> Any:
    """What has keys now, without those that are new; None for a key that is new itself."""
    if then is None:
        return None
    if not isinstance(then, dict) or not isinstance(now, dict):
        return now
    if "starting" in then and "importing" in now:  # two parts of goodput that have been split since
        between = now["starting"] + now["importing"] + now["down"] + now["queued"]
        assert between == pytest.approx(then["starting"] + then["down"])
        now = {**now, "starting": then["starting"], "down": then["down"]}
    return {key: now[key] for key in then}


def test_status_and_logs(root: Path, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make.write_programs(tmp_path / "bin")
    (tmp_path / "jobs.gone").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("COUNT", str(tmp_path / "jobs"))
    text = call("status", "runs/done", "runs/sent", "--json")
    printed("status", text)
    now = {Path(run["run"]).name: run for run in json.loads(text)["runs"]}
    text = (root / "outputs" / "status.json").read_text().replace(f'"{make.HOST}"', f'"{socket.gethostname()}"')
    then = {Path(run["run"]).name: run for run in json.loads(text)["runs"]}
    # What goes by the clock, or by what the machine does at the moment.
    gone = ("run", "checkpoint_seconds", "why", "mfu")
    # The run file of jobs that never began is where they were sent from.
    elsewhere = {"done": (), "sent": ("steps",)}
    for name, values in now.items():
        wrong = {
            key: (values[key], then[name].get(key))
            for key in values.keys() - {*gone, *elsewhere[name]}
            if known(values[key], then[name].get(key)) != then[name].get(key)
        }
        assert not wrong, name
    assert [each["outcome"] for each in now["done"]["attempts"]] == ["stopped", "failed", "done"]
    assert now["sent"]["state"] == "cancelled" and f"by {make.USER}" in now["sent"]["why"]
    assert "hit by a test" in call("logs", "runs/done", "--attempt", "2", "--first-error")
    assert "step 8/8" in call("logs", "runs/done", "--attempt", "3")


def test_submissions(root: Path) -> None:
    found = [read_submission(file) for file in sorted(root.glob("runs/sent/slurm/submissions/*.json"))]
    assert [(each.stage, each.command[0]) for each in found] == [
        *(("eval", "eval"), ("finish", "preprocess"), ("preprocess", "preprocess"), ("train", "train")),
    ]


def test_a_report(root: Path, call: Call, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    call("report", "runs/done", "runs/diverged", "runs/followed", "--out", str(page))
    text = page.read_text()
    assert all(name in text for name in ("lambada", "wikitext", "runs/diverged", "runs/followed"))


def test_kept_files_have_the_keys_of_the_listing(before: dict[str, bytes | None]) -> None:
    found = keys.found_in(before)
    assert found.keys() <= keys.listing()["files"].keys()
    check_keys(found)


def check_keys(found: dict[str, list[tuple[str, set[str]]]]) -> None:
    """Compare the keys of objects with the listing."""
    known = keys.listing()["files"]
    wrong = []
    for kind, objects in found.items():
        always = set(known.get(kind, {}).get("always", ()))
        all_of_them = always | set(known.get(kind, {}).get("sometimes", ()))
        for name, has in objects:
            wrong += [f"{name} ({kind}) has no {key}" for key in sorted(always - has)]
            wrong += [f"{name} ({kind}) has a new key, {key}" for key in sorted(has - all_of_them)]
    assert not wrong, "\n".join(dict.fromkeys([*wrong[:20], HINT]))


HINT = (
    "A key that has another name changes a file format: what was written before must be read all the same. A key that "
    "is new comes into tests/formats/keys.json by `python -m tests.formats.keys`."
)


def test_new_files_have_the_keys_of_old_ones(root: Path, before: dict[str, bytes | None]) -> None:
    """Those that the tests above have made, and new lines of old ones; run alone, it makes none and finds none."""
    found = {}
    for name, data in make.files(root).items():
        old = before.get(name)
        if data is None or data == old:
            continue
        found[name] = data.removeprefix(old) if old and name.endswith(".jsonl") else data
    check_keys(keys.found_in(found))


def test_fields_have_the_names_of_the_listing() -> None:
    known, now = keys.listing()["fields"], keys.fields()
    assert now.keys() == known.keys(), HINT
    wrong = [f"{name} has no field {each}" for name in known for each in sorted(set(known[name]) - set(now[name]))]
    wrong += [f"{name} has a new field {each}" for name in known for each in sorted(set(now[name]) - set(known[name]))]
    assert not wrong, "\n".join([*wrong, HINT])


def test_every_module_that_writes_by_field_name_is_listed() -> None:
    found = keys.modules_by_name()
    known = {*keys.CLASSES, *keys.WRITE_NOTHING}
    assert not found - known, f"{found - known}: name the classes in tests/formats/keys.py"
    idle = {module for module, names in keys.CLASSES.items() if not names} | set(keys.WRITE_NOTHING)
    assert not idle - found, f"{idle - found} do not ask for fields any more"


@pytest.mark.slow
@pytest.mark.timeout(3600)  # some thirty commands, two minutes of a processor
def test_what_is_made_anew_has_the_keys_of_the_listing(tmp_path: Path) -> None:
    """By all commands, and not only those that the tests above run."""
    place = tmp_path / "made"
    done = subprocess.run(
        [sys.executable, "-m", "tests.formats.make"],
        cwd=make.HERE.parents[1],
        env={**os.environ, "KEPT_ROOT": str(place)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = keys.found_in(make.files(place))
    assert found.keys() == keys.listing()["files"].keys()
    check_keys(found)
