# Everything a newcomer needs: `make train` trains the nano K3 and samples from it, `make test` runs the tests.
# Both set up .venv first. Any Python >= 3.12 that really runs is good enough.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv train sample test test-all lint format types notebooks tokenizer clean

help:
	@echo "make train     train the nano K3 on Python's own source files and sample from it (ARGS='--train.steps 100')"
	@echo "make sample    generate from the last run (ARGS='--prompt \"class \"')"
	@echo "make test      lint, types, tests and notebooks, under 15 minutes on 2 cores"
	@echo "make test-all  the same with soaks and training acceptances"
	@echo "make lint | format | types | notebooks | clean"

venv: $(STAMP)

# pyenv's shims exist but refuse to run without a chosen version, so every candidate is tried by running it.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	for python in python3.13 python3.12 python3 "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python3; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo "k3jax needs Python 3.12 or newer; none of python3.13, python3.12, python3 is" >&2; exit 1; fi; \
	echo "setting up $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'; \
	touch $@

train: $(STAMP)
	$(BIN)/python train.py configs/nano.py $(ARGS)

sample: $(STAMP)
	$(BIN)/python -m k3jax.generate runs/nano $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/pyrefly check

# two workers on two cores; XLA's own threads would only get in each other's way
test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests $(ARGS)
	$(MAKE) notebooks

test-all: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal tests $(ARGS)
	$(MAKE) notebooks

notebooks: $(STAMP)
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=600 notebooks

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
