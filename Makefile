# make run   sets up .venv and executes every notebook with papermill
# make test  sets up .venv, lints, type-checks, runs pytest and nbval
# make sweep PRESET=laptop JOBS=2   trains whatever records are missing

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PRESET ?= laptop
JOBS ?= 2
NOTEBOOKS := $(sort $(wildcard notebooks/[0-9]*.ipynb))

.PHONY: run test sweep lint clean

# The stamp is newer than pyproject.toml exactly when the pinned packages are installed.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

run: $(VENV)/.installed
	$(BIN)/python -m sinkutils run --preset $(PRESET)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --nbval --nbval-cell-timeout=1200 --nbval-sanitize-with notebooks/nbval_sanitize.cfg $(NOTEBOOKS)

sweep: $(VENV)/.installed
	$(BIN)/python -m sinkutils sweep --preset $(PRESET) --jobs $(JOBS)

clean:
	rm -rf $(VENV) build *.egg-info
