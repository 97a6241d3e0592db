"""The curation stage: what is decided, counted, and applied by preprocess; what is refused; other bounds."""

import builtins
import json
from collections import Counter

import pytest

from pipeline.common.console import Console
from pipeline.common.errors import UserError
from pipeline.config.curation.curate import DuplicatesConfig
from pipeline.data.curate.files import NOBODY
from pipeline.data.curate.results.export import export
from pipeline.data.curate.scope import place
from pipeline.data.curate.stage import curate
from pipeline.data.curate.verdicts import read_curation
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.indexed import EDITED
from pipeline.data.preprocess.stage import preprocess
from pipeline.data.sources.reader import UnitReader
from pipeline.data.work.units import cut_units, find_source_files
from tests.data.curate.runs import curate_config, everything, results, write_corpus
from tests.data.runs import tree


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    config = curate_config(tmp_path_factory.mktemp("done"), corpus)
    return config, curate(config), preprocess(config)


def rows_of(config):
    """{(source, unit, row): document} as the reader gives them."""
    found = {}
    for source in find_source_files(config):
        for unit in cut_units(source, config.data.preprocess.seed, config.data.preprocess.unit_bytes):
            for document in UnitReader(unit, source.reader):
                found[source.source.name, unit.index, document.row] = document
    return found


def verdicts_of(config):
    """{(source, unit, row): verdict}."""
    found = {}
    for source in config.data.sources:
        curation = read_curation(config.data_dir / source.name / "curate")
        for unit in curation.chunks:
            verdicts = curation.read(unit)
            found |= {(source.name, unit, row): verdicts.verdict(row) for row in range(verdicts.rows)}
    return found


@pytest.mark.guard
def test_every_row_has_one_verdict(done):
    config, report, _ = done
    rows, verdicts = rows_of(config), verdicts_of(config)
    assert rows.keys() == verdicts.keys()
    assert all((rows[key].reason is not None) == verdicts[key].is_rejected for key in rows)
    for source in report.sources:
        own = [verdict for key, verdict in verdicts.items() if key[0] == source.name]
        assert source.rows == len(own)
        assert source.rejected == sum(verdict.is_rejected for verdict in own)
        assert source.kept == sum(verdict.rule is None and not verdict.is_rejected for verdict in own)
        counted = Counter(verdict.rule for verdict in own if verdict.rule is not None)
        assert {rule: count for rule, count in source.removed.items() if count} == counted
        stored = json.loads((source.curation.decisions / "report.json").read_text())["funnel"]
        assert (stored["rows"], stored["documents"], stored["kept"]) == (source.rows, source.documents, source.kept)


def test_all_kinds_of_rules_fire(done):
    _, report, _ = done
    fired = {rule for source in report.sources for rule, count in source.removed.items() if count}
    assert {"gopher_quality.min_words", "duplicates.exact", "duplicates.near", "decontaminate"} <= fired
    assert sum(source.lines for source in report.sources) > 0


def test_duplicates_name_a_kept_document_of_the_scope(done):
    config, _, _ = done
    verdicts = verdicts_of(config)
    scope = {source: read_curation(config.data_dir / source / "curate").about["sources"] for source in "abc"}
    named = [(key, verdict) for key, verdict in verdicts.items() if verdict.kept != NOBODY]
    assert named
    for (source, _, _), verdict in named:
        number, unit, row = place(verdict.kept)
        keeper = verdicts[scope[source][number], unit, row]
        assert keeper.rule is None and not keeper.is_rejected
    assert {scope["a"][place(verdict.kept)[0]] for (source, _, _), verdict in named if source == "a"} == {"a", "b"}
    assert {place(verdict.kept)[0] for (source, _, _), verdict in named if source == "c"} == {0}


def test_preprocess_follows_the_verdicts(done):
    config, _, report = done
    verdicts = verdicts_of(config)
    for source in report.sources:
        kept = {key[1:]: v for key, v in verdicts.items() if key[0] == source.name and not v.is_rejected and not v.rule}
        found, edited = set(), set()
        for split in ("train", "heldout"):
            dataset = Dataset.open(config.data_dir / source.name / split)
            for number in range(dataset.documents):
                unit, row, flags, _ = dataset.provenance(number)
                found.add((unit, row))
                if flags & EDITED:
                    edited.add((unit, row))
        assert found == kept.keys()
        assert edited == {key for key, verdict in kept.items() if verdict.is_edited} != set()
        removed = Counter(v.rule for key, v in verdicts.items() if key[0] == source.name and v.rule)
        assert source.curated == removed
        assert sum(split.documents for split in source.splits.values()) == len(kept)


