# `make` prints what there is. Everything runs in .venv, which `make setup` makes.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
OLDEST  := .venv-oldest
BARE    := .venv-bare
INSTALL := -m pip --disable-pip-version-check install -qq --no-input --no-compile
PIP     := $(BIN)/python $(INSTALL)

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest check format smoke bench zoo clean

help:  ## print the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(STAMP)  ## make .venv and install everything into it, once

# torch goes first and by itself, so that pip takes the build that suits the machine. Byte code is made
# afterwards, on all cores and only of what gets imported: that saves a third of the time.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("autopar needs Python 3.10 or newer; say make PYTHON=python3.x" if sys.version_info < (3, 10) else 0)'
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch into $(VENV) (1/2)"
	@$(PIP) $$(grep '^torch==' constraints.txt)
	@echo "Installing autopar and what it needs (2/2)"
	@$(PIP) --constraint constraints.txt --editable '.[hf,notebook,integrations,test,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/(models|testing|tests)/' $(VENV)/lib || true
	@touch $@

demo: $(STAMP)  ## plan a small GPT-2, train it on four local processes, compare with one
	@$(BIN)/autopar demo

# A file of tests at a time on each core, four at most; some start up to four processes: one thread each.
PYTEST := -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test test-oldest: export OMP_NUM_THREADS ?= 1
test: $(STAMP)  ## run the tests; make test ARGS="-m 'not slow' -k fold" selects
	@$(BIN)/python $(PYTEST) $(or $(ARGS),tests)

# The lowest releases that pyproject.toml takes, each in its newest patch; they are built for Python 3.10 to 3.12.
test-oldest: $(OLDEST)/.installed  ## run the tests with the lowest versions that autopar takes, in .venv-oldest
	@$(OLDEST)/bin/python $(PYTEST) $(or $(ARGS),tests)

$(OLDEST)/.installed: pyproject.toml
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@grep -oE '"[A-Za-z_-]+>=[0-9.]+"' pyproject.toml | tr -d '"' | sed 's/>=\(.*\)/==\1.*/' >$(OLDEST)/lowest.txt
	@echo "Installing the lowest versions into $(OLDEST)"
	@$(OLDEST)/bin/python $(INSTALL) --constraint $(OLDEST)/lowest.txt --editable '.[hf,notebook,test]'
	@touch $@

check: $(STAMP)  ## what CI checks before the tests: format, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(STAMP)  ## format the code and repair what ruff can repair
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

bench: $(STAMP)  ## measure, and record under benchmarks/results/
	@$(BIN)/python -m benchmarks

zoo: $(STAMP)  ## every model under every plan against the original, recorded under benchmarks/results/
	@$(BIN)/python -m benchmarks.zoo
	@$(BIN)/python -m benchmarks.zoo_micro_batched
	@$(BIN)/python -m benchmarks.zoo_tiers
	@$(BIN)/python -m benchmarks.zoo_compiled

# The environment of somebody who only says `pip install autopar`: no extras, nothing editable, another folder.
smoke: $(STAMP)  ## build the wheel, install it without extras in .venv-bare, and try it there
	@rm -rf build dist $(BARE) && mkdir dist
	@$(BIN)/python -m build >dist/build.log 2>&1 || { cat dist/build.log; exit 1; }
	@$(PYTHON) -m venv $(BARE)
	@$(BARE)/bin/python $(INSTALL) --constraint constraints.txt dist/*.whl
	@cd $$(mktemp -d) && $(CURDIR)/$(BARE)/bin/python $(CURDIR)/.ci/smoke.py

clean:  ## remove .venv and every cache
	rm -rf $(VENV) $(OLDEST) $(BARE) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
