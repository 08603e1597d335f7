# make train       set up .venv, then train on the digits; NP=4 COMPRESSION=none EPOCHS=5 ARGS="--seed 1" ...
# make test        set up .venv, then run the tests (ARGS goes to pytest); make test-all: the long ones too
# make lint        ruff and mypy
# make clean       remove .venv, build products and caches; runs/ stays

PYTHON ?= python3
NP ?= 2
COMPRESSION ?= topk
DENSITY ?= 0.01
EXCHANGE ?= sparse
EPOCHS ?=
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet --no-input

# A set-up is known by what it was made from: the files' content, the Python, and the place (the package is
# installed editable). Its stamp is written last, so what was interrupted has none and is made again.
ABOUT := import sys; print(sys.version, sys.base_prefix)
stamp = $(VENV)/.$(1)-$(shell { $(PYTHON) -c "$(ABOUT)"; pwd -P; cat $(2); } 2>&1 | cksum | cut -d ' ' -f 1)
BASE := $(call stamp,base,requirements.txt setup.py)
TEST := $(call stamp,test,requirements.txt setup.py requirements-test.txt)

.PHONY: help train test test-all lint clean
help:
	@sed -n '/^# make/s/^# //p' Makefile

train: $(BASE)
	OMP_NUM_THREADS=1 $(RUN) -m torch.distributed.run --standalone --nproc_per_node=$(NP) \
	    examples/train_digits.py --compression $(COMPRESSION) --density $(DENSITY) \
	    --exchange $(EXCHANGE) $(if $(EPOCHS),--epochs $(EPOCHS)) $(ARGS)

test: $(TEST)
	$(RUN) -m pytest -m "not long" $(ARGS)

test-all: $(TEST)
	$(RUN) -m pytest $(ARGS)

lint: $(TEST)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find agmerge sparsifiers merging examples benchmarks tests -name __pycache__ -type d -exec rm -rf {} +

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo 'agmerge needs Python 3.10 or newer; name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo 'Setting up $(VENV) from requirements.txt (minutes the first time)'
	@rm -f $(VENV)/.base-* $(VENV)/.test-*
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	@touch $@

$(TEST): $(BASE)
	@echo 'Adding requirements-test.txt to $(VENV)'
	@rm -f $(VENV)/.test-*
	$(PIP) -r requirements-test.txt
	@touch $@
