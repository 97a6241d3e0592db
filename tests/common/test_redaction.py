"""Secrets by their names, and in addresses."""

from __future__ import annotations

import pytest

from pipeline.common.redaction import is_secret_variable, masked


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HF_TOKEN",
            "hf_token",
            "HUGGING_FACE_HUB_TOKEN",
            "GITHUB_TOKENS",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_ACCESS_KEY_ID",
        ),
        *(
            "WANDB_API_KEY",
            "OPENAI_APIKEY",
            "PGPASSWORD",
            "DB_PASSWD",
            "SSHPASS",
            "MYSQL_PWD",
            "KEY",
            "AUTH",
            "PROXY_AUTH",
        ),
        *("GOOGLE_APPLICATION_CREDENTIALS", "GITHUB_PAT", "CI_JWT", "SSH_KEY", "PRIVATE_KEY", "SENTRY_DSN", "NETRC"),
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_variable(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "HOME",
            "PWD",
            "OLDPWD",
            "SCRATCH",
            "TOKENIZERS_PARALLELISM",
            "TOKENIZER_DIR",
            "KEYBOARD",
            "MONKEY",
            "AUTHOR",
        ),
        *("NCCL_DEBUG", "PATH", "DATA_DIR", "SLURM_JOB_ID", "PASSES_DIR", "USER", "KEYED_HASH", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_names_of_others(name: str) -> None:
    assert not is_secret_variable(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://conda.anaconda.org/t/ab-12/channel", "https://conda.anaconda.org/t/***/channel"),
        ("https://host/conda/t/ab-12", "https://host/conda/t/***"),
        ("https://u:p@host/t/ab-12/c?token=x", "https://***@host/t/***/c?***"),
        ("git+https://u:p@host/x.git, a", "git+https://***@host/x.git, a"),
        ("https://host/t", "https://host/t"),
        ("/t/folder", "/t/folder"),
        ("https://host/text/x", "https://host/text/x"),
    ],
)
def test_addresses(text: str, shown: str) -> None:
    assert masked(text) == shown
