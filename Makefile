# make train    sets up .venv, and trains a small transformer on the source of Python's standard library
# make test     sets up .venv with what development needs, and passes every check that CI makes but the next
# make docs     sets up .venv, and builds the site of docs/ in build/docs; warnings are errors
# make test-oldest  runs what depends on torch and transformers with the oldest releases that pyproject.toml allows
# make fuzz     reads random bytes as each kind of input, SECONDS (1800) for each; `make -C csrc fuzz`: the wire protocol
# make gpu      the acceptance run on a GPU, with the torch of PYTHON as it is: MINUTES=7 ARGS="--from 12"
# make test-repeat  make test, TIMES=10 times, with BUSY=4 processes at work beside it; keeps a line of each
# make test-faults  plants faults in a copy of the code, one at a time, and tells which the tests miss
#
# What a target needs is set up once: a second call does no set-up work again.

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Tests start many Python processes: without bytecode, each of them compiles Shoal anew.
TESTING := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
EXTRAS := datasets,dev,docs,hf,lora,mlflow,otel,parquet,tensorboard,wandb,watch,web
AXE := axe-core@4.14.1

# Where PyPI has torch for CUDA alone, as on Linux on x86-64, this venv takes 5 GB.
OLDEST := .venv-oldest
OLDEST_TESTS := tests/models tests/trace tests/parallel tests/checkpoint/test_checkpoint_reshard.py \
  tests/collectives/test_pytorch_calls.py tests/collectives/test_pytorch_features.py \
  tests/train/test_train_trainer.py

MINUTES ?= 7

.PHONY: train test test-long test-repeat test-faults test-oldest fuzz gpu lint docs bench clean

train: $(VENV)/.ready
	$(BIN)/shoal train $(ARGS)

test: lint
	$(TESTING) $(BIN)/pytest -n $(JOBS) --dist loadfile

test-long: lint $(VENV)/.ready-store $(VENV)/.ready-browser $(VENV)/.ready-launch
	$(TESTING) $(BIN)/pytest -m long

TIMES ?= 1
BUSY ?= 0

test-repeat: $(VENV)/.ready-dev
	$(BIN)/python tests/repeat.py --times $(TIMES) --busy $(BUSY)

test-faults: $(VENV)/.ready-dev
	$(BIN)/python tests/faults/plant.py --jobs 2 $(ARGS)

SECONDS ?= 1800

fuzz: $(VENV)/.ready-fuzz
	$(BIN)/python tests/fuzz/fuzz.py --seconds $(SECONDS) $(ARGS)

gpu:
	$(PYTHON) benchmarks/gpu.py --minutes $(MINUTES) $(ARGS)

test-oldest: $(OLDEST)/.ready
	$(TESTING) $(OLDEST)/bin/pytest $(OLDEST_TESTS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(VENV)/.ready-dev
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

FOLDERS := csrc csrc/common csrc/codecs csrc/transport csrc/algorithms
CORE := setup.py $(foreach folder,$(FOLDERS),$(wildcard $(folder)/*.h $(folder)/*.cc))

$(VENV)/.ready: pyproject.toml constraints.txt $(CORE) | $(VENV)/bin/python
	@echo "installing Shoal and PyTorch into $(VENV) (once, a minute or more)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.ready-store: $(VENV)/.ready-dev
	$(INSTALL) --editable '.[$(EXTRAS),store]' 'moto[server]>=5'
	@touch $@

# Launchers are tested with a real sshd, Slurm and Ray, on this machine.
$(VENV)/.ready-launch: $(VENV)/.ready-dev
	@for program in sshd slurmctld slurmd munged; do \
	  PATH=$$PATH:/usr/sbin command -v $$program >/dev/null || { \
	    echo "make: there is no $$program. Install it: sudo apt-get install openssh-server slurm-wlm munge"; \
	    exit 1; }; done
	$(INSTALL) --editable '.[$(EXTRAS),store,ray]'
	@touch $@

$(VENV)/.ready-fuzz: $(VENV)/.ready-dev
	$(INSTALL) --editable '.[$(EXTRAS),fuzz]'
	@touch $@

# Pages are tested in Debian's Chromium, driven by Playwright; axe-core looks for what keeps people out.
$(VENV)/.ready-browser: $(VENV)/.ready-dev
	@command -v chromium npm >/dev/null || { \
	  echo "make: there is no chromium or no npm. Install them: sudo apt-get install chromium npm"; exit 1; }
	$(INSTALL) playwright
	npm install --silent --no-audit --no-fund --no-save --prefix build/browser $(AXE)
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt $(CORE) | $(VENV)/bin/python
	@echo "installing Shoal, PyTorch and what its tests need into $(VENV) (once, a minute or more)"
	$(INSTALL) --editable '.[$(EXTRAS)]' httpx2 kubeflow-trainer-api kubernetes-validate
	@touch $@ $(VENV)/.ready

$(OLDEST)/.ready: pyproject.toml constraints-oldest.txt $(CORE) | $(OLDEST)/bin/python
	@echo "installing Shoal, and the oldest PyTorch and transformers for it, into $(OLDEST) (once, some minutes)"
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-oldest.txt --editable '.[dev,hf,lora]'
	@touch $@

$(VENV)/bin/python $(OLDEST)/bin/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: there is no $(PYTHON). Install it: sudo apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) -V), and Shoal needs 3.11 or newer." \
	       "Install one: sudo apt-get install python3.11 python3.11-venv; then: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv. Install it: sudo apt-get install python3-venv"; exit 1; }
	@echo "making $(@:/bin/python=)"
	@$(PYTHON) -m venv $(@:/bin/python=) || { rm -rf $(@:/bin/python=); exit 1; }

clean:
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
