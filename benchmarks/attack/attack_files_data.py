"""Attacks of `attack_files.py` on weights, Hugging Face folders, datasets and documents; and all of them together."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
from attack_files_made import (
    ADOPT,
    DATA,
    ESCAPE,
    FILES,
    FROM_EXPORT,
    FROM_HF,
    STEP,
    WHERE,
    Attack,
    Make,
    checkpoints,
    configs,
    edit,
    pickles,
    repair,
)


def attacks(canary: Path, marker: Path, secret: str, seed: int, count: int) -> Iterator[Attack]:
    """All attacks; what is made at random follows from the seed."""
    yield from pickles(f"touch {marker}")
    yield from checkpoints(canary)
    yield from configs(canary, marker, secret)
    yield from _weights(canary, marker)
    yield from _data()
    yield from _documents()
    private = canary / "keep.txt"
    kinds: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to a private file": lambda path: path.symlink_to(private),
    }
    for number, (name, commands) in enumerate(FILES.items()):
        for kind, make in kinds.items():
            if name.startswith(STEP) or number % len(kinds) == list(kinds).index(kind):
                yield Attack(f"{kind} as {name}", _instead(name, make), commands, (name.split("/")[0],))
    for name, commands in FILES.items():
        yield Attack(f"1 TiB, sparse, as {name}", _instead(name, _sparse), commands, (name.split("/")[0],))
    chance = random.Random(seed)
    for number in range(count):
        name = chance.choice([*FILES])
        how = chance.choice(
            [_flip, _cut, _poke, _poke] if name.endswith(("json", "jsonl", "COMMIT")) else [_flip, _cut]
        )
        repaired = bool(name.startswith(STEP) and chance.random() < 0.8)
        label = f"random {number} {how.__name__[1:]} {name}{' with hashes' if repaired else ''}"
        make = _changed(name, how, chance.randrange(2**32), repaired)
        yield Attack(label, make, FILES[name], (name.split("/")[0],))


# Weights


def _tensors(path: Path, header: bytes, body: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)
    export = path.with_name("export.json")
    if export.exists():
        value, data = json.loads(export.read_text()), path.read_bytes()
        value["files"][path.name] = [len(data), xxhash.xxh3_64_hexdigest(data)]
        export.write_text(json.dumps(value))


def _header(change: Callable[[dict[str, Any]], object], folder: str) -> Make:
    def make(case: Path) -> None:
        path = case / folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        _tensors(path, json.dumps(header).encode(), data[8 + length :])

    return make


def _weights(canary: Path, marker: Path) -> Iterator[Attack]:
    outside = f"../../../{canary.name}/keep.txt"
    for folder, commands in (("export", FROM_EXPORT), ("hf", FROM_HF)):
        file = f"{folder}/model.safetensors"

        def first(header: dict[str, Any]) -> dict[str, Any]:
            return next(value for name, value in header.items() if name != "__metadata__")

        changes: dict[str, Callable[[dict[str, Any]], object]] = {
            "offsets overlap": lambda h: [v.update(data_offsets=[0, 64]) for k, v in h.items() if k != "__metadata__"],
            "offsets beyond": lambda h: first(h).update(data_offsets=[0, 2**62]),
            "offsets negative": lambda h: first(h).update(data_offsets=[-8, 8]),
            "dtype nonsense": lambda h: first(h).update(dtype="F4096"),
            "dtype of another size": lambda h: first(h).update(dtype="I8"),
            "shape huge": lambda h: first(h).update(shape=[2**62, 2**62]),
            "shape negative": lambda h: first(h).update(shape=[-1, -1]),
            "shape 100,000 axes": lambda h: first(h).update(shape=[1] * 10**5),
            "names of files": lambda h: h.update({outside: first(h)}),
            "names with escapes": lambda h: h.update({ESCAPE: first(h)}),
            "metadata nonsense": lambda h: h.update(__metadata__={"format": [1]}),
        }
        for name, change in changes.items():
            yield Attack(f"{file}: {name}", _header(change, folder), commands, (folder,))
        for name, header, length in (
            *(("header of 2**62 bytes", b"{}", 2**62), ("header of 99 MB missing", b"{}", 99 * 10**6)),
            *(("no JSON", b"\xff" * 64, None), ("100,000 deep", b'{"a":' * 10**5, None), ("nothing", b"", 0)),
        ):
            make = lambda c, f=file, h=header, n=length: _tensors(c / f, h, b"", n)  # noqa: E731
            yield Attack(f"{file}: {name}", make, commands, (folder,))
    for name in (outside, "/etc/hostname", "..", ESCAPE):
        entry = {name: [17, "0" * 16]}
        change = edit("export/export.json", lambda v, e=entry: v.update(files=e))
        yield Attack(f"export.json names {name!a}", change, FROM_EXPORT, ("export",))
        index = json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}})
        yield Attack(f"weight_map names {name!a}", lambda c, i=index: _index(c, i), FROM_HF, ("hf",))
    for index in ("[" * 10**5, '{"weight_map": 7}', '{"weight_map": {"a": null}}', '{"weight_map": {"a": ["b"]}}'):
        yield Attack(f"weight_map is {index[:30]}", lambda c, i=index: _index(c, i), FROM_HF, ("hf",))
    code = f"import os\nos.system('touch {marker}')\nclass A: pass\n"
    auto = {"auto_map": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), "modeling_x.A")}
    for config in (auto, auto | {"model_type": "x"}, {"model_type": "../x"}, {"architectures": ["os.system"]}):

        def make(case: Path, config: dict[str, Any] = config) -> None:
            for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py"):
                (case / "hf" / name).write_text(code)
            edit("hf/config.json", lambda v: v.update(config))(case)
            edit("hf/tokenizer_config.json", lambda v: v.update(auto, tokenizer_class="A"))(case)

        yield Attack(f"Hugging Face code: {config}"[:90], make, FROM_HF, ("hf",))
    for key, value in (
        *(("hidden_size", 10**18), ("vocab_size", 2**62), ("num_attention_heads", 0), ("head_dim", -1)),
        *(("rope_scaling", {"rope_type": ESCAPE}), ("rope_theta", "1e999"), ("model_type", ESCAPE)),
        *(("num_key_value_heads", 10**30), ("torch_dtype", "os.system"), ("quantization_config", {"a": 1})),
    ):
        change = edit("hf/config.json", lambda v, k=key, x=value: v.update({k: x}))
        yield Attack(f"hf/config.json: {key} {str(value)[:20]!a}", change, FROM_HF, ("hf",))
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    parts: dict[str, Any] = {
        "pre_tokenizer": slow,
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": "a" * 10**5},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 10**5},
        "added_tokens": [{"id": 2**31, "content": ESCAPE, "special": True, "single_word": False, "lstrip": False}],
        "post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        "model": {"type": "BPE", "vocab": {"a": 2**32 - 2}, "merges": []},
        "truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**9},
        "padding": {
            "strategy": {"Fixed": 10**12},
            "direction": "Right",
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
        },
    }
    for key, part in parts.items():
        change = edit("hf/tokenizer.json", lambda v, k=key, p=part: v.update({k: p}))
        make = lambda c, m=change: (m(c), (c / "t.jsonl").write_text(json.dumps({"text": "a" * 50_000 + "b"}) + "\n"))  # noqa: E731
        commands = [*FROM_HF, _preprocess("t.jsonl", "'tokenizer={{path: {c}/hf/tokenizer.json}}'")]
        yield Attack(f"tokenizer.json: {key}", make, commands, ("hf",))

    class _Touches:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {marker}",)

    evil = pickle.dumps(_Touches())
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"):

        def beside(case: Path, name: str = name, *, alone: bool = False) -> None:
            (case / "hf" / name).write_bytes(evil)
            for each in ("training_args.bin", "optimizer.pt", "adapter_model.bin"):
                (case / "hf" / each).write_bytes(evil)
            if alone:
                (case / "hf/model.safetensors").unlink()

        yield Attack(f"a pickle beside the weights: {name}", beside, FROM_HF, ("hf",))
        yield Attack(f"a pickle alone: {name}", lambda c, b=beside: b(c, alone=True), FROM_HF, ("hf",))
        index = json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}})
        make = lambda c, b=beside, i=index: (b(c), _index(c, i))  # noqa: E731
        yield Attack(f"weight_map names a pickle: {name}", make, FROM_HF, ("hf",))
    disguised = lambda c: (c / "hf/model.safetensors").write_bytes(evil)  # noqa: E731
    yield Attack("a pickle as model.safetensors", disguised, FROM_HF, ("hf",))
    for folder, commands in (("hf", FROM_HF), ("export", FROM_EXPORT)):

        def linked(case: Path, folder: str = folder) -> None:
            for path in list((case / folder).iterdir()):
                path.unlink()
                path.symlink_to(canary / "keep.txt")

        yield Attack(f"{folder}/: all files are links to a private one", linked, commands, (folder,))
        for text in (
            "[" * 10**6,
            '{"a":' * 10**6,
            '{"version": "1.0", "model": ' + "[" * 10**6,
            "9" * 10**6,
            "\0" * 10**6,
        ):
            make = lambda c, f=folder, t=text: (c / f / "tokenizer.json").write_text(t)  # noqa: E731
            yield Attack(f"{folder}/tokenizer.json is {text[:30]!a}...", make, commands, (folder,))
        for regex in (
            "(" * 10**6,
            "a" * 10**7,
            "(?:" * 5000 + "a" + ")" * 5000,
            "(a{1,1000}){1,1000}",
            "[" + "a-z" * 10**6 + "]",
        ):
            part = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
            change = edit(f"{folder}/tokenizer.json", lambda v, p=part: v.update(pre_tokenizer=p))
            yield Attack(f"{folder}/tokenizer.json: the regex {regex[:20]!a}...", change, commands, (folder,))
        sparse = lambda c, f=folder: os.truncate(c / f / "tokenizer.json", 2**40)  # noqa: E731
        yield Attack(f"{folder}/tokenizer.json of 1 TiB, sparse", sparse, commands, (folder,))
        sparse = lambda c, f=folder: os.truncate(c / f / "model.safetensors", 2**40)  # noqa: E731
        yield Attack(f"{folder}/model.safetensors of 1 TiB, sparse", sparse, commands, (folder,))


def _index(case: Path, text: str) -> None:
    (case / "hf/model.safetensors").unlink()
    (case / "hf/model.safetensors.index.json").write_text(text)


# Datasets and documents


def _data() -> Iterator[Attack]:
    part = "data/text/train/parts/00000/00000000"

    def forged(fields: dict[int, Any] | None = None, at: tuple[int, str, int] | None = None) -> Make:
        """An index with another header, or a number behind it, as a dataset's and as a foreign one."""

        def make(case: Path) -> None:
            data = bytearray((case / f"{part}.idx").read_bytes())
            header = list(struct.unpack_from("<9sQBQQ", data))
            for place, value in (fields or {}).items():
                header[place] = value
            struct.pack_into("<9sQBQQ", data, 0, *header)
            if at:
                struct.pack_into(at[1], data, at[0], at[2])
            (case / f"{part}.idx").write_bytes(data)
            (case / "files").mkdir()
            (case / "files/x.idx").write_bytes(data)
            (case / "files/x.bin").write_bytes((case / f"{part}.bin").read_bytes())
            _rehash(case / "data/text/train", part)

        return make

    made = {
        **{f"{n} sequences": forged({3: n, 4: n + 1}) for n in (0, 2**31, 2**60)},
        **{f"{n} bounds": forged({4: n}) for n in (0, 2**60, 2**64 - 1)},
        **{f"type {n}": forged({2: n}) for n in (0, 2, 6, 255)},
        "version 2**60": forged({1: 2**60}),
        "other magic": forged({0: b"\0" * 9}),
        **{f"length {n}": forged(at=(34, "<i", n)) for n in (-1, 0, 2**31 - 1)},
    }
    for name, make in made.items():
        yield Attack(f".idx: {name}", make, [*ADOPT, *DATA, *WHERE[:1]], ("data",))
    for text in ("../../../canary/keep", "/etc/passwd", ESCAPE, "x" * 10**5, 10**30, None, {"a": [1]}):
        for key in ("source", "split", "dtype", "settings", "parts", "tokens"):
            change = edit("data/text/train/manifest.json", lambda v, k=key, t=text: v.update({k: t}))
            if key in ("parts", "tokens") and isinstance(text, str):
                continue
            yield Attack(f"manifest: {key} {str(text)[:20]!a}", change, [*DATA, *WHERE[:1]], ("data",))
        change = edit("data/text/plan.json", lambda v, t=text: v["files"].__setitem__(0, [t, t, 9]))
        yield Attack(f"plan.json: a file {str(text)[:20]!a}", change, [WHERE[0] + " --ids", WHERE[1]], ("data",))
    many = edit("data/text/train/manifest.json", lambda v: v.update(parts=2**40, documents=2**60, tokens=2**62))
    yield Attack("manifest: 2**40 parts", many, [*DATA, *WHERE], ("data",))


