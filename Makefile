# The two commands: `make demo` runs the main job, `make test` the whole suite.
# Each sets up what it needs. PACELINE_TORCH_INDEX names a package index of torch's CPU builds
# (empty: a folder of wheels that pip's find-links names, else the default index's build).
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PACELINE_TORCH_INDEX PYTHON
LOCKS := $(patsubst %,requirements/%.lock,base train flows stores control hf lora eval sweeps gpu dev torch)
UV := $(shell command -v uv || echo $(BIN)/uv)
# Imports without bytecode are two to three times slower; some environments switch it off.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-services demo test test-nightly journeys gpu check format bench bench-links peers chaos schemas docs lock screenshots wheel release clean distclean

help:
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(VENV)/.ready ## install Paceline and its locked dependencies into .venv

$(VENV)/.ready: $(wildcard requirements/*) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "paceline needs Python 3.11 or later: got $$($(PYTHON) --version); set PYTHON=python3.11"; exit 2; }
	requirements/install.sh $(VENV) $(LOCKS)
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --offline -e .
	$(BIN)/python -m compileall -q src flows tasks
	@touch $@

setup-services: ## add Debian's servers and browser for the tests that use them (root)
	@test "$$(id -u)" = 0 || { echo "setup-services needs root (apt-get)"; exit 2; }
	@deployments/setup-services.sh

demo: setup ## bucket → relay → verify → train → evaluate → promote → roll out, on this machine
	@$(BIN)/paceline demo $(ARGS)

test: setup ## every promise once
	$(BIN)/python -m pytest $(ARGS)

test-nightly: setup ## the tests that show a promise again on slower, larger or rarer ways
	$(BIN)/python -m pytest -m 'nightly and not chaos' -n $$(nproc) $(ARGS)

journeys: setup ## what the guide has a user type, on hosts that share nothing (root)
	PACELINE_JOURNEY_MB=400 $(BIN)/python -m pytest -m "" -n 1 tests/journeys $(ARGS)

gpu: setup ## what needs an NVIDIA GPU: skipped where there is none
	$(BIN)/python -m pytest -m gpu tests/gpu $(ARGS)

check: setup ## what CI checks before the tests: format, lint, types, import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## every benchmark, results in benchmarks/results/
	@mkdir -p benchmarks/results
	@for each in $(filter-out benchmarks/link_bound.py benchmarks/one_relay.py,$(wildcard benchmarks/*.py)); do \
	  echo "== $$each"; $(BIN)/python $$each || exit 1; done

bench-links: setup ## one relay on fast links, then Paceline and its peers on limited ones (root; an hour)
	$(BIN)/python benchmarks/one_relay.py
	$(BIN)/python benchmarks/link_bound.py --hosts 8 16 32 --rate 50 50 25 --seconds 60 60 120 --budget-s 3600 $(ARGS)
	$(BIN)/python benchmarks/link_bound.py --plot benchmarks/results/link_bound.json

peers: .venv-peers/.ready ## the trainers that benchmarks compare with, in .venv-peers

.venv-peers/.ready: benchmarks/peers/requirements-training.lock
	requirements/install.sh .venv-peers $< requirements/torch.lock
	@touch $@

chaos: setup ## the long fault runs
	$(BIN)/python -m pytest -m chaos $(ARGS)

schemas: setup ## write docs/schemas anew from the records
	$(BIN)/python -m paceline.schemas.json_schemas docs/schemas

docs: setup ## the documentation's site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

screenshots: setup ## take the pictures in docs/screenshots anew (Chromium)
	PACELINE_REQUIRE=services PACELINE_SCREENSHOTS=docs/screenshots $(BIN)/python -m pytest -m "" -n 0 tests/telemetry/test_fleet_page_pictures.py tests/integration/test_ways_in.py -k "desk_and_a_phone or presses_run or fills_prefects_form"
	$(BIN)/python -c 'import sys; from PIL import Image; [Image.open(p).convert("RGB").quantize(256).save(p, optimize=True) for p in sys.argv[1:]]' docs/screenshots/*.png

lock: setup ## write requirements/*.lock anew: today's versions, or the newest with ARGS=--upgrade
	UV=$(UV) $(BIN)/python requirements/write_locks.py $(ARGS)

wheel: setup ## build dist/paceline-*.whl, what nodes and container images install
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir dist .

release: setup ## from a tag vX.Y.Z: dist/ with wheel, sdist, SBOM and their SHA-256
	$(BIN)/python deployments/release.py

clean: ## remove caches and results
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist benchmarks/results
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## also remove the environment
	rm -rf $(VENV)
