"""`pipeline init --profile`: a profile of this site, filled in with what its scheduler says."""

from __future__ import annotations

import getpass
import grp
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from pipeline.config.parsing.document import PLACEHOLDER
from pipeline.config.starter import write_new
from slurm import scheduler
from slurm.scheduler import NodeKind, Partition, SchedulerError

_DAY = 24 * 60
_GPUS = re.compile(r"gpu(?::(?P<type>[^:(]+))?:(?P<number>\d+)(?:\(.*\))?")
_TIMES = {"train": _DAY, "preprocess": 4 * 60, "eval": 2 * 60}
"""Most minutes of a stage's job. Short jobs start sooner; training and preprocessing continue in the next one."""
_MOST_CPUS = 8
"""Most CPUs for a task of preprocessing, and for a process without a GPU: a node may have several of each."""
_NETWORK = Path("/sys/class/net")


@dataclass(frozen=True)
class _Line:
    """A line of a profile."""

    key: str
    value: str
    """YAML; "" for a section that follows."""
    remark: str = ""
    on: bool = True
    """Otherwise it is a comment."""

    def __str__(self) -> str:
        text = f"{self.key}: {self.value}".rstrip()
        indent = text[: len(text) - len(text.lstrip())]
        text = text if self.on else f"{indent}# {text.lstrip()}"
        # What comes from the scheduler ends no comment.
        return f"{text:<30} # {_visible(self.remark)}" if self.remark else text


def write_profile(folder: Path) -> Path:
    """Ask the scheduler, and write `folder/site.yaml`; what is unknown is `???` there.

    Raises:
        UserError: `folder/site.yaml` exists, or the scheduler does not answer.
    """
    return write_new(folder / "site.yaml", profile().encode())


def profile() -> str:
    """The text of the profile."""
    partitions = scheduler.partitions()
    settings: dict[str, str] = {}
    with suppress(SchedulerError):
        settings = scheduler.configuration()
    name = settings.get("ClusterName") or PLACEHOLDER
    accounts = _accounts()
    chosen = _choose(partitions, accounts or [])
    lines = [
        _Line("description", _text(name), "" if name != PLACEHOLDER else "CHANGE: which site it is for"),
        _Line("defaults", ""),
        *_partition(partitions, chosen.trains),
        _account(accounts),
        _Line("  cpus_per_task", "8", "CPUs of each process; stages may have their own, as below", on=False),
        _Line("  mem_gb", "64", "memory of each node in GB; 0: all of it", on=False),
        *_stages(chosen),
        *_features(settings),
    ]
    head = (
        "# A profile of this site, from what its scheduler said. Correct what is marked CHANGE, and write\n"
        "# `slurm: {profile: PATH}` with the path of this file in run files. All keys: docs/slurm.md\n"
        "#\n# Partitions:\n"
    )
    about = [f"#   {_visible(_about(each))}" for each in partitions.values()]
    return head + "\n".join([*about, "", *map(str, lines), ""])


def _about(partition: Partition) -> str:
    limit = "no time limit" if partition.minutes is None else f"at most {_time(partition.minutes)}"
    gres = ", ".join(sorted({each for each in partition.gres if each != "(null)"})) or "no gres"
    state = "" if partition.state == "up" else f", {partition.state}"
    return f"{partition.name}: {partition.nodes} nodes, {limit}, {gres}{state}"


@dataclass(frozen=True)
class _Choice:
    """Partitions for the stages; None where that is for the user to say."""

    trains: Partition | None
    """For training and evaluation, and what else has no partition."""
    preprocesses: Partition | None
    """For preprocessing, where that is another one."""


def _choose(partitions: dict[str, Partition], accounts: Sequence[str]) -> _Choice:
    """The default partition, but for training one with GPUs, and for preprocessing one without, if there are any."""
    open_ones = _open_partitions(partitions, accounts)
    default = next((each for each in partitions.values() if each.default), None)
    if len(partitions) == 1:
        (default,) = partitions.values()
    with_gpus = [each for each in open_ones if _has_gpus(each)]
    trains = default
    if with_gpus and (default is None or not _has_gpus(default)):
        trains = max(with_gpus, key=lambda each: each.nodes) if default or len(with_gpus) == 1 else None
    if trains is None or not _has_gpus(trains):
        return _Choice(trains, None)
    without = [each for each in open_ones if not _has_gpus(each)]
    return _Choice(trains, default if default in without else max(without, key=lambda each: each.nodes, default=None))


