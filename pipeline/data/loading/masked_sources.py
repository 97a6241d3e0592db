"""Checks of a run over datasets that are trained on in part: conversations, of which answers alone are targets."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pipeline.common.errors import UserError
from pipeline.config import Config
from pipeline.config.blend import PhaseConfig
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.packing.files import read_index
from pipeline.data.loading.objectives.base import Objective
from pipeline.data.loading.objectives.choice import uses


def refuse_masked(config: Config, masked: Collection[str]) -> None:
    """Refuse what does not go with masks of targets: windows, attention across documents, other objectives.

    Args:
        config: The run file.
        masked: Names of the sources that have masks.

    Raises:
        UserError: A phase has one of these; the message names the source and what to set.
    """
    for number, phase in enumerate(config.blend.phases or [PhaseConfig()]):
        names = phase.sources or (phase.weights if isinstance(phase.weights, dict) else None)
        for name in names or [source.name for source in config.data.sources]:
            if name in masked:
                _refuse_in_phase(config, number, phase, name)


def _refuse_in_phase(config: Config, number: int, phase: PhaseConfig, name: str) -> None:
    source = f"source {name!r} has conversations that are trained on in part (chat.train_on)"
    packing = phase.packing or config.data.loader.packing
    if packing != "best_fit":
        key = "data.loader.packing" if phase.packing is None else f"blend.phases.{number}.packing"
        raise UserError(f"{source}, and {key}: {packing} would cut them: set {key}: best_fit, or chat.train_on: all")
    if not config.model.document_attention:
        raise UserError(
            f"{source}, and with model.document_attention: false they would see others in their pack: set "
            "model.document_attention: true"
        )
    first, *others = uses(config, number)
    use = next((other for other in others if other.key == f"{first.key}.by_source.{name}"), first)
    if use.objective.type != "causal":
        raise UserError(
            f"{source}, and {use.key}.type: {use.objective.type} chooses targets of its own: set "
            f"{first.key}.by_source.{name}.type: causal, or chat.train_on: all"
        )


def refuse_pairs(config: Config, pairs: Collection[str], others: Collection[str]) -> None:
    """Refuse pairs of conversations without `train.preference`, and what does not go with both.

    Args:
        config: The run file.
        pairs: Names of the sources that have pairs.
        others: Names of those that are known to have none.

    Raises:
        UserError: The run has such a thing; the message names the source and what to set.
    """
    if config.train.preference is None:
        if pairs:
            raise UserError(
                f"source {min(pairs)!r} has pairs of conversations (chat.format: preference), half of which are not to "
                "be learned: set train.preference, like {beta: 0.1}, or take the source out"
            )
        return
    if others:
        raise UserError(
            f"source {min(others)!r} has no pairs of conversations, and train.preference trains on nothing else: make "
            "it with chat.format: preference, or take it out"
        )
    weighs = [source.name for source in config.data.sources if source.loss_weight != 1 or source.weight_key is not None]
    weighs += [name for phase in config.blend.phases for name in phase.loss_weights]
    if weighs:
        raise UserError(
            f"source {weighs[0]!r} has loss weights, and train.preference counts each pair once: remove loss_weight, "
            "loss_weights and weight_key"
        )


def check_masked_datasets(config: Config, datasets: Mapping[str, Dataset]) -> None:
    """Check the datasets with masks of a run: what `refuse_masked` does, and that no document is cut.

    Args:
        config: The run file.
        datasets: The training split of each source.

    Raises:
        UserError: As `refuse_masked` and `refuse_pairs`; or documents are longer than a pack.
    """
    masked = {name: dataset for name, dataset in datasets.items() if dataset.manifest.has_mask}
    refuse_masked(config, masked)
    pairs = [name for name, dataset in masked.items() if dataset.manifest.has_pairs]
    refuse_pairs(config, pairs, datasets.keys() - pairs)
    for name, dataset in masked.items():
        for length in config.pack_lengths:
            index = read_index(dataset.folder, dataset.newer, length)
            if index.cut:
                raise UserError(
                    f"source {name!r}: {index.cut:,} of its {index.documents:,} conversations are longer than the "
                    f"sequence_length of {length:,} tokens, and none may be cut: set chat.max_tokens: {length} for the "
                    "source and preprocess it into a new folder, or raise train.sequence_length"
                )


def refuse_mixed_pairs(config: Config, datasets: Mapping[str, Dataset]) -> None:
    """Refuse held-out pairs of a model whose rejected answers would see the preferred ones.

    Args:
        config: The run file.
        datasets: Held-out splits, by source.

    Raises:
        UserError: A dataset has pairs, and attention crosses documents.
    """
    for name, dataset in datasets.items():
        if dataset.manifest.has_pairs and not config.model.document_attention:
            raise UserError(
                f"source {name!r} has pairs of conversations, and with model.document_attention: false the rejected "
                "one would see the preferred one: set model.document_attention: true, or take the source out"
            )


def refuse_arranged(key: str, datasets: Mapping[str, Dataset], objectives: Mapping[str, Objective | None]) -> None:
    """Refuse held-out conversations whose targets an objective would choose.

    Args:
        key: That names the objective.
        datasets: Held-out splits, by source.
        objectives: That arrange them; None: text is scored as it is.

    Raises:
        UserError: A dataset with a mask has one.
    """
    for name, dataset in datasets.items():
        if dataset.manifest.has_mask and objectives[name] is not None:
            raise UserError(
                f"{key}: source {name!r} has conversations that are trained on in part, and the objective chooses "
                "targets of its own: give the source an objective of type causal"
            )
