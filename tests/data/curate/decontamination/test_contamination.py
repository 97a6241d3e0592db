"""Documents with items of evaluations, and items in documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import DecontaminateConfig
from pipeline.data.curate.decontamination.index import (
    INDEX_FILE,
    NgramIndex,
    index_settings,
    open_index,
    prepare_index,
    unchecked_items,
)
from pipeline.data.curate.decontamination.items import PIECE, EvalItem
from pipeline.data.curate.decontamination.matching import (
    NumbaMatcher,
    NumpyMatcher,
    open_matcher,
    reference_ngrams,
    texts_batch,
)
from pipeline.data.curate.decontamination.measure import ContaminationMeasurer
from pipeline.data.curate.decontamination.rule import (
    TouchedItems,
    common_ngrams,
    contamination_rules,
    count_documents,
    fill_contamination,
    matches,
)
from tests.data.curate.decontamination.corpora import disguised, made_items, made_text, make_index
from tests.data.curate.outputs import measured

LENGTHS = [3, 7, *range(8, 14), 20, 40]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def reference(index: NgramIndex, texts: list[str]) -> list[tuple[int, int]]:
    return sorted({(row, ngram) for row, text in enumerate(texts) for ngram, _, _ in reference_ngrams(index, text)})


def found(index: NgramIndex, texts: list[str]) -> npt.NDArray[Any]:
    return open_matcher(index, "auto").hits(texts_batch(texts))


@pytest.mark.parametrize("way", range(5))
def test_items_in_any_form_are_found(way: int, rng: np.random.Generator, tmp_path: Path) -> None:
    items = made_items(rng, LENGTHS * 5)
    index = make_index(tmp_path, items)
    texts = [f"{made_text(rng, 30)} {disguised(item.text, way)} {made_text(rng, 30)}" for item in items]
    hits = found(index, texts)
    expected = [place for place, item in enumerate(items) if len(item.text.split(" ")) >= 8]
    assert np.unique(hits["row"]).tolist() == expected
    # An item is found whole, and with nothing else.
    for row in expected:
        ngrams = hits["ngram"][hits["row"] == row]
        assert len(ngrams) == index.arrays["counts"][row] == max(1, len(items[row].text.split(" ")) - 12)
        assert {int(item) for ngram in ngrams for item in index.items_of(int(ngram))} == {row}


def test_short_items_are_found_whole_only(rng: np.random.Generator, tmp_path: Path) -> None:
    items = made_items(rng, list(range(8, 13)))
    index = make_index(tmp_path, items)
    cut = [f"x {item.text.rsplit(' ', 1)[0]} y {item.text.split(' ', 1)[1]} z" for item in items]
    assert len(found(index, cut)) == 0
    assert found(index, [item.text for item in items])["row"].tolist() == list(range(5))


def test_a_long_item_is_found_by_13_words_of_it(rng: np.random.Generator, tmp_path: Path) -> None:
    (item,) = items = made_items(rng, [60])
    index = make_index(tmp_path, items)
    words = item.text.split(" ")
    assert len(found(index, [" ".join(words[20:32])])) == 0
    assert len(found(index, [" ".join(words[20:33])])) == 1
    assert len(found(index, [" ".join(words[20:34])])) == 2


def test_nothing_is_found_in_clean_documents(rng: np.random.Generator, tmp_path: Path) -> None:
    index = make_index(tmp_path, made_items(rng, [8, 9, 10, 13, 30, 100] * 100))
    texts = [made_text(rng, 100) for _ in range(4000)]
    assert len(found(index, texts)) == 0


def test_items_that_are_too_short_are_listed(rng: np.random.Generator, tmp_path: Path) -> None:
    index = make_index(tmp_path, made_items(rng, LENGTHS))
    assert unchecked_items(index).tolist() == [0, 1]
    with pytest.raises(UserError, match="none of the 2 items has 8 words or more"):
        make_index(tmp_path, made_items(rng, [3, 7]))
    assert unchecked_items(make_index(tmp_path, made_items(rng, [4, 5, 7]), words=5)).tolist() == [0]


def test_ngrams_do_not_cross_pieces_and_documents(rng: np.random.Generator, tmp_path: Path) -> None:
    first, second = made_text(rng, 20), made_text(rng, 9)
    index = make_index(tmp_path, [EvalItem("t", "0", f"{first}{PIECE}{second}")])
    assert index.arrays["counts"].tolist() == [8 + 1]
    assert len(found(index, [f"{first} {second}"])) == 9
    half = first.split(" ")
    assert len(found(index, [" ".join(half[:12]), " ".join(half[12:])])) == 0
    texts = {index.ngram_text(number) for number in range(len(index))}
    assert second.rstrip(".") in texts
    assert texts <= {" ".join(half[n : n + 13]).rstrip(".") for n in range(8)} | {second.rstrip(".")}


@pytest.mark.parametrize("words", [5, 8, 13, 32])
def test_engines_give_the_hits_of_the_reference(words: int, rng: np.random.Generator, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    # A small vocabulary: many n-grams are shared, and their first words lead to others.
    small = [" ".join(f"w{n}" for n in rng.integers(3, size=size)) for size in (*range(20), *range(20), 60)]
    index = make_index(tmp_path, [EvalItem("t", str(n), text) for n, text in enumerate(small)], words)
    texts = ["", *(" ".join(f"w{n}" for n in rng.integers(3, size=size)) for size in rng.integers(200, size=60)), ""]
    texts += [text.upper() for text in small]
    expected = reference(index, texts)
    assert expected
    for matcher in (NumpyMatcher(index), NumbaMatcher(index)):
        assert matcher.hits(texts_batch(texts)).tolist() == expected
        for cut in (1, 7):  # in any batches
            parts = [matcher.hits(texts_batch(texts[start : start + cut])) for start in range(0, len(texts), cut)]
            assert [
                (int(row) + start * cut, int(ngram)) for start, part in enumerate(parts) for row, ngram in part
            ] == expected


def test_index_does_not_depend_on_the_order_of_equal_items(rng: np.random.Generator, tmp_path: Path) -> None:
    items = made_items(rng, [20, 8, 30])
    one = make_index(tmp_path, [*items, *items])
    assert one.arrays["counts"].tolist() == [8, 1, 18] * 2
    assert all(len(one.items_of(number)) == 2 for number in range(len(one)))
    first = one.path.read_bytes()
    assert make_index(tmp_path, [*items, *items]).path.read_bytes() == first


def test_measures_and_hits_of_a_chunk(rng: np.random.Generator, tmp_path: Path) -> None:
    items = made_items(rng, [20, 8])
    index = make_index(tmp_path, items)
    texts = [made_text(rng, 20), f"{items[0].text} {items[0].text}", items[1].text, f"{items[1].text} {items[0].text}"]
    table, output = measured(ContaminationMeasurer(index.path), texts_batch(texts))
    assert table["contaminated"].tolist() == [0, 8, 1, 9]
    hits = output.file("hits")
    assert hits["row"].tolist() == [1] * 8 + [2] + [3] * 9
    (rule,) = contamination_rules(DecontaminateConfig(files=["/x"]))
    assert rule.fires(table).tolist() == [False, True, True, True]
    (rule,) = contamination_rules(DecontaminateConfig(files=["/x"], max_ngrams=1))
    assert rule.fires(table).tolist() == [False, True, False, True]
    assert contamination_rules(DecontaminateConfig(files=["/x"], action="report")) == ()
    assert contamination_rules(None) == ()


def test_common_ngrams_are_reported_and_not_used(rng: np.random.Generator, tmp_path: Path) -> None:
    licence, question = made_text(rng, 13), made_text(rng, 40)
    index = make_index(tmp_path, [EvalItem("code", "0", f"{licence}{PIECE}{question}"), EvalItem("code", "1", licence)])
    texts = [f"{licence} {made_text(rng, 20)}" for _ in range(11)]
    texts[3] += f" {question}"
    chunks = [found(index, texts[:6]), found(index, texts[6:])]
    counts = count_documents(index, chunks)
    assert sorted(counts.tolist()) == [1] * 28 + [11]
    common = common_ngrams(counts, 10)
    assert common.sum() == 1
    assert not common_ngrams(counts, 11).any()
    table = np.zeros(6, [("contaminated", "<u4")])
    fill_contamination(table, chunks[0], common)
    assert table["contaminated"].tolist() == [0, 0, 0, 28, 0, 0]
    touched = TouchedItems(index, counts, common)
    touched.add(chunks[0], 100)
    touched.add(chunks[1], 106)
    report = touched.report()
    assert report["tasks"] == {"code": {"items": 2, "checked": 2, "touched": 1, "documents": 1}}
    assert report["common"] == {"ngrams": 1, "listed": [{"text": licence.rstrip("."), "documents": 11}]}
    (item,) = report["items"]
    assert item | {"text": ""} == {
        "task": "code",
        "item": "0",
        "text": "",
        "documents": 1,
        "ngrams": 29,
        "found": 28,
        "share": 28 / 29,
        "examples": [103],
    }
    listed = matches(index, texts[3], common)
    assert [each["common"] for each in listed] == [True] + [False] * 28
    assert listed[0]["items"] == [{"task": "code", "item": "0"}, {"task": "code", "item": "1"}]
    assert all(texts[3][each["start"] : each["end"]] == each["text"] for each in listed)


def test_items_touched_equal_loops(rng: np.random.Generator, tmp_path: Path) -> None:
    """Counts by item and task, against plain loops over all documents and items."""
    items = [item for task in "abc" for item in made_items(rng, LENGTHS * 3, task)]
    index = make_index(tmp_path, items)
    texts = []
    for _ in range(200):
        chosen = [items[n] for n in rng.integers(len(items), size=rng.integers(4))]
        texts.append(" ".join([made_text(rng, 9), *(" ".join(each.text.split(" ")[:25]) for each in chosen)]))
    chunks = [found(index, texts[start : start + 50]) for start in range(0, 200, 50)]
    counts = count_documents(index, chunks)
    touched = TouchedItems(index, counts, common_ngrams(counts, 10**6))
    for number, chunk in enumerate(chunks):
        touched.add(chunk, number * 50)
    ngrams = [{ngram for ngram, _, _ in reference_ngrams(index, item.text)} for item in items]
    documents = [{ngram for ngram, _, _ in reference_ngrams(index, text)} for text in texts]
    expected = {}
    for number, item in enumerate(items):
        having = [row for row, each in enumerate(documents) if each & ngrams[number]]
        if having:
            share = len(ngrams[number] & set().union(*documents)) / len(ngrams[number])
            expected[item.task, item.name] = (len(having), share, having[:3])
    listed = list(touched.listed())
    assert {(i["task"], i["item"]): (i["documents"], i["share"], i["examples"]) for i in listed} == expected
    assert [i["share"] for i in listed] == sorted((i["share"] for i in listed), reverse=True)
    for number, task in enumerate("abc"):
        of_task = set().union(*ngrams[number * len(LENGTHS) * 3 : (number + 1) * len(LENGTHS) * 3])
        assert touched.report()["tasks"][task]["documents"] == sum(bool(each & of_task) for each in documents)


def test_files_of_items(rng: np.random.Generator, tmp_path: Path) -> None:
    first, second, third = (made_text(rng, 15) for _ in range(3))
    (tmp_path / "mine.txt").write_text(f"{first}\n\n{second}\n")
    record = {"question": third, "n": 1, "choices": {"text": ["a b", first]}}
    (tmp_path / "more.jsonl").write_text(f"{json.dumps(record)}\n\n")
    config = DecontaminateConfig(files=[str(tmp_path / "*.txt"), str(tmp_path / "more.jsonl")])
    path = prepare_index(config, tmp_path / "curate")
    index = open_index(path)
    names = [(index.item(n).task, index.item(n).name) for n in range(len(index.arrays["tasks"]))]
    assert names == [
        ("mine.txt", "1"),
        ("mine.txt", "3"),
        ("more.jsonl", "1:question"),
        ("more.jsonl", "1:choices:text:0"),
        ("more.jsonl", "1:choices:text:1"),
    ]
    assert np.unique(found(index, [first, "x", second, third])["row"]).tolist() == [0, 2, 3]
    # What is there is not written again; other words or items are.
    before, settings = path.stat().st_mtime_ns, index_settings(config, path)
    assert prepare_index(config, tmp_path / "curate") == path
    assert path.stat().st_mtime_ns == before
    for other in (DecontaminateConfig(files=config.files, words=9), DecontaminateConfig(files=config.files[:1])):
        assert index_settings(other, prepare_index(other, tmp_path / "curate")) != settings
    assert index_settings(config, prepare_index(config, tmp_path / "curate")) == settings


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"\n \n", "has no items"),
        ("bad.txt", b"\xff\xfe\n", r"bad\.txt:1 is damaged"),
        ("bad.jsonl", b'{"a": 1}\n{"a": \n', r"bad\.jsonl:2 is damaged"),
        ("numbers.jsonl", b'{"a": 1}\n', "has no items"),
        ("items.csv", b"a,b\n", r"neither \.txt"),
    ],
)
def test_files_without_items_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"data\.curate\.decontaminate\.files: .*{message}"):
        prepare_index(DecontaminateConfig(files=[str(tmp_path / name)]), tmp_path / "curate")


def test_a_glob_without_files_and_tasks_without_items_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.curate\.decontaminate\.files: .* matches no file"):
        prepare_index(DecontaminateConfig(files=[str(tmp_path / "*.txt")]), tmp_path)
    with pytest.raises(UserError, match=r"task_items\.jsonl is missing"):
        prepare_index(DecontaminateConfig(tasks=["lambada"]), tmp_path)
    (tmp_path / "task_items.jsonl").write_bytes(EvalItem("wikitext", "0", "some text").line())
    with pytest.raises(UserError, match="has no items of 'lambada', but of wikitext"):
        prepare_index(DecontaminateConfig(tasks=["wikitext", "lambada"]), tmp_path)
    with pytest.raises(ValueError, match="name tasks or files"):
        DecontaminateConfig()


def test_damaged_indexes_are_refused_and_written_anew(rng: np.random.Generator, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(made_text(rng, 30))
    config = DecontaminateConfig(files=[str(tmp_path / "mine.txt")])
    path = prepare_index(config, tmp_path)
    data = path.read_bytes()
    for damaged in (
        data[:-1],
        data[: len(data) // 2],
        b"",
        b"\0" * 8,
        data[:100] + bytes([data[100] ^ 1]) + data[101:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{INDEX_FILE} is damaged; remove it"):
            open_index(path)
    assert prepare_index(config, tmp_path).read_bytes() == data
    with pytest.raises(UserError, match="has changed since the curation was planned"):
        ContaminationMeasurer(path, "python", expected="0" * 16)
