"""Everything that may end a training at its start and that can be told before: for previews and for whoever starts it.

Nothing is written, no model is built and no weight is read. Ranks look again, at what they use.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.common.problems import Problems, StartCheck
from pipeline.config import Config
from pipeline.data.datasets.files import TRAIN
from pipeline.data.datasets.open import dataset_place, is_finished
from pipeline.data.loading.masked_sources import refuse_masked, refuse_pairs
from pipeline.data.preprocess.checks import known_tokenizer
from pipeline.data.preprocess.run_file_check import check_run_file
from pipeline.train.checkpoint.manager import Checkpoint, Checkpoints
from pipeline.train.monitor.loggers.open import check_loggers
from pipeline.train.optim.lr_schedule import refuse_short_duration
from pipeline.train.rules.layout import check_layout, layout_warnings
from pipeline.train.rules.layout_check import planned_model, planned_spec
from pipeline.train.run.folder import refuse_lost_checkpoints
from pipeline.train.start.from_mirror import check_mirror
from pipeline.train.start.open_run import open_validation
from pipeline.train.start.reference import check_reference_dir
from pipeline.train.start.run_plan import plan_run
from pipeline.train.start.schedule_seam import begin_lines, find_seam, run_schedule, schedule_differs
from pipeline.train.start.teacher import check_teacher
from pipeline.train.start.warm_start import check_init_from


@dataclass(frozen=True)
class TrainScope:
    """A training that is about to start.

    Attributes:
        config: the run.
        processes: that train.
        data_comes: preprocessing runs before it, so datasets need not be there yet.
    """

    config: Config
    processes: int
    data_comes: bool = False


def _layout(scope: TrainScope, found: Problems) -> None:
    layout = check_layout(scope.config, scope.processes)
    found.warn(*layout_warnings(scope.config, layout))


def _model(scope: TrainScope, found: Problems) -> None:
    try:
        known_tokenizer(scope.config)
    except UserError:
        if scope.data_comes:
            return  # the checks of preprocessing say so
    planned_model(scope.config)


def _loggers(scope: TrainScope, found: Problems) -> None:
    check_loggers(scope.config)


def _mirror(scope: TrainScope, found: Problems) -> None:
    found.warn(*check_mirror(scope.config))


def _checkpoint(scope: TrainScope, found: Problems) -> None:
    resume_checkpoint(scope.config, found)


def _schedule(scope: TrainScope, found: Problems) -> None:
    init_from = scope.config.train.init_from
    if init_from is None or not (init_from.tokens or init_from.optimizer):  # else the schedule is longer than the run
        refuse_short_duration(scope.config.train.schedule, scope.config.train.duration)


def _conversations(scope: TrainScope, found: Problems) -> None:
    sources = scope.config.data.sources
    refuse_masked(scope.config, {each.name for each in sources if each.chat and each.chat.train_on != "all"})
    pairs = [each.name for each in sources if each.chat and each.chat.format == "preference"]
    refuse_pairs(
        scope.config, pairs, [each.name for each in sources if each.dataset is None and each.name not in pairs]
    )
    if scope.config.train.preference is not None:
        check_reference_dir(scope.config)


def _kept_checkpoints(scope: TrainScope, found: Problems) -> None:
    if scope.config.eval.every_checkpoint and scope.config.train.checkpoint.keep_every is None:
        raise UserError(
            "eval.every_checkpoint=true evaluates the checkpoints that are kept for ever, but without "
            "train.checkpoint.keep_every there are none; set train.checkpoint.keep_every to a number of steps, or "
            "eval.every_checkpoint=false"
        )


def _weights(scope: TrainScope, found: Problems) -> None:
    config = scope.config
    if config.train.init_from is None or Checkpoints.of_run(config.run.dir).latest() is not None:
        return
    tokenizer = known_tokenizer(config)
    assert tokenizer is not None, "or the check waits"
    lines = check_init_from(config, tokenizer, planned_spec(config))
    found.warn(*(line.removeprefix("warning: ") for line in lines))


def _teacher(scope: TrainScope, found: Problems) -> None:
    config = scope.config
    if config.train.teacher is None:
        return
    tokenizer = known_tokenizer(config)
    assert tokenizer is not None, "or the check waits"
    found.warn(*check_teacher(config, tokenizer, scope.processes))


def _tokenizer_comes(scope: TrainScope) -> str:
    config = scope.config
    if (config.train.init_from or config.train.teacher) is None:
        return ""
    if config.tokenizer.path is not None or not scope.data_comes:
        return ""
    return "" if known_tokenizer(config) is not None else "they go with a tokenizer that is not trained yet"


def _data(scope: TrainScope, found: Problems) -> None:
    """Datasets, their order and the schedule over them, and the plan that the checkpoint has."""
    config = scope.config
    checkpoint = resume_checkpoint(config, found)
    plan = plan_run(config, checkpoint)
    if plan.length.steps == 0:
        raise UserError(f"the run has no step ({plan.length.reason}); give it at least one")
    check_run_file(config, plan.datasets)
    schedule = run_schedule(config, plan.journal, plan.length.steps, checkpoint)
    open_validation(config, plan.tokenizer, check=True)
    found.warn(*plan.warnings)
    if checkpoint is None:
        found.warn(*begin_lines(config, schedule, plan.journal))


def _seam(scope: TrainScope, found: Problems) -> None:
    """Check the learning rate where the run resumes: a rise there is meant, or a mistake that is noticed late."""
    config = scope.config
    if not schedule_differs(config):
        return
    checkpoint = resume_checkpoint(config, Problems())  # what is wrong with it is told already
    if checkpoint is None:
        return
    try:
        plan = plan_run(config, checkpoint)
    except UserError:  # another check says so
        return
    seam = find_seam(config, checkpoint, plan.journal, plan.length.steps)
    if seam is None:
        return
    if seam.rises and "schedule" not in config.resume.allow:
        found.question(str(seam), seam.agreement(config.run.dir), "if it is meant, say so with resume.allow=[schedule]")
    else:
        found.warn(str(seam))


def _data_comes(scope: TrainScope) -> str:
    return "preprocessing comes first and makes them" if scope.data_comes else ""


def _seam_waits(scope: TrainScope) -> str:
    if not schedule_differs(scope.config):
        return ""
    places = [dataset_place(scope.config, source, TRAIN) for source in scope.config.data.sources]
    return "" if all(is_finished(scope.config, place) for place in places) else _data_comes(scope)


SEAM_CHECK = StartCheck("learning rate where the run resumes", _seam, _seam_waits)
"""Of those that a person's start of a training on this machine looks at before its ranks do."""
TRAIN_CHECKS: tuple[StartCheck[TrainScope], ...] = (
    StartCheck("layout", _layout),
    StartCheck("model", _model),
    StartCheck("loggers", _loggers),
    StartCheck("mirror of checkpoints", _mirror),
    StartCheck("checkpoint to resume from", _checkpoint),
    StartCheck("schedule", _schedule),
    StartCheck("conversations", _conversations),
    StartCheck("checkpoints to evaluate", _kept_checkpoints),
    StartCheck("weights to start from", _weights, _tokenizer_comes),
    StartCheck("teacher", _teacher, _tokenizer_comes),
    StartCheck("datasets and their order", _data, _data_comes),
    SEAM_CHECK,
)


def resume_checkpoint(config: Config, found: Problems) -> Checkpoint | None:
    """The checkpoint that training would resume from, by its name and the sizes of its files.

    Raises:
        UserError: there is none, though there must be one.
    """
    checkpoints, wanted = Checkpoints.of_run(config.run.dir), config.resume.from_
    checkpoint = checkpoints.preferred(config.resume.step)
    if checkpoint is None:
        if config.resume.from_mirror is not None:
            return None
        if wanted is not None:
            raise checkpoints.not_there(config.resume.step)
        if config.train.checkpoint.mirror is None:  # which may have them
            refuse_lost_checkpoints(config.run.dir)
        return None
    if config.resume.step not in (None, checkpoint.step):
        found.warn(
            f"resume.from={config.resume.step}: {checkpoints.folder} has no such checkpoint; training refuses to "
            f"start, unless it already resumed from there before: then it resumes from step {checkpoint.step:,}"
        )
    if problems := checkpoint.problems(full=False):
        found.warn(f"checkpoint {checkpoint.path.name} is damaged, an older one will be used: {'; '.join(problems)}")
        return None
    return checkpoint
