PYTHON ?= python3

BIN := .venv/bin
USE := .venv/.installed
DEV := .venv/.installed-dev

.PHONY: demo test check lint dev

## Tune an example, then train it with what was found.
demo: $(USE)
	$(BIN)/advisor tune examples/conv.py --shape 64x3x256x256 --effort quick
	$(BIN)/python examples/train_conv.py

## Run the tests.
test: $(DEV)
	$(BIN)/python -m pytest

## Everything that CI checks.
check: lint test

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p advisor
	$(BIN)/lint-imports

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