def _open_partitions(partitions: dict[str, Partition], accounts: Sequence[str]) -> list[Partition]:
    """Partitions that are up, and open to this user as far as that is known."""
    details: dict[str, dict[str, str]] = {}
    with suppress(SchedulerError):
        details = scheduler.partition_details()
    groups = set(_groups())

    def is_open(values: dict[str, str]) -> bool:
        for key, mine in (("AllowAccounts", {*accounts}), ("AllowGroups", groups)):
            allowed = values.get(key, "ALL")
            if allowed != "ALL" and mine.isdisjoint(allowed.split(",")):
                return False
        return "YES" not in (values.get("RootOnly"), values.get("Hidden"))

    return [each for each in partitions.values() if each.state == "up" and is_open(details.get(each.name, {}))]


def _groups() -> Iterator[str]:
    for number in os.getgroups():
        with suppress(KeyError):  # one without a name
            yield grp.getgrgid(number).gr_name


def _has_gpus(partition: Partition) -> bool:
    return any(_gpus(gres) for gres in partition.gres)


def _partition(partitions: dict[str, Partition], chosen: Partition | None) -> list[_Line]:
    if chosen is None:
        remark = f"CHANGE: no partition is the default; one of {', '.join(partitions)}"
        return [_Line("  partition", PLACEHOLDER, remark), _Line("  time", "1h", "CHANGE")]
    what = "the default" if chosen.default else "the one with GPUs that has the most nodes"
    remark = f"{what}; others are above" if len(partitions) > 1 else ""
    return [
        _Line("  partition", _text(chosen.name), remark),
        _Line("  time", _text(_time(_minutes(chosen, "train"))), _limit_of(chosen)),
    ]


def _minutes(partition: Partition, stage: str) -> int:
    return min(_TIMES[stage], partition.minutes or _DAY)


def _limit_of(partition: Partition) -> str:
    limit = "has no limit" if partition.minutes is None else f"allows {_time(partition.minutes)}"
    return f"{partition.name} {limit}; training continues in the next job"


def _accounts() -> list[str] | None:
    """Accounts of this user; None where sacctmgr does not answer."""
    with suppress(SchedulerError):
        return sorted({each.account for each in scheduler.associations(getpass.getuser())})
    return None


def _account(found: Sequence[str] | None) -> _Line:
    if found is None:
        return _Line("  account", "project", "unknown (sacctmgr does not answer); where the site wants one", on=False)
    if len(found) == 1:
        return _Line("  account", _text(found[0]), "the only one that you have")
    if found:
        return _Line("  account", PLACEHOLDER, f"CHANGE: one of {', '.join(found)}")
    return _Line("  account", "project", "the site has no account for you", on=False)


def _stages(chosen: _Choice) -> list[_Line]:
    """Resources of stages, and the GPUs of nodes."""
    if chosen.trains is None:
        return [_Line("gpus_per_node", PLACEHOLDER, "CHANGE: 0 for nodes without any")]
    place = chosen.preprocesses or chosen.trains
    kinds = scheduler.node_kinds(chosen.trains.name)
    others = scheduler.node_kinds(place.name) if chosen.preprocesses else kinds
    values = {"time": _text(_time(_minutes(place, "preprocess")))}
    if chosen.preprocesses:
        values["partition"] = _text(place.name)
    cpus = min((kind.cpus for kind in others), default=0)
    if cpus:
        values["cpus_per_task"] = str(min(cpus, _MOST_CPUS))
    remark = f"of {cpus} CPUs of a node; slurm.array.tasks jobs share the work" if cpus else ""
    minutes = _text(_time(_minutes(chosen.trains, "eval")))
    return [_section("preprocess", values, remark), *_nodes(kinds, {"time": minutes})]


