# Every target sets itself up: python3 >= 3.11, gcc and make are all it needs.
#   PYTHON=python3.12       another interpreter
#   TORCH=2.11.0            another torch, in a .venv of its own (the demo and the tests were made with the default)
#   NEWER=2.15.0            the torch of `make test_newer`, in a .venv of its own
#   DEMO_ARGS, TEST_ARGS    passed on, e.g. make demo DEMO_ARGS="--codecs int8,int6,int4"
#   GPU_PYTHON=python3.12   the interpreter of `make gpu`, with the torch it has, without pip and the network; default:
#                           PYTHON where its torch has CUDA, else that of .venv
#   GPU_ARGS                passed on, e.g. make gpu GPU_ARGS="--stages smoke,kernels"
#   REHEARSAL=cpu           the device of `make gpu_rehearsal`; default: the virtual device of the tests
#   PYTHONS, TORCHES        what `make release` tries the wheel with: interpreters; newest, versions, or folders that hold a torch
#   TORCH_INDEX             where `make release` and `make soak` take these from; empty: from pip's own index, with CUDA

PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-torch-$(TORCH))
NEWER ?= 2.14.1
RELEASE ?= .venv-release
DEMO_ARGS ?=
PYTHONS ?= python3.11 python3.13 python3.14
TORCHES ?= 2.11 newest
export TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TEST_ARGS ?=
GPU_PYTHON ?=
GPU_ARGS ?=
REHEARSAL ?= virtual

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
# Compiling device code for every architecture takes minutes; test_all needs that it compiles and that one runs.
TEST_ARCHS := $(or $(GRADCKPT_CUDA_ARCHS),8.0;9.0+PTX)
# What an extra of pyproject.toml names, without the package itself.
names_of = $(PYTHON) -c 'import tomllib; \
    print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])'
# There is one extension in the tree, whatever the .venv: who builds another takes away the stamps of these names.
stamps = $(foreach venv,$(VENV) .venv*,$(addprefix $(venv)/,$(1)))
GPU_STAMPS := $(call stamps,.gpu-*) build/.gpu-*
# Of `make gpu`: the .venv, or an interpreter that has all it needs, where nothing is installed.
GPU_RUN := $(if $(GPU_PYTHON),env PYTHONPATH="$(CURDIR)" $(GPU_PYTHON),$(BIN)/python)
GPU_BUILT := $(if $(GPU_PYTHON),build,$(VENV))/.gpu-$(CARDS)
# Two test processes share the cores; two threads in each make both crawl.
PYTEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -q --timeout 600
# A test that hangs where no signal reaches it (C++ that waits with the GIL held) ends the run, with all its stacks.
WATCHDOG := -o faulthandler_timeout=660 -o faulthandler_exit_on_timeout=true --max-worker-restart 0
# Of `make test_newer`: the folders whose tests meet torch's engine most, without budgets, plans and offload's files.
TEST_FOLDERS := tests/engine tests/equivalence tests/selective tests/compile tests/models \
    tests/planner/test_simulation.py --ignore-glob='*/engine/test_offload*'

.PHONY: help demo test test_newer test_folders test_all soak mutants bench lint docs gpu gpu_here gpu_tools gpu_rehearsal release clean setup tools
.DEFAULT_GOAL := help
# All targets share one .venv and one build folder.
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z_]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.built  ## train a deep Llama: what checkpoints save, cost and change; table, demo.png (4 minutes)
	@$(BIN)/python examples/train_llama.py $(DEMO_ARGS)

# Each ends with pytest's closing line. tests/conftest.py says what `test` leaves to `test_all`, and why.
# Of another torch the tests alone: types and texts are those of the default.
test: $(if $(filter 2.13.0,$(TORCH)),lint) $(VENV)/.test  ## ruff, mypy and the tests of the library itself (15 minutes on two cores, set-up included)
	@$(PYTEST) $(WATCHDOG) -n 2 --dist loadgroup -m "not soak" --target test $(TEST_ARGS)

# With the extension that .venv has: one build serves each torch.
test_newer: $(VENV)/.test  ## of each test about regions and models two rows, on a newer torch (10 minutes; a CUDA build, 6 GB)
	@$(MAKE) --no-print-directory TORCH=$(NEWER) VENV=.venv-torch-$(NEWER) test_folders

test_folders: $(VENV)/.imports
	@PYTHONPATH="$(CURDIR)" $(PYTEST) $(WATCHDOG) -n 2 --dist loadgroup -m "not soak" --target test --rows 2 $(TEST_ARGS) $(TEST_FOLDERS)