def test_masks_and_lines_are_gone_from_what_is_exported(done, tmp_path):
    config, report, _ = done
    assert export(config, tmp_path / "out", "jsonl", Console(quiet=True)) == sum(each.kept for each in report.sources)
    texts = [json.loads(line)["text"] for path in tmp_path.rglob("*.jsonl") for line in path.open()]
    assert not any("@example.org" in text for text in texts)
    assert any("<email:" in text for text in texts)
    before = tree(tmp_path / "out")
    assert export(config, tmp_path / "out", "jsonl", Console(quiet=True)) == 0
    assert tree(tmp_path / "out") == before
    with pytest.raises(UserError, match="--export"):
        export(config, tmp_path / "out", "parquet", Console(quiet=True))


@pytest.mark.slow
def test_curating_what_was_exported_finds_no_duplicates(done, corpus, tmp_path):
    """But for documents that are more alike since repeated lines were cut out of them."""
    config, _, _ = done
    export(config, tmp_path / "out", "jsonl", Console(quiet=True))
    sources = [
        {"name": name, "type": "jsonl", "paths": [str(tmp_path / "out" / name / "*.jsonl")], "metadata": ["url"]}
        for name in "abc"
    ]
    again = curate_config(tmp_path, corpus)
    again = again.model_validate({**again.model_dump(), "data": {**again.model_dump()["data"], "sources": sources}})
    for source in curate(again).sources:
        found = {rule: count for rule, count in source.removed.items() if count}
        found.pop("duplicates.near", None)
        assert not any(rule.startswith(("duplicates", "decontaminate")) for rule in found), found
        assert source.lines == 0
    as_before, rows = {document.text for document in rows_of(config).values()}, rows_of(again)
    scope = {source: read_curation(again.data_dir / source / "curate").about["sources"] for source in "abc"}
    for key, verdict in verdicts_of(again).items():
        if verdict.rule == "duplicates.near":
            number, unit, row = place(verdict.kept)
            both = {rows[key].text, rows[scope[key[0]][number], unit, row].text}
            assert not both <= as_before


def test_again_finds_nothing_to_do(done):
    config, report, _ = done
    before = tree(config.data_dir)
    again = curate(config)
    assert again.made == 0 and not any(source.is_new for source in again.sources)
    assert tree(config.data_dir) == before
    assert [source.kept for source in again.sources] == [source.kept for source in report.sources]


@pytest.mark.slow
def test_other_bounds_read_no_text(corpus, tmp_path, monkeypatch):
    config = curate_config(tmp_path, corpus)
    first = results_after(config)
    settings = everything(corpus)
    settings["rules"]["gopher_quality"]["min_words"] = 60
    settings["duplicates"]["near"]["min_similarity"] = 0.9
    changed = curate_config(tmp_path, corpus, settings)
    opened = []
    plain = builtins.open

    def watched(file, *args, **kwargs):
        opened.append(str(file))
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", watched)
    monkeypatch.setattr(UnitReader, "__iter__", lambda self: pytest.fail("it read text"))
    second = results_after(changed)
    assert not [name for name in opened if name.endswith("a.jsonl")]
    assert first != second
    monkeypatch.undo()
    assert second == results_after(curate_config(tmp_path / "fresh", corpus, settings))
    assert first == results_after(config)  # the decisions of before are there yet


def results_after(config):
    curate(config)
    return results(config)


