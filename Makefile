# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: test lint demo bench clean

test: lint  ## lint, then every test
	$(BIN)/python -m pytest -q

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(READY)  ## a first look, under a minute; writes runs/demo/
	$(BIN)/sdmlm demo

bench: $(READY)  ## speed and memory as ratios; writes benchmarks/results/
	$(BIN)/python benchmarks/estimator.py  # benchmarks/training.py needs a model and sentences: see its text

clean:
	rm -rf .venv runs build src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lm,serve,parquet,faiss,dev]'
	touch $@
