PYTHON ?= python3
MUTANTS ?= 300
SEED ?= 10

BIN := .venv/bin
USE := .venv/.installed
DEV := .venv/.installed-dev
MUT := .venv/.installed-mutants

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
RUN := $(BIN)/python examples/train_mnist_plain.py --samples 4096 --epochs 1000

.PHONY: demo test test-all check lint mutants dev

## Tune the run of an ordinary script, then compare it with the original.
demo: $(USE)
	$(BIN)/advisor tune --effort quick --budget 90s -- $(RUN)
	$(BIN)/python examples/compare_run.py $(RUN)

## Run the tests on two cores. A file's tests share fixtures, so a file stays with one process; in
## file order, because otherwise the longest files come last. What is imported, and what pytest makes
## of the tests, is compiled once, whatever the caller's shell says: all processes read it.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: $(DEV)
	$(PYTEST)

## Also the tests marked long: Inductor, a Ray cluster, thousands of made-up requests.
test-all: $(DEV)
	$(PYTEST) -m "long or not long"

## Everything that CI checks.
check: lint test

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p advisor
	$(BIN)/lint-imports
	$(BIN)/python tests/ceilings.py

## Do the tests notice? A sample of MUTANTS mutants, 0 for all of them (hours): tests/mutants.md.
mutants: $(MUT)
	rm -rf .mutants && mkdir .mutants
	cp -RL advisor tests examples README.md pyproject.toml .mutants
	cd .mutants && ../$(BIN)/python tests/mutate.py $(MUTANTS) $(SEED)

## Only set up the environment for development.
dev: $(DEV)

# pip, not python: where python3-venv is missing, a failed attempt leaves python alone behind.
$(BIN)/pip:
	$(PYTHON) -m venv .venv

$(USE): pyproject.toml | $(BIN)/pip
	$(BIN)/pip install -e .
	touch $@

$(DEV): pyproject.toml | $(BIN)/pip
	$(BIN)/pip install -e ".[dev]"
	touch $(USE) $@

$(MUT): $(DEV)
	$(BIN)/pip install -e ".[mutants]"
	touch $@
