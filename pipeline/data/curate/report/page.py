"""The report as one HTML file, from `report.json` alone: no time and no path is in it, so equal reports are equal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from pipeline import __version__
from pipeline.common.format import counted, cut, percent, size
from pipeline.common.page.html import Fact, Table, document, escaped, prose, section, table, tile
from pipeline.common.page.words import figure, si
from pipeline.data.curate.report.bins import dense
from pipeline.data.curate.report.charts import bars, histogram
from pipeline.data.curate.report.statistics import NEAR_RULE
from pipeline.data.curate.scope import place

_TITLES = {
    "removed": "Removed by it first",
    "inside": "Just kept: nearest to the bound",
    "beyond": "Just removed: nearest to the bound, and by no other rule",
}
_UNBOUND = ("clean.", "duplicates.", "url_lists.")
"""Rules that remove or keep, without a value that is compared."""
_ID = 120
_LANGUAGES = 50


def page(report: Mapping[str, Any]) -> bytes:
    """The whole file."""
    fired = [rule for rule in report["rules"] if rule["fires"]]
    body = [
        *_head(report),
        "<main>",
        _funnel(report),
        _rules(report),
        "<h2>Values and bounds</h2>",
        "<p class='note above-grid'>Documents by the value that a rule looks at; the height is logarithmic. Dashed: "
        "the bound.</p>",
        "<ul class='legend'><li><i class='stays'></i>within the bound</li><li><i class='goes'></i>beyond it</li></ul>",
        "<div class='grid'>",
        *(_figure(rule, report) for rule in report["rules"] if rule["scale"]),
        *_other_charts(report),
        "</div>",
        _together(report, fired),
        *_groups(report),
        *_clusters(report),
        *contamination(report["contamination"], report["sources"]),
        *_examples(report),
        f"</main><footer>Made by pretraining-pipeline {__version__} from the verdicts "
        f"{escaped(report['decide_hash'])}. Tokens are estimated as a quarter of the bytes.</footer>",
    ]
    return document(f"Curation: {report['source']}", body, page_css())


def page_css() -> str:
    """Style of the pages of a curation."""
    return resources.files("pipeline.data.curate.report").joinpath("curation.css").read_text(encoding="utf-8")


def share(count: int, of: int) -> str:
    """Share of a count, as text: never 0 % of something, nor 100 % of all but something."""
    if of == 0:
        return "–"
    text = percent(count / of, 1)
    if 0 < count / of < 0.0005:
        return "< 0.1 %"
    return "> 99.9 %" if count < of and count / of > 0.9995 else text


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    funnel, observes = report["funnel"], report["mode"] == "observe"
    word, kind = ("observe: nothing is removed", "busy") if observes else ("apply", "good")
    removed = funnel["documents"] - funnel["kept"]
    yield "<header><p class='above'>Curation</p><div class='name'>"
    yield f"<h1>{escaped(report['source'])}</h1><span class='state {kind}'>{word}</span></div>"
    if len(report["sources"]) > 1:
        yield f"<p class='why'>Compared with: {escaped(', '.join(report['sources']))}</p>"
    facts = [
        Fact("documents", f"{funnel['documents']:,}", f"{size(funnel['bytes'])}, about {si(funnel['tokens'])} tokens"),
        Fact(
            "kept" if not observes else "would be kept",
            share(funnel["kept"], funnel["documents"]),
            f"{funnel['kept']:,} documents",
            funnel["kept"] / max(1, funnel["documents"]),
        ),
        Fact(
            "bytes kept",
            share(funnel["kept_bytes"], funnel["bytes"]),
            f"{size(funnel['kept_bytes'])}, about {si(funnel['kept_tokens'])} tokens",
            funnel["kept_bytes"] / max(1, funnel["bytes"]),
        ),
        Fact("removed" if not observes else "would be removed", f"{removed:,}", share(removed, funnel["documents"])),
        Fact("duplicates", f"{funnel['duplicates']:,}", "that name a kept document"),
        Fact("edited", f"{funnel['edited']:,}", "kept documents whose text is changed"),
        Fact("rejected", f"{funnel['rejected']:,}", f"of {funnel['rows']:,} records"),
    ]
    yield f"<dl class='tiles'>{''.join(map(tile, facts))}</dl></header>"


def _funnel(report: Mapping[str, Any]) -> str:
    funnel = report["funnel"]
    total = max(1, funnel["documents"])
    steps = [("documents", 0, 0, funnel["documents"], funnel["bytes"])]
    steps += [
        (step["rule"], step["documents"], step["bytes"], step["left"], step["left_bytes"])
        for step in funnel["steps"]
        if step["documents"]
    ]
    rows = "".join(
        f"<tr><td class=w>{escaped(name)}</td>"
        f"<td class='flow'>{_part('left', left / total)}{_part('gone', gone / total)}</td>"
        f"<td>{f'{gone:,}' if gone else ''}</td><td>{size(gone_bytes) if gone else ''}</td><td>{left:,}</td>"
        f"<td>{share(left, funnel['documents'])}</td><td>{size(left_bytes)}</td><td>{si(left_bytes // 4)}</td></tr>"
        for name, gone, gone_bytes, left, left_bytes in steps
    )
    heads = ("removed first by", "", "documents", "bytes", "left", "share", "bytes left", "tokens, estimated")
    head = "".join(f"<th{' class=w' if not place else ''}>{text}</th>" for place, text in enumerate(heads))
    return (
        "<section class='wide'><h3>Funnel</h3><div class='scroll' tabindex='0' role='region' aria-label='Table'>"
        f"<table class='funnel'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        "<p class='note'>Every rule looks at every document; the funnel counts a document at the first rule that "
        "removes it.</p></section>"
    )


def _part(kind: str, fraction: float) -> str:
    return f"<span class='{kind}' style='width:{100 * fraction:.2f}%'></span>"


def _rules(report: Mapping[str, Any]) -> str:
    total = report["funnel"]["documents"]
    rows = tuple(
        (
            rule["name"],
            _bound(rule),
            f"{rule['fires']:,}",
            share(rule["fires"], total),
            f"{rule['first']:,}",
            f"{rule['alone']:,}",
            _about(rule),
        )
        for rule in report["rules"]
    )
    head = ("rule", "keeps", "fires", "share", "fires first", "fires alone", "value")
    note = "Fires alone: documents that would be kept if this rule were off."
    return section("Rules", Table(head, rows, 1, last_words=True), note)


def _about(rule: Mapping[str, Any]) -> str:
    """Its value in words, where no code can be set."""
    return str(rule["about"]).replace("`", "")


def _bound(rule: Mapping[str, Any]) -> str:
    if rule["name"] == NEAR_RULE:
        return f"< {figure(rule['bound'])}"
    if rule["bound"] is None or rule["name"].startswith(_UNBOUND):
        return "–"
    return f"{'≥' if rule['keeps'] == 'min' else '≤'} {figure(rule['bound'])}"


def _breakable(name: str) -> str:
    """A name that is broken behind its parts, where it is too long for a line."""
    return re.sub(r"([._])", r"\1<wbr>", escaped(name))


def _figure(rule: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    total = report["funnel"]["documents"]
    drawn = histogram(dense(rule["all"]), rule["scale"], rule["keeps"], rule["bound"], rule["name"], _about(rule))
    rows = tuple(
        (
            "off"
            if row["bound"] is None
            else figure(row["bound"]) + (" (now)" if row["bound"] == rule["bound"] else ""),
            f"{row['kept']:,}",
            share(row["kept"], total),
            f"{row['kept'] - report['funnel']['kept']:+,}",
            share(row["passes"], total),
        )
        for row in rule["what_if"]
    )
    figures = Table(("bound", "kept", "share", "change", "passes this rule"), rows, 1)
    beyond, other = rule["fires"] - rule["otherwise"], rule["otherwise"]
    words = f"{counted(beyond, 'document')} ({share(beyond, total)}) beyond"
    if other:
        words += f"; {other:,} more ({share(other, total)}) in another language are not shown"
    return (
        f"<figure><figcaption><h3>{_breakable(rule['name'])}</h3></figcaption>"
        f"<p class='note'>{prose(rule['about'])}: keeps {_bound(rule)}; {words}</p>{drawn}"
        f"<details><summary>What if the bound were another one</summary>{table(figures)}"
        "<p class='note'>Duplicates stay those of the present bounds: a removed keeper would be replaced.</p>"
        "</details></figure>"
    )


def _other_charts(report: Mapping[str, Any]) -> Iterator[str]:
    if report["similarity"][0]:
        drawn = histogram(dense(report["similarity"]), "linear", "min", None, "similarity", "similarity", end=1.0)
        yield _chart("Near duplicates", "Estimated similarity of removed documents to the kept one.", drawn)
    if sizes := report["clusters"]["sizes"]:
        labels, counts = _powers(sizes)
        drawn = bars(labels, counts, "Cluster sizes", "clusters")
        figures = Table(
            ("documents removed for one kept", "clusters"), tuple((f"{n:,}", f"{c:,}") for n, c in sizes[:50])
        )
        more = f"<details><summary>Figures</summary>{table(figures)}</details>"
        yield _chart("Cluster sizes", "Kept documents by the number of documents removed for each.", drawn + more)


def _chart(title: str, words: str, drawn: str) -> str:
    return f"<figure><figcaption><h3>{title}</h3></figcaption><p class='note'>{words}</p>{drawn}</figure>"


def _powers(sizes: Sequence[Sequence[int]]) -> tuple[list[str], list[int]]:
    """Sizes by powers of two."""
    most = max(number for number, _ in sizes).bit_length()
    counts = [0] * most
    for number, times in sizes:
        counts[number.bit_length() - 1] += times
    return [si(1 << power) for power in range(most)], counts


def _together(report: Mapping[str, Any], fired: Sequence[Mapping[str, Any]]) -> str:
    if len(fired) < 2:
        return ""
    places = [place for place, rule in enumerate(report["rules"]) if rule["fires"]]
    matrix = report["together"]
    names = "".join(f"<th><span>{escaped(rule['name'])}</span></th>" for rule in fired)
    rows = []
    for row in places:
        total = matrix[row][row]
        cells = "".join(
            f"<td style='--part:{100 * matrix[row][column] / total:.0f}%' title='{matrix[row][column]:,}'>"
            f"{100 * matrix[row][column] / total:.0f}</td>"
            for column in places
        )
        rows.append(f"<tr><th class=w>{escaped(report['rules'][row]['name'])}</th>{cells}<td>{total:,}</td></tr>")
    return (
        "<section class='wide'><h3>Rules that fire together</h3><p class='note'>Of the documents that the rule of a "
        "row removes, the percentage that the rule of a column removes too; the last column counts the row's.</p>"
        "<div class='scroll' tabindex='0' role='region' aria-label='Table'><table class='matrix'><thead><tr><th></th>"
        f"{names}<th><span>documents</span></th></tr></thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _groups(report: Mapping[str, Any]) -> Iterator[str]:
    def rows(groups: Sequence[Sequence[Any]]) -> tuple[tuple[str, ...], ...]:
        return tuple(
            (name, f"{count:,}", f"{kept:,}", f"{count - kept:,}", share(kept, count), size(kept_bytes))
            for name, count, _, kept, kept_bytes in groups
        )

    head = ("documents", "kept", "removed", "share kept", "bytes kept")
    if languages := report["languages"]:
        more = f"{len(languages) - _LANGUAGES:,} more are in report.json." if len(languages) > _LANGUAGES else ""
        yield section("Languages", Table(("language", *head), rows(languages[:_LANGUAGES]), 1), more)
    domains = report["domains"]
    if domains["number"]:
        others = domains["number"] - len(domains["largest"])
        rest = [[f"{others:,} others", *domains["rest"]]] if others else []
        words = f"{domains['number']:,} domains."
        yield section("Domains", Table(("domain", *head), rows([*domains["largest"], *rest]), 1), words)


def _clusters(report: Mapping[str, Any]) -> Iterator[str]:
    largest = report["clusters"]["largest"]
    if not largest:
        return
    rows = tuple(
        (
            f"{cluster['source'] or '–'}, {cluster['unit']}:{cluster['row']}",
            f"{cluster['removed']:,}",
            ", ".join(
                f"{one['unit']}:{one['row']} ({one['rule'].removeprefix('duplicates.')} {one['value']:.3f})"
                for one in cluster["members"]
            ),
        )
        for cluster in largest
    )
    head = ("kept document (unit:row)", "removed for it", "the first of them, with similarity")
    yield section("Largest clusters", Table(head, rows, 1, last_words=True), "See one with `pipeline data why`.")


def _examples(report: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Examples</h2>"
    yield "<p class='note above-grid'>Chosen by keyed hashes, near a bound by their distance to it. "
    why = f"pipeline data why RUN.yaml --source {report['source']} --document UNIT:ROW --text"
    yield f"Texts that are not here: <code>{escaped(why)}</code></p>"
    for rule, examples in zip(report["rules"], report["examples"], strict=True):
        lists = "".join(
            f"<h4>{_TITLES[kind]}</h4><ol class='examples'>{''.join(map(_example, examples[kind]))}</ol>"
            for kind in _TITLES
            if examples[kind]
        )
        if lists:
            title = f"{escaped(rule['name'])} <small>{_bound(rule)}: removes {rule['fires']:,}</small>"
            yield f"<details class='wide'><summary>{title}</summary>{lists}</details>"


def _example(example: Mapping[str, Any]) -> str:
    value = "" if example["value"] is None else f"<b>{figure(example['value'])}</b> "
    where = f"{example['unit']}:{example['row']}"
    if "text" not in example:
        return f"<li>{value}<span class='place'>{where}</span></li>"
    id = f", id {escaped(example['id'][:_ID])}" if example["id"] else ""
    return (
        f"<li>{value}<span class='place'>{where}, {escaped(example['place'])}{id}</span>"
        f"<blockquote dir='auto'>{escaped(example['text'])}</blockquote></li>"
    )


_ROWS = 50
_CELL = 200


def contamination(found: Mapping[str, Any] | None, sources: Sequence[str]) -> Iterator[str]:
    """Sections of the page.

    Args:
        found: as `TouchedItems.report` returns it; None if nothing was looked for.
        sources: of the scope, by number.
    """
    if not found:
        return
    tasks = tuple(
        (name, *(f"{counts[key]:,}" for key in ("items", "checked", "touched", "documents")))
        for name, counts in found["tasks"].items()
    )
    of_tasks = ("task", "items", "long enough", "touched", "documents")
    short = found["too_short"]["items"]
    words = f"{counted(short, 'item')} too short to be looked for." if short else ""
    yield section("Contamination by task", Table(of_tasks, tasks, 1), words)
    items = tuple(_item(item, sources) for item in found["items"][:_ROWS])
    if items:
        more = len(found["items"]) - _ROWS
        words = "Those of which the largest share of n-grams was found come first." + _more(more)
        head = ("task", "item", "first documents (unit:row)", "text", "n-grams", "found", "documents")
        yield section("Items found in documents", Table(head, items, 4), words)
    common = found["common"]
    if common["ngrams"]:
        rows = tuple((cut(each["text"], _CELL), f"{each['documents']:,}") for each in common["listed"][:_ROWS])
        words = "They are in more documents than max_documents allows, and remove nothing."
        more = common["ngrams"] - len(rows)
        yield section("Common n-grams", Table(("n-gram", "documents"), rows, 1), words + _more(more))


def _item(item: Mapping[str, Any], sources: Sequence[str]) -> tuple[str, ...]:
    words = (item["task"], item["item"], _places(item["examples"], sources), cut(item["text"], _CELL))
    return (*words, *(f"{item[key]:,}" for key in ("ngrams", "found", "documents")))


def _places(documents: Sequence[int], sources: Sequence[str]) -> str:
    found = []
    for number in documents:
        source, unit, row = place(number)
        name = f"{sources[source]} " if len(sources) > 1 and source < len(sources) else ""
        found.append(f"{name}{unit}:{row}")
    return ", ".join(found)


def _more(rows: int) -> str:
    return f" {rows:,} more are not shown." if rows > 0 else ""
