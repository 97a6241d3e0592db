"""The `pipeline data` commands. As in `main`: no logic; everything heavy is imported inside."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeline.cli.arguments import AsJson, Overrides, RunOrFolder, on_a_disk, shard_bytes
from pipeline.common.console import Console, echo
from pipeline.common.errors import EXIT_OTHER

if TYPE_CHECKING:
    from pipeline.common.objects.access import RemoteAccess

data_app = typer.Typer(
    no_args_is_help=True,
    help="Datasets: inspect, verify, convert, push and pull. Runs: review their data (plan), trace it (where, when, "
    "losses, why).",
)

Endpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="A server that speaks the protocol of S3; default: AWS_ENDPOINT_URL.", show_default=False
    ),
]
Ids = Annotated[bool, typer.Option("--ids", help="Read ids from the source files if they are stored nowhere else.")]


@data_app.command("inspect")
def data_inspect(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A dataset's folder, or one of several.",
            callback=on_a_disk,
        ),
    ],
    documents: Annotated[int, typer.Option(help="Documents to show.", min=0)] = 3,
) -> None:
    """Show what a dataset holds: counts, tokenizer, lengths, the first documents."""
    from pipeline.data.provenance.inspect import inspect

    inspect(folder, documents=documents)


@data_app.command("verify")
def data_verify(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|RUN.yaml", help="A dataset's folder, or one of several; or a run file.", callback=on_a_disk
        ),
    ],
    overrides: Overrides = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Make damaged and missing parts again from the source files, byte for byte."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --repair: show what would be made again; write nothing.")
    ] = False,
    seal: Annotated[
        bool, typer.Option("--seal", help="Give manifests, plans and receipts of earlier versions a hash of their own.")
    ] = False,
) -> None:
    """Check all hashes and bounds of a dataset; exit code 1 if anything differs."""
    from pipeline.data.verify.command import verify_all

    if not verify_all(data, overrides or (), Console(), repairs=repair, dry_run=dry_run, seals=seal):
        raise typer.Exit(EXIT_OTHER)


@data_app.command("pack")
def data_pack(
    dataset: Annotated[
        Path,
        typer.Argument(
            metavar="DATASET", help="A dataset's folder, or one whose training splits to pack.", callback=on_a_disk
        ),
    ],
    length: Annotated[
        list[int], typer.Option(help="Tokens of a pack: the sequence length of a run; may be repeated.", min=1)
    ],
    workers: Annotated[
        int | None, typer.Option(help="Processes; default: one per core.", min=1, show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what there is to do.")] = False,
) -> None:
    """Pack the documents of a dataset for training with `data.loader.packing: best_fit`, or repair its packs."""
    from pipeline.data.packing.command import pack

    pack(dataset, length, workers=workers, dry_run=dry_run, console=Console())


@data_app.command("push")
def data_push(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A dataset's folder, or one of several.",
            callback=on_a_disk,
        ),
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to: s3://, gs:// or az://BUCKET/FOLDER.")],
    endpoint: Endpoint = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what there is to send.")] = False,
) -> None:
    """Write datasets to object storage, with their packs. Repeated, it sends what is missing."""
    from pipeline.common.objects.urls import parse_folder
    from pipeline.data.datasets.remote.push import push

    push(folder, parse_folder(url), _access(endpoint), Console(), dry_run=dry_run)


@data_app.command("pull")
def data_pull(
    url: Annotated[str, typer.Argument(metavar="URL", help="A dataset that was pushed, or a folder of several.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the dataset, or for all of them.")],
    endpoint: Endpoint = None,
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Read without credentials, from a public bucket.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what there is to fetch.")] = False,
) -> None:
    """Write datasets of object storage to a disk. Repeated, it fetches what is missing."""
    from pipeline.common.objects.urls import parse_folder
    from pipeline.data.datasets.remote.pull import pull

    pull(parse_folder(url), folder, _access(endpoint, anonymous), Console(), dry_run=dry_run)


def _access(endpoint: str | None, anonymous: bool = False) -> RemoteAccess:
    from pipeline.common.objects.access import RemoteAccess
    from pipeline.common.objects.urls import check_endpoint

    return RemoteAccess(endpoint=None if endpoint is None else check_endpoint(endpoint), anonymous=anonymous)


@data_app.command("export")
def data_export(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATASET",
            help="A dataset's folder, or a source's with --split.",
            callback=on_a_disk,
        ),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder of the files.")],
    form: Annotated[Literal["jsonl", "parquet"], typer.Option("--format", help="Format of the files.")] = "jsonl",
    documents: Annotated[
        str | None, typer.Option(metavar="A-B", help="Numbers of documents, from 0, both ends included; default: all.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the source; default: train.")] = None,
    ids: Annotated[
        bool | None,
        typer.Option(
            "--ids/--no-ids",
            help="Read ids from the source files if they are stored nowhere else; default: yes, but for sources of the "
            "hub and with shuffle: global.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also write the token ids.")] = False,
    max_shard: Annotated[str | None, typer.Option(help="Text of a file, about; default: 256MiB.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core.", min=1)] = None,
) -> None:
    """Write the documents of a dataset as text with their places, as JSON Lines or Parquet. Rerun to resume."""
    from pipeline.data.provenance.export_dataset import export_dataset

    export_dataset(
        data,
        to,
        form,
        Console(),
        documents=documents,
        split=split,
        ids=ids,
        tokens=tokens,
        shard_bytes=shard_bytes(max_shard),
        workers=workers,
    )


@data_app.command("merge")
def data_merge(
    dataset: Annotated[
        Path,
        typer.Argument(
            metavar="DATASET",
            help="A dataset's folder, like DATA_DIR/SOURCE/train.",
            callback=on_a_disk,
        ),
    ],
    prefix: Annotated[Path, typer.Argument(metavar="PREFIX", help="PREFIX.bin and PREFIX.idx are written.")],
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write a dataset as a single .bin/.idx pair, for tools that want one."""
    from pipeline.data.datasets.merge import merge

    echo(merge(dataset, prefix, force=force, console=Console()))


