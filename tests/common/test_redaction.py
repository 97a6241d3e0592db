"""Secrets by their names, and in addresses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline.common.redaction import is_secret_variable, masked, secret_in, without_secrets
from tests.planted import HARMLESS, SECRETS


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
            "SESSION_ID",
            "PRIVKEY",
            "PASSFILE",
            "S3_SAS",
            "AZURE_STORAGE_CONNECTION_STRING",
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


@pytest.mark.parametrize("number", SECRETS)
def test_secrets_are_masked_by_value(number: int) -> None:
    text, secret = SECRETS[number]
    around = f"2026-11-29 error: cannot reach {text}\nstep 3"
    for each in (text, around):
        assert secret in each and secret not in masked(each)
        assert masked(masked(each)) == masked(each)
    assert masked(around).endswith("step 3") or "PRIVATE KEY" in text


def test_texts_that_look_like_secrets_stay() -> None:
    assert [masked(text) for text in HARMLESS] == HARMLESS
    assert [text for text in HARMLESS if secret_in(text)] == []


def test_a_refusal_says_what_it_found() -> None:
    assert secret_in("see postgres://user:hunter2@h/db") == "a password in an address"
    assert secret_in("https://discord.com/api/webhooks/1/abc") == "the path of a webhook"
    assert secret_in("https://host/list?download=true") is None


def test_values_of_keys_named_like_secrets() -> None:
    values = {"api_key": "x", "mask_token": "[MASK]", "token": ["x"], "deep": [{"password": 1, "max_tokens": 5}]}
    shown = {"api_key": "***", "mask_token": "[MASK]", "token": "***", "deep": [{"password": "***", "max_tokens": 5}]}
    assert without_secrets(values) == shown


def test_a_text_made_to_be_slow_is_not() -> None:
    """By the number of characters that are looked at, not by time: a quadratic pattern would take hours here."""
    for piece in (
        "key=",
        "://",
        "a://a:",
        "password: ",
        "Bearer ",
        "--token ",
        'k="',
        "https://a/t/",
        "-----BEGIN PRIVATE KEY-----",
    ):
        assert masked(piece * (60_000 // len(piece)) + " end of it").endswith(("end of it", "***"))


def test_streams_are_masked() -> None:
    text, secret = SECRETS[0]
    code = (
        "import sys, warnings, logging; from pipeline.common.redaction import mask_streams;"
        "mask_streams('stdout', 'stderr');"
        f"print('a', {text!r}); warnings.warn({text!r}); logging.error({text!r}); raise ValueError({text!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == "a ***\n"
    assert secret not in done.stderr and "ValueError: ***" in done.stderr
