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
unexport PYTHONDONTWRITEBYTECODE # hundreds of processes would compile the package again, half a second each

.PHONY: demo test test-other-cpu test-plain test-all mutants compat lock export lint setup docs pictures bench gpu-luggage clean

setup: $(STAMP)

# Python 3.11 (from 3.11.5) on Linux x86-64 installs exactly what requirements.lock says, each file by its hash: pip and what builds packages first, then
# all the rest, torch included. Elsewhere constraints.txt holds the versions that matter.
LOCKED := $(shell $(PYTHON) -c "import platform, sys; print(int((3, 11, 5) <= sys.version_info < (3, 12) and sys.platform == 'linux' and platform.machine() == 'x86_64'))")
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
HASHED := install --no-deps --require-hashes -r

$(STAMP): setup.py settings.ini constraints.txt requirements.lock
	$(PYTHON) -m venv $(VENV)
ifeq ($(LOCKED),1)
	grep -E "^(pip|setuptools|wheel)==" requirements.lock > $(VENV)/builders.lock
	$(PIP) $(HASHED) $(VENV)/builders.lock
	sed -n "s/^torch==\([0-9.]*\)/torch==\1+cpu/p" requirements.lock > $(VENV)/torch.lock
	$(PIP) $(HASHED) $(VENV)/torch.lock 2> /dev/null || echo "pip is pointed at no CPU build of torch: its usual build is taken"
	$(PIP) $(HASHED) requirements.lock
	$(PIP) install --no-deps --no-build-isolation -e .
	$(PIP) check > /dev/null || $(PIP) install -c constraints.txt torch # a build of torch for GPUs pins its own packages
else
	$(PIP) install --upgrade pip
	$(PIP) install -c constraints.txt -e ".[test]"
endif
	$(PIP) check
	touch $(STAMP)

lock: $(STAMP)  ## requirements.lock from what is installed
	$(BIN)/python .ci/lock.py

demo: $(STAMP)  ## SFT, a reward model and PPO on the toy world: offline, on a CPU, in minutes
	$(BIN)/rlhf-nb demo

test: $(STAMP)  ## all fast tests: repository checks, every notebook, tests/
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" tests

# Processors that PyTorch, oneDNN and MKL pretend to have; what a test starts inherits these variables.
OTHER_CPUS ?= ATEN_CPU_CAPABILITY=avx2,ONEDNN_MAX_CPU_ISA=AVX2,MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=default
OTHER_THREADS ?= 1 2
OTHER_SEEDS ?= 1 2
OTHER_TESTS ?= tests

test-other-cpu: $(STAMP)  ## the fast tests (or OTHER_TESTS) as on other processors, with one thread and two, other seeds and other hashes
	@bad=; for cpu in $(OTHER_CPUS); do for threads in $(OTHER_THREADS); do for seed in $(OTHER_SEEDS); do \
		how="$$(echo $$cpu | tr , ' ') OMP_NUM_THREADS=$$threads RLHF_NB_TEST_THREADS=$$threads RLHF_NB_TEST_SEED=$$seed PYTHONHASHSEED=$$seed"; \
		echo "== $$how"; \
		env $$how $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" $(OTHER_TESTS) || { bad=1; echo "== FAILED: $$how"; set -- "$$@" "$$how"; }; \
	done; done; done; \
	if [ -n "$$bad" ]; then echo "== failed:"; printf '   %s\n' "$$@"; exit 1; fi; echo "== all passed"

NUMERICS := test_logprobs test_sampler test_dpo_like_trl test_losses_preference test_losses_group test_losses_numbers test_preference test_loop test_recompute

test-plain: $(STAMP)  ## the tests of numerics once more, with every fast path off
	RLHF_NB_FAST=0 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not fast_path" $(NUMERICS:%=tests/%.py)

$(BROWSER): $(STAMP)
	$(PIP) install -c constraints.txt -e ".[browser]"
	touch $(BROWSER)

test-all: $(BROWSER) $(DOCS)/.installed test-plain  ## the slow suites as well; those in a browser where Chromium is installed
	$(BIN)/python -m pytest -n 2 --dist worksteal tests

mutants: $(STAMP)  ## wrong changes of the code, each of which a test must notice; slow; writes docs/mutants.md
	$(BIN)/python tests/mutants.py --write

compat: $(STAMP)  ## core tests on the oldest and newest allowed packages and other Pythons; slow; writes docs/compat.md
	$(BIN)/python .ci/compat.py --write

export: $(STAMP)  ## notebooks -> package, README and the table of contents
	$(BIN)/nbdev_clean
	$(BIN)/python .ci/export.py
	$(BIN)/python .ci/order.py
	$(BIN)/python .ci/readme.py
	$(BIN)/python .ci/trl_page.py

# The site needs neither torch nor the package: an environment of its own, installed by hash wherever a wheel fits any machine.
DOCS := .venv-docs
$(DOCS)/.installed: .ci/book/requirements.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --quiet --disable-pip-version-check $(if $(filter 1,$(LOCKED)),$(HASHED) .ci/book/requirements.lock,install $$(grep docs_requirements settings.ini | cut -d= -f2-))
	touch $@

docs: $(DOCS)/.installed  ## the site, in build/site/html: no warning, no dead link, no notebook executed
	$(DOCS)/bin/python .ci/book.py

pictures: $(STAMP)  ## the recording in the README, from real runs
	$(BIN)/python .ci/pictures.py

lint: $(STAMP)
	$(BIN)/ruff check rlhf_nb nbs tests benchmarks .ci
	$(BIN)/ruff format --check nbs tests benchmarks .ci
	$(BIN)/mypy

bench: $(STAMP)  ## ours and the peers in turn, in less than 45 minutes; adds to docs/performance.jsonl, writes docs/performance.md
	$(BIN)/python benchmarks/table.py $(ROWS)

gpu-luggage: $(STAMP)  ## what a machine with a GPU and no network may lack for benchmarks/gpu.py, within 60 MB
	$(BIN)/python benchmarks/gpu.py --luggage build/gpu-luggage --model $${XDG_CACHE_HOME:-$$HOME/.cache}/rlhf_nb/smollm2-135m-instruct

clean:
	rm -rf build dist *.egg-info runs
