"""`run:`, `launch:` and `resume:`: where a run lives, its seed, the machine it uses, and where it resumes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from pipeline.config.base import DATA, MAX_PROCESSES, AbsLinePath, FolderUrl, Section


class RunConfig(Section):
    """Folder and seed of the run."""

    dir: Annotated[AbsLinePath, DATA]
    """Run folder: checkpoints, metrics, evaluations, the resolved config and, by default, the data."""
    seed: int = Field(default=1234, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the data."""


class TimeLimitsConfig(Section):
    """Seconds without progress after which a process counts as hung; all processes then end with exit code 76."""

    init_seconds: float = Field(default=600.0, gt=0)
    """To find the other processes and build the model."""
    first_step_seconds: float = Field(default=1800.0, gt=0)
    """For the first step, in which kernels are compiled and connections made."""
    step_seconds: float = Field(default=600.0, gt=0)
    """For each step after it, and for each batch of a validation."""
    save_seconds: float = Field(default=1800.0, gt=0)
    """For saving or loading a checkpoint."""


class LaunchConfig(Section):
    """Processes of the run and their resources."""

    processes: int | None = Field(default=None, ge=1, le=MAX_PROCESSES)
    """Processes of the training, one per device; by default as many as the degrees of `parallel` require. The command
    starts them on this machine, unless torchrun or another launcher did."""
    time_limits: TimeLimitsConfig = TimeLimitsConfig()
    """Limits after which a process counts as hung."""
    max_minutes: float | None = Field(default=None, gt=0)
    """Save and stop, with exit code 75, after this attempt has lasted N minutes."""
    reference_only: bool = False
    """End when the log-probabilities of `train.preference` are complete. `pipeline train --reference` sets it."""
    stop_before_end_seconds: float | None = Field(default=None, ge=0)
    """In a SLURM job with a time limit: save and stop, with exit code 75, N seconds before its end. The current step
    and the save must fit in. The default is twice the longest step and save of the attempt (120 until the first save is
    measured), at most a quarter of the job's time."""
    heartbeat_seconds: float = Field(default=30.0, gt=0)
    """Seconds between two heartbeats: each process writes its step and phase in the run folder."""
    crash_loop: int = Field(default=3, ge=1)
    """After N attempts in a row that died at the same step, the next one is refused with exit code 2."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA if there is a GPU."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads of each process for torch; by default `OMP_NUM_THREADS` of the shell, else the cores available to
    this process, divided by the processes per node. Set fewer where other programs use these cores: torch's threads
    wait for each other, so that training can become many times slower than with 1."""
    bind: Literal["auto", "none"] = "auto"
    """If several processes share a machine, `auto` gives each its own cores: on GPUs those of the NUMA node of its GPU,
    else whole cores side by side. It never takes a core that the process could not use before, and changes nothing if
    SLURM or another launcher has bound the processes."""


class ResumeConfig(Section):
    """The checkpoint to resume from, and what may differ from it."""

    from_: int | Literal["latest"] | None = Field(default=None, alias="from")
    """Step of the checkpoint; later ones are moved to `abandoned`. `latest`: the newest valid one, which must exist. By
    default the newest valid one, or a fresh start if the run has never saved. A start that would lose more than one
    save requires the step here."""
    from_mirror: FolderUrl | None = None
    """URL of the mirror of checkpoints (`train.checkpoint.mirror.to`) that a run folder without checkpoints begins
    from. `pipeline train --from-mirror` sets it."""
    verify_on_load: Literal["full", "size"] = "full"
    """`full` reads every file of the checkpoint and compares its hash; `size` compares only names and sizes."""
    allow: list[Literal["data", "tokenizer", "objective", "model", "distill", "preference", "code", "schedule"]] = (
        Field(default_factory=list)
    )
    """Differences to accept, by name; otherwise each is an error that shows the difference. `schedule`: a changed
    schedule whose learning rate rises at the resume."""

    @property
    def step(self) -> int | None:
        """The step that is named, if one is."""
        return self.from_ if isinstance(self.from_, int) else None

    @field_validator("from_", mode="before")
    @classmethod
    def _from(cls, value: Any) -> Any:
        # A union would complain once for each of its types.
        if value is None or value == "latest" or (type(value) is int and value >= 0):
            return value
        raise ValueError("must be the step of a checkpoint, a whole number ≥ 0, or `latest`")
