"""The `pipeline convert` commands. As in `main`: no logic; everything heavy is imported inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.arguments import shard_bytes, special_ids
from pipeline.cli.checkpoint import Weights
from pipeline.cli.mirrors import fetched
from pipeline.common.console import Console, echo
from pipeline.common.errors import EXIT_OTHER

EXIT_ONLY_SUMS = 3
"""Exit code of `check` where no logits could be compared."""

convert_app = typer.Typer(
    no_args_is_help=True,
    help="Convert models to and from Hugging Face's format, and from Megatron's, and tokenizers of other libraries. "
    "Nothing is downloaded or executed. `check` compares two models.",
)

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")]
OptionalOut = Annotated[Path | None, typer.Argument(metavar="OUT", help="Folder to create.", show_default=False)]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only check all names and shapes, and print the sections for a run file.")
]
MaxShard = Annotated[str, typer.Option(metavar="SIZE", help="Maximum size of one file of tensors.")]


@convert_app.command("to-hf")
def to_hf(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_OR_CKPT", help="A run folder, a checkpoint in it, or what `pipeline checkpoint export` wrote."
        ),
    ],
    out: Out,
    step: Annotated[
        int | None, typer.Option(help="Checkpoint step, for a run folder; default: the latest.", min=0)
    ] = None,
    weights: Weights = "model",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="Type of the weights; default: as stored (fp32).")
    ] = None,
    max_shard: MaxShard = "5GB",
    pooled: Annotated[
        bool,
        typer.Option("--pooled", help="Of an encoder: with the files of sentence-transformers, mean pooling."),
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Template in Jinja that makes a text of a conversation.", show_default=False),
    ] = None,
) -> None:
    """Write a model in the format of transformers: weights, config.json, tokenizer, model card."""
    from pipeline.common.console import say
    from pipeline.train.huggingface import convert

    console = Console()
    done = convert.to_hf(
        fetched(source, step),
        out,
        step=step,
        weights=weights,
        dtype=dtype,
        max_shard=shard_bytes(max_shard),
        pooled=pooled,
        chat_template=chat_template,
        console=console,
    )
    say(console, done)


@convert_app.command("from-hf")
def from_hf(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a downloaded model, with safetensors.")],
    out: OptionalOut = None,
    end_of_document: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token that ends each document; default: the model's end of text."),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave the tokenizer out; DIR needs none. It counts as unknown then.")
    ] = False,
    max_shard: MaxShard = "5GB",
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Ignore this key of config.json, which must not change the model; may be repeated."
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Convert the weights of a downloaded model, to train on from them (`train.init_from.path`)."""
    from pipeline.common.console import say
    from pipeline.common.errors import UserError
    from pipeline.train.huggingface import convert

    if dry_run:
        echo(
            convert.describe(folder, end_of_document=end_of_document, weights_only=weights_only, ignore=ignore or ()),
            end="",
        )
        return
    if out is None:
        raise UserError("give the folder to create after the model's folder, or use --dry-run")
    console = Console()
    done = convert.from_hf(
        folder,
        out,
        end_of_document=end_of_document,
        weights_only=weights_only,
        max_shard=shard_bytes(max_shard),
        ignore=ignore or (),
        console=console,
    )
    say(console, done)


@convert_app.command("from-megatron")
def from_megatron(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run of Megatron-LM (--save), or one iter_NNNNNNN in it.")
    ],
    out: OptionalOut = None,
    step: Annotated[int | None, typer.Option(help="Iteration; default: the latest.", min=0, show_default=False)] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Its tokenizer.json, or a folder with one; default: none, it counts as unknown then."
        ),
    ] = None,
    end_of_document: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Token that ends each document, with --tokenizer.")
    ] = None,
    max_shard: MaxShard = "5GB",
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="ARG", help="Ignore this argument, which must not change the model; may be repeated."),
    ] = None,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Convert Adam's moments and steps, too (train.init_from.optimizer).")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Convert the weights of a Megatron Core checkpoint (torch_dist), to train on from them."""
    from pipeline.common.console import say
    from pipeline.common.errors import UserError
    from pipeline.train.foreign import convert

    if dry_run:
        echo(
            convert.describe_megatron(folder, step, tokenizer, end_of_document, ignore or (), optimizer=optimizer),
            end="",
        )
        return
    if out is None:
        raise UserError("give the folder to create after the checkpoint's folder, or use --dry-run")
    console = Console()
    done = convert.from_megatron(
        folder,
        out,
        step=step,
        tokenizer=tokenizer,
        end_of_document=end_of_document,
        max_shard=shard_bytes(max_shard),
        ignore=ignore or (),
        optimizer=optimizer,
        console=console,
    )
    say(console, done)


