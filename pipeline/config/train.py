"""`train:`: steps, batches, optimizer, schedule, precision, validation, checkpoints, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from pipeline.config.base import (
    MAX_PROCESSES,
    MAX_SAMPLES,
    MAX_SEQUENCE,
    Count,
    DataPath,
    Duration,
    Section,
    StepsOrTokens,
    Text,
)
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.layers.mixers import MAX_LAYERS
from pipeline.config.objective import MixedObjectiveConfig
from pipeline.config.trackers import LoggerConfig, MlflowConfig, TrackioConfig, WandbConfig
from pipeline.config.weights import DistillConfig, InitFromConfig, PreferenceConfig


class MuonConfig(Section):
    """Muon (Jordan et al. 2024): the momentum of each matrix is orthogonalized before the update."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the momentum."""
    nesterov: bool = True
    """Look ahead by one step of momentum."""
    steps: int = Field(default=5, ge=1, le=20)
    """Newton-Schulz iterations, in bf16: 5 take most singular values to between 0.7 and 1.2."""
    adjust_lr: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Scale of the learning rate by the shape of a matrix. `match_rms_adamw`: updates are as large as AdamW's, so that
    its learning rate and weight decay can be used (Liu et al. 2025). `original`: the root of rows over columns."""


class ParameterGroupConfig(Section):
    """Parameters with a learning rate or weight decay of their own."""

    match: Annotated[Text, Field(min_length=1)] | Annotated[list[Text], Field(min_length=1)]
    """Names of parameters as in checkpoints, or patterns with `*`, `?` and `[...]`: `embedding.weight`, `*norm.weight`,
    `layers.*.mixer.w[qk].*`. `*` stands for dots, too."""
    lr_scale: float = Field(default=1.0, ge=0)
    """Factor on the learning rate, on top of that of muP; with 0 the parameters do not change."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of these parameters, vectors as well. By default matrices have train.optimizer.weight_decay, and
    vectors none."""

    @property
    def patterns(self) -> list[str]:
        """`match` as a list."""
        return [self.match] if isinstance(self.match, str) else self.match


class OptimizerConfig(Section):
    """AdamW or Muon with decoupled weight decay on matrices only (embedding included; norms and biases are spared)."""

    type: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of layers, AdamW for embedding, head, norms and biases. Both use the same weight
    decay, clipping and learning rate."""
    states: Literal["fp32", "bf16"] = "fp32"
    """Format of the moments. bf16 halves their memory; the arithmetic stays fp32, with stochastic rounding of the
    results, so that small changes are not lost."""
    muon: MuonConfig = MuonConfig()
    """type: muon."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW: decay of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices."""
    groups: list[ParameterGroupConfig] = Field(default_factory=list)
    """Parameters with a learning rate or weight decay of their own. A parameter belongs to the first group that matches
    its name."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled so that their global L2 norm is at most this. null: they are not scaled; the norm is still
    logged, and updates whose norm is not finite are withheld."""

    @model_validator(mode="after")
    def _betas(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}")
        return self


class ScheduleConfig(Section):
    """Learning rate over the run: warm-up from zero, then one of four shapes down to min_ratio * lr."""

    type: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """`wsd`: constant after the warm-up, then a linear decay over the last `decay`."""
    warmup: StepsOrTokens = Duration(count=0, unit="steps")
    """Linear warm-up, in steps or tokens."""
    decay: StepsOrTokens | None = None
    """wsd: length of the final decay, in steps or tokens."""
    min_ratio: float = Field(default=0.1, ge=0, le=1)
    """The learning rate at the end, relative to the peak."""

    @model_validator(mode="after")
    def _decay(self) -> ScheduleConfig:
        if (self.type == "wsd") != (self.decay is not None):
            raise ValueError("schedule.decay is needed with type: wsd and not allowed otherwise")
        return self


_CHUNK_LOGITS, _CHUNK_TOKENS, _CHUNK_STEP = 2**27, 1024, 256
"""Logits of a chunk, its fewest tokens, and what their number is a multiple of, where the run file does not say."""
_MTP_WEIGHT = 0.3