test_all: $(VENV)/.all $(VENV)/.frameworks  ## the tests beside those: frameworks, ranks, packaging, docs, device code
	@$(PYTEST) $(WATCHDOG) -n 2 --dist loadgroup -m "not soak" --target test_all $(TEST_ARGS)

soak: $(VENV)/.all $(VENV)/.frameworks  ## the long tests, and all rows of sweeps of which the others run some (hours)
	@$(PYTEST) -n 2 --dist loadgroup -m soak $(TEST_ARGS)

mutants: $(VENV)/.test  ## removes 40 guards of the C sources, one at a time: which do the tests notice? (an hour)
	@$(BIN)/python tests/mutate_guards.py $(TEST_ARGS)

bench: $(VENV)/.built  ## speed of the codecs, host cost per region, selective recompute (minutes)
	@$(BIN)/python benchmarks/bench_codecs.py
	@$(BIN)/python benchmarks/bench_overhead.py
	@$(BIN)/python benchmarks/bench_selective.py

lint: $(VENV)/.test  ## ruff, mypy, spelling and banned words (tests/language.py)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/codespell csrc gradckpt tests docs examples benchmarks release *.md Makefile setup.py pyproject.toml
	@$(BIN)/python tests/language.py

docs: $(VENV)/.docs  ## the documentation as a site, in build/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict  # with --quiet, mkdocs counts no warnings
	@echo "build/docs/index.html"

gpu:  ## on a CUDA machine: entry points, byte parity, sanitizers, streams, speed, memory; tables, a picture (8 minutes after the build)
	@if nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	    cards="$$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d ' ' | sort -u | paste -sd, -)"; \
	    own="$(GPU_PYTHON)"; \
	    if [ -z "$$own" ] && $(PYTHON) -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then \
	        own="$(PYTHON)"; \
	    fi; \
	    echo "make gpu: with $${own:-a .venv, whose packages pip installs}$${own:+ and its torch}"; \
	    $(MAKE) --no-print-directory gpu_tools GPU_PYTHON="$$own" \
	        && $(MAKE) --no-print-directory gpu_here GPU_PYTHON="$$own" CARDS="$$cards"; \
	else echo "make gpu: no CUDA device is visible here (nvidia-smi lists none), so nothing was run."; fi

# CARDS: compute capabilities, e.g. 9.0 or 8.6,9.0. A stage that fails is counted, and the next one runs.
gpu_here: $(GPU_BUILT)
	@$(GPU_RUN) benchmarks/gpu.py $(GPU_ARGS)

gpu_rehearsal: $(VENV)/.test  ## the code of `make gpu` without a card, tiny (5 minutes)
	@$(BIN)/python benchmarks/gpu.py --device $(REHEARSAL) --small $(GPU_ARGS)

# In a venv of its own: building needs no torch.
release: $(RELEASE)/.tools  ## dist/: sdist and manylinux wheel, checked and tried in fresh venvs (CUDA: minutes); RELEASING.md
	@$(RELEASE)/bin/python release/make_release.py --pythons $(PYTHONS) --torches $(TORCHES) --torch-index "$(TORCH_INDEX)"

