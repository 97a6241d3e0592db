"""`pipeline init --profile`: a profile of this site, filled in with what its scheduler says."""

from __future__ import annotations

import getpass
import re
import shutil
from collections.abc import Sequence
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
_MOST_CPUS = 32
"""Most CPUs for a task of preprocessing."""
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
    chosen = next((each for each in partitions.values() if each.default), None)
    if len(partitions) == 1:
        (chosen,) = partitions.values()
    kinds = scheduler.node_kinds(chosen.name) if chosen else []
    lines = [
        _Line("description", _text(name), "" if name != PLACEHOLDER else "CHANGE: which site it is for"),
        _Line("defaults", ""),
        *_partition(partitions, chosen),
        _account(),
        _Line("  cpus_per_task", "8", "CPUs of each process; stages may have their own, as below", on=False),
        _Line("  mem_gb", "64", "memory of each node in GB; 0: all of it", on=False),
        *_nodes(kinds),
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


def _partition(partitions: dict[str, Partition], chosen: Partition | None) -> list[_Line]:
    if chosen is None:
        remark = f"CHANGE: no partition is the default; one of {', '.join(partitions)}"
        return [_Line("  partition", PLACEHOLDER, remark), _Line("  time", "1h", "CHANGE")]
    limit = chosen.minutes
    remark = f"the longest that {chosen.name} allows" if limit is not None else f"{chosen.name} has no limit"
    time = _text(_time(_DAY if limit is None else limit))
    default = "the default; others are above" if len(partitions) > 1 else ""
    return [_Line("  partition", _text(chosen.name), default), _Line("  time", time, remark)]


def _account() -> _Line:
    try:
        found = sorted({each.account for each in scheduler.associations(getpass.getuser())})
    except SchedulerError:
        return _Line("  account", "project", "unknown (sacctmgr does not answer); where the site wants one", on=False)
    if len(found) == 1:
        return _Line("  account", _text(found[0]), "the only one that you have")
    if found:
        return _Line("  account", PLACEHOLDER, f"CHANGE: one of {', '.join(found)}")
    return _Line("  account", "project", "the site has no account for you", on=False)


def _nodes(kinds: Sequence[NodeKind]) -> list[_Line]:
    """GPUs and processors of the nodes of the partition; those of the smallest, where there are several kinds."""
    if not kinds:
        return [_Line("gpus_per_node", PLACEHOLDER, "CHANGE: 0 for nodes without any")]
    cpus = min(kind.cpus for kind in kinds)
    counts = {tuple(_gpus(kind.gres)) for kind in kinds}
    about = "; ".join(f"{kind.nodes} nodes with {kind.cpus} CPUs, {kind.gres}" for kind in kinds)
    lines = [_Line("preprocess", f"{{cpus_per_task: {min(cpus, _MOST_CPUS)}}}", f"of {cpus} CPUs of a node")]
    if len(counts) > 1:
        # A node of another kind would have too few, or some that nobody uses.
        gpus = _Line("gpus_per_node", PLACEHOLDER, f"CHANGE: there are {about}; `constraint` picks some")
        return [*lines, gpus]
    (gpus_there,) = counts
    number = sum(count for _, count in gpus_there)
    if number:
        cpus_per_gpu = max(1, cpus // number)
        lines += [
            _Line(stage, f"{{cpus_per_task: {cpus_per_gpu}}}", f"{cpus} CPUs, {number} GPUs")
            for stage in ("train", "eval")
        ]
    lines += [_Line("gpus_per_node", str(number)), _Line("gpus_by", "gres", "or gpus-per-node", on=bool(number))]
    if len(gpus_there) == 1 and gpus_there[0][0]:
        lines.append(_Line("gpu_type", _text(gpus_there[0][0])))
    return lines


def _gpus(gres: str) -> list[tuple[str, int]]:
    """`gpu:h100:8(S:0-1),nvme:1` -> (h100, 8)."""
    found = (_GPUS.fullmatch(word) for word in re.split(r",(?![^(]*\))", gres))
    return [(word["type"] or "", int(word["number"])) for word in found if word]


def _features(settings: dict[str, str]) -> list[_Line]:
    kept = settings.get("AccountingStorageType", "")
    sacct = shutil.which("sacct") is not None and not kept.endswith("/none")
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
