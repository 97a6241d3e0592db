# Everything runs in .venv; the first call makes it, later ones find it ready.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Nothing is installed but what is locked, with its hash. What comes as source is built with what is locked as well.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation
LOCKED := $(PIP) --require-hashes
# The CUDA build of torch needs libraries that its CPU build does not.
TORCH_IS_CUDA := $(BIN)/python -c "from importlib.metadata import requires; \
  raise SystemExit(not any(each.startswith(('cuda-', 'nvidia-')) for each in requires('torch')))"

# An environment with another torch than the locked one: TORCH=2.11.0, or the newest that pip finds.
TORCH_VENV := .venv-torch-$(or $(TORCH),newest)
TORCH_PIP := $(TORCH_VENV)/bin/python -m pip install -qq --disable-pip-version-check

# Base images of CUDA as in the torch that is locked: with nvcc and the headers of cuDNN, and without.
ENGINE ?= docker
TARGET ?= cpu
IMAGE_ARGS.cuda := BUILD_BASE=nvcr.io/nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04 \
  BASE=nvcr.io/nvidia/cuda:13.0.2-base-ubuntu24.04 TORCH_INDEX= EXTRAS=flash,te
IMAGE_VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' pipeline/__init__.py)

.PHONY: help quickstart install install-dev test test-guard test-slow test-slurm test-all test-torch lint lock audit licences docs words site site-links pictures dist sbom gpu-kit image devcluster devcluster-down clean
.DELETE_ON_ERROR:

help:
	@echo "make quickstart   train and evaluate a small model on this machine's CPU, in minutes"
	@echo "make test         the test suite, in minutes"
	@echo "make test-guard   kills, full disks, resuming, parallelism: one instance of each kind"
	@echo "make test-slow    every combination of parallelism against one process, and runs that are killed"
	@echo "make test-slurm   jobs on a real SLURM, which is brought up for them"
	@echo "make devcluster   a SLURM on this machine to try things on; down again: make devcluster-down"
	@echo "make test-all     all of these"
	@echo "make test-torch   the tests of training and evaluation with another torch (TORCH=2.11.0; default: the newest)"
	@echo "make lint         ruff, mypy, and which package may import which"
	@echo "make words        words and names that the tests refuse, with what to say instead"
	@echo "make docs         write the tables of docs/ anew (config.md, parallelism.md, curation-rules.md and others)"
	@echo "make site         the documentation as a site, in site/; a broken link or a page without a place ends it"
	@echo "make site-links   ask other servers whether the links to them lead somewhere (needs the internet)"
	@echo "make pictures     take the pictures of docs/ anew, from runs/quickstart (needs Chromium)"
	@echo "make gpu-kit      what a machine with a GPU and no network needs for benchmarks/gpu_evidence.py"
	@echo "make image        a container image for CPUs (TARGET=cuda: with CUDA; ENGINE=podman), see containers/README.md"
	@echo "make lock         write the versions and hashes in requirements/ anew, from pyproject.toml"
	@echo "make audit        ask osv.dev for known vulnerabilities of what is locked (needs the internet)"
	@echo "make licences     write the licences of all requirements anew, after make lock"
	@echo "make dist         wheel, source archive and bill of materials, for a release"
	@echo "make clean        remove the virtual environment and caches (runs/ stays)"

quickstart: install
	@$(BIN)/pipeline run configs/quickstart.yaml

# Two at a time: most tests wait for processes that they have started.
test: install-dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not guard and not slurm and not gpu"

test-guard: install-dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "guard and not slow and not slurm and not gpu"

test-slow: install-dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "slow and not slurm and not gpu"

test-slurm: install-dev
	@$(BIN)/python -m pytest -n 3 --dist loadfile -m "slurm and not slow" tests/slurm

test-all: install-dev
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slurm"
	@$(BIN)/python -m pytest -n 3 --dist loadfile -m slurm tests/slurm

