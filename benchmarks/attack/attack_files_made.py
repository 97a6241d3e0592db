"""Attacks of `attack_files.py` on checkpoints and runs: each changes files as a stranger could, and names commands."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

Make = Callable[[Path], object]
STEP = "run/checkpoints/step-00000002"
NEW = "run.dir={c}/child data.dir={b}/data 'train.duration=4 steps'"
SHOW, EXPORT = "checkpoint show {c}/run", "checkpoint export {c}/run --to {c}/out"
FORK = "fork {c}/run {b}/run.yaml --step 2 " + NEW
CHECKPOINT = [
    *(SHOW, "checkpoint verify {c}/run", "checkpoint list {c}/run", EXPORT, FORK + " --dry-run", FORK),
    *("convert to-hf {c}/" + STEP + " {c}/out-hf", "generate {c}/run/config.yaml run.dir={c}/run"),
    "eval {c}/run/config.yaml run.dir={c}/run",
    "load_model {c}/run",
    "train {b}/run.yaml run.dir={c}/child2 train.init_from.path={c}/" + STEP,
]
FEW = [SHOW, EXPORT, FORK, "load_model {c}/run"]
READ = ["status {c}/run", "report {c}/run", "logs {c}/run", "checkpoint list {c}/run", "data where {c}/run --step 1"]
DATA = ["data inspect {c}/data/text/train", "data verify {c}/data/text/train"]
WHERE = ["data where {b}/run.yaml data.dir={c}/data --step 1", "preprocess {b}/run.yaml data.dir={c}/data"]
FROM_HF = ["convert from-hf {c}/hf {c}/out", "load_model {c}/hf"]
FROM_EXPORT = [
    "load_model {c}/export",
    "convert to-hf {c}/export {c}/out",
    "train {b}/run.yaml run.dir={c}/child train.init_from.path={c}/export",
]
ADOPT = ["data adopt {c}/files/x --to {c}/out --tokenizer {b}/data/tokenizer/tokenizer.json"]
ESCAPE = "\x1b]0;pwned\x07\x1b[2J\x9b31m\u202e\r"
DCP = "torch.distributed.checkpoint.metadata"
FILES: dict[str, list[str]] = {
    **{f"{STEP}/{name}": FEW for name in ("COMMIT", "state.json", ".metadata", "__0_0.distcp")},
    f"{STEP}/tokenizer.json": [EXPORT, "generate {c}/run/config.yaml run.dir={c}/run"],
    **{f"run/{name}": READ[:2] for name in ("exit.json", "metrics.jsonl", "ledger.jsonl", "summary.json")},
    **{f"run/{name}": READ for name in ("config.yaml", "heartbeats/node-0000.jsonl", "eval/step-00000002.json")},
    "run/journal.json": [
        *READ[:2],
        READ[4],
        FORK,
        "train {c}/run/config.yaml run.dir={c}/run 'train.duration=4 steps'",
    ],
    "run/checkpoints/latest": [SHOW, READ[0]],
    **{f"export/{name}": FROM_EXPORT for name in ("export.json", "model.safetensors", "config.yaml")},
    "export/tokenizer.json": FROM_EXPORT,
    **{f"hf/{name}": FROM_HF for name in ("config.json", "model.safetensors", "tokenizer.json")},
    **{f"hf/{name}": FROM_HF for name in ("tokenizer_config.json", "generation_config.json")},
    **{f"data/text/train/{name}": [*DATA, *WHERE] for name in ("manifest.json", "parts.bin", "tokenizer.json")},
    **{f"data/text/train/parts/00000/00000000{end}": [*DATA, *WHERE] for end in (".bin", ".idx", ".prov")},
    **{f"data/text/{name}": WHERE for name in ("plan.json", "receipts/00000/00000000.json", "report.json")},
    "data/tokenizer/origin.json": WHERE[1:],
    "data/tokenizer/special_tokens.json": WHERE[1:],
}


@dataclass
class Attack:
    """Files of a stranger, and what is run on them."""

    name: str
    make: Make
    commands: list[str]
    needs: tuple[str, ...] = ("run",)
    """Folders of what was built that are copied for it."""


# Checkpoints: the pickle


def _word(text: str) -> bytes:
    return b"\x8c%c%s" % (len(text.encode()), text.encode())


def _global(module: str, name: str) -> bytes:
    return _word(module) + _word(name) + b"\x93"


def _put(name: str, data: bytes) -> Make:
    """A file of the checkpoint, with hashes that fit."""

    def make(case: Path) -> None:
        (case / STEP / name).write_bytes(data)
        repair(case / STEP)

    return make


def repair(folder: Path) -> None:
    """Write sizes and hashes into COMMIT as they are now."""
    commit = json.loads((folder / "COMMIT").read_bytes())
    for path in folder.iterdir():
        if path.name != "COMMIT" and path.is_file():
            data = path.read_bytes()
            commit["files"][path.name] = [len(data), xxhash.xxh3_64_hexdigest(data)]
    (folder / "COMMIT").write_text(json.dumps(commit))


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def _listed(change: Callable[[Metadata], object]) -> Make:
    """The list of tensors as it is, but for a change."""

    def make(case: Path) -> None:
        metadata = pickle.loads((case / STEP / ".metadata").read_bytes())
        change(metadata)
        _put(".metadata", pickle.dumps(metadata, 4))(case)

    return make


def pickles(command: str) -> Iterator[Attack]:
    start, call, evil = b"\x80\x04", _word(command) + b"\x85R", _Runs(command)
    key = "model.embedding.weight"
    yield Attack(
        "pickle: os.system in the list as it was", _listed(lambda m: setattr(m, "planner_data", evil)), CHECKPOINT
    )
    changes: dict[str, Callable[[Metadata], object]] = {
        "as a type of elements": lambda m: setattr(m.state_dict_metadata[key].properties, "dtype", evil),
        "as a tensor": lambda m: m.state_dict_metadata.update({"model.x": evil}),
        "as a key": lambda m: m.storage_data.update({evil: 1}),
        "bytes for a tensor": lambda m: m.state_dict_metadata.update({key: BytesStorageMetadata()}),
    }
    for name, change in changes.items():
        yield Attack(f"pickle: os.system {name}", _listed(change), FEW)
    doubled = b"]\x94)\x94" + b"".join(b"h%c" % (n + 1) * 2 + b"\x86\x94" for n in range(60))
    as_list = b"]\x94" + b"".join(b"]\x94(" + b"h%c" % n * 2 + b"e" for n in range(60))
    yield from (
        Attack(f"pickle: {name}", _put(".metadata", data), [SHOW, EXPORT])
        for name, data in {
            "REDUCE": start + _global("os", "system") + call + b".",
            "GLOBAL": b"cos\nsystem\n(S'" + command.encode() + b"'\ntR.",
            "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
            "OBJ": b"(" + b"cos\nsystem\n" + b"S'" + command.encode() + b"'\no.",
            "NEWOBJ_EX": start + _global("os", "system") + _word(command) + b"\x85}\x92.",
            **{
                f"{module} {name}": start + _global(module, name) + call + b"."
                for module, name in (
                    *((DCP, "os.system"), (DCP, "Metadata.__init__.__globals__"), ("torch", "Size.__class__")),
                    *(("torch", "_utils.os.system"), ("pathlib", "os.system"), ("builtins", "eval"), ("torch", "load")),
                    *(("torch.serialization", "_get_layout.__globals__"), ("torch\0", "Size"), ("os", "sys\x1b[2Jtem")),
                )
            },
            "a name of 1 MB": start + b"X" + struct.pack("<I", 10**6) + b"a" * 10**6 + _word("b") + b"\x93.",
            **{f"EXT{size}": start + code + b"\1\0\0\0"[:size] + b"." for size, code in ((1, b"\x82"), (4, b"\x84"))},
            "a persistent id": b"Pos.system\n.",
            "a persistent object": start + _word("os") + b"Q.",
            "BUILD of a class": start + _global(DCP, "Metadata") + b"}" + _word("__setstate__") + b"Nsb.",
            "BUILD with slots": start + _global(DCP, "Metadata") + b")\x81N}" + _word("__class__") + b"Ns\x86b.",
            "a place of 64 GB in the memo": start + b"Nr\xff\xff\xff\xff.",
            "bytes that are not there": start + b"\x8e" + struct.pack("<Q", 2**60) + b".",
            "a number of 255 bytes": start + b"\x8a\xff" + b"\x7f" * 255 + b".",
            "an int of 2 GB": start + b"\x8b\xff\xff\xff\x7f.",
            "doubled 60 times": start + doubled + b".",
            "doubled 60 times, lists": start + as_list + b".",
            "30,000 deep": start + b"]" * 30_000 + b"a" * 29_999 + b".",
            "itself": start + b"]\x94h\0a.",
            "a million empty dicts": start + b"(" + b"}" * 10**6 + b"t.",
            "no end": start + b"(" * 10**5,
        }.items()
    )
    # What stands in messages must not be spelled out: these would have 2**60 parts.
    index = _global(DCP, "MetadataIndex") + b")\x81}(" + _word("fqn")
    place = _global("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81}("
    place += b"".join(
        _word(k) + v for k, v in {"relative_path": _word("x"), "offset": b"K\0", "length": b"K\0"}.items()
    )
    for name, tensors, fqn, path in (
        ("name", b"}", b"h\x3d", b""),
        ("path", b"}", _word("x"), _word("relative_path") + b"h\x3d"),
        (
            "size",
            b"}" + _word("x") + _global(DCP, "TensorStorageMetadata") + b")\x81}(" + _word("size") + b"h\x3dubs",
            b"N",
            b"",
        ),
    ):
        stored = b"}" + index + fqn + b"ub" + place + path + b"ubs"
        body = _word("state_dict_metadata") + tensors + _word("storage_data") + stored
        data = start + doubled + _global(DCP, "Metadata") + b")\x81}(" + body + b"ub."
        yield Attack(f"pickle: a {name} doubled 60 times", _put(".metadata", data), [SHOW])


def checkpoints(canary: Path) -> Iterator[Attack]:
    key = "model.embedding.weight"

    def place(change: Callable[[Any], object]) -> Make:
        return _listed(lambda m: change(next(v for k, v in m.storage_data.items() if k.fqn == key)))

    def whole(change: Callable[[Any], object]) -> Make:
        return _listed(lambda m: change(m.state_dict_metadata[key]))

    made: dict[str, Make] = {
        **{f"offset {n}": place(lambda p, n=n: setattr(p, "offset", n)) for n in (-1, 1 << 62, 1 << 80, 1, "1")},
        **{f"length {n}": place(lambda p, n=n: setattr(p, "length", n)) for n in (-1, 0, 1 << 62, 1e9, None)},
        **{f"path {n}": place(lambda p, n=n: setattr(p, "relative_path", n)) for n in ("../state.json", "/etc/passwd")},
        "size 2**62": whole(lambda t: setattr(t, "size", torch.Size((2**62, 2)))),
        "no pieces": whole(lambda t: setattr(t, "chunks", [])),
        "a piece 100,000 times": whole(lambda t: setattr(t, "chunks", t.chunks * 100_000)),
        "a negative piece": whole(lambda t: setattr(t.chunks[0], "offsets", torch.Size((-1, 0)))),
        "a name with escapes": _listed(lambda m: m.state_dict_metadata.update({ESCAPE: m.state_dict_metadata[key]})),
        "a place too many": _listed(lambda m: m.storage_data.update({MetadataIndex("x"): 7})),
    }
    yield from (Attack(f"list of tensors: {name}", make, FEW) for name, make in made.items())
    packed, paths = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(0))
        archive.writestr("archive/data/0", bytes(10**8))
    with zipfile.ZipFile(paths, "w") as archive:
        archive.writestr(f"../../../../../../{canary.name}/more", b"x")
    runs = pickle.dumps(_Runs(f"touch {canary / 'code-ran'}"))
    bodies = {
        "a pickle": runs,
        "a compressed zip": packed.getvalue(),
        "a zip with paths": paths.getvalue(),
        "nothing": b"",
    }
    for name, body in bodies.items():
        yield Attack(
            f"tensors: {name}",
            lambda case, body=body: _put("__0_0.distcp", body * (1 + 200_000 // max(1, len(body))))(case),
            CHECKPOINT,
        )
        yield Attack(
            f"tensors: each is {name}", lambda case, body=body: _overwrite(case, body), [EXPORT, FORK, CHECKPOINT[9]]
        )
    for name in ("../../../../../canary/keep.txt", "/etc/hostname", "a/../../b", "", "..", ESCAPE, "x" * 10**5):
        entry = {name: [9, "0" * 16]}
        yield Attack(
            f"COMMIT names {name[:40]!a}",
            edit(f"{STEP}/COMMIT", lambda v, e=entry: v["files"].update(e)),
            CHECKPOINT[:6],
        )
    for value in ([], 7, {}, {"state.json": 7}, {"state.json": [1e400, 0]}, {"state.json": ["-1", None]}):
        yield Attack(
            f"COMMIT lists {value}", edit(f"{STEP}/COMMIT", lambda v, x=value: v.update(files=x)), CHECKPOINT[:6]
        )
    for name in ("state.json", "COMMIT"):
        deep = b"[" * 10**5
        yield Attack(f"{name} 100,000 deep", lambda c, n=name, d=deep: (c / STEP / n).write_bytes(d), CHECKPOINT[:6])
    for name, commands in (
        ("journal.json", FILES["run/journal.json"]),
        ("metrics.jsonl", READ),
        ("ledger.jsonl", READ),
    ):
        for text in ("[" * 10**5, "null", '{"step": 1e999}', '{"step": -1, "loss": "' + ESCAPE + '"}', "\0" * 10**5):
            yield Attack(f"{name}: {text[:24]!a}", lambda c, n=name, t=text: (c / "run" / n).write_text(t), commands)
    hosts = {"host": ESCAPE, "rank": 0, "pid": 10**30, "attempt": 1, "step": -1, "phase": ESCAPE, "time": 1e308}
    for name in ("run/heartbeats/node-0000.jsonl", "run/exit.json", "run/summary.json", "run/eval/step-00000002.json"):
        yield Attack(
            f"{name} with escapes", lambda c, n=name: (c / n).write_text(json.dumps(hosts | {"reason": ESCAPE})), READ
        )


def _overwrite(case: Path, body: bytes) -> None:
    """The bytes of every tensor are others; the list of tensors stays."""
    path = case / STEP / "__0_0.distcp"
    metadata, data = pickle.loads((case / STEP / ".metadata").read_bytes()), bytearray(path.read_bytes())
    for each in metadata.storage_data.values():
        fit = body[: each.length]
        data[each.offset : each.offset + each.length] = fit.rjust(each.length, b"\0")
    _put(path.name, bytes(data))(case)


# Run files


def edit(name: str, change: Callable[[Any], object]) -> Make:
    """A JSON or YAML file with a change."""

    def make(case: Path) -> None:
        path = case / name
        value = yaml.safe_load(path.read_text())
        change(value)
        path.write_text(json.dumps(value) if path.suffix != ".yaml" else yaml.safe_dump(value))

    return make


def configs(canary: Path, marker: Path, secret: str) -> Iterator[Attack]:
    own = "{c}/run/config.yaml run.dir={c}/run"
    readers = [*READ, f"data where {own} --step 1", f"config show {own}", f"generate {own}", f"eval {own}"]
    readers += [f"status {own.split(maxsplit=1)[0]}", f"report {own.split(maxsplit=1)[0]}", EXPORT, FORK + " --dry-run"]
    prompt = f"${{oc.env:{secret}}}"
    texts: dict[str, str] = {
        "of the environment": f"generate: {{prompt: '{prompt}'}}",
        "nested": f"generate: {{prompt: '${{oc.env:${{oc.decode:{secret}}}}}'}}",
        "with another case and a default": f"generate: {{prompt: '${{oc.env:{secret},x}}'}}",
        "as a file name": f"data: {{sources: [{{name: x, paths: ['{prompt}']}}]}}",
        "as a key": f"'{prompt}': 1",
        "included /etc/passwd": "include: /etc/passwd",
        "included private file": f"include: [{canary / 'keep.txt'}]",
        "python tag": f"run: !!python/object/apply:os.system ['touch {marker}']",
        "python name": "run: !!python/name:os.system",
        "anchors": "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
        "itself": "run: &a [*a]",
        "merged keys": "a: &a {b: 1}\n" * 3 + "run: {<<: [*a, *a], dir: x}",
        "20,000 deep": "run: " + "[" * 20_000,
        "nested interpolation": "generate: {prompt: '" + "${oc.decode:" * 16 + "1" + "}" * 16 + "'}",
        "escapes": 'run: {dir: "\\e]0;pwned\\a"}\n"\\e[2J": 1',
        "a number of a million digits": "run: {seed: " + "9" * 10**6 + "}",
    }
    for name, text in texts.items():
        yield Attack(f"run file: {name}", lambda c, t=text: (c / "run/config.yaml").write_text(t), readers)
    changes = {"of the environment, in all that was written": prompt, "escapes in a value": ESCAPE}
    for name, value in changes.items():
        change = edit("run/config.yaml", lambda v, x=value: v["generate"].update(prompt=x))
        yield Attack(f"run file: {name}", change, readers)
        change = edit(f"{STEP}/state.json", lambda v, x=value: v["config"]["generate"].update(prompt=x))
        yield Attack(f"state.json: {name}", lambda c, m=change: (m(c), repair(c / STEP)), readers)
