"""Files added to a finished source: what is there stays byte for byte, and what is new is appended, or nothing is."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.data.curate.stage import curate
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.verify import verify
from pipeline.data.preprocess.stage import grow_plans, is_complete, preprocess
from pipeline.data.preprocess.status import read_state
from pipeline.data.provenance.adopted_location import open_origins
from pipeline.data.verify.command import verify_all
from tests.data.runs import make_config, write_jsonl
from tests.data.stage import killed_at_rename, write_run_file

RULES = {"gopher_quality": {"min_words": 2, "min_stop_words": None, "min_alpha_words": None}}


def config_of(root: Path, **data: Any) -> Config:
    source = {"name": "web", "type": "jsonl", "paths": [str(root / "corpus" / "*.jsonl")], "metadata": ["id"]}
    preprocess_keys = {"unit_bytes": 20_000, **data.pop("preprocess", {})}
    return make_config(root, [source], preprocess=preprocess_keys, **data)


def first_files(root: Path) -> None:
    for number in range(2):
        write_jsonl(root / "corpus" / f"b{number}.jsonl", 60, number)


def more_files(root: Path) -> None:
    """Before and after the others in the order of names."""
    write_jsonl(root / "corpus" / "a.jsonl", 50, 7)
    write_jsonl(root / "corpus" / "c.jsonl", 40, 8)


def files_of(config: Config) -> dict[str, bytes]:
    data = config.data_dir
    return {str(path.relative_to(data)): path.read_bytes() for path in data.rglob("*") if path.is_file()}


def documents(folder: Path) -> list[tuple[bytes, Any, Any]]:
    """Tokens, metadata and place of each document, by the dataset's own numbers."""
    dataset = Dataset.open(folder)
    origins = open_origins(folder, dataset.manifest)
    assert origins is not None
    found = []
    for number in range(dataset.documents):
        start = dataset.document_start(number)
        ids = dataset.read(start, dataset.document_start(number + 1) - start)
        key = dataset.provenance(number)[:2]
        found.append((ids.tobytes(), dataset.metadata(number), str(origins.places([key])[key])))
    return found


def texts_of_files(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "splits", [{"heldout": 0.2}, pytest.param({"heldout": "20 documents"}, marks=pytest.mark.guard)]
)
def test_what_was_there_stays_and_what_is_new_is_appended(tmp_path, splits):
    first_files(tmp_path)
    config = config_of(tmp_path, splits=splits)
    preprocess(config)
    before, folders = files_of(config), [config.data_dir / "web" / name for name in ("train", "heldout")]
    then = [documents(folder) for folder in folders]
    fingerprints = [Dataset.open(folder).fingerprint for folder in folders]
    more_files(tmp_path)
    with pytest.raises(UserError, match="--grow"):
        preprocess(config)
    preprocess(config, dry_run=True, grow=True)
    assert files_of(config) == before

    preprocess(config, grow=True)
    after = files_of(config)
    changed = {name for name in before if after.get(name) != before[name]}
    of_splits = {f"web/{split}/{name}" for split in ("train", "heldout") for name in ("manifest.json", "parts.bin")}
    assert changed == {"web/plan.json", "web/report.json"} | of_splits
    for split in ("train", "heldout"):
        name = f"web/{split}/parts.bin"
        assert after[name].startswith(before[name]) and len(after[name]) > len(before[name])
    old, new = (json.loads(each["web/plan.json"]) for each in (before, after))
    for key in ("files", "units"):
        assert new[key][: len(old[key])] == old[key]
    assert (new["settings"], new["splits"]) == (old["settings"], old["splits"])
    now = [documents(folder) for folder in folders]
    for split, (one, two) in enumerate(zip(then, now, strict=True)):
        assert two[: len(one)] == one and len(two) > len(one)
        assert Dataset.open(folders[split]).lineage[0] == fingerprints[split]
        earlier = Dataset.open(folders[split], generation=0)
        assert (earlier.documents, earlier.fingerprint) == (len(one), fingerprints[split])
    assert sum(map(len, now)) == len(texts_of_files(tmp_path / "corpus")) == 210
    # Each document once, at the place that it names.
    places = [place for split in now for *_, place in split]
    expected = [f"{path}:{line}" for path in (tmp_path / "corpus").glob("*.jsonl") for line in lines_of(path)]
    assert sorted(places) == sorted(expected)
    assert verify(config.data_dir).problems == []
    assert is_complete(config) and read_state(config)[0].state == "finished"
    preprocess(config)
    preprocess(config, grow=True)
    assert files_of(config) == after


def lines_of(path: Path) -> range:
    return range(1, len(path.read_text().splitlines()) + 1)