# What pip picks for this torch may replace what is locked, so it comes last. `.venv` is left alone.
test-torch: $(TORCH_VENV)/.installed
	@$(TORCH_PIP) --upgrade "torch$(addprefix ==,$(TORCH))"
	@$(TORCH_VENV)/bin/python -c "import torch; print('torch', torch.__version__)"
	@$(TORCH_VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not slow and not slurm and not gpu" \
	  tests/train tests/eval

lint: install-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

words: install-dev
	@$(BIN)/python -m tests.test_words

docs: install-dev
	@$(BIN)/python -m pipeline.config.reference docs/config.md
	@$(BIN)/python -m pipeline.train.doc_tables docs/model.md docs/parallelism.md docs/checkpoints.md docs/slurm.md docs/huggingface.md docs/objectives.md docs/curation-rules.md docs/coming-from/megatron-lm.md docs/coming-from/torchtitan.md docs/coming-from/olmo-core.md docs/coming-from/nanotron-llm-foundry.md docs/coming-from/nemo.md

# Without what the last call left: a page that was removed would still be in it.
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env -c docs/sphinx -d build/doctrees
site: install-dev
	@rm -rf site
	@$(SPHINX) -b html . site
	@echo "site/index.html"

site-links: install-dev
	@$(SPHINX) -b linkcheck . build/links

pictures: install-dev
	@$(BIN)/python benchmarks/pictures.py runs/quickstart

lock: install-dev
	@$(BIN)/python requirements/lock.py $(UPGRADE)

# Needs nothing but Python.
audit:
	@$(PYTHON) requirements/audit.py

licences: install-dev
	@$(BIN)/python requirements/licences.py

# The same bytes for the same commit, wherever and whenever it is built. The wheel is made from the source archive.
# Outside git the time is that of pyproject.toml, which a source archive keeps.
dist: install-dev
	@rm -rf dist
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml) $(BIN)/python -m build --no-isolation .
	@$(BIN)/python -m twine check --strict dist/*.tar.gz dist/*.whl
	@$(MAKE) --no-print-directory sbom

sbom: install-dev
	@mkdir -p dist
	@$(BIN)/python requirements/sbom.py dist

gpu-kit: install-dev
	@PYTHONPATH=benchmarks $(BIN)/python -m evidence.kit $(KIT)

# With DIGESTS=1 both base images have to be named by their digests: what a tag names can change from one day to the next.
DIGESTS ?=
image:
	@for each in $(if $(DIGESTS),BUILD_BASE BASE); do \
	  echo "$(IMAGE_ARGS)" | grep -Eq "(^| )$$each=[^ ]+@sha256:[0-9a-f]{64}( |$$)" || \
	  { echo "error: DIGESTS=1 needs $$each=NAME@sha256:DIGEST in IMAGE_ARGS; containers/README.md says how to find it" >&2; exit 1; }; \
	done
	$(if $(filter cpu cuda,$(TARGET)),,$(error TARGET is $(TARGET); it is cpu or cuda))
	@$(ENGINE) build --file containers/Dockerfile --tag pretraining-pipeline:$(IMAGE_VERSION)-$(TARGET) \
	  --build-arg VERSION=$(IMAGE_VERSION) --build-arg REVISION=$(or $(shell git rev-parse HEAD 2>/dev/null),unknown) \
	  $(addprefix --build-arg ,$(IMAGE_ARGS.$(TARGET)) $(IMAGE_ARGS)) .

devcluster: install
	@$(BIN)/python -m slurm.devcluster up --install

devcluster-down: install
	@$(BIN)/python -m slurm.devcluster down

clean:
	rm -rf $(VENV) .venv-torch-* build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The advice is for who asked for the installation alone.
install: $(VENV)/.installed
ifneq ($(filter install,$(MAKECMDGOALS)),)
	@echo "installed: $(BIN)/pipeline; next: make quickstart, or . $(BIN)/activate"
endif
install-dev: $(VENV)/.installed-dev

$(BIN)/python $(TORCH_VENV)/bin/python: %/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than Python 3.11; name another one: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $* || \
	  { rm -rf $*; echo "error: $(PYTHON) has no venv; install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }

# The stamps are newer than what they were installed from, or pip runs again.
LOCKS := requirements/build.txt requirements/run.txt requirements/cuda.txt
$(VENV)/.installed: pyproject.toml $(LOCKS) | $(BIN)/python
	@echo "installing into $(VENV) (the first time, some minutes)"
	@$(LOCKED) -r requirements/build.txt
	@$(LOCKED) -r requirements/run.txt
	@if $(TORCH_IS_CUDA); then $(LOCKED) -r requirements/cuda.txt; fi
	@$(PIP) -e .
	@$(BIN)/python -m pip check --disable-pip-version-check
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements/dev.txt
	@echo "installing what the tests need"
	@$(LOCKED) -r requirements/dev.txt
	@$(BIN)/python -m pip check --disable-pip-version-check
	@touch $@

# torch's entry is its line and those that continue it.
$(TORCH_VENV)/.installed: pyproject.toml $(LOCKS) requirements/dev.txt | $(TORCH_VENV)/bin/python
	@echo "installing into $(TORCH_VENV), and torch after it (some minutes, several GB)"
	@sed '/^torch==/,/[^\\]$$/d' requirements/build.txt requirements/run.txt requirements/dev.txt >$(TORCH_VENV)/locked.txt
	@$(TORCH_PIP) --no-deps --no-build-isolation --require-hashes -r $(TORCH_VENV)/locked.txt
	@$(TORCH_PIP) --no-deps --no-build-isolation -e .
	@touch $@
