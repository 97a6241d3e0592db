"""`eval:`, `generate:` and `serve:`: what is measured on a checkpoint, how text is continued, and how on request."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from pipeline.config.base import (
    MAX_PROCESSES,
    MAX_SAMPLES,
    MAX_SEQUENCE,
    AbsPath,
    DataPath,
    KeyMark,
    Section,
    Text,
    parse_bytes,
)
from pipeline.config.layers.mixers import MAX_ROWS
from pipeline.config.parallel import ParallelConfig
from pipeline.config.parsing.task_files import files_of_folder, files_of_tasks


class TaskConfig(Section):
    """A built-in benchmark, on a file of this machine."""

    type: Literal["wikitext", "lambada"]
    """`wikitext`: perplexity per word of WikiText, as in lm-evaluation-harness's task of this name. `lambada`: accuracy
    and perplexity of the last word of a passage, as in the harness's `lambada_openai`; all tokens of the word have to
    be right, like Megatron-LM's `--strict-lambada`."""
    path: DataPath
    """`wikitext`: the corpus' own text file (articles begin with a line like ` = Title = `), or a JSON object per
    line with an article as `page` or `text`. `lambada`: a JSON object per line with a passage as `text`."""
    name: Text | None = Field(default=None, min_length=1)
    """Name of the results; by default the type."""
    stride: int | None = Field(default=None, ge=1)
    """`wikitext`: score windows that begin every `stride` tokens. In each window but the first of a text only the last
    `stride` tokens count. By default each token is in one window, as in the harness."""
    detokenize: bool = True
    """`wikitext`: undo the corpus' tokenization (` @,@ `, spaces before punctuation) before scoring. Words and bytes
    are those of the file in any case."""
    documents: bool = True
    """`wikitext`: score each article alone, as the harness does; words are separated by spaces and line ends. `false`:
    the file is one text, and each line end is a word too, as in published word-level figures."""

    @property
    def title(self) -> str:
        """Name of the results."""
        return self.name or self.type

    @model_validator(mode="after")
    def _has_only_its_keys(self) -> TaskConfig:
        given = {"stride": self.stride is not None, "detokenize": not self.detokenize, "documents": not self.documents}
        if self.type == "lambada" and any(given.values()):
            key = next(key for key, is_given in given.items() if is_given)
            raise ValueError(f"{key} is only for type: wikitext; remove it from a task of type: lambada")
        return self


class HarnessConfig(Section):
    """Tasks of lm-evaluation-harness, on the layout of the evaluation.

    It needs the extra: `pip install 'pretraining-pipeline[eval]'`.
    """

    tasks: Annotated[list[str], KeyMark("code", files_of_tasks)] = Field(min_length=1)
    """Names of tasks, groups or tags, or paths of task files."""
    num_fewshot: int | None = Field(default=None, ge=0, le=10_000)
    """Examples before each question; by default the task's number."""
    limit: int | None = Field(default=None, ge=1)
    """Score only the first N documents of each task, for trials; by default all."""
    include_path: Annotated[AbsPath | None, KeyMark("code", files_of_folder)] = None
    """Folder with task files that the harness does not have. `pipeline eval prefetch` writes the data that tasks need
    without network into its folder `prefetched`."""
    batch_size: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Requests of one forward pass on a process; by default `eval.batch_size`."""
    apply_chat_template: bool = False
    """Ask each question as a message of a user, by the model's chat template (`docs/after-pretraining.md`); an answer
    ends with its turn."""


class ContinuationsConfig(Section):
    """Fixed prompts that each evaluation continues; reports show the texts of the steps side by side.

    Several processes generate without a cache, and only with `temperature: 0`.
    """

    prompts: list[Text] = Field(min_length=1, max_length=100)
    """Texts to continue; an empty one begins a document."""
    max_tokens: int = Field(default=64, ge=1, le=4096)
    """Most new tokens of each text."""
    temperature: float = Field(default=0, ge=0, le=1000)
    """Divides the logits; 0 takes the most probable token each time (greedy)."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws: the same at every step."""