@data_app.command("adopt")
def data_adopt(
    prefixes: Annotated[
        list[Path],
        typer.Argument(metavar="PREFIX...", help="Paths without suffix, globs or folders; with --format, files."),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder of the source to create.")],
    tokenizer: Annotated[Path, typer.Option(help="The tokenizer.json that the files were made with.")],
    end_of_document: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    special_token: Annotated[list[str] | None, typer.Option(help="Additional special token; may be repeated.")] = None,
    split: Annotated[str, typer.Option(help="Split to put the documents into.")] = "train",
    link: Annotated[
        Literal["symlink", "hardlink", "copy"], typer.Option(help="How the dataset refers to the files.")
    ] = "symlink",
    append_eod: Annotated[
        bool, typer.Option("--append-eod", help="Copy the files, adding missing end-of-document tokens.")
    ] = False,
    form: Annotated[
        Literal["megatron", "npy", "ds", "mds"],
        typer.Option(
            "--format",
            help="npy: ids alone (OLMo-core); ds: of datatrove and nanotron; mds: folders of MosaicML's streaming.",
        ),
    ] = "megatron",
    ids: Annotated[
        Literal["uint16", "uint32", "int32", "int64"] | None,
        typer.Option(
            help="Type of the ids, where the files do not say it; default: by the vocabulary.", show_default=False
        ),
    ] = None,
    leave_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npy",
            help="Copy the file without the documents with these numbers (`pipeline data position` writes such files).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a dataset of .bin/.idx files of Megatron-LM, NeMo or GPT-NeoX, checked and without a second copy.

    Token files of other suites (--format) are copied.
    """
    from pipeline.data.datasets.adopt import adopt

    echo(
        adopt(
            prefixes,
            to,
            tokenizer=tokenizer,
            end_of_document=end_of_document,
            special_tokens=special_token or [],
            split=split,
            link=link,
            append_eod=append_eod,
            leave_out=leave_out,
            form=form,
            ids=ids,
            console=Console(),
        )
    )


@data_app.command("position")
def data_position(
    cache: Annotated[
        Path,
        typer.Argument(metavar="CACHE", help="Folder of the indices of a run of Megatron-LM (--data-cache-path)."),
    ],
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder to create, for lists of documents.")],
    consumed: Annotated[
        int | None, typer.Option(help="Samples that the run has read.", min=0, show_default=False)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Its checkpoints, which say that number, too.", show_default=False),
    ] = None,
    of: Annotated[str | None, typer.Option(help="Beginning of the name of the blend, where there are several.")] = None,
    keep_cut: Annotated[
        bool, typer.Option("--keep-cut", help="Read documents again of which only a part was read.")
    ] = False,
) -> None:
    """List the documents that a run of Megatron-LM has read, so that training here does not read them again."""
    from pipeline.common.errors import UserError
    from pipeline.data.datasets.position_command import write_position

    if (consumed is None) == (checkpoint is None):
        raise UserError("give one of --consumed and --checkpoint: how many samples the run has read")
    if checkpoint is not None:
        from pipeline.train.foreign.convert import consumed_samples

        consumed = consumed_samples(checkpoint)
    assert consumed is not None
    write_position(cache, consumed, to, of=of, keep_cut=keep_cut)


@data_app.command("plan")
def data_plan(
    run: RunOrFolder,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks, for micro-batches and padding.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="Number of first steps whose order is hashed.", min=0)] = 1000,
    preview: Annotated[int, typer.Option(help="Number of first windows to show as text.", min=0)] = 0,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE=TOKENS",
            help="Plan as if SOURCE had this number of tokens, like web=1T, whether or not it has a dataset; may be "
            "repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, with all digits.")] = False,
) -> None:
    """Show a run's blend on paper: sources, segments, epochs, accounts at the end, warnings, a hash of the order.

    Writes nothing. A run that has begun is planned from its newest checkpoint.
    """
    from pipeline.config.load import load_run

    config = load_run(run, overrides or ())
    from pipeline.data.plan.show import print_data_plan
    from pipeline.train.start.schedule_seam import planned_seam

    print_data_plan(
        config,
        Console(),
        ranks=ranks,
        hashed_steps=steps,
        preview=preview,
        assume=assume or (),
        as_json=as_json,
        check=partial(planned_seam, config),
    )


@data_app.command("where")
def data_where(
    run: RunOrFolder,
    step: Annotated[int, typer.Option(help="The step, from 1 as in metrics.jsonl.")],
    overrides: Overrides = None,
    rank: Annotated[int | None, typer.Option(help="Only the samples of this data-parallel rank.", min=0)] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Data-parallel ranks; default: those of the newest checkpoint.", min=1)
    ] = None,
    ids: Ids = False,
    as_json: AsJson = False,
) -> None:
    """Show the documents in a step, trained or to come: source, file, line or row, id, tokens, first words."""
    from pipeline.data.provenance.run import open_view, print_result
    from pipeline.data.provenance.step_to_documents import where

    view = open_view(run, overrides or ())
    print_result(where(view, step, rank=rank, ranks=ranks, ids=ids, say=_note), as_json)


@data_app.command("when")
def data_when(
    run: RunOrFolder,
    source: Annotated[str, typer.Option(help="The document's source.")],
    overrides: Overrides = None,
    doc: Annotated[str | None, typer.Option(help="Its id, or the xxh3:... that `data where` shows.")] = None,
    document: Annotated[
        str | None,
        typer.Option(
            metavar="N|PLACE|ID",
            help="Its number, as `data where` shows it; or its place, UNIT:ROW or its id, as for `data why`.",
        ),
    ] = None,
    row: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:N]",
            help="Its file and line (from 1) or row (from 0), as `data where` shows them; the file alone where that "
            "is one document.",
        ),
    ] = None,
    ids: Ids = False,
    as_json: AsJson = False,
) -> None:
    """Show the steps at which a document was or will be trained on, in every epoch, or why it is not."""
    from pipeline.data.provenance.document_to_steps import when
    from pipeline.data.provenance.run import open_view, print_result

    view = open_view(run, overrides or ())
    print_result(when(view, source, id=doc, document=document, row=row, ids=ids, say=_note), as_json)


@data_app.command("losses")
def data_losses(
    run: RunOrFolder,
    overrides: Overrides = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="source|epoch|step|file|COLUMN", help="Rows of the table; COLUMN is kept metadata of documents."
        ),
    ] = "source",
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only these steps, from 1, both ends included.")
    ] = None,
    every: Annotated[int | None, typer.Option(help="Steps per row, with --by step.", min=1)] = None,
    source: Annotated[str | None, typer.Option(help="Only this source.")] = None,
    doc: Annotated[str | None, typer.Option(help="One document by its id; needs --source.")] = None,
    document: Annotated[
        str | None,
        typer.Option(metavar="N|PLACE|ID", help="One document, named as for `data when`; needs --source."),
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="FILE[:N]", help="One document by its place; needs --source.")
    ] = None,
    highest: Annotated[int | None, typer.Option(help="List the N documents with the highest loss.", min=1)] = None,
    lowest: Annotated[int | None, typer.Option(help="List the N documents with the lowest loss.", min=1)] = None,
    gain: Annotated[
        bool, typer.Option("--gain", help="Show what the second epoch gained over the first, by source and document.")
    ] = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a row per sample to this Parquet file.")
    ] = None,
    documents: Annotated[bool, typer.Option("--documents", help="With --parquet: the documents of samples.")] = False,
    ids: Ids = False,
    as_json: AsJson = False,
) -> None:
    """Show the recorded losses of samples (train.metrics.windows): by source, step or file, of documents, gains.

    The loss of a document is an estimate from the samples that hold it.
    """
    from pipeline.data.provenance.losses import LossQuestion, answer_losses
    from pipeline.data.provenance.run import open_view, print_result

    question = LossQuestion(by, steps, every, source, doc, document, row, highest, lowest, gain, parquet, documents)
    print_result(answer_losses(open_view(run, overrides or ()), question, ids=ids, say=_note), as_json)


@data_app.command("why")
def data_why(
    run: RunOrFolder,
    source: Annotated[str, typer.Option(help="The document's source.")],
    document: Annotated[
        str,
        typer.Option(
            metavar="PLACE|ID",
            help="FILE:LINE, FILE: row N, the file alone where that is one document, UNIT:ROW as the report shows it, "
            "or the document's id.",
        ),
    ],
    overrides: Overrides = None,
    cluster: Annotated[bool, typer.Option("--cluster", help="List all documents removed for the same one.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Show the text, beside that of the kept document.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Measure again from the source files and compare.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Show why curation removed or kept a document: rule, value, bound, kept duplicate, edits.

    Exit code 1 if the source files give another value than the one that was stored.
    """
    from pipeline.config.load import load_run
    from pipeline.data.provenance.run import print_result
    from pipeline.data.provenance.why_removed import why

    config = load_run(run, overrides or (), of_data=True)
    found = why(config, source, document, cluster=cluster, text=text, verify=verify, say=_note)
    print_result(found, as_json)
    if not found.agrees:
        raise typer.Exit(EXIT_OTHER)


def _note(message: str) -> None:
    """Print what is about to take some time."""
    echo(message, error=True, flush=True)
