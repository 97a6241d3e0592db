# ruff: noqa: E501
"""Secrets as they stand in texts, each around a part that must never be seen again, and texts that only look like it.

No secret is a real one. They are put together here, so that scanners of repositories find none in this file.
"""

from __future__ import annotations

import random
import string


def _drawn(number: int, length: int, letters: str = string.ascii_letters + string.digits) -> str:
    """A part of a secret, the same in each run, with small and capital letters and digits where `letters` has them."""
    chance = random.Random(number)
    ends = [min(letters), max(letters)] if letters != string.ascii_letters + string.digits else ["a", "Z", "7"]
    return "".join([*ends, *chance.choices(letters, k=length - len(ends))])


_HEX = string.hexdigits[:16]
_UPPER = string.ascii_uppercase + string.digits
_FORMS = [
    # tokens by their beginnings
    *[("h" + "f_{}", 34), ("gh" + "p_{}", 36), ("gh" + "o_{}", 36), ("github_" + "pat_{}", 60), ("gl" + "pat-{}", 20)],
    *[("xo" + "xb-1234567890-{}", 24), ("xo" + "xp-{}", 40), ("xa" + "pp-1-{}", 40), ("s" + "k-{}", 48)],
    *[("s" + "k-proj-{}", 48), ("s" + "k-ant-api03-{}", 48), ("sk_" + "live_{}", 24), ("rk_" + "live_{}", 24)],
    *[("np" + "m_{}", 36), ("py" + "pi-AgEIcHlwaS5vcmc{}", 60), ("S" + "G.{}." + "b" * 43, 22), ("GOC" + "SPX-{}", 28)],
    *[("hv" + "s.{}", 24), ("gs" + "k_{}", 52), ("dckr_" + "pat_{}", 27), ("ya" + "29.{}", 60), ("AI" + "za{}", 35)],
    *[("ey" + "Jhbm9uZSJ9abc.ey" + "J{}." + "c" * 43, 40), ("tskey-" + "auth-{}", 30), ("nv" + "api-{}", 64)],
    # addresses
    *[("postgres://user:{}@db.example.org/x", 7), ("mongodb+srv://root:{}@c.example.net", 9)],
    *[("redis://:{}@cache:6379/0", 12), ("https://user:{}@proxy.example.org:3128", 8)],
    *[("https://{}@github.com/o/r.git", 30), ("https://__token__:{}@pypi.example.org/simple", 30)],
    *[("amqp://guest:{}@mq:5672/%2f", 8), ("root:{}@tcp(10.0.0.1:3306)/db", 10)],
    *[("https://hooks.slack." + "com/services/T0001/B0001/{}", 24), ("https://discord.com/api/webhooks/12345/{}", 60)],
    *[("https://example.webhook.office.com/webhookb2/{}", 36), ("https://api.telegram.org/bot{}/sendMessage", 40)],
    *[("https://conda.example.org/t/{}/main", 20), ("https://app.example.org/cb#access_token={}", 20)],
    *[("https://b.s3.amazonaws.com/k?X-Amz-Credential=a&X-Amz-Signature={}&X-Amz-Date=1", 40)],
    *[("https://a.blob.core.windows.net/c/b?sv=2020&sig={}%3D&se=1", 43), ("https://host/x?api_key={}", 6)],
    *[("https://storage.googleapis.com/b/o?X-Goog-Signature={}", 64), ("//host/x?sv=2020&sig={}&se=2026", 43)],
    # settings
    *[("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={}==;EndpointSuffix=x", 86)],
    *[("Endpoint=sb://x/;SharedAccessKeyName=n;SharedAccessKey={}=", 43), ("password={}", 7), ("DB_PASSWD={}", 9)],
    *[("host=h user=u password={} dbname=d", 8), ('{{"password": "{}"}}', 8), ('{{"client_secret": "{}"}}', 12)],
    *[("{{'api_key': '{}'}}", 16), ("secret_key: {}", 12), ("aws_secret_access_key = {}", 40), ("key={}", 32)],
    *[("token={}", 40), ('"token": "{}"', 24), ("wandb login --api-key {}", 16), ("tool --password {} -v", 8)],
    *[("machine h login u password {}", 8), ("session_id={}", 12)],
    # headers
    *[
        ("Authorization: Bearer {}", 20),
        ("authorization: Basic {}=", 19),
        ("Bearer {}", 24),
        ("Cookie: session={}", 16),
    ],
    *[("Proxy-Authorization: Basic {}", 20), ("X-Api-Key: {}", 24)],
    ("-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----", 64),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\\n{}\\n", 64),
]
SECRETS = {number: (form.format(part := _drawn(number, size)), part) for number, (form, size) in enumerate(_FORMS)}
"""Text and the part of it that is secret, by number."""
SECRETS |= {
    100: (f"AKIA{(part := _drawn(100, 16, _UPPER))}", part),
    101: (f"WANDB_API_KEY={(part := _drawn(101, 40, _HEX))}", part),
    102: (f"dapi{(part := _drawn(102, 32, _HEX))}", part),
    103: (f"hub token={(part := '0b5e91c2-7d1c-4b57-9a3e-5f0c2d9e8a71')}", part),
}

HARMLESS = [
    *["meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mixtral-8x7B-v0.1", "EleutherAI/gpt-neox-20b", "tokenizer.json"],
    *["hf_model_with_a_long_name_of_words", "scikit-learn", "sk-learn-contrib-extension-pack-for-pipelines"],
    *["xxh3-128:9d1f0c27b6f7a54d9d1f0c27b6f7a54d", "3f786850e387550fdab836ed7e6dc881de23001b", "sha256:" + "ab12" * 16],
    *["commit 3f786850e387550fdab836ed7e6dc881de23001b", "git+ssh://host/x.git", "git@github.com:o/r.git"],
    *["inputs_hash=9d1f0c27b6f7a54d9d1f0c27b6f7a54d", "fingerprint: 9d1f0c27b6f7a54d", "0b5e91c2-7d1c-4b57-9a3e-5f0c2d9e8a71"],
    *["/scratch/user/runs/2026-11-29/step-0000120/model-00001-of-00012.safetensors", "s3://bucket/prefix/*.jsonl.zst"],
    *["https://huggingface.co/datasets/HuggingFaceFW/fineweb", "http://127.0.0.1:5000/v1/models", "https://[::1]:8000/x"],
    *["eos_token=<|endoftext|>", "pad_token: '[PAD]'", "mask_token=[MASK]", "max_tokens=128000", "tokens: 1,234,567"],
    *["token=50256", "tokens per second 1,200", "bos_token_id=1", "the key heads: 8", "key=/scratch/a/file", "text_key=text"],
    *["secret: mask", "clean.pii.secret = keep", "password: set it in the environment", "key: data.sources.0.weight"],
    *["loss=3.1415926535897932", "lr=3e-4 step=120 grad_norm=0.9", "seed=12345678901234567890", "mail a@b.example, please"],
    *["Basic understanding of attention", "Bearer of good news", "a digest authentication", "12:34:56 rank 3: saved"],
    *["HF_TOKEN=$HF_TOKEN", "export WANDB_API_KEY=${KEY}", "--api-key-file key.txt", "<|im_start|>user: hello", "DP=8 TP=4 PP=2"],
    *["SLURM_JOB_ID=1234567", "NCCL_DEBUG=INFO", "CUDA_VISIBLE_DEVICES=0,1,2,3", "PATH=/usr/bin:/bin", "torch==2.11.0+cu130"],
]  # fmt: skip
"""Texts that stay as they are."""
