"""A trained model as a torch module.

Shapes: B rows, S positions, T positions of a decoder beside an encoder, V vocabulary.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast, get_args, overload

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from pipeline.api.run import Run, WhichStep, checkpoint_step
from pipeline.api.settings import invalid
from pipeline.api.sharded import gathered_logits, load_sharded
from pipeline.common.errors import UserError
from pipeline.common.format import counted
from pipeline.common.paths import StrPath
from pipeline.common.run_files import EXPORT_ORIGIN, RunFiles
from pipeline.config import Config
from pipeline.config.eval import GenerateConfig
from pipeline.config.model import ModelConfig
from pipeline.data.tokenization.tokenizer import TOKENIZER_FILE, Tokenizer
from pipeline.eval.encoders import refuse_encoder
from pipeline.eval.generation.generate import Continuation
from pipeline.eval.generation.generate import generate as continue_texts
from pipeline.eval.generation.sampling import Sampling
from pipeline.eval.inference import plain_decoder, start_token
from pipeline.eval.text import SLOTS, sampling_of
from pipeline.train.checkpoint.committed import COMMIT, step_of
from pipeline.train.checkpoint.exported import HF_CONFIG, Weights
from pipeline.train.checkpoint.manager import Checkpoints
from pipeline.train.checkpoint.tensors import Stored
from pipeline.train.checkpoint.weight_source import open_weights
from pipeline.train.distributed.process_group import visible_gpus
from pipeline.train.huggingface.folder import HuggingFaceFolder
from pipeline.train.model.context import Context
from pipeline.train.model.decoder import Decoder
from pipeline.train.model.decoder_spec import decoder_spec
from pipeline.train.parallel.mesh import Mesh
from pipeline.train.parallel.parallelize import COMPUTE_DTYPE
from pipeline.train.start.setup import ALONE, choose_device, set_arithmetic

Prompt = str | Sequence[int]
"""A text, or the ids of its tokens."""


class SamplingOptions(TypedDict, total=False):
    """Settings of `Model.generate`, as the keys of `generate:` in a run file."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: str | Sequence[str]
    seed: int
    logprobs: int | None


@dataclass(frozen=True)
class ModelOrigin:
    """Place that a model was loaded from."""

    path: Path
    """Checkpoint or folder."""
    step: int | None
    """Steps trained; None for weights in a folder."""
    run: Run | None
    """Its run; None for weights in a folder."""


