"""A disk that is full at any write, or cannot be written: one message, nothing half-written, and it goes on later."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.data.datasets.files import receipt_path
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.run_tokenizer import run_tokenizer, tokenizer_folder
from pipeline.data.preprocess.source_plan import make_plan, source_job
from pipeline.data.preprocess.split_counts import find_splits
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.tokenize_unit import UnitJob, WorkerContext
from pipeline.data.work.units import find_source_files
from tests.data import mixed
from tests.data.runs import both, datasets, make_config, tree, write_both
from tests.data.stage import left_behind, start, write_run_file

pytestmark = pytest.mark.guard

PAGE = 4096


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_both(mixed.write(tmp_path_factory.mktemp("corpus")) / "both").parent


def sources(corpus):
    """Units of one link, and one of several with metadata and rejected records."""
    return [both(corpus / "both")[0], mixed.sources(corpus)[2]]


def config_of(root, corpus, **data):
    settings = {"workers": 2, "unit_bytes": 4000, "max_error_rate": 0.1}
    return make_config(root, sources(corpus), preprocess=settings, **data)


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A run that nothing disturbed."""
    config = config_of(tmp_path_factory.mktemp("done"), corpus)
    preprocess(config)
    return config


@pytest.fixture
def small_disk(tmp_path):
    """mount(options) makes a small disk, or changes it; skips where this process may not mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = []

    def mount(options):
        known = (
            ["-o", f"remount,{options}", str(folder)]
            if mounted
            else ["-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        )
        result = subprocess.run(["mount", *known], capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"mounting a tmpfs is not possible here: {result.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


def on(disk, corpus, done):
    return config_of(disk, corpus, tokenizer={"path": str(done.data_dir / "tokenizer")})


def test_the_command_ends_with_one_message_and_goes_on(small_disk, corpus, done, tmp_path):
    disk = small_disk("size=700k")
    config = on(disk, corpus, done)
    file = write_run_file(config, tmp_path / "run.yaml")
    process = start(file)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 1, said
    assert f"error: {config.data_dir}" in said.replace("\n", "")
    assert "No space left on device; free some space" in said.replace("\n", " ")
    assert "Traceback" not in said
    assert left_behind(config) == []
    kept = {name for name in tree(config.data_dir) if "/receipts/" in name and name.endswith("0.json")}
    assert kept
    small_disk("size=20m")
    process = start(file)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "done before" in said
    assert datasets(config) == datasets(done)
    assert left_behind(config) == []


def grow_until_done(mount, folder, step, size):
    """Call `step` again and again, each time with a page more; the suffixes of the files that did not fit."""
    failed = []
    while size < 8 * 2**20:
        mount(f"size={size}")
        try:
            step()
        except OSError as error:
            assert error.strerror == "No space left on device"
            assert str(folder) in str(error.filename)
            assert not any(path.name.endswith(".tmp") for path in folder.rglob("*"))
            assert not any(path.is_file() for path in folder.glob("**/leases/**/*"))
            failed.append(Path(str(error.filename)).name.removesuffix(".tmp"))
            size += PAGE
        else:
            return failed
    raise AssertionError(failed)


def used(folder):
    """Bytes of the disk that are taken."""
    return int(subprocess.run(["df", "--output=used", "-B1", folder], capture_output=True, text=True).stdout.split()[1])


def test_at_every_write_of_a_unit(small_disk, corpus, done):
    """Parts, metadata, rejected records, receipts and what is only kept meanwhile, page by page."""
    disk = small_disk("size=20m")
    config = on(disk, corpus, done)
    preprocess(config)
    files = find_source_files(config)
    splits = find_splits(config, Console(quiet=True), files)
    plan = make_plan(files[1], run_tokenizer(config), config, splits["zst"])
    folder = config.data_dir / "zst"
    before = tree(folder)
    for name in before:
        if name.startswith(("receipts/", "train/parts/", "heldout/parts/")):
            (folder / name).unlink()
    job = UnitJob(source_job(plan, config, "start over"), plan.units[0])
    bench = WorkerContext(tokenizer_folder(config), 0.0)
    failed = grow_until_done(small_disk, disk, lambda: job.run(bench, lambda _: None), used(disk))
    for kind in ("bin", "idx", "meta", "json", "rejected.jsonl"):
        assert any(kind in name for name in failed), (kind, sorted(set(failed)))
    assert folder.name not in failed  # every write names its file
    assert tree(folder) == before
    assert not receipt_path(folder, 0, 99).exists()


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "parts.bin", "special_tokens.json", "report.json", "rejected.jsonl", "plan.json"],
)
def test_at_the_writes_of_the_command_itself(corpus, done, tmp_path, monkeypatch, name):
    config = on(tmp_path, corpus, done)
    preprocess(config)
    before = tree(config.data_dir)
    for path in config.data_dir.rglob(name):
        path.unlink()
    if name == "special_tokens.json":
        shutil.rmtree(config.data_dir / "tokenizer")
    rename = os.replace

    def full(old, new):
        if Path(new).name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(new))
        rename(old, new)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        preprocess(config)
    assert left_behind(config) == []
    assert not list(config.data_dir.rglob(name))
    monkeypatch.undo()
    preprocess(config)
    assert tree(config.data_dir) == before
    assert verify(config.data_dir).problems == []


def test_read_only_folder(small_disk, corpus, done):
    disk = small_disk("size=20m")
    config = on(disk, corpus, done)
    small_disk("ro")
    with pytest.raises(OSError, match="Read-only file system") as error:
        preprocess(config)
    assert str(disk) in str(error.value.filename)
    small_disk("rw")
    preprocess(config)
    small_disk("ro")
    assert preprocess(config).units_done == 0  # what is done can be used from there
