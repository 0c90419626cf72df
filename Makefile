# Everything a newcomer needs. Each target sets up .venv/ first, and is quick when it is there already.
#   make quickstart                                  a whole asynchronous run on this machine, in minutes
#   make quickstart ARGS="run.seed=1 --dry-run"      the same with overrides
#   make test | check | bench | clean

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
ARGS ?=
TESTS ?= tests

.PHONY: help quickstart test check bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

quickstart: $(INSTALLED)
	$(PY) -m areal_rloo.launcher.local --config quickstart.yaml $(ARGS)

test: $(INSTALLED)
	$(PY) -m pytest $(TESTS)

check: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) -m pytest -q tests/project

bench: $(INSTALLED)
	set -e; for bench in benchmarks/*.py; do echo "== $$bench"; $(PY) $$bench $(ARGS); done

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf $(VENV)

# The versions of constraints.txt are the ones the tests passed with. The build runs outside pip's isolation, so that
# the build tools are pinned too.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is missing or older than 3.11; install Python 3.11 or newer," \
		"or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) \
		|| { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment;" \
		"install its venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 2; }
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt hatchling editables
	$(PY) -m pip install --disable-pip-version-check -q -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
