# What people and CI call. Everything needs only python3 (3.11 or newer) and make; `setup` gets the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Where all is installed a demo needs nothing more.
DEMO_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.ready-demo)
MAN_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.ready-man)
DOCS_READY := $(VENV)/.ready-docs
# So many tests at a time, more than cores as many of them wait; 0 for all in one process.
WORKERS ?= 4
RUNS ?= 10
PYTEST := scripts/pytest.sh $(BIN)/python $(WORKERS)
# Benches that need root are left out for others.
BENCHES := launch fork fork_fallbacks restarts rendezvous kill ckpt compile env_key report \
    $(if $(filter 0,$(shell id -u)),hosts env pressure image peers start warm zero)

# Tests see what a fresh shell has, whatever this one sets.
unexport PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONWARNINGS

.PHONY: setup demo demo-setup test campaign soak check lint rewritten bench bench-guard man docs record-parity clean

setup: $(READY)  ## make .venv with all that tests and benches need

$(READY): pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh

$(VENV)/.ready-demo: pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh demo

$(VENV)/.ready-man: pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh man

$(VENV)/.ready-docs: pyproject.toml scripts/setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh docs

demo-setup: $(DEMO_READY)  ## install an environment, then restore it: two starts, stage by stage
	@$(BIN)/python scripts/demo_setup.py

demo: $(DEMO_READY)  ## train a small model on two ranks, lose one, restart, resume
	@$(BIN)/python scripts/demo.py

test: setup  ## all that CI runs
	@$(MAKE) --no-print-directory -j2 lint rewritten
	$(PYTEST)

campaign: setup  ## each case of each test, for an hour and more: daily, and before a release
	@$(MAKE) --no-print-directory -j2 lint rewritten
	BOOTSEER_CAMPAIGN=full PYTEST_LIMIT_S=21600 $(PYTEST) --record-durations out/durations.jsonl

soak: setup  ## whole runs in a row (RUNS=10): 2 to 6 workers in turn, in another order each time
	@for run in $$(seq $(RUNS)); do \
	    echo "== run $$run of $(RUNS): $$((2 + run % 5)) workers, order $$run"; \
	    scripts/pytest.sh $(BIN)/python $$((2 + run % 5)) -q --random-order-bucket=class --random-order-seed=$$run || exit; \
	done

check: lint  ## about five minutes, no system package
	$(PYTEST) -m "not system and not slow"

lint: setup  ## style, types, and which package may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

rewritten: setup  # pytest's own bytecode of the tests, made once beside the slow lint: each worker would make all of it
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true

bench: setup  ## all benches, each with its JSON in out/, then checked against its targets
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@failed=; for name in $(BENCHES); do \
	    echo "== $$name"; \
	    $(BIN)/python -m bench $$name --json out/$$name.json && $(BIN)/python -m bench check out/$$name.json \
	        || failed="$$failed $$name"; \
	done; if [ -n "$$failed" ]; then echo "not as they should be:$$failed"; exit 1; fi

# Ten minutes, with nothing beside it: is this code as fast as the last tag's, or that of AGAINST=COMMIT?
bench-guard: setup  ## this code against that of the last tag: launch, restart, environment, rendezvous
	$(BIN)/python -m bench guard $(if $(AGAINST),--against $(AGAINST)) --json out/guard.json
	$(BIN)/python -m bench check out/guard.json

man: $(MAN_READY)  ## man pages and completions of shells, in share/
	@$(BIN)/python scripts/man.py share

docs: $(DOCS_READY)  ## the site of docs/, in out/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir out/site

record-parity: setup  ## record what torchrun does, the pinned one or TORCH=x, for the parity suite
	$(BIN)/python -m tests.parity.record $(if $(TORCH),--missing --torch $(TORCH))
	$(BIN)/python -m tests.parity.options_of $(or $(TORCH),$$($(BIN)/python -c "from importlib import metadata; print(metadata.version('torch').partition('+')[0])"))

clean:  ## remove what can be made again
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