class TestRefused:
    def test_other_measures(self, done, corpus):
        config, _, _ = done
        settings = everything(corpus)
        settings["duplicates"]["near"]["words"] = 3
        with pytest.raises(UserError, match=r"data\.curate\.duplicates: .* then, .* now"):
            curate(curate_config(config.run.dir.parent, corpus, settings))

    def test_preprocess_before_curate(self, corpus, tmp_path):
        with pytest.raises(UserError, match="there are no decisions in .*: run `pipeline curate"):
            preprocess(curate_config(tmp_path, corpus))

    def test_preprocess_with_other_bounds(self, done, corpus):
        config, _, _ = done
        settings = everything(corpus)
        settings["rules"]["gopher_quality"]["min_words"] = 60
        with pytest.raises(UserError, match=r"rule gopher_quality\.min_words: 5 then, 60 now") as caught:
            preprocess(curate_config(config.run.dir.parent, corpus, settings))
        assert "max_top_2_grams" not in str(caught.value)  # which is the same

    def test_a_dataset_of_other_decisions(self, corpus, tmp_path):
        config = curate_config(tmp_path, corpus, {"mode": "apply", "rules": {"gopher_quality": {"min_words": 5}}})
        curate(config)
        preprocess(config)
        changed = curate_config(tmp_path, corpus, {"mode": "apply", "rules": {"gopher_quality": {"min_words": 9}}})
        curate(changed)
        with pytest.raises(UserError, match="curation: "):
            preprocess(changed)

    def test_too_many_bad_records(self, corpus, tmp_path):
        config = curate_config(tmp_path, corpus, preprocess={"max_error_rate": 0.001})
        with pytest.raises(UserError, match="max_error_rate"):
            curate(config)

    @pytest.mark.parametrize("dry_run", [True, False])
    def test_against_a_folder_that_is_no_curation(self, corpus, tmp_path, dry_run):
        config = curate_config(tmp_path, corpus, {"against": [str(tmp_path)], "duplicates": {"exact": "text"}})
        with pytest.raises(UserError, match=r"data\.curate\.against: .* is not a finished curation"):
            curate(config, dry_run=dry_run)
        assert not (config.data_dir / "a").exists()  # nothing was measured in vain

    @pytest.mark.parametrize("keep", ["biggest", "newest", "newest:", "longest:url"])
    def test_an_order_that_does_not_exist(self, keep):
        with pytest.raises(ValueError, match="newest:KEY"):
            DuplicatesConfig(keep=[keep])

    def test_a_key_that_is_not_kept(self, corpus, tmp_path):
        settings = everything(corpus)
        settings["duplicates"]["url"] = "address"
        with pytest.raises(UserError, match=r"data\.curate\.duplicates\.url"):
            curate(curate_config(tmp_path, corpus, settings))


@pytest.mark.guard
def test_observe_changes_no_dataset(corpus, tmp_path):
    plain = curate_config(tmp_path / "plain", corpus)
    plain = plain.model_copy(update={"data": plain.data.model_copy(update={"curate": None})})
    observed = curate_config(tmp_path / "observed", corpus, everything(corpus) | {"mode": "observe"})
    curate(observed)
    for config in (plain, observed):
        preprocess(config)

    def datasets(config):
        files = tree(config.data_dir)
        return {name: data for name, data in files.items() if not name.startswith("curate/") and "/curate/" not in name}

    assert datasets(observed) == datasets(plain)


@pytest.mark.slow
def test_splits_with_numbers_count_kept_documents(corpus, tmp_path):
    config = curate_config(tmp_path, corpus, splits={"heldout": "5 documents"})
    curate(config)
    report = preprocess(config)
    assert [source.splits["heldout"].documents for source in report.sources] == [5, 5, 5]
    assert all(source.curated for source in report.sources)


@pytest.mark.slow
def test_units_does_one_pass_at_a_time(corpus, tmp_path):
    config = curate_config(tmp_path, corpus)
    passes = 0
    while curate(config, units=True).made:
        passes += 1
        assert passes < 12
    assert passes == 10
    assert not (config.data_dir / "a" / "curate" / "curation.json").exists()
    curate(config)
    assert results(config) == results_after(curate_config(tmp_path / "other", corpus))


@pytest.mark.guard
def test_number_of_workers_does_not_matter(done, corpus, tmp_path):
    config, _, _ = done
    assert results_after(curate_config(tmp_path, corpus, workers=2)) == results(config)


