"""What was finished and has to be made again: by a condemned engine, after a global shuffle, by two plans at once."""

import json
import os
import threading
from dataclasses import replace

import orjson
import pytest
from rich.console import Console

from pipeline.common.errors import MachineError, UserError
from pipeline.common.hashing import put_sealed
from pipeline.data.datasets.open import open_datasets
from pipeline.data.preprocess.run_tokenizer import run_tokenizer
from pipeline.data.preprocess.run_units import TokenizeRun
from pipeline.data.preprocess.shuffle_pass import ShufflePass
from pipeline.data.preprocess.source_plan import make_plan, source_job
from pipeline.data.preprocess.splits import make_splits
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.preprocess.tokenize_unit import UnitJob, WorkerContext
from pipeline.data.work import unit_chunks
from pipeline.data.work.frozen_plan import freeze_alone
from pipeline.data.work.receipts import read_receipts
from pipeline.data.work.units import find_source_files
from tests.data.runs import datasets, make_config, write_jsonl


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", 60)


def config_of(root, path, **settings):
    return make_config(
        root, [{"name": "s", "type": "jsonl", "paths": [str(path)]}], preprocess={"unit_bytes": 6000, **settings}
    )


def receipts(config):
    return sorted((config.data_dir / "s" / "receipts" / "00000").glob("*.json"))


def pretend(config, engine):
    """As if another engine had made the tokens."""
    for path in receipts(config):
        put_sealed(path, orjson.loads(path.read_bytes()) | {"engine": engine})


def condemn(config, engine):
    (config.data_dir / "tokenizer" / "condemned.json").write_bytes(orjson.dumps({engine: "it erred"}))


def manifests(config):
    return sorted(config.data_dir.glob("s/*/manifest.json"))


@pytest.mark.parametrize("shuffle", ["unit", "global"])
class TestCondemnedLater:
    @pytest.mark.first(1)
    def test_a_finished_source_is_made_again(self, tmp_path, corpus, shuffle, capsys):
        config = config_of(tmp_path, corpus, shuffle=shuffle)
        preprocess(config)
        before = datasets(config)
        pretend(config, "fast 1")
        assert preprocess(config).units_done == 0
        condemn(config, "fast 1")
        capsys.readouterr()
        assert preprocess(config).units_done == len(receipts(config))
        assert "fast 1 is not used any more (it erred)" in capsys.readouterr().out.replace("\n", " ")
        assert datasets(config) == before
        report = json.loads((config.data_dir / "s" / "report.json").read_text())
        assert report["condemned"] == {"fast 1": "it erred"}
        assert [name.split()[0] for name in report["engines"]] == ["tokenizers"]
        assert preprocess(config).units_done == 0

    @pytest.mark.first(1)
    def test_meanwhile_it_is_no_finished_dataset(self, tmp_path, corpus, shuffle, monkeypatch):
        config = config_of(tmp_path, corpus, shuffle=shuffle)
        preprocess(config)
        before = datasets(config)
        pretend(config, "fast 1")
        condemn(config, "fast 1")

        def killed(*_, **__):
            assert manifests(config) == []
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TokenizeRun, "run", killed)
            preprocess(config)
        with pytest.raises(UserError, match="is not a finished dataset"):
            open_datasets(config, "train")
        preprocess(config)
        assert datasets(config) == before


class TestAfterAGlobalShuffle:
    @pytest.mark.guard
    def test_touched_input_is_compared_without_a_first_pass(self, tmp_path, corpus):
        path = tmp_path / "a.jsonl"
        path.write_bytes(corpus.read_bytes())
        config = config_of(tmp_path, path, shuffle="global")
        preprocess(config)
        os.utime(path, ns=(1, 1))
        assert preprocess(config).units_done == 0
        assert not list(config.data_dir.rglob("unshuffled"))
        path.write_bytes(corpus.read_bytes().replace(b"tokens", b"TOKENS", 1))
        with pytest.raises(UserError, match="changed since it was tokenized"):
            preprocess(config)

    @pytest.mark.guard
    def test_a_lost_bucket_is_made_again(self, tmp_path, corpus):
        config = config_of(tmp_path, corpus, shuffle="global")
        preprocess(config)
        before = datasets(config)
        (config.data_dir / "s" / "train" / "parts" / "00000" / "00000000.bin").unlink()
        preprocess(config)
        assert datasets(config) == before
        assert not list(config.data_dir.rglob("unshuffled"))

    def test_killed_before_the_first_pass_was_removed(self, tmp_path, corpus, monkeypatch):
        config = config_of(tmp_path, corpus, shuffle="global")
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ShufflePass, "clean", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            preprocess(config)
        assert list(config.data_dir.rglob("unshuffled"))
        assert preprocess(config).units_done == 0
        assert not list(config.data_dir.rglob("unshuffled"))


