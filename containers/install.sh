#!/bin/sh
# Steps of Dockerfile and pipeline.def alike:
#   install.sh system
#       packages of Debian or Ubuntu, as root
#   install.sh environment FOLDER [TORCH_INDEX [EXTRAS]]
#       a virtual environment with the locked requirements and this package. TORCH_INDEX: where to look for builds of torch,
#       too; the locked hashes hold for them. EXTRAS: of pyproject.toml, like eval,wandb; they are not locked.
set -eu
cd "$(dirname "$0")/.."

case "${1:-}" in
system)
    apt-get update
    # A compiler and Python's headers for train.compile; the rest is what NCCL loads for InfiniBand and RoCE.
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates g++ python3 python3-dev python3-venv \
        ibverbs-providers libibverbs1 librdmacm1
    rm -rf /var/lib/apt/lists/*
    ;;
environment)
    folder=$2 extras=${4:-}
    export PIP_EXTRA_INDEX_URL="${3:-}" NVTE_FRAMEWORK=pytorch
    python3 -m venv "$folder"
    pip() { "$folder/bin/python" -m pip --no-cache-dir --disable-pip-version-check "$@"; }
    locked() { pip install --quiet --no-deps --no-build-isolation --require-hashes -r "requirements/$1.txt"; }
    locked build
    locked run
    # As the Makefile does: torch's CUDA build alone needs them.
    if "$folder/bin/python" -c "from importlib.metadata import requires; \
raise SystemExit(not any(each.startswith(('cuda-', 'nvidia-')) for each in requires('torch')))"; then
        locked cuda
    fi
    pip install --quiet --no-deps --no-build-isolation .
    if [ -n "$extras" ]; then
        # What is locked stays as it is. The tools are those that flash-attn and Transformer Engine are built with.
        pip freeze --exclude pretraining-pipeline >"$folder/locked.txt"
        pip install --constraint "$folder/locked.txt" ninja packaging psutil pybind11 wheel
        pip install --no-build-isolation --constraint "$folder/locked.txt" ".[$extras]"
        rm "$folder/locked.txt"
    fi
    pip check
    ;;
*)
    echo "usage: $0 system | environment FOLDER [TORCH_INDEX [EXTRAS]]" >&2
    exit 2
    ;;
esac
