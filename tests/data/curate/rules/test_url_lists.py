"""Lists of addresses: against plain Python, and by the stage."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

from pipeline.common.errors import UserError
from pipeline.config.curation.curate import UrlListsConfig
from pipeline.config.root import Config
from pipeline.data.curate.stage import curate
from pipeline.data.curate.url_lists import UrlLists, url_list_rules, url_list_settings
from pipeline.data.curate.verdicts import read_curation
from pipeline.data.provenance.why_removed import why
from tests.data.curate.runs import curate_config


def write_lists(root: Path) -> Path:
    """Folders as UT1 has them, one of them compressed, and a user's list."""
    for name, files in {
        "adult": {"domains": "bad.example\nworse.example\n", "urls": "mixed.example/adult\n"},
        "games": {"urls": "http://www.Mixed.example/play/\nmixed.example/watch?v=1\n", "domains": "bad.example\n"},
        "other": {"expressions": "never read"},
    }.items():
        (root / "ut1" / name).mkdir(parents=True)
        for file, content in files.items():
            (root / "ut1" / name / file).write_text(content)
    (root / "ut1" / "phishing").mkdir()
    (root / "ut1" / "phishing" / "domains.gz").write_bytes(gzip.compress(b"fish.example\n"))
    (root / "own.txt").write_text("# ours\n\nWWW.Own.example. # a comment\nsome.example/page\nport.example:8080\n")
    return root


def make_config(root: Path, **more: Any) -> UrlListsConfig:
    return UrlListsConfig(lists=[root / "ut1", root / "own.txt"], **more)


CASES = {
    "https://bad.example/": "adult",
    "http://a.b.bad.example:8080/x?y#z": "adult",
    "notbad.example": "",
    "bad.example.org": "",
    "https://www.worse.example": "adult",
    "http://mixed.example": "",
    "http://mixed.example/adult": "adult",
    "http://mixed.example/ADULT/a/b?c": "adult",
    "http://mixed.example/adults": "",
    "http://sub.mixed.example/adult": "",
    "//mixed.example/play/1": "games",
    "mixed.example/watch?v=1": "games",
    "mixed.example/watch?v=2": "",
    "mixed.example/watch": "",
    "fish.example/x": "phishing",
    "own.example": "own",
    "x.own.example": "own",
    "some.example/page/2": "own",
    "some.example/pages": "",
    "port.example:8080/x": "own",
    "port.example/x": "",
    "": "",
    "\ud800": "",
}


def test_addresses(tmp_path: Path) -> None:
    config = make_config(write_lists(tmp_path))
    settings = url_list_settings(config)
    names = ["", *sorted(settings["lists"])]
    found = UrlLists(config, settings).find([*CASES, None, 7])
    assert dict(zip(CASES, (names[number] for number in found), strict=False)) == CASES
    assert found[-2:].tolist() == [0, 0]
    assert [rule.name for rule in url_list_rules(settings)] == [f"url_lists.{name}" for name in names[1:]]


def test_forms_of_other_lists(tmp_path: Path) -> None:
    """Hosts files, blockers' lists, a byte-order mark; and a category of which one file is empty."""
    lines = "first.example\n! a comment\n0.0.0.0 hosts.example\n||blocked.example^\n*.stars.example\n"
    (tmp_path / "own").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (tmp_path / "ut1" / "adult").mkdir(parents=True)
    (tmp_path / "ut1" / "adult" / "domains").write_text("bad.example\n")
    (tmp_path / "ut1" / "adult" / "urls").touch()
    config = UrlListsConfig(lists=[tmp_path / "own", tmp_path / "ut1"])
    names = ("first", "hosts", "blocked", "a.stars", "bad", "comment", "good")
    found = UrlLists(config, url_list_settings(config)).find([f"http://{name}.example/" for name in names])
    assert found.tolist() == [2, 2, 2, 2, 1, 0, 0]