class Model(nn.Module):
    """A model whose call gives logits; `load_model` makes it, in evaluation mode.

    An ordinary torch module: `parameters()`, `state_dict()`, `to()` and autograd work as usual. Dropout and the losses
    that balance experts are those of `pipeline train` alone: here nothing is dropped, in training mode either.

    Attributes:
        decoder: The module inside, which has the weights under the names of checkpoints.
        config: The `model:` section; its attributes are the keys of `docs/config.md`.
        tokenizer: `encode(text)`, `decode(ids)`, `vocab_size`, `end_of_document` (an id); None where an export has
            none.
        vocab_size: Columns of the logits.
        positions: The longest context of its training, in tokens.
        origin: Place that it was loaded from: `path`, `step`, `run`.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        positions: int,
        origin: ModelOrigin,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self.config = config
        self.tokenizer = tokenizer
        self.vocab_size = decoder.spec.vocab_size
        self.positions = positions
        self.origin = origin
        self._mesh = mesh
        self.train(decoder.training)

    def forward(
        self,
        ids: Tensor,
        decoder_ids: Tensor | None = None,
        *,
        bounds: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """Logits of what follows each position; of an encoder, of what stands at each position.

        Args:
            ids: [B, S], int64 ids on the device of the model. Of an encoder-decoder they are the encoder's.
            decoder_ids: [B, T], int64, of an encoder-decoder alone: input of the decoder, which begins with its start
                token.
            bounds: [B, S], or [B, S + T] with a decoder: for each position the one at which its document begins in the
                row, to which attention and positions are then limited; `RunBatch.bounds`. By default each row is one
                document. Rows of different lengths are filled up at their ends with a document of their own.
            prefix: [B, S]: for each position the one behind the prefix of its document; `RunBatch.prefix`.

        Returns:
            [B, S, V], or [B, T, V] with a decoder, in the type of the weights. A model over several processes gives
            all columns on each of them.

        Raises:
            UserError: Shapes or ids that do not fit the model.
        """
        encoder = self._checked(ids, decoder_ids, bounds, prefix)
        everything = ids if decoder_ids is None else torch.cat([ids, decoder_ids], dim=1)
        context = Context(bounds_BS=bounds, prefix_BS=prefix, length=everything.shape[1], encoder=encoder)
        logits = cast(Tensor, self.decoder(everything, context))
        if self._mesh is not None:
            logits = gathered_logits(logits, self._mesh)
        return logits[..., : self.vocab_size]

    @overload  # a text is a sequence of texts, too
    def generate(  # type: ignore[overload-overlap]
        self, prompts: str, **sampling: Unpack[SamplingOptions]
    ) -> Continuation: ...
    @overload
    def generate(self, prompts: Sequence[Prompt], **sampling: Unpack[SamplingOptions]) -> list[Continuation]: ...
    def generate(
        self, prompts: str | Sequence[Prompt], **sampling: Unpack[SamplingOptions]
    ) -> Continuation | list[Continuation]:
        """Continue a text, or several together; equal to `pipeline generate` with the same settings and seed.

        Args:
            prompts: A text; or a list of texts, or of lists of ids.
            sampling: Keys of `generate:` in a run file: `max_tokens`, `temperature` (0 takes the most probable token),
                `top_k`, `top_p`, `min_p`, `repetition_penalty`, `stop` and `seed`; by default those of the run. And
                `logprobs`: log-probabilities of each token and of as many most probable ones.

        Returns:
            Of a text, and in a list of each: `text`, `tokens` (each with `id`, `text`, `logprob` and `top`) and
            `finish` (`stop` or `length`).

        Raises:
            UserError: A setting that means nothing, a prompt without room for a new token, an encoder, a model over
                several processes, or one without a tokenizer.
        """
        refuse_encoder(self.config, "generate")
        if self._mesh is not None:
            raise UserError("generate: the model is cut over several processes; load it in one process to generate")
        if self.tokenizer is None:
            raise UserError(f"generate: {self.origin.path} has no {TOKENIZER_FILE}; put that of the model there")
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        if any(isinstance(each, int) or getattr(each, "ndim", 1) == 0 for each in several):
            raise UserError("generate: the prompts are numbers; give a list of lists of ids, [[1, 2, 3]]")
        run = self.origin.run
        slots = 1 if len(several) == 1 else SLOTS
        settings = _sampling(GenerateConfig() if run is None else run.config.generate, dict(sampling))
        with as_the_command():
            if run is not None:
                set_arithmetic(run.config, ALONE, self.device)
            # As the command: cuDNN's attention would make a plan for every number of keys.
            torch.backends.cuda.enable_cudnn_sdp(False)
            found = continue_texts(self.decoder, self.tokenizer, several, settings, slots=slots)
        return found[0] if isinstance(prompts, str) else found

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def extra_repr(self) -> str:
        """Line of `repr` that says where it comes from."""
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{self.origin.path}, {count:,} parameters, vocabulary of {self.vocab_size:,}"

    def _checked(self, ids: Tensor, decoder_ids: Tensor | None, bounds: Tensor | None, prefix: Tensor | None) -> int:
        """Positions of the encoder; 0 without one."""
        for name, each in (("ids", ids), ("decoder_ids", decoder_ids)):
            if each is None and name == "decoder_ids":
                continue
            if not isinstance(each, Tensor):
                raise UserError(
                    f"{name}: {type(each).__name__}, but must be a tensor [rows, positions] of torch.int64; for one "
                    "text: torch.tensor([tokenizer.encode(text)])"
                )
            if each.ndim != 2 or not each.numel() or each.dtype not in (torch.int64, torch.int32):
                raise UserError(
                    f"{name} has shape {list(each.shape)} and type {each.dtype}, but must be [rows, positions] of "
                    "torch.int64, at least one of each; for one text: torch.tensor([tokenizer.encode(text)])"
                )
            if each.device.type == "cpu" and not 0 <= int(each.min()) <= int(each.max()) < self.vocab_size:
                raise UserError(
                    f"{name} has ids from {int(each.min())} to {int(each.max())}, but the vocabulary of the model has "
                    f"0 to {self.vocab_size - 1}; was the text encoded with the model's tokenizer?"
                )
        sided = self.decoder.spec.sided
        if sided and decoder_ids is None:
            raise UserError(
                "the model is an encoder-decoder: give the ids of the decoder as well, model(ids, decoder_ids), which "
                "begin with its start token"
            )
        if not sided and decoder_ids is not None:
            raise UserError("decoder_ids: the model has no encoder; give all ids as `ids`")
        rows, positions = ids.shape
        if decoder_ids is not None:
            if len(decoder_ids) != rows:
                raise UserError(f"decoder_ids has {len(decoder_ids)} rows, but ids has {rows}; give as many")
            positions += decoder_ids.shape[1]
        for name, each in (("bounds", bounds), ("prefix", prefix)):
            if each is None:
                continue
            if not isinstance(each, Tensor) or each.dtype not in (torch.int64, torch.int32):
                raise UserError(f"{name} must be a tensor of torch.int64, as `RunBatch.{name}` is")
            if each.shape != (rows, positions):
                raise UserError(f"{name} has shape {list(each.shape)}, but must be {[rows, positions]} as the ids")
        if bounds is not None and bounds.device.type == "cpu" and not _are_bounds(bounds.long()):
            raise UserError(
                "bounds must have, for each position, the one at which its document begins in the row, such as "
                "[0, 0, 0, 3, 3] for documents of 3 and 2 tokens; `RunBatch.bounds` has them"
            )
        if prefix is not None and bounds is None:
            raise UserError("prefix: give bounds as well, as `RunBatch` has both")
        return ids.shape[1] if sided else 0


def load_model(
    path: StrPath | Run,
    step: WhichStep = None,
    *,
    weights: Weights | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    parallel: Mapping[str, int] | None = None,
) -> Model:
    """Load a model as a torch module, in evaluation mode. Every file of weights is verified against its hash.

    In a process of an initialized `torch.distributed` group of several processes all of them call this, and the model
    of a run is cut over them.

    Args:
        path: A run folder or run file, a checkpoint's folder, a folder of `pipeline checkpoint export` or `average`, or
            a model in Hugging Face's format (`pipeline convert to-hf`, or a download of a supported family).
        step: Of a run: steps of the checkpoint, `"best"` (the lowest validation loss), or `"latest"` (the default).
        weights: `model` for those that were trained, `ema` for their moving average; by default `eval.weights` of the
            run.
        device: By default a GPU if there is one and the run's `launch.device` is not `cpu`.
        dtype: Of the weights; by default what a run computes in (`train.precision.compute`), and of a folder the type
            in its files. `torch.float32` to train them on.
        parallel: Of several processes, degrees by axis as in `parallel:` of a run file, such as `{"tp": 2}`: `tp`,
            `dp_shard` and `dp_replicate`; by default `eval.parallel` of the run, or `parallel`.

    Raises:
        UserError: There is no such checkpoint, it is damaged, the model is of a family that is not computed here, or a
            layout that is not possible.
    """
    if weights not in (None, *get_args(Weights)):
        raise UserError(f"weights={weights!r}: give {' or '.join(map(repr, get_args(Weights)))}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"dtype={dtype!r}: give a floating-point type of torch, such as torch.float32")
    place = None if device is None else _device(device)
    run, folder, step = _where(path, step)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if run is None:
            raise UserError(
                f"{folder}: over several processes the checkpoints of a run alone are loaded; name a run, or load the "
                "folder in one process"
            )
        if device is not None or dtype is not None:
            raise UserError("over several processes the run decides on device and dtype; leave both out")
        wanted = run.config if weights is None else _with_weights(run.config, weights)
        found = load_sharded(wanted, checkpoint_step(run, step), parallel)
        origin = ModelOrigin(found.source.path, found.source.step, run)
        positions = run.config.max_positions
        return Model(found.model.whole, run.config.model, found.tokenizer, positions, origin, found.setup.mesh)
    if parallel is not None:
        raise UserError("parallel: there is one process; call torch.distributed.init_process_group in several first")
    if run is None:
        return _from_folder(folder, weights or "model", place, dtype)
    config = run.config
    checkpoint = Checkpoints.of_run(run.path).find(checkpoint_step(run, step))
    source = open_weights(run.path, checkpoint.step, weights or config.eval.weights)
    vocabulary = source.model.vocab_size or source.tokenizer.vocab_size
    spec = decoder_spec(source.model, vocabulary, source.model.max_positions or source.positions)
    compute = COMPUTE_DTYPE[config.train.precision.compute]
    decoder = plain_decoder(spec, source.read(source.tensors), dtype or compute, trained=True)
    if decoder.spec.sided:
        decoder.start_token = start_token(config, source.tokenizer)
    decoder.to(place or choose_device(config.launch.device, ALONE))
    return Model(
        decoder,
        source.model,
        source.tokenizer,
        source.positions,
        ModelOrigin(checkpoint.path, checkpoint.step, run),
    )


def generate(
    model: Model | StrPath | Run,
    prompts: str | Sequence[Prompt],
    step: WhichStep = None,
    **sampling: Unpack[SamplingOptions],
) -> Continuation | list[Continuation]:
    """Continue texts with a model, or with one that is loaded for this; see `Model.generate` and `load_model`.

    Raises:
        UserError: As these.
    """
    loaded = model if isinstance(model, Model) else load_model(model, step)
    return loaded.generate(prompts, **sampling)


@contextmanager
def as_the_command() -> Iterator[None]:
    """Inside, torch may be set as in a command, so that figures are equal; afterwards it is set as before.

    The process group that the command's code makes in a process alone is gone afterwards, too, with what it leaves in
    the environment and in `sys.excepthook`.
    """
    from pipeline.train.distributed import process_group

    began = dist.is_initialized()
    environment, excepthook = dict(os.environ), sys.excepthook
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    threads, products = torch.get_num_threads(), torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        with torch.inference_mode(False):  # FSDP counts versions of tensors
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(products)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        if not began:
            process_group.destroy()
            for name in os.environ.keys() - environment.keys():
                del os.environ[name]
            os.environ.update(environment)
            sys.excepthook = excepthook


def _where(path: StrPath | Run, step: WhichStep) -> tuple[Run | None, Path, WhichStep]:
    """The run of a path, None for weights in a folder; the folder; and the step that is asked for."""
    if isinstance(path, Run):
        return path, path.path, step
    folder = Path(os.path.abspath(path))
    number = step_of(folder.name)
    if (folder / COMMIT).is_file() and number is not None and RunFiles(folder.parent.parent).config.is_file():
        if step is not None:
            raise UserError(f"{folder} is a checkpoint, and step={step!r} names one of a run; leave one of them out")
        return Run(folder.parent.parent), folder.parent.parent, number
    if not (folder / EXPORT_ORIGIN).is_file() and not (folder / HF_CONFIG).is_file():
        if not folder.exists() and folder.suffix not in (".yaml", ".yml"):
            raise UserError(
                f"{folder} does not exist; name a run, a checkpoint of it, an export, or the folder of a model in "
                "Hugging Face's format"
            )
        return Run(path), folder, step
    if step is not None:
        raise UserError(f"{folder} has the weights of one model; step={step!r} is for the checkpoints of a run")
    return None, folder, None


def _from_folder(folder: Path, weights: Weights, device: torch.device | None, dtype: torch.dtype | None) -> Model:
    """A model of an export, or in Hugging Face's format."""
    if (folder / EXPORT_ORIGIN).is_file():
        source = open_weights(folder, None, weights)
        model, tensors, read = source.model, source.tensors, source.read
        tokenizer: Tokenizer | None = source.tokenizer
        positions, start = source.positions, source.start_token
    else:
        if weights != "model":
            raise UserError(f"weights={weights!r}: {folder} has the weights of one model; leave it out")
        found = HuggingFaceFolder(folder)
        model, tensors, read = found.model, found.tensors, found.read
        tokenizer = found.tokenizer() if (folder / TOKENIZER_FILE).is_file() else None
        positions, start = found.positions, found.start_token
    vocabulary = model.vocab_size or (tokenizer.vocab_size if tokenizer else 0)
    spec = decoder_spec(model, vocabulary, model.max_positions or positions)
    decoder = plain_decoder(spec, read(tensors), dtype or _main_dtype(tensors), trained=True)
    decoder.start_token = start
    decoder.to(device or choose_device("auto", ALONE))
    return Model(decoder, model, tokenizer, positions, ModelOrigin(folder, None, None))


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"device={device!r} is not a device of torch; give 'cpu', 'cuda' or 'cuda:1'") from None
    if found.type == "cuda" and (found.index or 0) >= (gpus := visible_gpus()):
        raise UserError(f"device={device!r}: torch sees {counted(gpus, 'GPU')} here; give another one, or 'cpu'")
    return found