def test_failed_units_are_listed_also_when_nothing_was_made_before(tmp_path, corpus, monkeypatch):
    config = config_of(tmp_path, corpus)
    rounds = iter([True, False])

    def units(run, jobs, _):
        run.engine_is_rejected = next(rounds)
        if not run.engine_is_rejected:
            run.outcome.failed.append((jobs[0], "it died"))
        return run.outcome

    monkeypatch.setattr(TokenizeRun, "run", units)
    with pytest.raises(MachineError, match=r"1 unit of s failed:\n  unit \d+ of s .*: it died\n"):
        preprocess(config)


def test_bad_records_of_a_run_that_skipped_are_refused_by_fail(tmp_path, corpus):
    path = tmp_path / "a.jsonl"
    path.write_bytes(corpus.read_bytes() + b"bad\n")
    preprocess(config_of(tmp_path, path, max_error_rate=0.5))
    with pytest.raises(UserError, match=r"more than data\.preprocess\.on_error: fail allows.*a\.jsonl:61"):
        preprocess(config_of(tmp_path, path, on_error="fail"))


@pytest.mark.guard
def test_two_plans_at_once(tmp_path, corpus):
    """No unit was begun, so one replaces the other; that one's workers find it out before they write anything."""
    kept = {"path": str(tmp_path / "run" / "data" / "tokenizer")}
    preprocess(config_of(tmp_path, corpus))
    tokenizer = run_tokenizer(config_of(tmp_path, corpus))
    refused = []
    for attempt in range(10):
        data = tmp_path / "run" / "data" / str(attempt)
        plans = []
        for seed in (1, 2):
            config = make_config(
                tmp_path,
                [{"name": "s", "type": "jsonl", "paths": [str(corpus)]}],
                tokenizer=kept,
                preprocess={"seed": seed},
            )
            plans.append(make_plan(find_source_files(config)[0], tokenizer, config, make_splits(config.data)))
        barrier = threading.Barrier(2)

        def freeze(plan, config=config, folder=data, both=barrier):
            both.wait()
            freeze_alone(plan, config, folder, Console(quiet=True))

        threads = [threading.Thread(target=freeze, args=(plan,)) for plan in plans]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for plan in plans:
            try:
                replace(source_job(plan, config, ""), folder=data).check_plan()
            except UserError as error:
                refused.append(str(error))
        assert len(refused) == attempt + 1
    assert all("replaced by another command" in message for message in refused)


def test_a_link_ends_after_so_many_records(tmp_path, corpus, monkeypatch):
    """However plain the file: memory goes by the number of documents. The documents are the same ones."""
    config = config_of(tmp_path, corpus, unit_bytes=2**30)
    preprocess(config)
    (whole,) = [list(read_receipts(config.data_dir / "s", 0))]
    monkeypatch.setattr(unit_chunks, "CHUNK_RECORDS", 25)
    plan = make_plan(find_source_files(config)[0], run_tokenizer(config), config, make_splits(config.data))
    folder = tmp_path / "links"
    job = source_job(plan, config.model_copy(update={"data": config.data.model_copy(update={"dir": folder})}), "")
    (folder / "s").mkdir(parents=True)
    plan.freeze(folder / "s")
    bench = WorkerContext(config.data_dir / "tokenizer", 0.0)
    assert UnitJob(job, plan.units[0]).run(bench, lambda _: None).made == 3
    links = list(read_receipts(folder / "s", 0))
    assert [link["records"] for link in links] == [25, 25, 10]
    for count in ("documents", "tokens", "text_bytes"):
        for split in ("train", "heldout"):
            assert sum(link["splits"][split][count] for link in links) == whole[0]["splits"][split][count]


def test_a_unit_that_was_given_up_and_that_another_command_made_is_no_problem(tmp_path, corpus, monkeypatch):
    config = config_of(tmp_path, corpus)
    preprocess(config)
    (config.data_dir / "s" / "receipts" / "00000" / "00000000.json").unlink()
    run = TokenizeRun.run

    def fails_beside_another(self, jobs, done_before):
        outcome = run(self, jobs, done_before)
        outcome.failed.append((jobs[0], "it died here"))
        return outcome

    monkeypatch.setattr(TokenizeRun, "run", fails_beside_another)
    assert preprocess(config).sources
