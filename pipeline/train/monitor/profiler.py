"""Profiles of some steps, `train.profile`: traces of torch's profiler, spans of every process, allocations of a GPU.

None of it changes what is computed, and none of it ends a run: what cannot be written is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pipeline.common import links, storage
from pipeline.common.console import Console, say
from pipeline.common.errors import NumericalError, Stopped
from pipeline.common.run_files import RunFiles
from pipeline.config.train import ProfileConfig
from pipeline.train.host.trace_spans import Spans, recorded_by, span
from pipeline.train.run.folder import RunFolder
from pipeline.train.run.rewind_request import Rewind
from pipeline.train.torch_compat.core import end_allocations, record_allocations, write_allocations

_AGREED = (Stopped, Rewind, NumericalError)
"""Raised by all ranks after the same step: no device waits for another one, and a profile can be ended in peace."""


class Profile(AbstractContextManager["Profile"]):
    """A context manager around the steps of a run. Every process has one; without a config it does nothing.

    Args:
        config: `train.profile`.
        device: Of this process.
        rank: Of this process.
        folder: Of the run, in which each attempt has a folder of its own.
        console: Where rank 0 speaks.
    """

    def __init__(
        self,
        config: ProfileConfig | None,
        device: torch.device,
        rank: int,
        folder: RunFolder,
        console: Console,
    ) -> None:
        self._config = config
        self._device = device
        self._rank = rank
        self._run = folder
        self._console = console
        chosen = config is not None and rank in config.ranks
        self._traces = chosen and config is not None and config.trace
        self._watches_memory = chosen and config is not None and config.memory and device.type == "cuda"
        self._records_memory = False
        self._trace: profile | None = None
        self._spans: Spans | None = None
        self._first = self._last = 0

    def _folder(self) -> Path:
        return RunFiles(self._run.path).profiles / f"attempt-{self._run.attempt:04d}"

    def watch_memory(self) -> None:
        """Record allocations from now on, if that is asked for, up to the last step of the profile.

        It comes before the model, so that the snapshot knows who allocated the weights.
        """
        if self._watches_memory:
            self._records_memory = self._attempted(record_allocations)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._write_memory("out-of-memory")
        if error is None or isinstance(error, _AGREED):
            self.finish()
        else:
            self._drop()
        self._end_memory()

    def announce(self, total: int) -> Iterator[str]:
        """Lines about settings that have no effect in a run of `total` steps."""
        config = self._config
        if config is None:
            return
        if config.steps[0] > total:
            yield f"train.profile.steps={list(config.steps)} has no effect: the run has {total:,} steps"
        if config.memory and self._device.type != "cuda":
            yield f"train.profile.memory=true has no effect on a {self._device.type}: it records the memory of a GPU"

    def ends_with(self, step: int) -> bool:
        """True for the last step of the profile, counted from 1; `finish` comes after it."""
        return self._config is not None and step == self._config.steps[1]

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around a step, counted from 1, with all that belongs to it."""
        config = self._config
        if config is None or not config.steps[0] - 1 <= step <= config.steps[1]:
            yield
            return
        self._last = step
        if step < config.steps[0]:
            self._begin_trace(warm_up=True)
            yield
            self._next_step()
            return
        self._begin(step)
        assert self._spans is not None
        try:
            with recorded_by(self._spans), span(f"step {step}"):
                yield
        except _AGREED:
            raise  # what was recorded is kept; `finish` may take longer than a step
        except BaseException:
            self._drop()
            raise
        self._attempted(self._spans.write)
        if step < config.steps[1]:
            self._next_step()

    def _begin(self, step: int) -> None:
        assert self._config is not None
        self._begin_trace(warm_up=False)
        if self._spans is None:
            self._first = step
            if self._config.spans:
                self._attempted(self._open_spans)
            self._spans = self._spans or Spans(None, self._rank, traced=self._trace is not None)

    def _open_spans(self) -> None:
        path = self._folder() / f"spans.{self._whose()}.json"
        storage.make_below(self._run.path, path.parent)
        self._spans = Spans(path, self._rank, traced=self._trace is not None)

    def _begin_trace(self, *, warm_up: bool) -> None:
        """Start torch's profiler, unless it runs; its first step is slower, and is thrown away where there is one."""
        if not self._traces or self._trace is not None:
            return
        assert self._config is not None
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        first, last = self._config.steps
        steps = schedule(wait=0, warmup=1, active=last - first + 2, repeat=1) if warm_up else None

        def start() -> None:
            trace = profile(activities=activities, schedule=steps, record_shapes=True)
            trace.start()
            self._trace = trace

        self._traces = self._attempted(start)

    def _next_step(self) -> None:
        trace = self._trace
        if trace is not None and not self._attempted(trace.step):
            self._traces, self._trace = False, None
            self._attempted(trace.stop)

    def finish(self) -> None:
        """Write what has been recorded, if anything is; the device does what it has been given first."""
        spans, self._spans = self._spans, None
        trace, self._trace = self._trace, None
        if trace is not None and not self._attempted(trace.stop):
            trace = None
        if spans is None:
            return
        self._attempted(spans.close)
        if trace is not None:
            steps, export = f"{self._first:08d}-{self._last:08d}", trace.export_chrome_trace
            final = self._folder() / f"trace-step-{steps}.{self._whose()}.json.gz"
            self._attempted(lambda: self._put(final, lambda tmp: export(str(tmp))))
        viewers = "open trace-* and spans.* in https://ui.perfetto.dev"
        if self._records_memory:
            self._write_memory(f"step-{self._last:08d}")
            self._end_memory()
            viewers += ", memory-* in https://docs.pytorch.org/memory_viz"
        if self._rank == 0:
            steps = f"steps {self._first:,} to {self._last:,}"
            say(self._console, f"train: the profile of {steps} is in {self._folder()}: {viewers}")

    def _drop(self) -> None:
        """End without what the device would have to be waited for: it may wait for a rank that is gone."""
        spans, self._spans = self._spans, None
        trace, self._trace = self._trace, None
        if spans is not None:
            self._attempted(spans.close)
        if trace is not None and self._device.type == "cpu":
            self._attempted(trace.stop)

    def _write_memory(self, when: str) -> None:
        if self._records_memory:
            self._attempted(
                lambda: self._put(self._folder() / f"memory-{when}.{self._whose()}.pickle", write_allocations)
            )

    def _end_memory(self) -> None:
        if self._records_memory:
            self._attempted(end_allocations)
            self._records_memory = False

    def _put(self, final: Path, write: Callable[[Path], object]) -> None:
        """A file that is there whole or not at all."""
        storage.make_below(self._run.path, final.parent)
        tmp = storage.temporary(final)
        tmp = tmp.with_name(tmp.name + "".join(final.suffixes[-1:]))  # torch compresses what ends with .gz
        try:
            with links.folder_of(tmp):  # not where a link of somebody else leads
                write(tmp)
            storage.commit(tmp, final)
        finally:
            links.remove(tmp, missing_ok=True)

    def _attempted(self, action: Callable[[], object]) -> bool:
        """Do something, and warn on this rank if it fails. The run continues, or ends by an error of its own."""
        try:
            action()
            return True
        except Exception as error:
            reason = str(error) or type(error).__name__
            with suppress(OSError):
                Console(stderr=True, soft_wrap=True).print(
                    f"warning: rank {self._rank}: train.profile could not do everything it was set to: {reason}",
                    markup=False,
                )
            return False

    def _whose(self) -> str:
        return f"rank-{self._rank:04d}"
