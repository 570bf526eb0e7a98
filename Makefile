# Everything starts here: `make pretrain` and `make test` need Python, git and make, nothing else.
#
# .venv is made with python3 and holds the versions of constraints.txt. An interpreter that you name (PYTHON=...) or an
# environment that is active (VIRTUAL_ENV, CONDA_PREFIX) is used instead: its torch stays as it is, and only what
# is missing is installed, so that a GPU machine keeps its own build of torch.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv pretrain test lint types

ifneq ($(filter command environment override,$(firstword $(origin PYTHON))),)
  PY := $(PYTHON)
else ifneq ($(filter-out $(CURDIR)/.venv,$(VIRTUAL_ENV)),)
  PY := $(VIRTUAL_ENV)/bin/python
else ifneq ($(and $(CONDA_PREFIX),$(if $(VIRTUAL_ENV),,yes)),)
  PY := $(CONDA_PREFIX)/bin/python
endif

ifdef PY
  PREFIX := $(shell $(PY) -c 'import sys; print(sys.prefix)')
  ifeq ($(PREFIX),)
    $(error $(PY) does not run; give another PYTHON, or leave the environment)
  endif
  STAMP := .stamps/$(subst /,_,$(PREFIX))
else
  PY := .venv/bin/python
  STAMP := .venv/.installed
endif

help:  ## print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null \
	  || sed -n 's/^\([a-z]*\):.*## /make \1   /p' $(MAKEFILE_LIST)

venv: $(STAMP)  ## install what the other targets need, once

pretrain: $(STAMP)  ## train a small Llama under a heterogeneous strategy: hetero-megatron pretrain recipes/quickstart.yaml
	$(PY) -m hetero_megatron pretrain recipes/quickstart.yaml

test: lint types  ## lint, check types, run all tests
	$(PY) -m pytest -q

lint: $(STAMP)  ## check style
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)  ## check types
	$(PY) -m mypy

.venv/.installed: setup.py constraints.txt
	python3 -m venv .venv
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# Also when the environment was made anew since.
.stamps/%: setup.py constraints.txt .ci/constraints.py $(wildcard $(PREFIX)/pyvenv.cfg)
	@mkdir -p .stamps
	$(PY) .ci/constraints.py constraints.txt > $@.constraints
	$(PY) -m pip install --quiet -c $@.constraints -e '.[dev]'
	@touch $@
