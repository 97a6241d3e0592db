from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.common.errors import UserError
from pipeline.config.load import dump, find, load, load_run, packaged_configs
from pipeline.config.parsing.document import parse, render
from pipeline.config.parsing.schema import keys
from pipeline.config.root import Config
from tests import tiny
from tests.config.runfile import MINIMAL, refused, write


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_values(tmp_path: Path) -> None:
    path = write(
        tmp_path, MINIMAL + "  optimizer: {lr: 3e-4, eps: 1E-9}\n  batch_size: 1e3\n  sequence_length: 2_048\n"
    )
    config = load(path)
    assert config.train.optimizer.lr == 3e-4
    assert config.train.optimizer.eps == 1e-9
    assert (config.train.batch_size, config.train.sequence_length) == (1000, 2048)
    assert config.run.dir == tmp_path / "runs/small"
    assert config.data.sources[0].paths == [str(tmp_path / "words.txt")]


def test_scalars_are_those_of_yaml_1_2() -> None:
    text = "[3e-4, 1e9, .5, 012, 0x1f, 0o17, -3, yes, on, NO, 2024-01-01, 1:30, true, null, ~, '3', .inf, 1_000]"
    values = parse(text, "x").value
    assert values[:-2] == [
        *[3e-4, 1e9, 0.5, 12, 31, 15, -3],
        *["yes", "on", "NO", "2024-01-01", "1:30", True, None, None, "3"],
    ]
    assert math.isinf(values[-2])
    assert values[-1] == "1_000"


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("2000 steps", 2000, "steps"),
        ("1 step", 1, "steps"),
        ("10B tokens", 10**10, "tokens"),
        ("1.1M tokens", 1_100_000, "tokens"),
        ("2_500 tokens", 2500, "tokens"),
        ("9007199254740993 tokens", 2**53 + 1, "tokens"),
        ("3e9 tokens", 3 * 10**9, "tokens"),
        ("4.35T tokens", 4_350_000_000_000, "tokens"),
    ],
)
def test_durations(tmp_path: Path, text: str, count: int, unit: str) -> None:
    duration = load(write(tmp_path), [f"train.duration={text}"]).train.duration
    assert (duration.count, duration.unit) == (count, unit)


@pytest.mark.parametrize(
    "text",
    ["10", "ten steps", "1.5 steps", "-3 steps", "5 lunches", "[1]", "", "1e400 steps", "1e99999999999999999999 steps"],
)
def test_bad_durations(tmp_path: Path, text: str) -> None:
    message = refused(write(tmp_path), f"train.duration={text}")
    assert "command line: train.duration" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("text", ["1000", "1000 steps", "1K steps", "1000.0", "1e3"])
def test_numbers_of_steps(tmp_path: Path, text: str) -> None:
    config = load(write(tmp_path), [f"train.checkpoint.keep_every={text}"])
    assert config.train.checkpoint.keep_every == 1000
    assert "keep_every: 1000\n" in dump(config)


@pytest.mark.parametrize("text", ["10B tokens", "many steps", "1.5 steps", "0 steps", "-3"])
def test_bad_numbers_of_steps(tmp_path: Path, text: str) -> None:
    assert "command line: train.checkpoint.keep_every" in refused(
        write(tmp_path), f"train.checkpoint.keep_every={text}"
    )


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64MiB", 64 * 2**20), ("1.5GB", 1_500_000_000), ("2 KiB", 2048), ("7B", 7)]
)
def test_sizes(tmp_path: Path, text: str, size: int) -> None:
    assert load(write(tmp_path), [f"data.preprocess.unit_bytes={text}"]).data.preprocess.unit_bytes == size


@pytest.mark.parametrize("text", ["64Mib", "1.0000001KB", "-1", "many", "1e-3", "9" * 40 + "TB"])
def test_bad_sizes(tmp_path: Path, text: str) -> None:
    assert "data.preprocess.unit_bytes = " in refused(write(tmp_path), f"data.preprocess.unit_bytes={text}")


