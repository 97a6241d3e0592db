"""Masks of personal data."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.curation.curate import CleanConfig, PiiConfig
from pipeline.data.curate.cleaning.clean import Cleaner
from pipeline.data.curate.cleaning.patterns import FINDERS
from pipeline.data.curate.cleaning.pii import apply_masks, find_masked, mask_of

KINDS = tuple(FINDERS)
ALL = PiiConfig(email="mask", ip="mask", phone="mask", secret="mask")
KEY = "Ab3dEfGhIjKlMnOpQrStUvWxYz0123456789"


def cleaner(seed: int = 1, **kinds: str) -> Cleaner:
    return Cleaner(CleanConfig(pii=PiiConfig.model_validate(kinds) if kinds else ALL), seed)


def masked(text: str) -> list[tuple[str, str]]:
    """Kinds and texts of all places that are masked."""
    return [(each.kind, text[each.start : each.end]) for each in find_masked(text, KINDS, 1)]


FOUND = {
    "email": [
        "jane.doe@example.com",
        "j+tag_1%x@mail.sub-domain.co.uk",
        "UPPER@EXAMPLE.ORG",
        "a@b.museum",
        "x" * 64 + "@example.com",
    ],
    "ip": ["8.8.8.8", "93.184.216.34", "2001:4860:4860::8888", "2a00:1450:4001:81b:0:0:0:200e"],
    "phone": [
        "+1 (555) 123-4567",
        "+49 30 901820",
        "+442079460958",
        "555-123-4567",
        "415.555.2671",
        "(415) 555-2671",
        "(415)555-2671",
    ],
    "secret": [
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + KEY,
        "github_pat_" + KEY,
        "glpat-" + KEY[:20],
        "xoxb-123456789012-abcdefghij",
        "sk_" + "live_" + KEY[:24],
        "AIza" + KEY[:35],
        "sk-proj-" + KEY,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nabc=\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nMIIEow\n-----END PRIVATE KEY-----",
    ],
}
"""Values that are found, in any surroundings."""
AROUND = [("", ""), ("see ", " there"), ("(", ")"), ('"', '",'), ("<", ">"), ("\n", "\n"), ("一", "。"), ("é: ", ".")]
STAYS = [
    "logo@2x.png icon@3x.jpg",
    "git@github.com:owner/name.git",
    "@decorator @media @user",
    "a@b",
    "x" * 65 + "@example.com",
    "10.0.0.1 192.168.1.1 172.16.0.1 127.0.0.1 169.254.1.1 0.0.0.0 255.255.255.255 224.0.0.1 100.64.0.1 192.0.2.1",
    "::1 fe80::1 fc00::1 2001:db8::1 12:30:45 2020:10",
    "version 8.8.8.8, v8.8.8.8, Release: 93.184.216.34, Firefox/93.0.0.1, section 12.3.4.5, § 12.3.4.5",
    "1.2.3 1.2.3.4.5 01.02.03.04 256.1.1.1 93.184.216.34-beta x93.184.216.34",
    "2020-12-31 2020-12-31T12:00:00 123-45-6789 1234567890 12345678901234567890",
    "x = a +1 - b + 12, 555-1234, 3.14159265, 1,234,567.89",
    "sk-circle-fade-dot-and-a-very-long-name-of-a-class task-based-risk-averse-long-hyphen-words",
    "AKIA is a prefix, ghp_ too; eyJhbGciOiJIUzI1NiJ9 alone; AKIAIOSFODNN7EXAMPLEX",
    "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    "-----BEGIN PRIVATE KEY-----",
]
"""Texts in which nothing is found."""


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in FOUND.items() for value in values])
def test_values_are_found(kind: str, value: str) -> None:
    for before, after in AROUND:
        text = f"{before}{value}{after}"
        assert masked(text) == [(kind, value)], text
        assert cleaner().clean(text) == f"{before}{mask_of(1, kind, normal(kind, value))}{after}"


def normal(kind: str, value: str) -> str:
    """The value that is hashed."""
    if kind == "email":
        return value.lower()
    if kind == "phone":
        return "+" * value.startswith("+") + re.sub("[^0-9]", "", value)
    return value.replace(":0:0:0:", "::")


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_so_stays(text: str) -> None:
    assert masked(text) == []
    assert cleaner().clean(text) == text


def test_numbers_behind_a_word_are_telephones() -> None:
    assert masked("Tel. 030 1234567, fax: 030/7654321") == [("phone", "030 1234567"), ("phone", "030/7654321")]
    assert masked("The hotel 030 1234567, tell 030 1234567") == []


def test_masks_are_keyed_hashes_of_normal_values() -> None:
    text = "Jane@Example.com|jane@example.COM|john@example.com|+1 555 123 4567|+1 (555) 123-4567"
    masks = cleaner().clean(text + "|2A00:1450::1|2a00:1450:0::1").split("|")
    assert masks[0] == masks[1] != masks[2]
    assert masks[3] == masks[4]
    assert masks[5] == masks[6]
    assert all(re.fullmatch(r"<(email|phone|ip):[0-9a-f]{6}>", each) for each in masks)
    assert cleaner(seed=2).clean(text) != cleaner().clean(text)


def test_masks_do_not_depend_on_the_order_of_documents() -> None:
    texts = [f"from user{n % 7}@example.com at {n % 5 + 20}.8.8.8" for n in range(60)]
    first = dict(zip(texts, map(cleaner().clean, texts), strict=True))
    shuffled = random.Random(0).sample(texts, len(texts))
    one = cleaner()
    assert {text: one.clean(text) for text in shuffled} == first
    assert len(set(first.values())) == 35


def test_kinds_are_masked_alone() -> None:
    text = " ".join(values[0] for values in FOUND.values())
    for kind in KINDS:
        assert [each.kind for each in find_masked(text, (kind,), 1)] == [kind]
        assert cleaner(**{kind: "mask"}).clean(text).count("<") == 1


def test_a_secret_wins_over_what_is_in_it() -> None:
    pem = "-----BEGIN PRIVATE KEY-----\njane@example.com 8.8.8.8\n-----END PRIVATE KEY-----"
    assert masked(pem) == [("secret", pem)]


PIECES = [
    "jane@example.com", "@", "a", "b.co", "8.8.8.8", "1.", "2001:4860::8888", ":", "+1 555 123 4567", "555-123-4567",
    "(", ")", "+", "-", ".", " ", "\n", "tel ", "version ", "v", "<", ">", "<email:0a1b2c>", "<ip:123456>",
    "ip:123456>", "sk-", "AKIAIOSFODNN7EXAMPLE", "eyJabcdefghijkl", "-----BEGIN PRIVATE KEY-----",
    "-----END PRIVATE KEY-----", "é", "中", "9", "12", "x@y.version", "/", "_", "ghp_" + KEY,
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=1500)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_cleaning_twice_changes_nothing(text: str) -> None:
    once = cleaner().clean(text)
    assert cleaner().clean(once) == once
    assert find_masked(once, KINDS, 1) == []


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_places_are_those_of_the_text(text: str) -> None:
    found = find_masked(text, KINDS, 1)
    assert all(a.end <= b.start for a, b in pairwise(found))
    assert all(0 <= each.start < each.end <= len(text) for each in found)
    assert apply_masks(text, found) == cleaner().clean(text)
    assert cleaner().spans(text) == found


@pytest.mark.first(4)
@pytest.mark.parametrize(
    "piece", [*PIECES, "a.", "@a.", "a@", "1 ", "555-", "(555) ", " eyJaaaaaaaaaaaa", "eyJa.", "a-"]
)
def test_hostile_texts_end(piece: str) -> None:
    # Quadratic time would be hours for a million characters.
    text = (piece * (10**6 // len(piece) + 1))[: 10**6]
    for find in FINDERS.values():
        for start, end, _ in find(text):
            assert start < end


def test_settings_name_all_that_masks_depend_on() -> None:
    assert cleaner().settings()["pii"]["kinds"] == ["email", "ip", "phone", "secret"]
    assert cleaner(seed=2).settings() != cleaner().settings()
    nothing = Cleaner(CleanConfig(), 3)
    assert nothing.settings() == {}
    assert nothing.changes_nothing
    text = "jane@example.com"
    assert nothing.clean(text) is text