@pytest.mark.slow
@pytest.mark.guard
def test_chunks_of_compressed_files(corpus, tmp_path):
    import gzip

    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "items.txt").write_bytes((corpus / "items.txt").read_bytes())
    for name in "abc":
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress((corpus / f"{name}.jsonl").read_bytes()))
    sources = [
        {"name": name, "type": "jsonl", "paths": [str(folder / f"{name}.jsonl.gz")], "metadata": ["url"]}
        for name in "abc"
    ]
    config = curate_config(tmp_path, corpus)
    config = config.model_validate({**config.model_dump(), "data": {**config.model_dump()["data"], "sources": sources}})
    report = curate(config)
    assert any("-00001" in path.name for path in (config.data_dir / "a" / "curate" / "measured").rglob("*"))
    rows, verdicts = rows_of(config), verdicts_of(config)
    assert rows.keys() == verdicts.keys()
    assert preprocess(config).documents == sum(source.kept for source in report.sources)


class TestDamage:
    @pytest.fixture
    def config(self, done, corpus, tmp_path):
        import shutil

        config = curate_config(tmp_path, corpus)
        shutil.copytree(done[0].data_dir, config.data_dir)
        return config

    def kinds(self, config):
        """A file of each kind of result that passes read: {kind: path}."""
        found = {}
        for path in sorted(config.data_dir.rglob("*")):
            inside = "curate" in path.relative_to(config.data_dir).parts
            if (
                path.is_file()
                and inside
                and path.stat().st_size > 100
                and path.suffix not in (".json", ".jsonl", ".html")
            ):
                found.setdefault(f"{path.parent.parent.name}{path.suffix}", path)
        return found

    @pytest.mark.guard
    def test_a_flipped_byte_is_found_and_its_pass_makes_the_file_again(self, config, corpus, capsys):
        before = tree(config.data_dir)
        settings = everything(corpus)
        settings["rules"]["gopher_quality"]["min_words"] = 6
        settings["duplicates"]["near"]["min_similarity"] = 0.75
        expected = None
        kinds = self.kinds(config)
        assert len(kinds) > 5
        for path in kinds.values():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        changed = curate_config(config.run.dir.parent, corpus, settings)
        curate(changed)
        after = results(changed)
        expected = results_after(curate_config(config.run.dir.parent / "fresh", corpus, settings))
        assert after == expected
        assert "is damaged" in capsys.readouterr().out
        measured = {name: data for name, data in before.items() if "/measured/" in name}
        assert {name: data for name, data in tree(config.data_dir).items() if name in measured} == measured

    @pytest.mark.parametrize("suffix", ["verdicts", "lines"])
    def test_flipped_bytes_of_verdicts_are_found_though_nothing_is_missing(self, config, suffix, capsys):
        before = results(config)
        path = max(
            (config.data_dir / "a" / "curate" / "decisions").rglob(f"*.{suffix}"), key=lambda p: p.stat().st_size
        )
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        capsys.readouterr()
        curate(config)
        assert "pass 'decide'" in capsys.readouterr().out.replace("\n", " ")
        assert results(config) == before

    def test_preprocess_refuses_damaged_verdicts(self, config):
        import shutil

        for source in "abc":
            for name in ("train", "heldout", "receipts"):
                shutil.rmtree(config.data_dir / source / name)
        path = next((config.data_dir / "a" / "curate" / "decisions").rglob("*.verdicts"))
        data = bytearray(path.read_bytes())
        data[3] ^= 1
        path.write_bytes(data)
        with pytest.raises(UserError, match="decide"):
            preprocess(config)
        curate(config)
        preprocess(config)


@pytest.mark.slow
@pytest.mark.guard
def test_documents_that_changed_since_they_were_measured_get_no_verdicts(corpus, tmp_path):
    """The file has the same size, so the plan is the same; whoever applies decisions reads other bytes."""
    import shutil

    copied = shutil.copytree(corpus, tmp_path / "corpus")
    config = curate_config(tmp_path, copied)
    curate(config)
    path = copied / "a.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(UserError, match="changed since `pipeline curate` measured it"):
        preprocess(config)
    with pytest.raises(UserError, match="changed since `pipeline curate` measured it"):
        export(config, tmp_path / "exported", "jsonl", Console(quiet=True))
    path.write_bytes(b"".join(lines))
    preprocess(config)
    export(config, tmp_path / "exported", "jsonl", Console(quiet=True))