def test_all_problems_in_one_report_with_their_lines(tmp_path: Path) -> None:
    text = """\
run: {dir: runs/small, seed: -1}
data:
  sources:
    - name: words
      type: pdf
      paths: [words.txt]
      wieght: 2
tokenizer:
  train: {vocab_size: 3}
model:
  layers: two
  heads: 4
  norm:
    eps: 1
train:
  duration: 10 steps
  lr: 1
  optimizer:
    betas: [0.9]
corpus: x
"""
    lines = refused(write(tmp_path, text)).split("\n")
    assert lines[0] == "run.yaml has 10 problems:"
    assert [line.strip() for line in lines[1:11]] == [
        "run.yaml:1: run.seed = -1: must be greater than or equal to 0",
        "run.yaml:5: data.sources.0.type = \"pdf\": must be one of 'text', 'html', 'jsonl', 'csv', 'tsv', 'warc', "
        "'parquet', 'arrow', 'hub'",
        "run.yaml:7: data.sources.0.wieght: unknown key; did you mean data.sources.0.weight?",
        "run.yaml:9: tokenizer.train.vocab_size = 3: must be greater than or equal to 257",
        "run.yaml:10: model.dim: required key is missing (Width of the residual stream.)",
        'run.yaml:11: model.layers = "two": must be a whole number',
        "run.yaml:13: model.norm: must be one of 'rmsnorm', 'layernorm'",
        "run.yaml:17: train.lr: unknown key; did you mean train.optimizer.lr?",
        "run.yaml:19: train.optimizer.betas: the list needs another entry",
        "run.yaml:20: corpus: unknown key; a run file has the keys run, launch, data, blend, heldout_sets, "
        "stage, tokenizer, model, parallel, train, resume, eval, generate, serve, slurm, notify",
    ]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("train.bach_size=1", "did you mean train.batch_size?"),
        ("model.batch_size=1", "did you mean train.batch_size or eval.batch_size or"),
        ("train.validation.every=1", "did you mean train.validation.every_steps?"),
        ("vocab_size=1", "did you mean model.vocab_size or tokenizer.train.vocab_size?"),
        ("trian.batch_size=1", "did you mean train?"),
        ("model.init.sdt=1", "did you mean model.init.std?"),
        ("model.kinds.near.sliding_windo=1", "did you mean model.kinds.near.sliding_window?"),
        ("eval.zzz=1", "eval has the keys split, batch_size"),
        ("model.moe=1", "model.moe: unknown key; model has the keys "),
        ("train.warmpu=1", "did you mean train.schedule.warmup?"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, override: str, hint: str) -> None:
    assert hint in refused(write(tmp_path), override)


@pytest.mark.parametrize("key", ["stage.dir", "run.dir"])
def test_a_url_is_named_as_one(tmp_path: Path, key: str) -> None:
    url = "s3://bucket/folder/*.jsonl"
    with pytest.raises(UserError, match=r"not a s3 URL: only data.sources.N.paths") as error:
        load(tiny.write_run(tmp_path), [f"{key}={url}"])
    assert key in str(error.value)


def test_paths_may_be_urls_without_secrets(tmp_path: Path) -> None:
    url = "s3://bucket/a b%20/**/*.txt"
    assert load(tiny.write_run(tmp_path), [f"data.sources.0.paths=[{url}]"]).data.sources[0].paths == [url]
    tokenizer = load(tiny.write_run(tmp_path), ["tokenizer.train=null", "tokenizer.path=s3://bucket/tokenizer.json"])
    assert tokenizer.tokenizer.path == "s3://bucket/tokenizer.json"
    assert load(write(tmp_path, dump(tokenizer))).tokenizer == tokenizer.tokenizer
    for secret in ("s3://me:hunter2hunter2@bucket/x", "https://host/x?X-Amz-Signature=hunter2hunter2"):
        message = refused(tiny.write_run(tmp_path), f"data.sources.0.paths=['{secret}']")
        assert "must not have a user, a password, a query" in message and "hunter2" not in message


def test_a_misspelled_required_key_is_one_problem(tmp_path: Path) -> None:
    message = refused(write(tmp_path, MINIMAL.replace("dim:", "dmi:")))
    assert "has a problem:" in message and "model.dmi: unknown key; did you mean model.dim?" in message


