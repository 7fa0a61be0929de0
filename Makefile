# make demo: write a project and train it here.  make test: everything.  make check: before each commit.
# Each sets up .venv itself, once.

PYTHON ?= python3
# Torch alone first: for other builds (CUDA version, CPU only) set TORCH, or install it into .venv yourself.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test check bench gpu-check snapshots release clean

demo: $(READY)
	$(BIN)/ddpgen demo demo

# Two workers: most tests wait for processes of their own.
test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 15

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/black --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -m "not slow"

# Figures for the README; ratios and counts, because machines differ.
bench: $(READY)
	$(BIN)/python benchmarks/order.py

# What only GPUs can show, in a table; without one it says what is left out.
gpu-check: $(READY)
	$(BIN)/python -m tests.gpu_check

# After a wanted change of the template.
snapshots: $(READY)
	UPDATE_SNAPSHOTS=1 $(BIN)/python -m pytest -q tests/test_snapshots.py

# Freezes the template of this version: see CONTRIBUTING.md.
release: $(READY)
	$(BIN)/python -m tests.release
	$(BIN)/python -m pytest -q tests/test_store.py

clean:
	rm -rf $(VENV) demo dist build

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@
