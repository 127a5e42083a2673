# `make train` and `make test` need nothing but Python 3.11 or later: each makes .venv when it is
# missing and installs exactly what the lock files say. PYTHON=… chooses another Python.

ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	$$p -c '$(ENOUGH)' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
CORE := .venv/.core-installed
TEST := .venv/.test-installed
DOCS := .venv-docs/.installed
# What `make check` runs, without the tests marked slow. Chosen by measuring: each takes well under a second.
FAST := $(addprefix tests/,blocks cli functions graph networks plan strategies \
	$(addprefix replay/test_replay_,input.py limiter.py numbers.py trees.py) \
	$(addprefix docs/test_,contributing.py page_links.py site.py) test_door.py test_imports.py)
RESOLVE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-emit-index-url --custom-compile-command "make lock"
COMPILE = $(RESOLVE) pyproject.toml

.PHONY: help train test check lint format docs bench lock clean

help:
	@echo "make train   train PPO on CartPole-v1 until it is solved (ARGS=… adds options)"
	@echo "make test    lint, types, the import check and all tests"
	@echo "make check   lint, types, the import check and the fast tests, in about two minutes"
	@echo "make lint    lint and types only"
	@echo "make format  formats the code and fixes what the linter can"
	@echo "make docs    builds the documentation as a site, site/html/index.html"
	@echo "make bench   the measurements of benchmarks/RESULTS.md (ARGS=… adds options)"
	@echo "make lock    resolve the lock files again from pyproject.toml"
	@echo "make clean   remove .venv and every cache; runs/ is kept"

train: $(CORE)
	@$(BIN)/dovetail train ppo --env CartPole-v1 --until 475 $(ARGS)

test: lint
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

check: lint
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(FAST) $(ARGS)

lint: $(TEST)
	@$(BIN)/ruff check --quiet --output-format concise . && $(BIN)/ruff format --check --quiet . || \
		{ echo "Lint: run 'make format' and look at what is left."; exit 1; }
	@$(BIN)/pyright --pythonpath $(BIN)/python

format: $(TEST)
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

docs: $(DOCS)
	@$(PYTHON) tools/site.py site/pages
	@.venv-docs/bin/zensical build --strict --clean
	@echo "The site is in site/html/index.html."

bench: $(CORE)
	@$(PYTHON) benchmarks/run.py $(ARGS)

lock:
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(COMPILE) --extra test --output-file requirements-test.lock
	$(COMPILE) --constraint requirements-test.lock --output-file requirements.lock
	$(COMPILE) --extra ray --constraint requirements-test.lock --output-file deploy/requirements.lock
	$(RESOLVE) --group docs --constraint requirements-test.lock --output-file docs/requirements.lock

clean:
	rm -rf .venv .venv-docs .pytest_cache .ruff_cache .hypothesis .cache dist site
	find dovetail tests benchmarks examples tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): requirements.lock pyproject.toml tools/install.py
	@$(call install,requirements.lock)
	@touch $@

$(TEST): requirements-test.lock pyproject.toml tools/install.py
	@$(call install,requirements-test.lock)
	@touch $@ $(CORE)

$(DOCS): docs/requirements.lock tools/install.py
	@$(call install,docs/requirements.lock,.venv-docs)
	@touch $@

define install
if [ -z "$(PYTHON)" ]; then \
	echo "Dovetail needs Python 3.11 or later, and none is on the PATH: install one, or name it: make PYTHON=/path/to/python3."; \
	exit 2; fi; \
$(PYTHON) -c '$(ENOUGH)' || { \
	echo "$(PYTHON) is older than Python 3.11: name a later one: make PYTHON=/path/to/python3."; exit 2; }; \
$(PYTHON) tools/install.py $(or $(2),.venv) $(1)
endef