def test_dotted_key_in_a_file(tmp_path: Path) -> None:
    message = refused(write(tmp_path, MINIMAL + "train.batch_size: 3\n"))
    assert "run.yaml:15: train.batch_size: unknown key; in a file, write nested sections" in message


def test_checks_over_several_keys_have_a_place(tmp_path: Path) -> None:
    assert "command line: model: dim 32 is not divisible by heads 5" in refused(write(tmp_path), "model.heads=5")
    text = MINIMAL.replace("heads: 4", "heads: 5")
    assert "run.yaml:11: model: dim 32 is not divisible by heads 5" in refused(write(tmp_path, text))
    message = refused(write(tmp_path), "model.positions=learned", "model.max_positions=8")
    assert "command line: model.max_positions 8 is less than the longest sequence_length 2048" in message


def test_missing_section_is_placed_in_the_file(tmp_path: Path) -> None:
    text = MINIMAL.replace("train:\n  duration: 10 steps\n", "")
    assert "run.yaml:1: train: required key is missing" in refused(write(tmp_path, text))


def test_empty_section_has_its_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL + "  optimizer:\n    # lr: 1\neval:\n"))
    assert config.train.optimizer.lr == 3e-4
    assert config.eval.batch_size == 8


def test_overrides(tmp_path: Path) -> None:
    config = load(
        write(tmp_path),
        [
            "train.batch_size=64",
            "train.optimizer.betas=[0.8, 0.9]",
            "data.sources.0.weight=2",
            "tokenizer={path: tokenizer.json}",
            "generate.prompt='a: b # c'",
            "train.batch_size=65",
        ],
    )
    assert config.train.batch_size == 65
    assert config.train.optimizer.betas == (0.8, 0.9)
    assert config.data.sources[0].weight == 2
    assert config.data.sources[0].name == "words"
    assert config.tokenizer.path == tmp_path / "tokenizer.json"
    assert config.tokenizer.train is None
    assert config.generate.prompt == "a: b # c"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_size", "an override has the form key.path=value"),
        ("=3", "an override has the form key.path=value"),
        ("train..x=3", "an override has the form key.path=value"),
        ("data.sources.1.weight=2", "data.sources is a list with the entries 0 to 0, not 1"),
        ("data.sources.x.weight=2", "data.sources is a list with the entries 0 to 0, not x"),
        ("data.sources.0.paths=[*.txt]", "put text that begins with"),
        ("model={layers: 1, layers: 2}", "given twice"),
        ("train.batch_size=???", "train.batch_size = ???: fill in a value here"),
        ("model.qk_norm=maybe", 'model.qk_norm = "maybe": must be true or false'),
        ("model.rope_theta=.inf", "must be a finite number"),
        ("train.batch_size=true", "train.batch_size = true: must be a whole number"),
        ("model.kv_heads=false", "model.kv_heads = false: must be a whole number"),
        ("tokenizer.train.max_bytes=true", "tokenizer.train.max_bytes = true: must be a whole number"),
        ("train.optimizer.lr=true", "train.optimizer.lr = true: must be a number"),
        ("train.optimizer.betas=[true, 0.9]", "train.optimizer.betas = [true, 0.9]: must be a number"),
        ("data.sources.0.name=tokenizer", 'data.sources.0.name = "tokenizer"'),
    ],
)
def test_bad_overrides(tmp_path: Path, override: str, message: str) -> None:
    report = refused(write(tmp_path), override)
    assert message in report
    assert "command line: " in report


def test_values_are_taken_as_they_are(tmp_path: Path) -> None:
    prompt = "${run.dir} ??? : [\n"
    config = load(write(tmp_path), (), {"generate.prompt": prompt, "generate.seed": 3})
    assert (config.generate.prompt, config.generate.seed) == (prompt, 3)
    with pytest.raises(UserError, match=r"command line: generate\.temperature = -1"):
        load(write(tmp_path), (), {"generate.temperature": -1})


