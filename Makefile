# make install | quickstart | test | test-slow | test-quick | test-hf | chaos | notebooks | lint | docs-check | site     (PYTHON=python3.12 chooses the interpreter, EXTRAS=cuda13 the CUDA version)

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
TEST_JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 4 ] && echo 4 || echo $$n)
PYTEST_ARGS ?=
MINUTES ?= 10
SEED ?= 0
CHAOS_ARGS ?=
# With an NVIDIA driver the CUDA 12 build of JAX is installed, otherwise the CPU build.
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
EXTRAS ?= $(if $(GPU),cuda12,)

# Python compiles the modules that it imports. pip would compile all that it installs, which doubles its time.
export PIP_NO_COMPILE ?= 1

PY := $(VENV)/bin/python
stamp = $(VENV)/.installed-$(1)
comma := ,

.PHONY: install quickstart test test-fast test-slow test-quick quick test-hf lint pytest docs docs-check site notebooks chaos format clean

install: $(call stamp,run)

quickstart: $(call stamp,run)
	$(PY) train.py --config=configs/quickstart.py

# What one waits for: lint, types and every test that is not of the rest below. A file's tests run in one process:
# they share what they compile and their fixtures. Files begin in the order of tests/conftest.py. With -j2 both at once.
test: lint test-fast

test-fast: $(call stamp,test)
	$(MAKE) --no-print-directory pytest PYTEST_ARGS='-m "not slow and not notebook" --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)'

# The rest, which is marked slow or named in tests/slow.txt: notebooks, kills and damage, two processes, every shape and
# layout compiled for GPUs. CI runs it beside `make test`.
test-slow: $(call stamp,test)
	$(MAKE) --no-print-directory pytest PYTEST_ARGS='-m "slow or notebook" $(PYTEST_ARGS)'

# For those who change something: a little of every package, every operator against the reference with its gradients.
QUICK := tests/test_config.py tests/test_command_line.py tests/ops/test_block_lists.py tests/ops/test_arguments.py \
  tests/ops/test_implementations.py::test_implementation_agrees_with_reference \
  tests/kernels/test_gated.py tests/kernels/test_norm_swiglu.py tests/kernels/test_select.py::test_ties_go_to_the_lower_index \
  tests/nn/test_layers.py tests/nn/test_transformer.py::test_every_parameter_gets_a_finite_nonzero_gradient \
  tests/data/test_packing.py tests/data/test_token_cache.py tests/train/test_guards.py \
  tests/train/test_step.py::test_losses_and_their_gradients_are_those_of_the_formula \
  tests/decode/test_decode_attention.py tests/tools/test_export.py tests/tools/test_generate.py::test_command_line

test-quick: lint quick

quick: $(call stamp,test)
	$(PY) -m pytest -q -n $(TEST_JOBS) -m "not slow and not notebook" $(QUICK) $(PYTEST_ARGS)

# The pages that are generated: the configuration reference, and measured figures from benchmarks/results.
docs: $(call stamp,run)
	$(PY) docs/config_reference.py
	$(PY) docs/figures.py

docs-check: $(call stamp,test)
	$(PY) -m pytest -q tests/test_docs.py $(PYTEST_ARGS)

# The pages as a static site in site/; a link that leads nowhere fails. REPOSITORY_URL is where links to files lead.
SITE_VENV ?= .venv-site

site: $(SITE_VENV)/.installed
	$(SITE_VENV)/bin/python -m mkdocs build --strict

$(SITE_VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .[docs]
	@touch $@

lint: $(call stamp,test)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

pytest: $(call stamp,test)
	$(PY) -m pytest -q -n $(TEST_JOBS) $(PYTEST_ARGS)

# Against Hugging Face transformers and lm-evaluation-harness, in an environment of its own. Where pip finds a CPU build
# of PyTorch this takes two minutes to install (2.5 GB); elsewhere pip takes the build with CUDA, several GB more. To
# avoid that, name PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL. .ci/run runs it only with a CPU build.
HF_VENV ?= .venv-hf
HF_CONSTRAINTS ?= constraints-hf.txt

test-hf: $(HF_VENV)/.installed
	JAX_PLATFORMS=cpu $(HF_VENV)/bin/python -m pytest -q -n $(TEST_JOBS) tests/hf $(PYTEST_ARGS)

$(HF_VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(HF_CONSTRAINTS)
	$(PYTHON) -m venv $(HF_VENV)
	$(HF_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -c $(HF_CONSTRAINTS) \
	  -e .[eval] torch transformers accelerate pytest pytest-timeout pytest-xdist
	@touch $@

# Attacks on the project's promises, drawn from SEED, for MINUTES; a short form is part of the tests.
chaos: $(call stamp,test)
	$(PY) -m tests.chaos --minutes $(MINUTES) --seed $(SEED) $(CHAOS_ARGS)

notebooks: $(call stamp,test)
	$(PY) notebooks/build.py run

format: $(call stamp,test)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "nsa_jax needs Python 3.11 or newer, and $(PYTHON) is %d.%d: run make with PYTHON=python3.11 (or newer)" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(call stamp,run): pyproject.toml $(CONSTRAINTS) | $(PY)
	@echo "$(if $(GPU),GPU found ($(GPU)),no NVIDIA GPU found): installing nsa_jax$(if $(EXTRAS), with [$(EXTRAS)],, CPU only)"
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .[train$(comma)report$(if $(EXTRAS),$(comma)$(EXTRAS))]
	@touch $@

$(call stamp,test): $(call stamp,run)
	$(PY) -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e .[dev$(comma)aot]
	@touch $@

clean:
	rm -rf $(VENV) $(HF_VENV) $(SITE_VENV) site build *.egg-info
