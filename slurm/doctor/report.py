"""Reports of nodes on themselves, and the verdict from comparing them. Nothing here measures.

One node cannot know that it is slow, or that its clock is the one that is wrong: that takes the others. And a node that
is lost takes the measurements of healthy ones with it, which must not be blamed for that.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from pipeline.common import links, storage

SLOW_FACTOR = 2.0
"""A device that takes this multiple of the median of all for the same matrix product is slow."""
_REPORTS = "reports.json"
"""Those of all nodes, by name."""
_ENOUGH = 3
"""With fewer of a kind the median does not say which one is the odd one."""
_CLOCK_WARNING = 2.0
"""Seconds."""
_CLOCK_ERROR = 60.0
"""Seconds: logs are out of order, and file systems and licences begin to refuse."""
RUN_SPACE = "space of run.dir"
"""Name of the check of a disk that all nodes share."""
UNKNOWN = "unknown"
"""Value of a check that found nothing out."""
_MAY_DIFFER = ("driver", "gpu")
"""Facts that make runs uneven rather than wrong."""

Severity = Literal["error", "warning"]
NetworkState = Literal["alone", "pending", "ok", "closed", "unreached", "late", "failed"]
"""`alone`: there are no others. `pending`: no end was noted. `closed`: the first node could not open its port.
`unreached`: this node could not reach the first one. `late`: it came when the others had begun. `failed`: the
all-reduce did."""


@dataclass(frozen=True)
class NodeCheck:
    """One look at a node."""

    name: str
    ok: bool
    value: str
    """Finding, for a table."""
    message: str = ""
    """The problem, in a sentence that names this check and value; empty if it is ok."""
    severity: Severity = "error"
    """Of a check that is not ok: whether it makes the node unfit."""


def failed(name: str, value: str, message: str) -> NodeCheck:
    """A check whose result makes the node unfit."""
    return NodeCheck(name, False, value, message)


@dataclass(frozen=True)
class Network:
    """Result of the all-reduce over nodes, as one of them saw it."""

    state: NetworkState = "alone"
    rank: int = 0
    """Rank of this node; the others come to the one with rank 0."""
    nodes: int = 1
    """Took part in the all-reduce."""
    missing: tuple[int, ...] = ()
    """Ranks that did not come."""
    message: str = ""
    """Message of what went wrong."""
    backend: str = ""
    seconds: float | None = None
    """Median time of an all-reduce."""
    size: int = 0
    """Bytes of an all-reduce."""
    clock: float | None = None
    """Seconds since 1970 on this node's clock at an instant that was the same for all nodes."""

    def value(self) -> str:
        """For a table."""
        if self.seconds is None:
            return self.state
        # Each byte crosses the link of a node twice, but for its own share.
        rate = 2 * (self.nodes - 1) / self.nodes * self.size / self.seconds / 1e9
        return f"{self.nodes} nodes, {self.size / 2**20:.0f} MiB in {self.seconds * 1e3:.1f} ms ({rate:.2g} GB/s)"


@dataclass(frozen=True)
class Report:
    """All that a node says; written again whenever it gets on, so that a crash or hang leaves what was known."""

    node: str
    at: str = ""
    """What it was doing; empty when it had finished."""
    checks: tuple[NodeCheck, ...] = ()
    products: dict[str, float] = field(default_factory=dict)
    """Seconds of a matrix product by device, like `GPU 3` or `CPU`."""
    facts: dict[str, str] = field(default_factory=dict)
    """Facts that should be the same on all nodes: versions by package, the kind of GPU."""
    network: Network = Network()

    @property
    def errors(self) -> list[str]:
        """Problems that make this node unfit by itself."""
        return [check.message for check in self.checks if not check.ok and check.severity == "error"]


@dataclass(frozen=True)
class NodeVerdict:
    """Nodes that are unfit for training, with the reasons."""

    unhealthy: dict[str, list[str]] = field(default_factory=dict)
    """By node, in words that do not repeat its name."""
    warnings: list[str] = field(default_factory=list)

    def add(self, node: str, text: str, *, unfit: bool = True) -> None:
        """Add a reason against a node, or a warning where it does not make the node unfit."""
        if unfit:
            self.unhealthy.setdefault(node, []).append(text)
        else:
            self.warnings.append(f"{node}: {text}")


def report_file(folder: Path, node: str) -> Path:
    """File of a node's report."""
    return folder / f"{node}.json"


def parse_report(data: bytes) -> Report:
    """The report that JSON says.

    Raises:
        ValueError: it is none.
    """
    try:
        values: dict[str, Any] = orjson.loads(data)
        network = Network(**values["network"] | {"missing": tuple(values["network"]["missing"])})
        checks = tuple(NodeCheck(**check) for check in values["checks"])
        return Report(**values | {"checks": checks, "network": network})
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is not a report of a node ({error})") from None


def full_run_disk(reports: Mapping[str, Report | None]) -> str | None:
    """The problem of a disk of run.dir that has too little room as every node sees it, so that no node is to blame.

    Args:
        reports: of all nodes that were asked.

    Returns:
        What the first node says of it; None where a node has room, or does not know.
    """
    messages = []
    for report in reports.values():
        checks = report.checks if report is not None else ()
        full = [check for check in checks if check.name == RUN_SPACE and not check.ok and check.value != UNKNOWN]
        if not full:
            return None
        messages.append(full[0].message)
    return messages[0] if messages else None


