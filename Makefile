# `make` alone prints what can be made. Needs GNU make, Python 3.11, gcc; everything else is installed here.
SHELL        := bash
.SHELLFLAGS  := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS    += --no-builtin-rules --no-print-directory
.NOTPARALLEL:
unexport PYTHONDONTWRITEBYTECODE PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON   ?= python3.11
VENV     := .venv
BIN      := $(VENV)/bin
SCENARIO ?= scenarios/quickstart.yaml
UPGRADE  ?=
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

ACCELERATOR ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
LOCK  := requirements/$(ACCELERATOR).lock
# One stamp per state: a changed lock, or a changed pyproject.toml, names another file.
DEPS  := $(VENV)/.installed-$(ACCELERATOR)-$(shell sha256sum $(LOCK) | cut -c1-12)
SELF  := $(VENV)/.editable-$(shell sha256sum pyproject.toml | cut -c1-12)
WARM  := $(DEPS)-warm
APT   := chromium chromium-driver fonts-dejavu-core prometheus

say = @printf '==> %s\n' "$(1)"

.PHONY: help
help: ## print this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  variables: SCENARIO=$(SCENARIO)  ACCELERATOR=$(ACCELERATOR)  PYTHON=$(PYTHON)"

.PHONY: setup
setup: $(WARM) $(SELF) ## create .venv from the lock of this machine's accelerator (once per lock)
	@echo "set up: $(VENV) holds $(LOCK)"

.PHONY: run
run: setup ## predict, execute and compare SCENARIO; measures this machine first, once
	$(call say,cost profile of this machine (measured once; about 2 minutes))
	@$(BIN)/lab profile --quick --keep
	$(call say,lab run $(SCENARIO))
	@$(BIN)/lab run $(SCENARIO)

.PHONY: test
test: setup apt lint ## lint, types, and every test that takes seconds
	$(call say,tests)
	@$(BIN)/python -m pytest -m "not full"

.PHONY: test-all
test-all: setup apt lint ## the same, and the learning runs and repeats that take minutes
	$(call say,all tests)
	@$(BIN)/python -m pytest

.PHONY: lint
lint: setup ## ruff (style, imports) and mypy (strict for lab, profiles, simulator)
	$(call say,ruff)
	@$(BIN)/ruff check .
	$(call say,mypy)
	@$(BIN)/mypy

.PHONY: ui
ui: setup ## open the pages in a browser
	@$(BIN)/lab ui

.PHONY: schema
schema: setup ## write scenarios/scenario.schema.json, which editors use to complete and check scenarios
	@$(BIN)/lab schema scenarios/scenario.schema.json

.PHONY: bench
bench: setup ## how fast the simulator itself is
	@for name in speed million asynchronous network; do echo "benchmarks/$$name.py"; $(BIN)/python "benchmarks/$$name.py"; done

.PHONY: lock
lock: ## resolve requirements/*.lock anew from pyproject.toml and requirements/*.in
	@tool=$$(mktemp -d); trap 'rm -rf "$$tool"' EXIT; \
	$(PYTHON) -m venv "$$tool"; "$$tool/bin/pip" install --quiet uv; \
	resolve() { UV_FIND_LINKS="$${PIP_FIND_LINKS:-}" "$$tool/bin/uv" pip compile --quiet $(UPGRADE) \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
	  --extra exec --extra ui --extra silicon --extra dev --extra "exec-$$1" "$${@:2}" \
	  pyproject.toml "requirements/$$1.in" --output-file "requirements/$$1.lock" >/dev/null; }; \
	without="--no-emit-package torchvision --no-emit-package torchaudio --no-emit-package torchcodec"; \
	without="$$without --no-emit-package triton"; \
	resolve cpu $$without || resolve cpu --torch-backend cpu $$without; \
	resolve gpu; \
	git --no-pager diff --stat -- requirements || true

.PHONY: clean
clean: ## remove .venv and caches; keeps runs/ and the profiles in your data directory
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Some tests drive a system Chromium, some a Prometheus (whose service is not started: RUNLEVEL=1). Without root: say how
# to get them, and go on.
.PHONY: apt
apt:
	@missing=$$(for name in chromium prometheus; do command -v $$name >/dev/null || printf ' %s' $$name; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "no$$missing: their tests are skipped. To get it: sudo apt-get install -y $(APT)"; exit 0; fi; \
	echo "==> apt-get install $(APT)   (browser and Prometheus tests)"; export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
	if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends $(APT); } >/dev/null; then \
	  echo "apt-get failed: their tests are skipped. To try again: apt-get install -y $(APT)"; fi

# ---------------------------------------------------------------- how .venv comes to be

$(BIN)/python:
	$(call say,$(VENV): a new environment with $(PYTHON))
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) on the path; make setup PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "$(PYTHON) is no Python 3.11, which the locks are for; make setup PYTHON=..."; exit 1; }
	@if ! $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	  line="apt-get install -y python3.11-venv"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -qq && $$line; \
	  else echo "this Python cannot make environments. To fix it: sudo $$line"; exit 1; fi; fi
	@$(PYTHON) -m venv $(VENV)

# torch first and alone: its CPU build may have to come from PyTorch's own index.
$(DEPS): | $(BIN)/python
	$(call say,installing $(LOCK) ($(shell grep -c == $(LOCK)) packages: minutes and gigabytes; log in $(VENV)/install.log))
	@if compgen -G "$(VENV)/.installed-*" | grep -qv "/.installed-$(ACCELERATOR)-"; then \
	  echo "$(VENV) is for another accelerator: starting anew"; $(PYTHON) -m venv --clear $(VENV); fi
	@torch=$$(grep '^torch==' $(LOCK)); \
	$(BIN)/pip install --quiet --no-deps "$$torch" 2>$(VENV)/torch.log \
	  || { echo "$$torch is not on the configured index; trying $(TORCH_CPU_INDEX)"; \
	       $(BIN)/pip install --quiet --no-deps --index-url $(TORCH_CPU_INDEX) "$$torch" \
	         || { cat $(VENV)/torch.log; exit 1; }; }
	@$(BIN)/pip install --no-deps --progress-bar off -r $(LOCK) 2>&1 | tee $(VENV)/install.log \
	  | awk '/^(Collecting|Processing|Requirement)/ && ++n % 25 == 0 {print "    " n " of $(shell grep -c == $(LOCK))"; fflush()} \
	         /^Installing collected/ {print "    unpacking and compiling"; fflush()}' \
	  || { tail -30 $(VENV)/install.log; exit 1; }
	@rm -f $(VENV)/.installed-* $(VENV)/.editable-*
	@touch $@

$(SELF): $(DEPS)
	$(call say,installing this project: the lab command)
	@$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@rm -rf build; rm -f $(VENV)/.editable-*
	@touch $@

$(WARM): | $(SELF)
	$(call say,warming caches: the first import of torch and the engine takes a while)
	@$(BIN)/lab doctor --warm
	@touch $@
