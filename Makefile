# make demo      set up, then train a GPT on 2 ranks at stage 3
# make test      set up, then run every test that needs no GPU and no long time
# make test-all  everything;  make quick  seconds, while editing;  make clean  removes what these made
#
# PYTHON chooses the interpreter (3.10 or newer), VENV where the environment goes, TORCH which PyTorch (2.11 to 2.14).

PYTHON ?= python3
VENV ?= .venv
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
TORCH ?= torch==2.13.0
else
TORCH ?= torch>=2.11,<2.15
endif

BIN := $(VENV)/bin
# One thread a rank: two ranks on two cores would otherwise take turns.
export OMP_NUM_THREADS ?= 1
# Only what is installed in the environment counts.
unexport PYTHONPATH PYTHONHOME

.PHONY: demo test test-all quick clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 -m zero_fx train --stage 3

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not full"

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet -e '.[test,triton]'
	$(BIN)/python -m pytest

quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow and not full"

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "zero_fx needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1 | head -n 1)." \
	    "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments (no venv or ensurepip)." \
	    "Install your system's package for that, such as python3-venv" >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || { \
	  echo "found no C++ compiler (g++), which PyTorch's Inductor needs; install one, or name it in CXX" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; open(os.path.join(sysconfig.get_paths()["include"], "Python.h"))' \
	  2>/dev/null || { \
	  echo "$(PYTHON) has no headers (Python.h), which PyTorch's Inductor needs." \
	    "Install your system's package for that, such as python3-dev" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# PyTorch by itself, so that a change of ours does not install it again.
$(VENV)/.torch: $(VENV)/.created
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install --quiet -e '.[test]'
	@touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build zero_fx.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