@convert_app.command("config")
def config(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE_OR_ARGS",
            help="File of its settings; of Megatron-LM also a script, a checkpoint, or the arguments behind `--`.",
        ),
    ],
    suite: Annotated[
        Literal["megatron", "nemo", "torchtitan", "nanotron", "olmo"], typer.Option("--from", help="The other suite.")
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="RUN.yaml", help="Run file to write; default: print it.", show_default=False),
    ] = None,
) -> None:
    """Translate the settings of a run of another suite to a run file; every setting is accounted for."""
    from pipeline.train.foreign.settings.translate import convert_config

    convert_config(suite, given, to)


@convert_app.command("tokenizer")
def tokenizer(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="SentencePiece's .model, tiktoken's .tiktoken, Mistral's tekken.json, or GPT-2's vocab.json.",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="The tokenizer.json to create, or a folder that has none yet.")
    ],
    merges: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Merges of a vocab.json; default: merges.txt beside it.", show_default=False),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Regex that splits a text, for tiktoken's ranks, which lack it; or gpt2, cl100k, o200k. "
            "Published files are recognized.",
            show_default=False,
        ),
    ] = None,
    special: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKEN=ID", help="Special token for tiktoken's ranks; may be repeated."),
    ] = None,
    end_of_document: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Special token that ends each document; default: the one FILE names."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text in UTF-8 whose ids are compared, too, line by line.", show_default=False
        ),
    ] = None,
    allow: Annotated[int, typer.Option(metavar="N", help="Write it although up to N texts get other ids.", min=0)] = 0,
    unproven: Annotated[
        bool, typer.Option("--unproven", help="Write it without comparing ids; needs no other package.")
    ] = False,
) -> None:
    """Convert a tokenizer of another library to a tokenizer.json (`tokenizer.path`), with the same ids.

    The ids are compared with those of the original program (sentencepiece, tiktoken; the extra `convert`), for hard
    texts, each entry of the vocabulary, and --text. If one differs, nothing is written.
    """
    from pipeline.common.console import say
    from pipeline.data.tokenization.conversion.convert import convert_tokenizer

    console = Console()
    done = convert_tokenizer(
        file,
        out,
        merges=merges,
        pattern=pattern,
        special=special_ids(special or ()),
        end_of_document=end_of_document,
        text=text,
        allow=allow,
        unproven=unproven,
        console=console,
    )
    say(console, done)


@convert_app.command("check")
def check(
    a: Annotated[
        Path,
        typer.Argument(
            metavar="A",
            help="Folder of a model: a run, a checkpoint, an export or conversion; a model of Hugging Face; or a "
            "checkpoint of Megatron Core (torch_dist).",
        ),
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one, of any of these kinds.")],
    text: Annotated[Path, typer.Option(metavar="FILE", help="Text in UTF-8 whose logits are compared.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A tokenizer.json; default: that of A, else of B.", show_default=False),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Compare the first N tokens of the text.", min=2)] = 2048,
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of a window; each begins anew. Default: 1024, or the positions of a model that has fewer.",
            min=2,
            show_default=False,
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Largest difference of two logits a and b, as |a - b| / (1 + |a|). Default: 1e-4 in fp32, 0.01 in "
            "fp16, 0.05 in bf16.",
            min=0,
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"], typer.Option(help="What is computed in; of Megatron Core always fp32.")
    ] = "fp32",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device, as torch names it; Megatron Core is computed on the CPU.")
    ] = "cpu",
) -> None:
    """Compare two models: their logits and losses on a text, side by side.

    A model of Hugging Face is computed by transformers, one of Megatron Core by megatron-core, and ours by this
    package. So a conversion is checked against the program that the model came from. Both models have to fit into
    memory.

    Exit code 0: equal within the tolerance. 1: different. 3: transformers or megatron-core is missing, so that only
    names, shapes and sums of the tensors were compared, which are equal, and prove nothing.
    """
    from pipeline.eval.comparison import compare

    options = compare.CheckOptions(text, tokenizer, tokens, length, tolerance, dtype, device)
    equal = compare.check(a, b, options, Console())
    if not equal:
        raise typer.Exit(EXIT_OTHER if equal is False else EXIT_ONLY_SUMS)
