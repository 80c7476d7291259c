# Two commands do everything on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BROWSER := $(VENV)/.installed-browser
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM := false
export PYTHONWARNINGS := ignore::FutureWarning
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test test-all mutants compat export lint setup clean

setup: $(STAMP)

$(STAMP): setup.py settings.ini constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(STAMP)

demo: $(STAMP)  ## SFT, a reward model and PPO on the toy world: offline, on a CPU, in minutes
	$(BIN)/rlhf-nb demo

test: $(STAMP)  ## all fast tests: repository checks, every notebook, tests/
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

$(BROWSER): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	touch $(BROWSER)

test-all: $(BROWSER)  ## the slow suites as well; those in a browser where Chromium is installed
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

mutants: $(STAMP)  ## wrong changes of the code, each of which a test must notice; slow; writes docs/mutants.md
	$(BIN)/python tests/mutants.py --write

compat: $(STAMP)  ## core tests on the oldest and newest allowed packages and other Pythons; slow; writes docs/compat.md
	$(BIN)/python .ci/compat.py --write

export: $(STAMP)  ## notebooks -> package and README
	$(BIN)/nbdev_clean
	$(BIN)/python .ci/export.py
	$(BIN)/python .ci/readme.py

lint: $(STAMP)
	$(BIN)/ruff check rlhf_nb nbs tests benchmarks .ci
	$(BIN)/ruff format --check nbs tests benchmarks .ci
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info runs
