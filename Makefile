# Everything a newcomer needs: `make train` trains the nano K3 and samples from it, `make test` runs the tests.
# Both set up .venv first. Any Python >= 3.12 that really runs is good enough.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv train sample test test-oldest test-all lint format types notebooks docs docs-serve tokenizer clean

help:
	@echo "make train     train the nano K3 on Python's own source files and sample from it (ARGS='--train.steps 100')"
	@echo "make sample    generate from the last run (ARGS='--prompt \"class \"')"
	@echo "make test      lint, types, tests and notebooks, under 15 minutes on 2 cores"
	@echo "make test-oldest  the kernels again, on the oldest jax that pyproject.toml admits, under 3 minutes"
	@echo "make test-all  the same with soaks and training acceptances"
	@echo "make docs      the documentation, built into site/ (make docs-serve shows it while you write)"
	@echo "make lint | format | types | notebooks | clean"

venv: $(STAMP)

# pyenv's shims exist but refuse to run without a chosen version, so every candidate is tried by running it.
$(STAMP): constraints.txt
$(STAMP): PACKAGES := -e '.[test]'
$(OLDEST_STAMP): constraints-oldest.txt
$(OLDEST_STAMP): PACKAGES := -e . hypothesis pytest pytest-xdist
$(STAMP) $(OLDEST_STAMP): pyproject.toml
	@set -e; \
	for python in python3.13 python3.12 python3 "$$(pyenv root 2>/dev/null)"/versions/3.1[2-9]*/bin/python3; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo "k3jax needs Python 3.12 or newer; none of python3.13, python3.12, python3 is" >&2; exit 1; fi; \
	echo "setting up $(@D) with $$("$$found" --version)"; \
	"$$found" -m venv $(@D); \
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(filter constraints%,$^) $(PACKAGES); \
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

# What leans on Pallas most, on the jax at the lower bound of pyproject.toml; `make test` runs the newest. Listed by name,
# so that a test that is renamed is missed aloud.
test-oldest: $(OLDEST_STAMP)
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS) @tests/kernels.txt

test-all: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal tests $(ARGS)
	$(MAKE) notebooks

notebooks: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal --nbmake --nbmake-timeout=600 notebooks

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# warnings are errors, and a page that loads anything from another host is one too
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@! grep -rlE '<(script|link|img|iframe)[^>]*(src|href)="?(https?:)?//' --include='*.html' site

docs-serve: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) $(OLDEST) site .cache .pytest_cache .ruff_cache