def test_include_merges_sections_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, "model: {layers: 7, heads: 8}\ntrain: {batch_size: 3}\n", "parts/model.yaml")
    write(
        tmp_path, "include: model.yaml\nmodel: {heads: 2}\ntrain: {optimizer: {betas: [0.1, 0.2]}}\n", "parts/all.yaml"
    )
    text = "include: [parts/all.yaml]\n" + MINIMAL.replace("  layers: 2\n", "").replace("  heads: 4\n", "")
    config = load(write(tmp_path, text + "  optimizer: {lr: 1.0}\n"), ["train.batch_size=4"])
    assert (config.model.layers, config.model.heads, config.train.batch_size) == (7, 2, 4)
    assert (config.train.optimizer.betas, config.train.optimizer.lr) == ((0.1, 0.2), 1.0)


def test_any_text_replaces_what_was_included(tmp_path: Path) -> None:
    write(tmp_path, "generate: {prompt: a}\ndata: {dir: '${run.dir}/x'}\n", "base.yaml")
    for text in ("???", "${", "", "${run"):
        quoted = text.replace("${", "\\${")
        config = load(
            write(
                tmp_path,
                f"include: base.yaml\ngenerate: {{prompt: '{quoted}'}}\n{MINIMAL}".replace(
                    "data:\n", "data:\n  dir: y\n"
                ),
            )
        )
        assert (config.generate.prompt, config.data.dir) == (text, tmp_path / "y")


def test_problems_of_included_files_have_their_lines(tmp_path: Path) -> None:
    write(tmp_path, "# a comment\nmodel:\n  dim: wide\n  layers: -3\ntokenizer: {train: 3}\n", "part.yaml")
    message = refused(write(tmp_path, "include: part.yaml\n" + MINIMAL.replace("  dim: 32\n", "")))
    assert 'part.yaml:3: model.dim = "wide": must be a whole number' in message
    assert "layers" not in message, "the main file replaced that value"
    assert "tokenizer" not in message, "the main file replaced that section"


def test_include_cycles_and_missing_files(tmp_path: Path) -> None:
    write(tmp_path, "include: b.yaml\n", "a.yaml")
    write(tmp_path, "include: [a.yaml]\n", "b.yaml")
    assert "files include each other: a.yaml -> b.yaml -> a.yaml" in refused(tmp_path / "a.yaml")
    assert "files include each other" in refused(write(tmp_path, "include: self.yaml", "self.yaml"))
    message = refused(write(tmp_path, MINIMAL + "include:\n  - nowhere.yaml\n"))
    assert message.startswith('run.yaml:16: include = "nowhere.yaml": no file to include nowhere.yaml')
    assert "run.yaml:15: include = 3: must be a file" in refused(write(tmp_path, MINIMAL + "include: 3\n"))


def test_the_same_file_may_be_included_on_two_ways(tmp_path: Path) -> None:
    write(tmp_path, "train: {batch_size: 9}\n", "base.yaml")
    write(tmp_path, "include: base.yaml\n", "a.yaml")
    write(tmp_path, "include: base.yaml\n", "b.yaml")
    assert load(write(tmp_path, "include: [a.yaml, b.yaml]\n" + MINIMAL)).train.batch_size == 9


def test_packaged_run_files() -> None:
    shipped = packaged_configs() / "quickstart.yaml"
    assert find(Path("quickstart.yaml")) == find(Path("configs/quickstart.yaml")) == shipped
    assert load(Path("quickstart.yaml")).model.layers > 0
    Path("quickstart.yaml").write_text(MINIMAL)
    assert find(Path("quickstart.yaml")) == Path("quickstart.yaml")
    with pytest.raises(UserError, match=r"no run file quikstart\.yaml.*like quickstart\.yaml") as caught:
        find(Path("quikstart.yaml"))
    assert not any(part in str(caught.value) for part in ("corpora/", "curation/", "monitoring/"))
    write(Path(), name="mine/run.yaml")
    with pytest.raises(UserError, match=r"no run file mine/rnu\.yaml; mine has mine/run\.yaml$"):
        find(Path("mine/rnu.yaml"))
    with pytest.raises(UserError, match=r"\. is a folder; name a run file \(.yaml\)"):
        find(Path("."))
    with pytest.raises(UserError, match="no run file"):
        find(Path("../configs/quickstart.yaml"))


