# Two commands do everything, set-up included: make demo, make test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-all reliability lint clean

demo: $(VENV)/.installed
	$(BIN)/python scripts/demo.py

test: $(VENV)/.installed-test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q --durations=15 -m "not slow"

# what takes long: kernels in Triton's interpreter, compilers, a browser, whole commands
test-slow: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q --durations=15 -m slow

test-all: test test-slow

# see docs/reliability.md: code, files and runs broken on purpose; about half an hour
reliability: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python scripts/mutants.py --jobs 2
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py
	OMP_NUM_THREADS=1 $(BIN)/python scripts/soak.py

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist *.egg-info outputs