class LossConfig(Section):
    """Terms and masks of the training loss."""

    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the mean squared log-partition function (PaLM)."""
    chunk_tokens: int | None = Field(default=None, ge=1)
    """Compute logits and loss for N tokens of a micro-batch at once, so that the logits never exist whole; with large
    vocabularies they need most of the memory. The loss is the same. By default N gives 128 million logits per process,
    and is at least 1,024."""
    mask_document_start: bool = False
    """Do not train on the first token of a document, which has no context in its document."""
    mtp: float | None = Field(default=None, ge=0)
    """Weight of the loss of multi-token prediction, the mean over the depths of `model.mtp`; by default 0.3
    (DeepSeek-V3). Only targets in the same document as the predicting position count. `loss` in the metrics excludes
    it."""

    @property
    def mtp_weight(self) -> float:
        """`mtp` with its default."""
        return _MTP_WEIGHT if self.mtp is None else self.mtp

    def tokens_at_once(self, columns: int) -> int:
        """Tokens whose logits exist at once on a process that has `columns` of the vocabulary."""
        return self.chunk_tokens or max(_CHUNK_TOKENS, _CHUNK_LOGITS // columns // _CHUNK_STEP * _CHUNK_STEP)


class BalanceConfig(Section):
    """Load balance of experts: keeps a router from sending all tokens to a few. It does not depend on the layout."""

    loss: float = Field(default=0.01, ge=0)
    """Coefficient of the balance loss, which is 1 per layer for equal loads and summed over layers. DeepSeek-V3, which
    balances mostly by the bias: 0.0001."""
    over: Literal["sequence", "batch"] = "sequence"
    """The balance loss multiplies an expert's mean score by its load: that in the same window (`sequence`), or that in
    the whole batch of the step before (`batch`)."""
    z_loss: float = Field(default=0.0, ge=0)
    """Coefficient of the mean square of the log-partition function of the router's logits (ST-MoE: 0.001)."""
    bias_rate: float = Field(default=0.001, ge=0)
    """Change of model.experts.score_bias in a step: up for experts with less than their share, down for the others."""
    force: bool = False
    """Send tokens to experts in turn, ignoring the router. Only for measurements of speed: such a model learns nothing
    useful."""


class BatchRampConfig(Section):
    """A batch size that grows to train.batch_size in equal steps over a number of tokens."""

    start: int = Field(ge=1, le=MAX_SAMPLES)
    """Batch size of the first step."""
    increment: int = Field(ge=1, le=MAX_SAMPLES)
    """Size of each rise."""
    tokens: Count = Field(ge=1)
    """Target tokens after which the batch size is train.batch_size."""


class LossScaleConfig(Section):
    """Factor on the loss that keeps fp16 gradients from vanishing. It halves at each overflow."""

    initial: float = Field(default=65536.0, ge=1)
    """Factor of the first step."""
    growth_steps: int = Field(default=1000, ge=1)
    """It doubles after N steps without an overflow."""


Fp8Recipe = Literal["tensorwise", "rowwise", "delayed", "current", "mxfp8"]
_FP8_RECIPES: dict[str, tuple[Fp8Recipe, ...]] = {
    "torchao": ("tensorwise", "rowwise"),
    "te": ("current", "delayed", "mxfp8"),
}
"""By backend, the default first."""


