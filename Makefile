# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two processes of one thread each; the tests of a file stay together.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.PHONY: install test lint coverage docs screenshot dist demo base-model bench clean

install: $(READY)  ## into .venv; then `. .venv/bin/activate` puts `sdmlm` on the path

test: lint docs  ## lint, the documentation site, and every test: the code of the pages, the examples of docstrings, the wheel
	$(PYTEST)

lint: $(READY)  ## ruff; mypy, strict over the code and lenient over the tests; the order of the packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests

coverage: $(READY)  ## the tests with a report of the lines they run; apart from `test`, which it would slow down
	$(PYTEST) --cov --cov-report=term --cov-report=html:runs/coverage

docs: $(READY)  ## the documentation site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

screenshot: $(READY)  ## docs/images/page.png, from the model that `make demo` left; needs chromium
	$(BIN)/python docs/make_screenshot.py runs/demo

dist: $(READY)  ## source distribution and wheel, into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

demo: $(READY)  ## an SDM language model is trained and asked, in minutes; writes runs/demo/
	$(BIN)/sdmlm demo

base-model: $(READY)  ## trains the demo's base model anew, from scratch; replaces src/sdmlm/demo/base/
	OMP_NUM_THREADS=1 $(BIN)/python -m sdmlm.demo.base_model

bench: $(READY)  ## speed and memory as ratios; writes benchmarks/results/
	$(BIN)/python benchmarks/estimator.py  # benchmarks/training.py needs a model and sentences: see its text

clean:
	rm -rf .venv build dist site src/*.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'setuptools>=77' -e '.[lm,serve,parquet,faiss,dev,docs]'
	touch $@
