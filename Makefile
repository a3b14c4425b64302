# make demo   set up what is missing, then compare SGD, SAM, SAF and MESA on scikit-learn's digits and make a page of it
# make test   set up what is missing, a browser too, then lint and run every test
# make lint   ruff and mypy alone
# make docs   the documentation, as a site in site/
# make clean  remove the set-ups
# make test-lowest  set up .venv-lowest, then test the rooms below the runner on the lowest versions declared

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
LOWEST := .venv-lowest
# One thread a worker: the nets are small and the workers many.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Of each method the first seed; coarse, so that a CPU takes seconds.
DEMO := runs/demo
LANDSCAPES := $(foreach method,base sam saf mesa,$(DEMO)/$(method)/seed0) --points 31 --images 128

# What `make test-lowest` tests: the code and the tests of these rooms, as far as they are there.
ROOMS := core memory teacher terms sam sharpness landscape
LOWEST_TESTS ?= $(wildcard $(foreach room,$(ROOMS),tests/$(room) src/saltflat/$(room)))

.PHONY: demo test test-lowest lint docs setup browser clean

demo: $(READY)
	$(BIN)/saltflat compare --config recipes/digits_noisy.yaml --methods "[base,sam,saf,mesa]" --jobs 2 --out $(DEMO)
	$(BIN)/saltflat landscape $(LANDSCAPES)
	$(BIN)/saltflat report $(DEMO) -o $(DEMO)/report.html

test: lint browser
	$(TEST_ENV) $(BIN)/python -m pytest -n auto

test-lowest: $(LOWEST)/ready
	$(TEST_ENV) $(LOWEST)/bin/python -m pytest -n auto -m "not oracle and not newest" $(LOWEST_TESTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

setup: $(READY) browser

# The tests open pages in it. CHROMIUM says where it is, if that is no usual place.
browser:
	@for name in "$${CHROMIUM:-chromium}" chromium-browser google-chrome google-chrome-stable; do \
	  if command -v "$$name" >/dev/null; then exit 0; fi; \
	done; \
	echo "set-up: install Chromium"; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update \
	  && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; then exit 0; fi; \
	echo "the tests need Chromium: install it (apt install chromium), or set CHROMIUM=PATH" >&2; exit 1

# $(call step,what,command): say what is done, and which step it was if it fails.
step = @echo "set-up: $(1)"; $(2) || { echo "set-up failed: $(1)" >&2; exit 1; }

$(READY): pyproject.toml constraints.txt
	$(call step,look for Python 3.11 or newer,$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))')
	$(call step,make $(VENV),$(PYTHON) -m venv $(VENV))
	$(call step,bring pip up to date,$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip)
	$(call step,install saltflat and its tools (a few minutes),$(BIN)/python -m pip install -q -c constraints.txt -e ".[all]" --group dev)
	@touch $@

# About 3.1 GB to download. The lowest numpy has no wheel for Python 3.13.
$(LOWEST)/ready: pyproject.toml constraints-lowest.txt
	$(call step,look for Python 3.11 or 3.12,$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in [(3, 11), (3, 12)])')
	$(call step,make $(LOWEST),$(PYTHON) -m venv $(LOWEST))
	$(call step,bring pip up to date,$(LOWEST)/bin/python -m pip install -q --upgrade -c constraints-lowest.txt pip)
	$(call step,install the lowest versions (a few minutes),$(LOWEST)/bin/python -m pip install -q -c constraints-lowest.txt -e ".[sharpness]" --group test-rooms)
	@touch $@

clean:
	rm -rf $(VENV) $(LOWEST) site
