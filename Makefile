# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: install test lint demo base-model bench clean

install: $(READY)  ## into .venv; then `. .venv/bin/activate` puts `sdmlm` on the path

test: lint  ## lint, then every test, in two processes of one thread; the tests of a file stay together
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(READY)  ## an SDM language model comes to life, in minutes; writes runs/demo/
	$(BIN)/sdmlm demo

base-model: $(READY)  ## trains the demo's base model anew, from scratch; replaces src/sdmlm/demo/base/
	OMP_NUM_THREADS=1 $(BIN)/python -m sdmlm.demo.base_model

bench: $(READY)  ## speed and memory as ratios; writes benchmarks/results/
	$(BIN)/python benchmarks/estimator.py  # benchmarks/training.py needs a model and sentences: see its text

clean:
	rm -rf .venv build src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lm,serve,parquet,faiss,dev]'
	touch $@