def read_reports(folder: Path, nodes: Sequence[str]) -> dict[str, Report | None]:
    """Reports of nodes by name, before they are gathered; None for one without a report, which did not answer.

    Args:
        folder: of the reports, which has none of earlier calls.
        nodes: all that were asked, by the names that the scheduler has for them.
    """
    found: dict[str, Report | None] = {}
    for node in nodes:
        try:
            found[node] = parse_report(report_file(folder, node).read_bytes())
        except (OSError, ValueError):  # the report is renamed into place, so a damaged one is a damaged disk
            found[node] = None
    return found


def gather_reports(folder: Path, nodes: Sequence[str]) -> None:
    """Put the reports of nodes into one file, when they are not written any more."""
    files = {node: file for node in nodes if (file := report_file(folder, node)).exists()}
    with suppress(OSError, ValueError):  # on a full disk they stay as they are
        storage.put_json(folder / _REPORTS, {node: orjson.loads(file.read_bytes()) for node, file in files.items()})
        for file in files.values():
            links.remove(file)


def compare(reports: Mapping[str, Report | None]) -> NodeVerdict:
    """Verdict from the reports of all nodes by name; None for one that did not answer."""
    found = NodeVerdict()
    answered = {node: report for node, report in reports.items() if report is not None}
    for node, report in reports.items():
        if report is None:
            found.add(node, "it did not answer: the check could not start there, or left no report")
            continue
        if report.at and report.network.state != "pending":
            found.add(node, f"it did not get past this check: {report.at}; it hung there, or was killed")
        for check in report.checks:
            if not check.ok:
                found.add(node, check.message, unfit=check.severity == "error")
    _compare_networks(answered, found)
    _compare_products(answered, found)
    _compare_clocks(answered, found)
    _compare_facts(answered, found)
    return found


def _compare_networks(reports: Mapping[str, Report], found: NodeVerdict) -> None:
    """Whose fault it is that the nodes did not come together, as far as that can be told."""
    networks = {node: report.network for node, report in reports.items() if report.network.state != "alone"}
    first = next((node for node, network in networks.items() if network.rank == 0), None)
    came = [node for node, network in networks.items() if network.state in ("ok", "failed")]
    unreached = {node: network for node, network in networks.items() if network.state == "unreached"}
    for node, network in networks.items():
        if network.state in ("late", "closed"):
            # A port that is taken does not make a node unfit: the training will use another one.
            found.add(node, network.message, unfit=network.state == "late")
        if network.rank == 0 and network.missing:
            found.add(
                node, f"the all-reduce went without {len(network.missing)} that did not join in time", unfit=False
            )
    closed = first is not None and networks[first].state == "closed"
    if first is None or closed or first in found.unhealthy:
        for node, network in unreached.items():
            found.add(node, network.message, unfit=False)
    elif unreached:
        alone = not set(came) - {first}
        if alone:
            found.add(first, f"network: none of the other nodes reaches it ({', '.join(unreached)})")
        # Of two nodes that do not reach one another either may be the one.
        for node, network in unreached.items():
            found.add(node, network.message, unfit=not (alone and len(unreached) > 1))
    # A node that is lost fails the all-reduce for the others, too.
    consequence = closed or bool(found.unhealthy)
    for node, network in networks.items():
        if network.state in ("failed", "pending"):
            text = network.message or "network: it hung in the all-reduce with the other nodes, or was killed there"
            found.add(node, text, unfit=not consequence)


def _compare_products(reports: Mapping[str, Report], found: NodeVerdict) -> None:
    times = {(node, device): seconds for node, report in reports.items() for device, seconds in report.products.items()}
    if len(times) < 2:
        return
    usual = statistics.median_low(times.values())
    for (node, device), seconds in times.items():
        if seconds <= SLOW_FACTOR * usual:
            continue
        text = (
            f"slow: {device} takes {seconds * 1e3:.1f} ms for a matrix product, {seconds / usual:.1f} times as long as "
            f"is usual here ({usual * 1e3:.1f} ms)"
        )
        found.add(node, text, unfit=len(times) >= _ENOUGH)


def _compare_clocks(reports: Mapping[str, Report], found: NodeVerdict) -> None:
    clocks = {node: report.network.clock for node, report in reports.items()}
    known = {node: clock for node, clock in clocks.items() if clock is not None}
    if len(known) < 2:
        return
    median = statistics.median_low(known.values())
    spread = max(known.values()) - min(known.values())
    for node, clock in known.items():
        off = abs(clock - median) if len(known) >= _ENOUGH else spread
        if off > _CLOCK_WARNING:
            text = f"clock: it is {off:.0f} s off the clocks of the other nodes; check its time service"
            found.add(node, text, unfit=off > _CLOCK_ERROR)


def _compare_facts(reports: Mapping[str, Report], found: NodeVerdict) -> None:
    """The majority is right; without one everybody differs."""
    for fact in sorted({fact for report in reports.values() for fact in report.facts}):
        values = {node: report.facts.get(fact, "none") for node, report in reports.items() if report.facts}
        (usual, most), *rest = Counter(values.values()).most_common()
        if not rest:
            continue
        tie = most == rest[0][1]
        for node, value in values.items():
            if value == usual and not tie:
                continue
            others = ", ".join(sorted({other for other in values.values() if other != value})) if tie else usual
            found.add(node, f"{fact}: it has {value}, other nodes have {others}", unfit=fact not in _MAY_DIFFER)