class Fp8Config(Section):
    """Matrix products of layers in 8-bit floating point, in training and its validations.

    Weights keep their formats, so checkpoints and exports do not change, and the eval stage computes in the compute
    format.
    """

    backend: Literal["torchao", "te"] = "torchao"
    """`torchao` (extra `fp8`), or NVIDIA's Transformer Engine (extra `te`)."""
    recipe: Fp8Recipe | None = None
    """Recipe of scaling. torchao: `tensorwise` (default; one scale per matrix), or `rowwise` (one per row: finer, for
    more work). te: `current` (default; one per matrix), `delayed` (one per matrix, from earlier steps; reset when a run
    is resumed), or `mxfp8` (one per 32 numbers; Blackwell)."""
    all_gather: bool | None = None
    """torchao, tensorwise: processes that share weights (dp_shard, cp) send them in fp8. By default true if the rows of
    all matrices can be divided evenly among them."""
    min_size: int = Field(default=1024, ge=16)
    """Matrices with fewer rows or columns than this on one process stay in the compute format: fp8 is slower there. So
    do those whose rows or columns are not a multiple of 16 (mxfp8: 32)."""
    first_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of layers at the beginning that stay in the compute format."""
    last_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of layers at the end that stay in it."""
    emulate: bool = False
    """torchao: round to fp8 and multiply in the compute format, for tests on devices without fp8."""

    @property
    def scaling(self) -> Fp8Recipe:
        """`recipe`, or the backend's own."""
        return self.recipe or _FP8_RECIPES[self.backend][0]

    @property
    def multiple(self) -> int:
        """Divisor of both sides of a product's factors."""
        return 32 if self.scaling == "mxfp8" else 16

    @model_validator(mode="after")
    def _together(self) -> Fp8Config:
        allowed = _FP8_RECIPES[self.backend]
        if self.scaling not in allowed:
            other = next(name for name, recipes in _FP8_RECIPES.items() if self.scaling in recipes)
            raise ValueError(
                f"recipe: {self.scaling} does not work with backend: {self.backend}; set recipe to "
                f"{' or '.join(allowed)}, or backend: {other}"
            )
        if self.all_gather and self.scaling != "tensorwise":
            raise ValueError(
                f"all_gather: true does not work with recipe: {self.scaling}, only with tensorwise (torchao); remove "
                "it, or set backend: torchao and recipe: tensorwise"
            )
        if self.emulate and self.backend == "te":
            raise ValueError("emulate: true does not work with backend: te; set backend: torchao, or emulate: false")
        return self