def _rehash(folder: Path, part: str) -> None:
    """The table of parts, and its hash, as the files are now."""
    table = bytearray((folder / "parts.bin").read_bytes())
    for number, end in enumerate((".bin", ".idx", ".prov")):
        data = (folder.parents[2] / f"{part}{end}").read_bytes()
        struct.pack_into("<Q", table, 24 + 8 * number, xxhash.xxh3_64_intdigest(data))
    (folder / "parts.bin").write_bytes(table)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parts_hash"] = xxhash.xxh3_128_hexdigest(bytes(table))
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _preprocess(name: str, more: str = "") -> str:
    kind = name.removesuffix(".gz").removesuffix(".xz").removesuffix(".zst").rpartition(".")[2]
    sources = "'data.sources=[{{name: t, type: " + kind + ', paths: ["{c}/' + name + "\"]}}]'"
    return "preprocess {b}/run.yaml run.dir={c}/child data.dir={c}/made " + sources + " " + more


def _documents() -> Iterator[Attack]:
    rows = [{"id": f"{ESCAPE}{n}", "text": f"the sea {ESCAPE} {n} " * 40, ESCAPE: 1} for n in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    sources = "'data.sources=[{{name: t, type: jsonl, paths: [\"{c}/*.jsonl\"]}}]'"
    shown = "data where {b}/run.yaml run.dir={c}/child data.dir={c}/made --step 1 " + sources
    after = [shown, shown + " --ids", "data inspect {c}/made/t/train", "status {c}/child"]

    def named(case: Path) -> None:
        (case / "a\x1b[31m\nb\x07.jsonl").write_bytes(lines)

    yield Attack("documents: escapes in ids, texts, names", named, [_preprocess("*.jsonl"), *after], ())
    zeros = b'{"text": "' + b"a" * (1 << 20)
    once = gzip.compress(zeros * 64)
    bombs: dict[str, bytes] = {
        "bomb.jsonl.gz": once * 40,  # 2.6 GB in one line
        "lines.jsonl.gz": gzip.compress(b"\n" * (1 << 27)),
        "cut.jsonl.gz": gzip.compress(lines)[:-20],
        "flipped.jsonl.gz": gzip.compress(lines)[:40] + b"\0\0\0" + gzip.compress(lines)[43:],
        "more.jsonl.gz": gzip.compress(lines) + b"trailing",
        "bomb.jsonl.xz": lzma.compress(zeros * 64, preset=0) * 20,
        "window.jsonl.zst": b"\x28\xb5\x2f\xfd\x00\xf8" + b"\x01\0\0" * 9,  # asks for a window of terabytes
        "bomb.jsonl.zst": b"\x28\xb5\x2f\xfd\x00\x58"
        + b"".join([b"\x02\0\x10a"] * 19_000)
        + b"\x01\0\0",  # blocks of one byte
        "cut.jsonl": lines[:-30],
        "deep.jsonl": b'{"text": ' + b"[" * 10**6 + b"\n",
        "surrogates.jsonl": b'{"text": "\\ud800 a"}\n{"text": "\xff\xfe"}\n' + lines,
        "numbers.jsonl": b'{"text": 1e999}\n{"text": ' + b"9" * 10**6 + b"}\n" + lines,
        "zero.jsonl": bytes(10**7),
        "name.parquet": b"PAR1" + bytes(40) + b"\xff\xff\xff\x7fPAR1",
        "name.arrow": b"ARROW1\0\0\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64) + b"ARROW1",
    }
    for name, data in bombs.items():
        make = lambda c, n=name, d=data: (c / n).write_bytes(d)  # noqa: E731
        yield Attack(f"documents: {name} ({len(data):,} bytes)", make, [_preprocess(name), _preprocess(name)], ())


# Whatever a file is


def _instead(name: str, make: Callable[[Path], object]) -> Make:
    return lambda case: ((case / name).unlink(), make(case / name))


def _sparse(path: Path) -> None:
    path.write_bytes(b"{}\n")
    os.truncate(path, 2**40)


def _changed(name: str, how: Callable[[Path, random.Random], object], seed: int, repaired: bool) -> Make:
    def make(case: Path) -> None:
        how(case / name, random.Random(seed))
        if repaired and not name.endswith("COMMIT"):
            repair(case / STEP)

    return make


def _flip(path: Path, chance: random.Random) -> None:
    """Change some bits, half of the time near the start, where headers are."""
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 3, 30])):
        if data:
            data[chance.randrange(min(len(data), chance.choice([100, len(data)])))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, chance: random.Random) -> None:
    """End the file early, or put something behind it."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.7 else data + chance.randbytes(64))


def _poke(path: Path, chance: random.Random) -> None:
    """Put a value of another kind somewhere into JSON, or into a line of it."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = chance.randrange(len(lines))
    whole = value = [json.loads(lines[number])]
    key: Any = 0
    while isinstance(value[key], (dict, list)) and value[key] and (chance.random() < 0.75 or value is whole):
        value = value[key]
        key = chance.choice([*value] if isinstance(value, dict) else range(len(value)))
    kinds: list[Any] = [None, [], {}, [[]], {"a": 1}, {"": {}}, [None] * 3, "", f"x{ESCAPE}", "9" * 400, True]
    numbers = [-1, 0, 2**63, 10**30, 1e308, float("nan"), float("-inf")]
    value[key] = chance.choice([*kinds, "../../../canary/keep.txt", *numbers])
    lines[number] = json.dumps(whole[0])
    path.write_text("\n".join(lines) + "\n")
