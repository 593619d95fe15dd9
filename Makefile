# Needs python3 (3.11 or newer) with venv, and make. Only pip uses the network.
#   make run     text from the embedded checkpoint
#   make test    lint, types, contracts and all tests
# On Linux, PyPI has torch with CUDA (gigabytes). For the CPU build:
#   make run PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
RUN_ARGS ?= --max-tokens 120
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.PHONY: run test lint unit golden xcompile nano-numbers wheel clean

run: $(VENV)/installed
	@# stdin is closed off so that a prompt is never waited for
	@$(BIN)/k3port run $(RUN_ARGS) </dev/null

test: lint unit

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# One thread per test process: more would only wait for each other.
unit: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

# After a change of kernels or profiles: rewrites the golden plans and the settings page; read the diff like code.
golden: $(VENV)/installed-dev
	$(BIN)/python -m k3port.testing.golden
	$(BIN)/python -m k3port.testing.settings_doc

# Every configuration of every Triton kernel, for every target and TP size, on the installed Triton and on the oldest one
# that kernels are written for: docs/cross-compilation.md. Takes long; results are kept in ~/.cache/k3port.
xcompile: $(VENV)/installed-dev $(VENV)/triton36/installed
	$(BIN)/python -m k3port.testing.xcompile --all --jobs $(JOBS)
	PYTHONPATH=$(VENV)/triton36 $(BIN)/python -m k3port.testing.xcompile --all --jobs $(JOBS)

# Every number that depends on the embedded checkpoint. WORK is the scratch folder of recipes/k3_nano/README.md.
nano-numbers: $(VENV)/installed-dev
	cd recipes/k3_nano && PYTHONPATH=../.. ../../$(BIN)/python evaluate.py --backend k3port_backend:load \
	  --checkpoint ../../k3port/assets/k3-nano --data $(WORK) --master $(WORK)/b/master-*.safetensors --out results.json
	$(BIN)/python recipes/k3_nano/report.py
	$(BIN)/python tests/performance/measure_cpu.py k3port/assets/k3-nano

wheel: $(VENV)/installed-dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find k3port tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than their inputs once an installation is complete, so later runs skip it.
$(VENV)/installed: $(INPUTS) | $(BIN)/python
	@echo 'installing k3port and what it needs into $(VENV)'
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(INPUTS) | $(BIN)/python
	@echo 'installing k3port and its development tools into $(VENV)'
	@$(PIP) -e ".[dev]"
	@touch $@ $(VENV)/installed

# Beside the installed Triton, not in its place: PYTHONPATH chooses it.
$(VENV)/triton36/installed: | $(BIN)/python
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(VENV)/triton36 triton==3.6.0
	@touch $@
