"""A pretraining suite: documents to tokens, tokens to a trained model, a model to numbers."""

__version__ = "0.2.0"

DISTRIBUTION = "pretraining-pipeline"
"""Our name on the package registry; `pipeline` is another project there."""