def _section(stage: str, values: dict[str, str], remark: str) -> _Line:
    return _Line(stage, f"{{{', '.join(f'{key}: {value}' for key, value in values.items())}}}", remark)


def _nodes(kinds: Sequence[NodeKind], evaluation: dict[str, str]) -> list[_Line]:
    """CPUs of a process and GPUs of the nodes of the partition; of CPUs those of the smallest kind of node.

    Args:
        kinds: of nodes.
        evaluation: what else the evaluation asks for.
    """
    counts = {tuple(_gpus(kind.gres)) for kind in kinds}
    if len(counts) != 1:
        # A node of another kind would have too few, or some that nobody uses.
        about = "; ".join(f"{kind.nodes} nodes with {kind.cpus} CPUs, {kind.gres}" for kind in kinds)
        remark = f"CHANGE: there are {about}; `constraint` picks some" if kinds else "CHANGE: 0 for nodes without any"
        return [_section("eval", evaluation, ""), _Line("gpus_per_node", PLACEHOLDER, remark)]
    (gpus_there,) = counts
    number, cpus = sum(count for _, count in gpus_there), min(kind.cpus for kind in kinds)
    if not number:
        each = {"cpus_per_task": str(min(cpus, _MOST_CPUS))}
        remark = f"of {cpus} CPUs of a node, for each of its processes (slurm.processes_per_node)"
        lines = [_section("train", each, remark), _section("eval", evaluation | each, remark)]
        return [*lines, _Line("gpus_per_node", "0"), _Line("gpus_by", "gres", "or gpus-per-node", on=False)]
    each = {"cpus_per_task": str(max(1, cpus // number))}
    remark = f"{cpus} CPUs, {number} GPUs"
    lines = [_section("train", each, remark), _section("eval", evaluation | each, remark)]
    lines += [_Line("gpus_per_node", str(number)), _Line("gpus_by", "gres", "or gpus-per-node")]
    if len(gpus_there) == 1 and gpus_there[0][0]:
        lines.append(_Line("gpu_type", _text(gpus_there[0][0])))
    return lines


def _gpus(gres: str) -> list[tuple[str, int]]:
    """`gpu:h100:8(S:0-1),nvme:1` -> (h100, 8)."""
    found = (_GPUS.fullmatch(word) for word in re.split(r",(?![^(]*\))", gres))
    return [(word["type"] or "", int(word["number"])) for word in found if word]


def _features(settings: dict[str, str]) -> list[_Line]:
    kept = settings.get("AccountingStorageType", "")
    sacct = shutil.which("sacct") is not None and not kept.endswith(("/none", "(null)"))  # since 23.11
    requeue = settings.get("JobRequeue")
    remark = f"JobRequeue={requeue}" if requeue else "CHANGE: unknown (`scontrol show config` does not answer)"
    if requeue == "0":
        remark += "; set slurm.chain=singleton in run files"
    interfaces = ", ".join(_interfaces()) or "unknown"
    return [
        _Line("has_sacct", str(sacct).lower(), f"AccountingStorageType={kept}" if kept else ""),
        _Line("has_requeue", str(requeue != "0").lower(), remark),
        _Line("network_interface", "ib0", f"here: {interfaces}; see `ip -brief address` on a node", on=False),
    ]


def _interfaces() -> list[str]:
    """Those of this machine that are up, and are not of containers."""
    found = []
    with suppress(OSError):
        for each in sorted(_NETWORK.iterdir()):
            with suppress(OSError):
                real = (each / "device").exists() or each.name.startswith(("bond", "eth", "en", "ib", "hsn"))
                if real and (each / "operstate").read_text().strip() == "up":
                    found.append(each.name)
    return found


def _time(minutes: int) -> str:
    days, rest = divmod(minutes, _DAY)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00" if days else f"{rest // 60:02d}:{rest % 60:02d}:00"


def _text(value: str) -> str:
    """A text in YAML, quoted; but for a placeholder, which is none then."""
    return value if value == PLACEHOLDER else orjson.dumps(value).decode()


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
