# make demo   set up what is missing, then compare SGD, SAM, SAF and MESA on scikit-learn's digits
# make test   set up what is missing, then lint and run every test
# make lint   ruff and mypy alone
# make clean  remove the set-up

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# One thread a worker: the nets are small and the workers many.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test lint setup clean

demo: $(READY)
	$(BIN)/saltflat compare --config recipes/digits_noisy.yaml --methods "[base,sam,saf,mesa]" --jobs 2 --out runs/demo

test: lint
	$(TEST_ENV) $(BIN)/python -m pytest -n auto

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)

# $(call step,what,command): say what is done, and which step it was if it fails.
step = @echo "set-up: $(1)"; $(2) || { echo "set-up failed: $(1)" >&2; exit 1; }

$(READY): pyproject.toml constraints.txt
	$(call step,look for Python 3.11 or newer,$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))')
	$(call step,make $(VENV),$(PYTHON) -m venv $(VENV))
	$(call step,bring pip up to date,$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip)
	$(call step,install saltflat and its tools (a few minutes),$(BIN)/python -m pip install -q -c constraints.txt -e ".[all]" --group dev)
	@touch $@

clean:
	rm -rf $(VENV)
