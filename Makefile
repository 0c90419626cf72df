# The two commands of a newcomer: `make quickstart` and `make test`. Each sets up .venv/ first, where it is not there yet.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=

.PHONY: quickstart site monitoring test test-all simulate soak fuzz check lint extras sglang vllm bench bench-shapes bench-learning bench-memory gpu-check gpu-wheels clean

quickstart: $(STAMP)
	$(BIN)/python -m areal_rloo.launcher.local --config quickstart.yaml $(ARGS)

PYTEST := $(BIN)/python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder

test: $(STAMP)  # all that needs no cluster, no server of an engine and no C++ compiler: 20 to 35 minutes on two cores
	$(PYTEST) -m 'not full and not rare' $(ARGS)

test-all: $(STAMP)  # everything; a test skips if its cluster, server or extra is missing
	$(PYTEST) $(ARGS)

SCHEDULES ?= 100000
simulate: $(STAMP)  # searches schedules of messages and faults for one that breaks the protocol; minutes on two cores
	cd tests && ../$(BIN)/python -m simulation.search --schedules $(SCHEDULES) $(ARGS)

soak: MINUTES ?= 5
fuzz: MINUTES ?= 1
SEED ?=
soak: $(STAMP)  # a real run under random faults; the last line counts the damage, which is 0. Linux only
	$(BIN)/python tests/chaos/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: $(STAMP)  # bytes that break a boundary, a minute for each; needs atheris, which make extras installs
	$(BIN)/python tests/fuzz/fuzz.py --minutes $(MINUTES) $(ARGS)

check: lint
	$(BIN)/python -m pytest -q tests/project

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py
	$(BIN)/lint-imports

extras: $(STAMP)  # for tests of the hub, reasoning-gym, adapters, MCP, Ray and trackers, which skip without it, and for make fuzz
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,data,fuzz,mcp,mlflow,peft,ray,rg,tensorboard,wandb]'

sglang:  # a real SGLang server without a GPU, for trying it out and for its tests, which skip without it
	PYTHON=$(PYTHON) tests/sglang/install.sh

vllm:  # a real vLLM server without a GPU, likewise
	PYTHON=$(PYTHON) tests/vllm/install.sh

bench: $(STAMP)  # 15 minutes on two quiet cores: ratios to named alternatives, in benchmarks/results/
	$(BIN)/python -m benchmarks $(ARGS)

bench-shapes: $(STAMP)  # an hour on two cores, 13 GiB of memory
	$(BIN)/python -m benchmarks.generation_shapes

bench-learning: $(STAMP)
	$(BIN)/python -m benchmarks.staleness
	$(BIN)/python -m benchmarks.algorithms

bench-memory: $(STAMP)  # eleven minutes: memory of all processes, healthy and with either half 100 times slower
	$(BIN)/python -m benchmarks.memory

# Needs no .venv/: a machine with a GPU may have no network, but has torch. docs/gpu.md describes both.
gpu-check:  # 20 minutes on one GPU; results in benchmarks/results/gpu/
	$(or $(wildcard $(BIN)/python),$(PYTHON)) benchmarks/gpu_check.py $(ARGS)

gpu-wheels:  # the packages that a machine with torch and without a network lacks; ARGS='--python 3.12'
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_wheels $(ARGS)

site: $(STAMP)  # the documents as web pages in build/site; a broken link is an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[site]'
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs/site . build/site $(ARGS)

PORT ?= 9090
monitoring:  # Prometheus for all runs of this clone, at http://127.0.0.1:9090; or PORT=9091
	prometheus --config.file=launcher/monitoring/prometheus/prometheus.yml --storage.tsdb.path=runs/prometheus \
		--web.listen-address=127.0.0.1:$(PORT) $(ARGS)

clean:
	rm -rf .venv .venv-sglang .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