clean:  ## remove .venv and everything that was built
	rm -rf .venv .venv-torch-* $(VENV) $(RELEASE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis gradckpt/_C*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.built  ## .venv with the package installed, nothing else

# ---- the stages of .venv

# What is asked of the machine, before anything is downloaded.
tools:
	@command -v $(PYTHON) >/dev/null \
	    || { echo "make: $(PYTHON) was not found; install the Debian package python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "make: $(PYTHON) is older than 3.11; install the Debian package python3.11, then PYTHON=python3.11" >&2; \
	         exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "make: $(PYTHON) cannot make a venv; install the Debian package python3-venv" >&2; exit 1; }
	@command -v gcc >/dev/null || { echo "make: gcc was not found; install the Debian package gcc" >&2; exit 1; }
	@echo '#include <stdlib.h>' | gcc -E - >/dev/null 2>&1 \
	    || { echo "make: gcc finds no stdlib.h; install the Debian package libc6-dev" >&2; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
	    || { echo "make: Python.h was not found; install the Debian package python3-dev" >&2; exit 1; }

$(VENV)/.torch: pyproject.toml | tools
	@echo "setting up $(VENV): torch $(TORCH) and what pyproject.toml names (once, minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) "torch==$(TORCH)"
	@touch $@

$(RELEASE)/.tools: pyproject.toml | tools
	@echo "setting up $(RELEASE): what builds and checks packages (once)"
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install --quiet --disable-pip-version-check $$($(call names_of,release))
	@touch $@

# Editable, so that the sources and the installed package are one; C is compiled again when it changed.
$(VENV)/.built: $(VENV)/.torch $(SOURCES)
	@echo "building gradckpt"
	@rm -f $(call stamps,.test .all) $(GPU_STAMPS)
	@$(PIP) --editable ".[demo]" "torch==$(TORCH)"
	@touch $@

# For `test` and `lint`: warnings are errors, and nvcc, which takes minutes, is left to `test_all`.
$(VENV)/.test: $(VENV)/.torch $(SOURCES)
	@echo "building gradckpt without device code, warnings are errors"
	@rm -f $(call stamps,.built .all) $(GPU_STAMPS)
	@GRADCKPT_WERROR=1 GRADCKPT_CUDA=$${GRADCKPT_CUDA:-0} $(PIP) --editable ".[test]" "torch==$(TORCH)"
	@touch $@

# What the tests import, and no build: the extension in the tree stays.
$(VENV)/.imports: $(VENV)/.torch
	@echo "installing what tests import into $(VENV)"
	@$(PIP) $$($(call names_of,test)) "torch==$(TORCH)"
	@touch $@

# The same with device code and all that the tests import; serves the other targets too.
$(VENV)/.all: $(VENV)/.torch $(SOURCES)
	@echo "building gradckpt, warnings are errors"
	@rm -f $(GPU_STAMPS)
	@GRADCKPT_WERROR=1 GRADCKPT_CUDA_ARCHS="$(TEST_ARCHS)" $(PIP) --editable ".[demo,test-all]" "torch==$(TORCH)"
	@touch $(VENV)/.built $(VENV)/.test $@

# What builds the site, as pyproject.toml names it.
$(VENV)/.docs: $(VENV)/.built
	@$(PIP) $$($(call names_of,docs))
	@touch $@

# What tests of `test_all` import in processes of their own only; the list says why. pip's --target does not replace.
$(VENV)/.frameworks: tests/helpers/frameworks.txt $(VENV)/.torch
	@echo "installing timm, torchvision, DeepSpeed and torchtitan beside $(VENV)'s packages"
	@rm -rf $(VENV)/frameworks $(VENV)/engines
	@for folder in frameworks engines; do \
	    sed -n "/^# ---- $$folder$$/,/^$$/p" $< > $(VENV)/$$folder.txt && \
	    $(PIP) --no-deps --target $(VENV)/$$folder --requirement $(VENV)/$$folder.txt || exit 1; \
	done
	@touch $@

# For the cards of this machine alone.
$(VENV)/.gpu-$(CARDS): $(VENV)/.torch $(SOURCES)
	@$(BIN)/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' \
	    || { echo "make gpu: the torch in $(VENV) is built without CUDA; install one with CUDA there" >&2; exit 1; }
	@echo "building gradckpt for compute capability $(CARDS)"
	@rm -f $(call stamps,.built .test .all) $(GPU_STAMPS)
	@GRADCKPT_CUDA=1 GRADCKPT_WERROR=1 GRADCKPT_CUDA_ARCHS="$(CARDS)" $(PIP) --editable ".[demo,test]" "torch==$(TORCH)"
	@touch $@

build/.gpu-$(CARDS): $(SOURCES)
	@echo "building gradckpt for compute capability $(CARDS) with $(GPU_PYTHON)"
	@rm -f $(call stamps,.built .test .all) $(GPU_STAMPS)
	@GRADCKPT_CUDA=1 GRADCKPT_WERROR=1 GRADCKPT_CUDA_ARCHS="$(CARDS)" $(GPU_PYTHON) setup.py -q build_ext --inplace
	@mkdir -p build && touch $@

# Asked before anything is downloaded or built; nvcc where setup.py looks for it.
gpu_tools:
ifneq ($(GPU_PYTHON),)
	@command -v $(GPU_PYTHON) >/dev/null \
	    || { echo "make gpu: GPU_PYTHON=$(GPU_PYTHON) was not found; name an interpreter that has torch" >&2; exit 1; }
	@GPU_PYTHON="$(GPU_PYTHON)" $(GPU_PYTHON) benchmarks/gpu_python.py
endif
	@home="$${CUDA_HOME:-$$CUDA_PATH}"; \
	 if [ -n "$$home" ]; then test -x "$$home/bin/nvcc"; \
	 else command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc; fi \
	    || { echo "make gpu: nvcc was not found; install the CUDA toolkit and put nvcc on PATH or set CUDA_HOME" >&2; \
	         exit 1; }