def test_a_run_folder(tmp_path: Path) -> None:
    """It may have been moved since training has written its run file."""
    with pytest.raises(UserError, match=r"moved is not a run folder: it has no config\.yaml"):
        load_run(write(tmp_path, name="moved/run.yaml").parent)
    with pytest.raises(UserError, match="no run file or run folder nothere; "):
        load_run(Path("nothere"))
    (tmp_path / "moved/config.yaml").write_text(dump(load(tmp_path / "moved/run.yaml")))
    config = load_run(Path("moved"), ["train.batch_size=7"])
    assert (config.run.dir, config.train.batch_size) == (tmp_path / "moved", 7)
    assert load_run(Path("moved/run.yaml")).run.dir == tmp_path / "runs/small"
    with pytest.raises(UserError, match=r"moved is a folder; name a run file, like moved/config\.yaml"):
        load(Path("moved"))


def test_interpolation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUS", "/corpus")
    text = MINIMAL.replace("[words.txt]", '["${oc.env:CORPUS}/a.txt", "${sysconfig:stdlib}/*.py"]')
    text += "  checkpoint: {every_steps: '${train.validation.every_steps}'}\n"
    config = load(
        write(tmp_path, text), ["data.dir=${run.dir}/tokens", "run.dir=/other", "train.validation.every_steps=7"]
    )
    assert config.data.sources[0].paths == ["/corpus/a.txt", sysconfig.get_path("stdlib") + "/*.py"]
    assert config.data.dir == Path("/other/tokens")
    assert config.train.checkpoint.every_steps == 7


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${nothing.here}", "'nothing.here' not found"),
        ("${oc.env:SURELY_NOT_SET}", "'SURELY_NOT_SET' not found"),
        ("${sysconfig:nolib}", "sysconfig knows the paths"),
        ("${unknown:1}", "Unsupported interpolation type unknown"),
        ("${run.dir", "not readable"),
        ("${data.dir}", "Recursive interpolation"),
    ],
)
def test_bad_interpolation(tmp_path: Path, value: str, reason: str) -> None:
    for message in (
        refused(write(tmp_path, MINIMAL.replace("data:\n", f'data:\n  dir: "{value}"\n'))),
        refused(write(tmp_path), f"data.dir={value}"),
    ):
        assert f'data.dir = "{value}": ' in message
        assert reason in message
    assert "command line: " in message


