"""Check of a run file against its datasets, before they are trained on."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config import Config
from pipeline.data.datasets.dataset import Dataset
from pipeline.data.datasets.validate import check_tokenizers
from pipeline.data.loading.objectives.choice import check_objectives
from pipeline.data.preprocess.run_tokenizer import check_tokenizer_settings
from pipeline.data.preprocess.source_settings import check_settings


def check_run_file(config: Config, datasets: Mapping[str, Dataset]) -> None:
    """Check that datasets belong together, and are what the run file asks for by now.

    Raises:
        UserError: they are not; or the tokenizer lacks what the objective needs.
    """
    check_tokenizers(datasets)
    check_settings(config, {name: dataset.manifest for name, dataset in datasets.items()})
    check_tokenizer_settings(config)
    first = next(iter(datasets.values()))
    check_objectives(config, first.manifest.tokenizer, first.folder)