def test_domains_against_plain_python(tmp_path: Path) -> None:
    chance = random.Random(0)
    labels = ["a", "b", "cc", "example", "net"]
    listed = {".".join(chance.choices(labels, k=chance.randint(2, 4))) for _ in range(60)}
    (tmp_path / "list").write_text("\n".join(sorted(listed)))
    config = UrlListsConfig(lists=[tmp_path / "list"])
    urls = [f"https://{'.'.join(chance.choices(labels, k=chance.randint(1, 6)))}/{n}" for n in range(500)]
    found = UrlLists(config, url_list_settings(config)).find(urls)
    hosts = [urlsplit(url).hostname or "" for url in urls]
    assert [bool(number) for number in found] == [
        any(host == domain or host.endswith(f".{domain}") for domain in listed) for host in hosts
    ]
    assert 0 < found.sum() < len(urls)


def test_the_settings_are_those_of_the_files(tmp_path: Path) -> None:
    config = make_config(write_lists(tmp_path))
    before = url_list_settings(config)
    assert set(url_list_settings(make_config(tmp_path, categories=["adult"]))["lists"]) == {"adult", "own"}
    (tmp_path / "ut1" / "adult" / "domains").write_text("bad.example\n")
    after = url_list_settings(config)
    assert [name for name in after["lists"] if after["lists"][name] != before["lists"][name]] == ["adult"]
    with pytest.raises(UserError, match="has changed since"):
        UrlLists(config, before)


def test_lists_that_cannot_be_used(tmp_path: Path) -> None:
    write_lists(tmp_path)
    with pytest.raises(UserError, match=r"data\.curate\.url_lists\.categories: 'adlut' .* adult, games, phishing"):
        url_list_settings(make_config(tmp_path, categories=["adlut"]))
    with pytest.raises(UserError, match=r"url_lists\.lists: .*nowhere does not exist"):
        url_list_settings(UrlListsConfig(lists=[tmp_path / "nowhere"]))
    with pytest.raises(UserError, match="no folder in"):
        url_list_settings(UrlListsConfig(lists=[tmp_path / "ut1" / "other"]))
    packed = gzip.compress(random.Random(0).randbytes(4000).hex().encode())
    flipped = packed[:1000] + bytes(each ^ 255 for each in packed[1000:1010]) + packed[1010:]
    for name, content in (
        ("empty", b"# nothing\n"),
        ("cut.gz", gzip.compress(b"a.example\n")[:-6]),
        ("flipped.gz", flipped),
    ):
        (tmp_path / name).write_bytes(content)
        config = UrlListsConfig(lists=[tmp_path / name])
        with pytest.raises(UserError, match=rf"{name}(: there is no entry| is damaged)"):
            UrlLists(config, url_list_settings(config))


def _config(root: Path, curate: dict[str, Any]) -> Config:
    urls = ["http://good.example/", "http://a.bad.example/x", "http://mixed.example/play/1", None]
    records = [{"id": f"{number}", "text": f"text {number}", "url": url} for number, url in enumerate(urls)]
    (root / "a.jsonl").write_bytes(b"\n".join(map(orjson.dumps, records)))
    config = curate_config(root, root, {"engine": "python", **curate})
    return config.model_copy(update={"data": config.data.model_copy(update={"sources": config.data.sources[:1]})})


def test_the_stage_names_the_list(tmp_path: Path) -> None:
    lists = {"lists": [str(write_lists(tmp_path) / "ut1")]}
    config = _config(tmp_path, {"url_lists": lists})
    (source,) = curate(config).sources
    assert {rule: count for rule, count in source.removed.items() if count} == {
        "url_lists.adult": 1,
        "url_lists.games": 1,
    }
    assert read_curation(config.data_dir / "a" / "curate").about["rules"][1]["name"] == "url_lists.adult"
    for number, name in enumerate((None, "url_lists.adult", "url_lists.games", None)):
        found = why(config, "a", f"0:{number}", say=lambda _: None)
        assert (found.first.name if found.first else None) == name and found.agrees
    lists_of_none = _config(tmp_path, {"url_lists": lists | {"key": "address"}})
    with pytest.raises(UserError, match=r"data\.curate\.url_lists\.key: source 'a' keeps no key 'address'"):
        curate(lists_of_none)