def test_placeholder(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL.replace("[words.txt]", "???"))
    assert "run.yaml:6: data.sources.0.paths = ???: fill in a value here" in refused(path)
    assert load(path, ["data.sources.0.paths=[x.txt]"]).data.sources[0].paths == [str(tmp_path / "x.txt")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "train:\n  duration: 1 steps\n", "run.yaml:15: train: the key is given twice, first in run.yaml:13"),
        (MINIMAL.replace("heads: 4", "heads: 4\n  heads: 4"), "run.yaml:13: model.heads: the key is given twice"),
        ("run:\n\tdir: x\n", "run.yaml:2: not readable as YAML"),
        ("run:\n\tdir: x\n", "indent with spaces"),
        ("run: {dir: x\n", "not readable as YAML"),
        ("run: x: y\n", "run.yaml:1: not readable as YAML"),
        ("a: 1\n---\nb: 1\n", "not readable as YAML"),
        ("- run\n", "a run file is a mapping of sections"),
        ("text", "a run file is a mapping of sections"),
        ("", "run: required key is missing"),
        ("run: &a [*a]\n", "the alias contains itself"),
        ("run: *a\n", "undefined alias"),
        ("run: !!python/object:os.system {}\n", "not supported"),
        ("run: !!int x\n", "'x' is not a valid int"),
        ("? [a]\n: 1\n", "is not text"),
        (f"run: {'[' * 100}{']' * 100}", "more than 50 levels"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(f"{b}: &{b} [{'*' + a}{f',*{a}' * 9}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
            "more than 100,000 values",
        ),
        (f"run: {'[' * 5000}{']' * 5000}", "more than 50 levels"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(write(tmp_path, text))


def test_file_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"run: \xff\xfe")
    assert "is not a UTF-8 text file" in refused(path)
    path.write_bytes(b"run: \x00")
    assert "not readable as YAML" in refused(path)


def test_round_trip(tmp_path: Path) -> None:
    config = load(
        write(tmp_path),
        [
            "train.schedule={type: wsd, decay: 3 steps, warmup: 1M tokens}",
            "train.optimizer.lr=1e-7",
            "model.rope_scaling={type: yarn, factor: 4}",
            "tokenizer.special_tokens=['no', '???', '1e5', '~', '\\${x}']",
            "train.metrics.wandb={project: p}",
            "resume.allow=[data, code]",
        ],
    )
    assert config.tokenizer.special_tokens == ["no", "???", "1e5", "~", "${x}"]
    text = dump(config)
    assert load(write(tmp_path, text, "elsewhere/again.yaml")) == config
    assert dump(load(tmp_path / "elsewhere/again.yaml")) == text
    # Another reader of YAML sees the same file.
    assert yaml.safe_load(text)["train"]["duration"] == "10 steps"


@pytest.mark.slow
@settings(max_examples=60)
@given(prompt=st.text(alphabet="ab$\\{}?:.#'\" \n\t-", max_size=12) | st.text(max_size=12))
def test_any_text_survives_a_round_trip(tmp_path_factory: pytest.TempPathFactory, prompt: str) -> None:
    folder = tmp_path_factory.mktemp("round")
    config = load(write(folder), (), {"generate.prompt": prompt})
    assert config.generate.prompt == prompt
    assert load(write(folder, dump(config), "again.yaml")) == config


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\r", "\n", "\ufeff"])
def test_every_line_end_is_read_back(end: str) -> None:
    for value in (end, f"a{end}b", f" {end}: {end} "):
        assert parse(render({"text": [value]}), "x").value == {"text": [value]}


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="abc", min_size=1), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_render_and_parse_are_inverse(value: object) -> None:
    assert parse(render(value), "x").value == value


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.splits={train: 0.1}", "'train' is not a valid name of a split"),
        ("data.splits={heldout: 0.6, test: 0.4}", "leave nothing to train on"),
        ("data.splits={heldout: 1}", "must be a share of at least 0 and less than 1"),
        ("data.splits={heldout: some documents}", "must be a whole number"),
        ("data.splits={heldout: [1]}", "must be a share like 0.01"),
        ("data.splits={test: 0.1}", "eval.split: 'heldout' is not in data.splits (test)"),
        ("tokenizer.allow_special=[<|x|>]", "is not in special_tokens"),
        ("tokenizer.allow_special=[<|endoftext|>]", "is end_of_document"),
        ("data.sources=[{name: a, type: hub}]", "exactly one of paths"),
        ("data.sources=[{name: a, paths: [x], hub: {path: y}}]", "exactly one of paths"),
        ("data.sources=[{name: a, hub: {path: y}}]", "type: hub needs the key hub"),
    ],
)
def test_data_that_makes_no_sense(tmp_path: Path, override: str, said: str) -> None:
    assert said in refused(write(tmp_path), override)


def test_a_run_folder_whose_run_file_has_a_list_for_the_section_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("run: [1]\n")
    with pytest.raises(UserError, match=r"run\.dir: run is a list"):
        load_run(run)


def test_no_splits_hold_nothing_out(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["data.splits={}"])
    assert config == load(write(tmp_path), ["data.splits={heldout: 0}"])
    with pytest.raises(UserError, match=r"eval.split: 'test' is not in data.splits \(heldout\)"):
        load(write(tmp_path), ["data.splits={}", "eval.split=test"])


def test_splits_are_shares_or_numbers(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["data.splits={heldout: 0.02, test: 1K documents}"])
    assert config.data.model_dump()["splits"] == {"heldout": 0.02, "test": "1000 documents"}
    again = load(write(tmp_path), ["data.splits.heldout=7 documents"])
    assert again.data.splits["heldout"].documents == 7


