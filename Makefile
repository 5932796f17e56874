# Every target sets up what it needs. `make X PY=python3` skips set-up and uses that Python as it is:
# for GPU machines that have torch, triton and pytest, and no package index.

TORCH := torch==2.13.0
NUMPY := numpy<2.4# Triton 3.6's interpreter cannot run loops with a runtime bound under numpy 2.4
TRITON := triton==3.6.0
CUPTI := nvidia-cuda-cupti==13.0.85# the library that reads hardware counters, and names them for chips that are not here
OLDEST_TRITON := 3.5.0
NEWEST_TRITON := 3.9.0

VENV := .venv
ifdef PY
READY :=
PYTHON := PYTHONPATH=.:kernels $(PY)
else
READY := $(VENV)/ready
PYTHON := $(VENV)/bin/python
endif

PYTEST := $(PYTHON) -m pytest
DEPENDENCIES := import tomllib; \
	print(*(line for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"] \
	if not line.startswith(("torch", "triton"))))

.DEFAULT_GOAL := help
.PHONY: help setup sweep test check fix gpu wheel unit interpreter offline tables other-tritons

help:
	@echo 'make setup         make .venv: torch, triton, the project and its tools (the other targets do this themselves)'
	@echo 'make sweep         tune the default layer on this GPU; without a GPU, replay recorded trials (ARGS="--model ...")'
	@echo 'make test          everything that needs no GPU: check, unit, interpreter, offline, tables'
	@echo 'make check         ruff, pyright, import-linter'
	@echo 'make fix           let ruff repair and format'
	@echo 'make gpu           the GPU tests'
	@echo 'make wheel         build the wheel into dist/'
	@echo 'make other-tritons the offline tests under the oldest and the newest supported Triton'
	@echo 'Add PY=python3 to any of them to skip set-up and use that Python.'

setup: $(VENV)/ready

# The pins go in first and without dependencies, so that neither torch nor the project replaces them.
$(VENV)/ready: pyproject.toml Makefile
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'moetune needs Python 3.11 or newer as python3: install it, or use `make X PY=/path/to/python`.' >&2; exit 3; }
	@python3 -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'python3 cannot make virtual environments here: run `apt-get install python3-venv`.' >&2; exit 3; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
		{ echo 'Triton needs a C compiler to launch kernels on a GPU: run `apt-get install gcc python3-dev`.' >&2; \
		test ! -e /dev/nvidiactl || exit 3; }
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)/bin/python -m pip install --quiet '$(TORCH)' '$(NUMPY)'
	$(VENV)/bin/python -m pip install --quiet --no-deps '$(TRITON)' '$(CUPTI)'
	$(VENV)/bin/python -m pip install --quiet '$(NUMPY)' $$($(VENV)/bin/python -c '$(DEPENDENCIES)') --group dev
	$(VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

sweep: $(READY)
	$(PYTHON) -m moetune sweep $(ARGS)

test: check unit interpreter offline tables

check: $(READY)
	$(PYTHON) -m ruff check --quiet .
	$(PYTHON) -m ruff format --quiet --check .
	$(PYTHON) -m pyright --pythonpath $$(command -v $(or $(PY),$(VENV)/bin/python))
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

fix: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# Three processes: a function that Triton's interpreter has wrapped can no longer be compiled.
unit: $(READY)
	$(PYTEST) tests --ignore=tests/interpreter --ignore=tests/offline --ignore=tests/gpu

interpreter: $(READY)
	TRITON_INTERPRET=1 $(PYTEST) tests/interpreter

offline: $(READY)
	$(PYTEST) tests/offline

gpu: $(READY)
	$(PYTEST) -m gpu tests/gpu

tables: $(READY)
	$(PYTHON) -m moetune check tuned_configs

wheel: $(READY)
	$(PYTHON) -m build --wheel --no-isolation --outdir dist .

# A second Triton lies in a folder of its own, ahead of the pinned one on the path; torch stays shared.
other-tritons: offline-with-$(OLDEST_TRITON) offline-with-$(NEWEST_TRITON)

offline-with-%: $(READY)
	test -d $(VENV)/triton-$*/triton || \
		$(VENV)/bin/python -m pip install --quiet --no-deps --target $(VENV)/triton-$* triton==$*
	PYTHONPATH=$(CURDIR)/$(VENV)/triton-$* TRITON_CACHE_DIR=$(CURDIR)/.triton-cache/$* EXPECTED_TRITON=$* $(PYTEST) tests/offline