class PrecisionConfig(Section):
    """Number formats. Master weights and the reduction of gradients are always fp32."""

    compute: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Parameters and activations in forward and backward. With fp16 the loss is scaled dynamically."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """fp16: the factor on the loss."""
    fp8: Fp8Config | None = None
    """With compute: bf16, matrix products in fp8."""

    @model_validator(mode="after")
    def _fp8_in_bf16(self) -> PrecisionConfig:
        if self.fp8 is not None and self.compute != "bf16":
            raise ValueError(f"fp8 needs compute: bf16, not {self.compute}; set compute: bf16, or remove fp8")
        return self


class AttentionConfig(Section):
    """Kernels of attention. All compute the same, within rounding."""

    backend: Literal["auto", "sdpa", "flex", "varlen", "flash", "te"] = "auto"
    """`auto` depends on the device, the installed packages and the model: `sdpa` on a CPU, in fp32, and without
    documents and windows; else the first possible of `flash`, `varlen`, `flex`. `--verbose` and the logs of jobs show
    the choice and the reason. `sdpa`: torch's, anywhere; on a GPU with documents or windows it needs a mask of sequence
    x sequence. `flex`, `varlen`: torch's without such a mask, on a GPU from compute capability 8.0. `flash`: the
    package flash-attn (extra `flash`), version 2, 3 or 4. `te`: Transformer Engine (extra `te`), with train.compile:
    false and without recompute.mode: selective. `varlen`, `flash` and `te` compute in bf16 or fp16, with head sizes
    that are multiples of 8 up to 256. docs/performance.md lists the features of attention that each supports,
    docs/gpu-results.md those that ran on a GPU."""


class RecurrenceConfig(Section):
    """Kernels of layers with a recurrence: Mamba-2, the gated delta rule, Kimi delta attention."""

    backend: Literal["auto", "plain", "fla"] = "auto"
    """`plain`: PyTorch alone, anywhere. `fla`: the package fla-core (extra `linear`), on a GPU, in bf16 or fp16,
    without train.deterministic; it has never been run here. `auto`: `fla` if possible; `--verbose` and the logs of jobs
    show the choice and the reason."""


class RecomputeConfig(Section):
    """Activations that backward computes again instead of keeping them: less memory for more arithmetic."""

    mode: Literal["none", "full", "selective", "budget"] = "none"
    """`full`: only the input of a layer is kept. `selective`: cheap operations are computed again, results of `keep`
    are kept. `budget`: the compiler chooses, within `budget`."""
    every: int = Field(default=1, ge=1)
    """full, selective: one of every N layers is computed again, the others keep everything."""
    keep: list[Literal["attention", "matmul", "communication"]] = Field(
        default=["attention", "matmul", "communication"]
    )
    """selective: operations whose results are kept."""
    budget: float = Field(default=0.5, ge=0, le=1)
    """budget: share of the memory of `mode: none`; 0 is `full` and 1 is `none`. Needs train.compile."""
    offload: bool = False
    """full, on a GPU: move the kept inputs of layers to the memory of the host, and back when they are needed."""


class ValidationConfig(Section):
    """Loss on a fixed sample of a held-out split while training."""

    split: Text = "heldout"
    """The split, one of `data.splits`."""
    every_steps: int = Field(default=500, ge=1)
    """Validate every N steps, and at the end."""
    samples: int = Field(default=64, ge=0, le=MAX_SAMPLES)
    """Windows of the split, the same ones each time; 0 turns validation off."""


class FaultsConfig(Section):
    """Handling of steps that are not finite, and of spikes of the loss or the gradient norm."""

    on_nonfinite: Literal["stop", "skip", "rewind"] = "skip"
    """A loss or gradient that is not finite never reaches the weights. `stop` ends the run at once, `skip` continues
    with the next step, `rewind` goes back to a checkpoint and skips the steps around the fault."""
    on_spike: Literal["ignore", "skip", "rewind"] = "ignore"
    """Treatment of a step whose loss or gradient norm is far above those of earlier steps. `ignore` detects none,
    `skip` withholds its update, `rewind` goes back to a checkpoint as above."""
    spike_window: int = Field(default=128, ge=8, le=2**20)
    """Number of earlier steps with which a step is compared; nothing is a spike while fewer than half of them exist."""
    spike_zscore: float = Field(default=6.0, gt=0)
    """Number of standard deviations above their mean that make a spike."""
    rewind_steps: int = Field(default=100, ge=1)
    """`rewind`: the checkpoint is at least N steps older than the fault, and these steps and the faulty one are skipped
    when the run reaches them again."""
    max_in_a_row: int = Field(default=3, ge=1)
    """Number of faulty steps in a row that ends the run with code 77."""
    max_rewinds: int = Field(default=3, ge=0)
    """More rewinds than this, over all attempts at the run, end it with code 77."""


class EmaConfig(Section):
    """A moving average of the weights, kept beside them and saved with them."""

    decay: float = Field(default=0.999, gt=0, lt=1)
    """Decay of the average per step: the weight of its old value."""


class ProfileConfig(Section):
    """Profiles of time and memory in some steps: files in `profile/attempt-NNNN` of the run folder."""

    steps: tuple[int, int]
    """First and last step, counted from 1."""
    ranks: list[Annotated[int, Field(ge=0, le=MAX_PROCESSES)]] = Field(default=[0])
    """Processes that write traces and snapshots."""
    trace: bool = True
    """Torch profiler traces (`trace-*`), for https://ui.perfetto.dev."""
    memory: bool = False
    """On a GPU, a snapshot of all allocations after the last step, or when a step before it runs out of memory
    (`memory-*`), for https://docs.pytorch.org/memory_viz. Recording begins before the model is built and takes Python's
    stack at every allocation, in all steps up to the last one: choose early steps."""
    spans: bool = True
    """Timeline of every process (`spans.*`), for https://ui.perfetto.dev: fetch, forward, backward, reduce, clip,
    optimizer, metrics, validation, save. On a GPU these are the times at which the host issues the work."""

    @model_validator(mode="after")
    def _order(self) -> ProfileConfig:
        first, last = self.steps
        if not 1 <= first <= last:
            raise ValueError(f"steps must be a first and a last step, counted from 1, got {list(self.steps)}")
        return self


def _folder_of_files(path: Path) -> Path:
    if path.suffix == ".prom":
        raise ValueError("must be a folder: the name of the file follows from that of the run; leave the file out")
    return path