class EvalConfig(Section):
    """Measurements on a checkpoint."""

    split: Text = "heldout"
    """The split to evaluate, one of `data.splits`."""
    batch_size: int = Field(default=8, ge=1, le=MAX_SAMPLES)
    """Windows of one forward pass on a process."""
    samples: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Score a fixed sample of N windows, with each source in proportion; by default the whole split."""
    stride: int | None = Field(default=None, ge=1)
    """Begin a window every `stride` tokens. In each window but the first of a text only the last `stride` tokens count:
    every token counts once, with at least train.sequence_length - stride tokens before it. By default windows do not
    overlap."""
    documents: bool = False
    """Score each document alone: windows begin with it, and contain no other document. By default the split is one text
    of consecutive documents, as in training."""
    pseudo_tokens: int = Field(default=256, ge=0, le=MAX_SEQUENCE)
    """Encoders: number of tokens of each source for the pseudo-perplexity; each is masked alone and takes a window in
    the forward pass. 0: no pseudo-perplexity."""
    importance_samples: int = Field(default=1024, ge=1, le=MAX_SAMPLES)
    """Windows that `pipeline eval --importance` reads, the same ones each time, with each source in proportion."""
    max_length: int | None = Field(default=None, ge=1, le=MAX_SEQUENCE)
    """Longest input of a task, in tokens; by default train.sequence_length."""
    processes: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Processes of the evaluation, one per device. The command starts them on this machine, unless torchrun or another
    launcher did; a job places as many on each node as it has GPUs."""
    parallel: ParallelConfig | None = None
    """Layout over the processes of the evaluation; by default that of the training (`parallel`)."""
    tasks: list[TaskConfig] = Field(default_factory=list)
    """Built-in benchmarks, after the held-out loss."""
    harness: HarnessConfig | None = None
    """Tasks of lm-evaluation-harness, after `tasks`."""
    continuations: ContinuationsConfig | None = None
    """Texts that are generated in each evaluation and kept in its report; by default none."""
    every_checkpoint: bool = False
    """On SLURM: send an evaluation job for each permanent checkpoint (`train.checkpoint.keep_every`) while training
    continues."""
    weights: Literal["model", "ema"] = "model"
    """Weights for evaluation and generation: the trained ones, or their moving average (`train.ema`)."""

    @model_validator(mode="after")
    def _tasks_have_names(self) -> EvalConfig:
        twice = [name for name, count in Counter(task.title for task in self.tasks).items() if count > 1]
        if twice:
            raise ValueError(f"tasks: several have the name {twice[0]!r}; give each a different `name`")
        return self


class GenerateConfig(Section):
    """Continuation of a prompt, by `pipeline generate` and as the sample at the end of `pipeline run`."""

    prompt: Text = "def "
    """Text to continue."""
    max_tokens: int = Field(default=64, ge=1, le=MAX_SEQUENCE)
    """Most new tokens; generation ends earlier at the end of the document."""
    temperature: float = Field(default=0.8, ge=0, le=1000)
    """Divides the logits; 0 takes the most probable token each time (greedy)."""
    top_k: int | None = Field(default=None, ge=1, le=MAX_ROWS)
    """Draw from the k most probable tokens only."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw from the smallest set of tokens whose probability reaches this (nucleus)."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw only from tokens with at least this share of the largest probability."""
    repetition_penalty: float = Field(default=1, gt=0, le=1000)
    """Makes tokens that are already in the prompt or the new text less probable: their positive logits are divided by
    it, negative ones multiplied."""
    stop: list[Annotated[Text, Field(min_length=1)]] = Field(default_factory=list)
    """The text ends before the first of these."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draws."""


class ServeConfig(Section):
    """Server of a checkpoint of the run (`pipeline serve`); `docs/serving.md` has the interfaces."""

    host: Text = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. One that other machines reach needs an API key (`--api-key-file`, or `PIPELINE_API_KEY` in
    the environment)."""
    port: int = Field(default=5000, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which is printed."""
    slots: int = Field(default=16, ge=1, le=4096)
    """Texts that are generated together. Each holds a cache of up to `max_length` positions."""
    queue: int = Field(default=256, ge=1, le=2**16)
    """Texts that may wait for a slot; beyond it requests are refused with status 429."""
    max_length: int | None = Field(default=None, ge=2, le=MAX_SEQUENCE)
    """Most tokens of a text, prompt and new ones together; by default the longest sequence length that the run trains
    with."""
    max_body_bytes: Annotated[int, BeforeValidator(parse_bytes)] = Field(default=2**20, ge=1024, le=2**30)
    """Largest body of a request; a larger one is refused with status 413."""
    watch: bool = False
    """Load new checkpoints as they are committed. While one is loaded, memory holds two models."""
    log_prompts: bool = False
    """Write the prompts of requests into the log, too."""