@pytest.mark.guard
def test_twice(tmp_path):
    first_files(tmp_path)
    config = config_of(tmp_path)
    preprocess(config)
    folder = config.data_dir / "web" / "train"
    states = [documents(folder)]
    for number in range(2):
        write_jsonl(tmp_path / "corpus" / f"a{number}.jsonl", 30, 20 + number)
        if number:
            grow_plans(config)  # as before jobs are submitted, which are not told
            assert not is_complete(config) and documents(folder) == states[-1]
            assert read_state(config)[0].state == "stopped"
        preprocess(config, grow=not number)
        states.append(documents(folder))
    assert states[2][: len(states[1])] == states[1] and states[1][: len(states[0])] == states[0]
    assert [len(Dataset.open(folder, generation=n).manifest.generations) for n in range(3)] == [0, 1, 2]
    assert [Dataset.open(folder, generation=n).documents for n in range(3)] == list(map(len, states))
    # A part that is lost is made again with the bytes that it had, whatever generation it is of.
    whole = files_of(config)
    for path in folder.rglob("*.bin"):
        if path.name != "parts.bin":
            path.unlink()
    preprocess(config)
    assert files_of(config) == whole
    for path in sorted(folder.glob("parts/*/*.prov"))[::2]:
        path.unlink()
    assert verify_all(config.data_dir, [], Console(quiet=True), repairs=True)
    assert files_of(config) == whole


@pytest.mark.guard
def test_what_is_refused(tmp_path):
    first_files(tmp_path)
    config = config_of(tmp_path)
    preprocess(config)
    before = files_of(config)
    more_files(tmp_path)
    (tmp_path / "corpus" / "b0.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(UserError, match=r"files changed: 1, the first is b0\.jsonl"):
        preprocess(config_of(tmp_path, tokenizer={"path": str(config.data_dir / "tokenizer")}), grow=True)
    assert files_of(config) == before
    curated = config_of(tmp_path, curate={"mode": "apply", "rules": {"gopher_quality": {}}})
    write_jsonl(tmp_path / "corpus" / "b0.jsonl", 60, 0)
    with pytest.raises(UserError, match="mode: apply"):
        preprocess(curated, grow=True)
    assert files_of(config) == before
    shuffled = config_of(tmp_path / "two", preprocess={"shuffle": "global"})
    first_files(tmp_path / "two")
    preprocess(shuffled)
    more_files(tmp_path / "two")
    with pytest.raises(UserError, match="shuffle: global"):
        preprocess(shuffled, grow=True)


@pytest.mark.parametrize(
    ("keys", "hinted"),
    [
        ({}, True),
        ({"curate": {"mode": "observe", "rules": RULES}}, True),
        ({"curate": {"mode": "apply", "rules": RULES}}, False),
        ({"preprocess": {"shuffle": "global"}}, False),
    ],
    ids=["plain", "observe", "apply", "global"],
)
def test_growing_is_offered_only_where_it_is_possible(tmp_path, keys, hinted):
    first_files(tmp_path)
    config = config_of(tmp_path, **keys)
    if "curate" in keys:
        curate(config)
    preprocess(config)
    more_files(tmp_path)
    with pytest.raises(UserError) as refused:
        preprocess(config)
    assert ("--grow" in str(refused.value)) == hinted


def test_a_held_out_source_grows_beside_a_curation(tmp_path):
    first_files(tmp_path)
    write_jsonl(tmp_path / "kept" / "a.jsonl", 20, 3)
    exams = [{"name": "exams", "type": "jsonl", "paths": [str(tmp_path / "kept" / "*.jsonl")]}]
    config = config_of(tmp_path, curate={"mode": "apply", "rules": RULES})
    config = Config.model_validate(
        {
            **config.model_dump(),
            "data": {**config.data.model_dump(), "heldout_sources": exams},
            "heldout_sets": {"exams": {"sources": ["exams"]}},
        }
    )
    curate(config)
    preprocess(config)
    write_jsonl(tmp_path / "kept" / "b.jsonl", 30, 4)
    with pytest.raises(UserError, match="--grow"):
        preprocess(config)
    preprocess(config, grow=True)
    assert sum(Dataset.open(path.parent).documents for path in config.data_dir.glob("exams/*/manifest.json")) == 50


@pytest.mark.slow
def test_killed_at_any_instant(tmp_path):
    first_files(tmp_path)
    config = config_of(tmp_path)
    preprocess(config)
    kept = tmp_path / "kept"
    shutil.copytree(config.data_dir, kept)
    folders = [config.data_dir / "web" / name for name in ("train", "heldout")]
    then = [documents(folder) for folder in folders]
    more_files(tmp_path)
    file, log = write_run_file(config, tmp_path / "run.yaml"), tmp_path / "renames"
    clean = killed_at_rename(log, 0, "preprocess", file, "--grow")
    assert clean.returncode == 0, clean.stdout + clean.stderr
    whole, renames = files_of(config), log.stat().st_size
    last = [documents(folder) for folder in folders]
    assert renames > 12
    seed = random.randrange(2**32)
    print("seed", seed)
    # The plan, some of the units, and all of the end.
    chosen = [1, 2, *random.Random(seed).sample(range(3, renames - 8), 2), *range(renames - 8, renames + 1)]
    seen = set()
    for number in chosen:
        shutil.rmtree(config.data_dir)
        shutil.copytree(kept, config.data_dir)
        assert killed_at_rename(log, number, "preprocess", file, "--grow").returncode == -9
        for folder, old, new in zip(folders, then, last, strict=True):
            found = documents(folder)
            assert found in (old, new)
            seen.add((folder.name, found == new))
        assert verify(config.data_dir).problems == []
        preprocess(config, grow=True)
        assert files_of(config) == whole
    assert len(seen) == 4