def _are_bounds(bounds: Tensor) -> bool:
    """True if each position [B, S] has a begin that is one, not behind it, nor before that of the last position."""
    columns = torch.arange(bounds.shape[1])
    if not bool(((bounds >= 0) & (bounds <= columns)).all()):
        return False
    return bool((bounds.gather(1, bounds) == bounds).all()) and bool((bounds.diff(dim=1) >= 0).all())


def _sampling(config: GenerateConfig, options: dict[str, Any]) -> Sampling:
    """Sampling by the `generate:` section and what was given in place of its keys."""
    if unknown := sorted(options.keys() - SamplingOptions.__annotations__.keys()):
        known = ", ".join(SamplingOptions.__annotations__)
        raise UserError(f"generate has no setting {unknown[0]!r}; settings: {known}")
    logprobs = options.pop("logprobs", None)
    if logprobs is not None and (isinstance(logprobs, bool) or not isinstance(logprobs, int)):
        raise UserError(f"generate.logprobs: {logprobs!r} is not a number of tokens")
    if isinstance(stop := options.get("stop"), str):
        options["stop"] = [stop]
    try:
        return sampling_of(GenerateConfig.model_validate(config.model_dump() | options), logprobs)
    except ValidationError as error:
        raise invalid("generate", error) from None


def _main_dtype(tensors: Mapping[str, Stored]) -> torch.dtype:
    """The type that most of the weights have."""
    counts: dict[torch.dtype, int] = {}
    for each in tensors.values():
        counts[each.dtype] = counts.get(each.dtype, 0) + each.numel
    return max(counts, key=lambda dtype: counts[dtype])


def _with_weights(config: Config, weights: Weights) -> Config:
    return config.model_copy(update={"eval": config.eval.model_copy(update={"weights": weights})})
