"""The commands that generate text: `pipeline generate` and `pipeline serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.arguments import Overrides, RunOrFolder, Step, WeightsFolder
from pipeline.cli.mirrors import fetched, refuse_mirror
from pipeline.common.console import Console
from pipeline.common.errors import UserError

if TYPE_CHECKING:
    from pipeline.train.checkpoint.exported import WeightsOf

ChatTemplateFile = Annotated[
    Path | None,
    typer.Option(
        "--chat-template", metavar="FILE", help="Chat template (Jinja) in place of the model's own.", show_default=False
    ),
]


def generate(
    run: RunOrFolder,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue; may be repeated. Default: generate.prompt."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="One prompt per line; in a .jsonl file a JSON string, or an object with `prompt`."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of new tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divide the logits by this; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the smallest set with this total probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Sample from tokens with at least this fraction of the top probability.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Penalty on tokens that were used; above 1 repeats less.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token each time.")] = False,
    seed: Annotated[int | None, typer.Option(help="Random seed, the same for each prompt.")] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities, and those of the N most likely tokens.", min=0, metavar="N"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt, with the tokens.")] = False,
    experts: Annotated[
        bool, typer.Option("--experts", help="Show which experts each token was routed to, by layer, and their shares.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a message of a user, which the model answers.")
    ] = False,
    chat_template: ChatTemplateFile = None,
    step: Step = None,
    weights: WeightsFolder = None,
) -> None:
    """Generate text from prompts, in batches. Options override the keys of `generate:`."""
    options = {
        "prompt": prompt[0] if prompt else None,
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "seed": seed,
    }
    given = {f"generate.{name}": value for name, value in options.items() if value is not None}
    which = chosen_weights(step, weights)
    run = fetched(run, step)
    from pipeline.config.load import load_run

    config = load_run(run, overrides or (), given)
    if logprobs is not None and not as_json:
        raise UserError("--logprobs shows nothing without --json; add --json")
    if chat_template is not None and not chat:
        raise UserError("--chat-template is for conversations; add --chat")
    if chat and experts:
        raise UserError("use either --chat or --experts")
    if len(prompt or ()) < 2 and prompts is None and not as_json and not experts:
        from pipeline.eval.text import continue_prompt

        continue_prompt(config, which, chat=chat, chat_template=chat_template)
        return
    from pipeline.eval.text import continue_prompts, read_prompts

    texts = [*(prompt or ()), *(read_prompts(prompts) if prompts else ())] or [config.generate.prompt]
    continue_prompts(
        config,
        texts,
        which,
        as_json=as_json,
        logprobs=logprobs,
        experts=experts,
        chat=chat,
        chat_template=chat_template,
    )


def serve(
    run: RunOrFolder,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; default: serve.host.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. Default: serve.port.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Load new checkpoints as they are committed.")] = False,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the keys of which requests must send one, read again when it changes; default: "
            "PIPELINE_API_KEY, or else a key made for this start."
        ),
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Ask for no key: all users of this machine can use the server.")
    ] = False,
    socket: Annotated[
        Path | None, typer.Option(help="Unix socket (mode 600) to listen on instead of a port; needs no key.")
    ] = None,
    ssl_certificate: Annotated[Path | None, typer.Option(help="Certificate for TLS, a PEM file.")] = None,
    ssl_key: Annotated[Path | None, typer.Option(help="Private key of the certificate, a PEM file.")] = None,
    chat_template: ChatTemplateFile = None,
    step: Step = None,
    weights: WeightsFolder = None,
) -> None:
    """Serve a model over HTTP: a web page, OpenAI's completions and chat APIs, Megatron-LM's /api."""
    options = {"host": host, "port": port, "watch": watch or None}
    given = {f"serve.{name}": value for name, value in options.items() if value is not None}
    if watch:
        refuse_mirror(run, "--watch")
    run = fetched(run, step)
    which = chosen_weights(step, weights)
    if socket is not None and (host is not None or port is not None):
        raise UserError("use either --socket, or --host and --port")
    from pipeline.config.load import load_run

    config = load_run(run, overrides or (), given)
    from pipeline.eval.server.serve import Access
    from pipeline.eval.server.serve import serve as start

    access = Access(api_key_file, no_key=no_key, socket=socket, certificate=ssl_certificate, ssl_key=ssl_key)
    start(config, which, access, Console(), chat_template)


def chosen_weights(step: int | None, weights: Path | None) -> WeightsOf:
    """The weights that a command reads."""
    if weights is None:
        return step
    from pipeline.train.checkpoint.exported import choose_weights

    return choose_weights(step, weights)
