# Two commands matter: `make run` trains the example on two ranks, `make test` passes the tests.
# Everything lives in .venv and .meshloom below this folder; delete both to start over.

PYTHON ?= python3
# Which torch to install. Any pip requirement: TORCH='torch==2.12.0', a wheel's path, and so on.
TORCH ?= torch==2.13.0
# Further options for pip, such as where to find CPU-only or other CUDA builds.
PIP_OPTIONS ?=
# Further options for pytest, such as PYTEST_OPTIONS='-k oracle --device cuda'.
PYTEST_OPTIONS ?=
# Which tests `make test` runs: parts, system or all.
SUITE ?= parts
# Options of the chaos program; its --help names them.
CHAOS ?= --seed 7 --minutes 20 --kill-every 60
# Tests mostly wait for processes, so three at a time keep two cores busy; those of one file stay
# together (they share servers).
WORKERS ?= 3
# Where `make test-images` keeps bases, wheels and images: 10 GB, on a file system that is no overlay.
IMAGES ?= /var/tmp/meshloom-images
# Where `make test-kubernetes` keeps Kubernetes's programs: 180 MB, and more while it builds them for a quarter of an hour.
KUBERNETES ?= /var/tmp/meshloom-kubernetes
EXAMPLE ?= examples/stdlib-gpt.yaml

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_OPTIONS)
CHOICE := $(shell printf '%s' '$(TORCH) $(PIP_OPTIONS)' | cksum | cut -d' ' -f1)
RUNNABLE := .venv/.runnable-$(CHOICE)
TESTABLE := .venv/.testable-$(CHOICE)

TYPES := $(BIN)/mypy
LAYERS := $(BIN)/lint-imports --no-cache
# They start some hundred processes, each of which would compile our sources again.
TESTS = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_OPTIONS)

.DEFAULT_GOAL := help
.PHONY: help run up install test test-system test-full test-images test-kubernetes lint types layers tests chaos sbom format docs dashboard clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(RUNNABLE) ## Train the example on two ranks, from nothing to a committed checkpoint
	@$(BIN)/python -m services.local run $(EXAMPLE)

up: $(RUNNABLE) ## Keep Redis, controller, agent and dashboard running until Ctrl-C
	@$(BIN)/python -m services.local up

install: $(RUNNABLE) ## Only set up .venv

# Types and layers take a core for a minute: they run at low priority, and are printed after the tests.
test: lint ## Lint, types, layers and the tests of all parts
	@(set -x; nice $(TYPES) && nice $(LAYERS)) >.venv/checks.log 2>&1 & checks=$$!; \
	(set -x; $(TESTS) --suite=$(SUITE)); tested=$$?; \
	wait $$checks; checked=$$?; \
	cat .venv/checks.log; exit $$((tested | checked))

test-system: $(TESTABLE) ## Tests of whole stacks (clusters, several hosts, chaos, browsers, examples), and what takes long
	$(TESTS) --suite=system

test-full: SUITE = all
test-full: override PYTEST_OPTIONS += --grid=full
test-full: test ## All tests, with every cell of the engine's grid and the whole example

test-images: $(TESTABLE) ## Build the container images without an engine, and run compose's services from them
	$(BIN)/python -m pytest --images '$(IMAGES)' $(PYTEST_OPTIONS) tests/deploy

test-kubernetes: $(TESTABLE) ## Build Kubernetes's control plane from Debian's source, and run pools on it
	$(BIN)/python -m tests.pools.kube_binaries '$(KUBERNETES)'
	$(BIN)/python -m pytest --kubernetes '$(KUBERNETES)' -m kubernetes $(PYTEST_OPTIONS) tests/pools

lint: $(TESTABLE) ## Style of code and of words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/typos
	$(BIN)/proselint check README.md docs

types: $(TESTABLE) ## mypy --strict
	$(TYPES)

layers: $(TESTABLE) ## Which module may import which
	$(LAYERS)

tests: $(TESTABLE) ## Only the tests
	$(TESTS)

sbom: $(TESTABLE) ## What the images hold, as CycloneDX files in sbom/, and docs/licences.md
	$(BIN)/python -m tests.deploy.licences

chaos: $(TESTABLE) ## Long jobs with a fault each minute (CHAOS='--seed 7 --minutes 20')
	$(BIN)/python -m tests.chaos $(CHAOS)

format: $(TESTABLE) ## Format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

docs: $(TESTABLE) ## Build the documentation site into .site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dashboard: ## Rebuild the dashboard's bundle (needs Node)
	npm --prefix services/controller/dashboard ci --no-audit --no-fund
	npm --prefix services/controller/dashboard run types
	npm --prefix services/controller/dashboard run build

clean: ## Remove what this Makefile made, the jobs' checkpoints included
	rm -rf .venv .meshloom .site

$(BIN)/python:
	@echo "setting up .venv (once; torch is the large part)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Meshloom needs Python 3.11 or newer; say make PYTHON=python3.12")'
	@$(PYTHON) -m venv .venv

$(RUNNABLE): pyproject.toml constraints.txt | $(BIN)/python
	@$(PIP) '$(TORCH)' numpy
	@$(PIP) --editable '.[all]'
	@rm -f .venv/.runnable-* .venv/.testable-*
	@touch $@

$(TESTABLE): $(RUNNABLE)
	@$(PIP) --editable '.[dev]'
	@touch $@
