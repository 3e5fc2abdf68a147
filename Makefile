# One environment, .venv in this checkout; nothing outside it and the user's cache folder is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# An exact version: a range would pull the newest build with gigabytes of CUDA packages.
# To use a CUDA or ROCm build that is already installed, see "On HIP, CUDA and CPU" in the README.
TORCH  ?= torch==2.13.0
PYTEST_ARGS ?=
MAKEFLAGS += --no-print-directory

.PHONY: demo test amd check venv clean docs help triton-versions
help:
	@echo "make demo   one real model, four prompts, text on the screen"
	@echo "make test   every check and every test"
	@echo "make amd    every kernel interpreted for AMD's GPUs: a quarter of an hour of one core"
	@echo "make docs   the documentation, into site/"
	@echo "make venv   the environment alone      make check   ruff, mypy, import contracts"

$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvforge needs Python 3.11 or newer: make PYTHON=python3.x " + sys.argv[1])' "$(MAKECMDGOALS)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch first: a few minutes on a new machine)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[worker,gateway,terminal,loadtest,ray,docs,dev]"
	@touch $@

venv: $(VENV)/.ready

demo: venv
	@exec $(BIN)/kvforge demo

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

docs: venv
	$(BIN)/python docs/error_catalogue.py
	$(BIN)/python docs/settings_catalogue.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# `make amd TARGETS=gfx942` for one of them.
amd: venv
	$(BIN)/python -m tests.amdgcn.suite $(if $(TARGETS),--target $(TARGETS))

# Every Triton that torch's releases bring, fetched for a look at its names (1.3 GB): see
# tests/worker/kernels/triton_names.py.
triton-versions: venv
	$(BIN)/python -m tests.worker.kernels.triton_names "$${TMPDIR:-/tmp}/kvforge-triton"

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