class MetricsConfig(Section):
    """Outputs of the metrics besides metrics.jsonl, which is always written."""

    log_every_steps: int = Field(default=10, ge=1)
    """A line on the terminal every N steps (metrics.jsonl has every step)."""
    layers_every_steps: int | None = Field(default=None, ge=1)
    """Every N steps, log by layer the gradient norm, the size of the activations and the largest attention
    logit."""
    tensorboard: bool = True
    """Write TensorBoard event files to `tensorboard` in the run folder."""
    windows: bool = False
    """Record the mean loss of every sample in `losses.bin` in the run folder, two bytes per sample, for
    `pipeline data losses`."""
    wandb: WandbConfig | None = None
    """Log to Weights & Biases (needs the extra `wandb`)."""
    mlflow: MlflowConfig | None = None
    """Log to MLflow (needs the extra `mlflow`)."""
    trackio: TrackioConfig | None = None
    """Log to Trackio (needs the extra `trackio`)."""
    loggers: list[LoggerConfig] = Field(default_factory=list)
    """Loggers of plug-ins."""
    prometheus: Annotated[DataPath, AfterValidator(_folder_of_files)] | None = None
    """Folder of the textfile collector of Prometheus's node_exporter on the node of rank 0, like
    `/var/lib/node_exporter/textfile`. A file with the state of the run is written there at each heartbeat
    (`launch.heartbeat_seconds`), and removed when training ends."""
    hardware_seconds: float | None = Field(default=60.0, gt=0)
    """Seconds between two readings of the error counters of network cards, memory and GPUs, by one process per node.
    Counters that rose are in `hardware` in the run folder and in the metrics. `null` turns it off."""


class TrainConfig(Section):
    """The training stage."""

    duration: Duration
    """Training length, in steps, in target tokens, or, for one source of packs, in `epochs`: each of them has every
    document once, and the last step is padded. It may be raised later: the order of data does not depend on it."""
    sequence_length: int = Field(default=2048, ge=1, le=MAX_SEQUENCE)
    """Tokens of a window."""
    batch_size: int = Field(default=32, ge=1, le=MAX_SAMPLES)
    """Windows of a step, over all ranks."""
    batch_ramp: BatchRampConfig | None = None
    """Begin with smaller batches."""
    micro_batch_size: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Windows of one forward and backward on one rank; the rest is accumulated. By default batch_size."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning rate schedule."""
    objective: MixedObjectiveConfig = MixedObjectiveConfig()
    """Objective of the training."""
    loss: LossConfig = LossConfig()
    """Loss."""
    balance: BalanceConfig = BalanceConfig()
    """Balance of experts."""
    precision: PrecisionConfig = PrecisionConfig()
    """Number formats."""
    attention: AttentionConfig = AttentionConfig()
    """Kernels of attention."""
    recurrence: RecurrenceConfig = RecurrenceConfig()
    """Kernels of recurrences."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Recomputation of activations."""
    compile: bool | None = None
    """Compile each layer (torch.compile): the first steps take longer, the others less time and memory. By default true
    on a GPU, unless a zero-bubble schedule or train.recompute.offload excludes it, and for long runs on a CPU."""
    deterministic: bool = False
    """On a GPU, use only algorithms that give the same bits each time, at some cost in speed. A CPU always does."""
    validation: ValidationConfig = ValidationConfig()
    """Validation while training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    faults: FaultsConfig = FaultsConfig()
    """Handling of non-finite steps and spikes."""
    ema: EmaConfig | None = None
    """Moving average of the weights."""
    init_from: InitFromConfig | None = None
    """Weights to start from, where there is no checkpoint to resume from."""
    distill: DistillConfig | None = None
    """Distillation from a teacher."""
    preference: PreferenceConfig | None = None
    """Training on pairs of conversations, one of which is preferred."""
    metrics: MetricsConfig = MetricsConfig()
    """Metrics."""
    profile: ProfileConfig | None = None
    """Traces of some steps."""

    @property
    def teacher(self) -> DistillConfig | None:
        """`distill` where the teacher has a part in the loss."""
        return self.distill if self.distill is not None and self.distill.weight else None

    @model_validator(mode="after")
    def _exported_average(self) -> TrainConfig:
        if self.ema is None and self.checkpoint.export is not None and self.checkpoint.export.weights == "ema":
            raise ValueError("checkpoint.export.weights is ema, but ema is not set; set ema, or weights: model")
        return self

    @model_validator(mode="after")
    def _ramp(self) -> TrainConfig:
        ramp = self.batch_ramp
        if ramp is not None and (self.batch_size - ramp.start <= 0 or (self.batch_size - ramp.start) % ramp.increment):
            raise ValueError(
                f"batch_ramp: start {ramp.start} plus a multiple of increment {ramp.increment} is never batch_size "
                f"{self.batch_size}"
            )
        return self