@pytest.mark.parametrize(
    ("path", "kind"), [("a.jsonl", "jsonl"), ("b/*.jsonl.zst", "jsonl"), ("c.parquet", "parquet"), ("d.txt", None)]
)
def test_a_type_that_was_forgotten(tmp_path: Path, path: str, kind: str | None) -> None:
    source = f"data.sources=[{{name: a, paths: [{path}]}}]"
    if kind is None:
        load(write(tmp_path), [source])
    else:
        assert f"write type: {kind}" in refused(write(tmp_path), source)
    load(write(tmp_path), [f"data.sources=[{{name: a, type: text, paths: [{path}]}}]"])


def test_a_umask_is_what_was_written(tmp_path: Path) -> None:
    """Messages and docs advise `slurm.umask=0002`, which YAML takes for the number 2."""
    plain = write(tmp_path)
    for text in ("0002", '"0002"', "002", "0027", "0077", "022"):
        wanted = text.strip('"')
        config = load(plain, [f"slurm.umask={text}"])
        assert config.slurm.umask == wanted
        assert load(write(tmp_path, MINIMAL + f"slurm: {{umask: {text}}}\n", "with.yaml")).slurm.umask == wanted
        assert load(write(tmp_path, MINIMAL + f"slurm:\n  umask: {text}\n", "with.yaml")) == config
        assert load(write(tmp_path, dump(config), "again.yaml")) == config
    below = write(tmp_path, MINIMAL + "slurm: {umask: 0002}\n", "below.yaml")
    assert load(below, ["slurm={umask: 0027}"]).slurm.umask == "0027"
    assert load(below, ["slurm.umask=null"]).slurm.umask is None
    for text in ("2", "0o027", "0x2", "-002", "0008"):  # none of these is read as another number
        assert f'slurm.umask = "{text}": must match' in refused(plain, f"slurm.umask={text}")


@pytest.mark.parametrize("number", ["9" * 5_000, "-" + "9" * 5_000, "0x" + "f" * 5_000])
def test_a_whole_number_that_python_does_not_write(tmp_path: Path, number: str) -> None:
    for message in (
        refused(write(tmp_path, f"{MINIMAL}seed: {number}\n")),
        refused(write(tmp_path), f"train.batch_size={number}"),
    ):
        assert "is not a valid int" in message and len(message) < 1_000


def test_a_secret_in_a_run_file_is_refused_and_one_in_a_run_folder_is_not(tmp_path: Path) -> None:
    text = f"{MINIMAL}generate: {{prompt: 'see postgres://user:hunter2@h/db'}}\n"
    message = refused(write(tmp_path, text))
    assert "generate.prompt = " in message and "a password in an address" in message and "hunter2" not in message
    write(tmp_path, text, "config.yaml")
    (tmp_path / "ledger.jsonl").touch()
    assert load(tmp_path / "config.yaml").generate.prompt == "see postgres://user:hunter2@h/db"


@pytest.mark.parametrize("value", ["postgres://user:hunter2@h/db", "https://h/x?sig=hunter2", "password=hunter2"])
def test_a_secret_of_the_environment_is_refused_by_its_value(
    tmp_path: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", value)
    for form in ("${oc.env:DATABASE_URL}", "x ${oc.env:DATABASE_URL,none}"):
        message = refused(write(tmp_path, f"{MINIMAL}generate: {{prompt: '{form}'}}\n"))
        assert "the value of the variable DATABASE_URL may be a secret" in message and "hunter2" not in message


def test_every_size_of_windows_has_a_bound(tmp_path: Path) -> None:
    """One that has none makes a plan run for minutes, and a list fill the memory, before anything is trained."""
    named = {"sequence_length", "batch_size", "micro_batch_size", "samples", "max_length"}
    sizes = [key for key in keys(Config) if key.name in named and "int" in str(key.field.annotation)]
    assert len(sizes) > 10
    assert [key.path for key in sizes if not any(hasattr(each, "le") for each in key.field.metadata)] == []
    assert "train.sequence_length = 1000000000000" in refused(write(tmp_path), "train.sequence_length=1000000000000")
