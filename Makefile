# make train       set up .venv, then train a small GPT over a simulated slow network: uncompressed, default, sync="updates"
# make train COMPRESSION=sidco  the same, with a compressor as the third training
# make train JOB=digits        train on the digits; NP=4 COMPRESSION=none MERGING=dear EPOCHS=5 ARGS="--seed 1" ...
# make train LAUNCHER=horovodrun   (or mpirun; torchrun is the default) set up Horovod and MPI too
# make train JOB=resnet50-cifar100 DATA=/data NP=8     a published experiment: examples/README.md; make small: data to try with
# make test        set up .venv with Horovod and MPI, then run the short tests and real workers, 10 minutes (ARGS goes to pytest)
# make unit        the tests that train nothing and start no process, within a minute: -m "unit and not slow and not long"
# make check       about a minute of these and of those that train: the first case of each, and no Horovod
# make test-all    all tests, with all values of all parameters, and the unit tests once more for every level of arithmetic that is here
# make mutants     change a line of the library, in some 150 ways, one at a time: a named test has to fail (ARGS="exchanges native")
# make bench       step times beside other libraries on slow networks (root; an hour; ARGS="--rates 200mbit --models gpt2")
# make prove       ten minutes: the loss of a small GPT with each compressor, beside uncompressed training (ARGS="--size 1m --workers 4")
# make gpu         test the GPUs of this machine, and write gpu.json, to attach to an issue; without a GPU, list the checks
# make docs        the site, in build/site
# make docs-check  the site without warnings, its search, its pages in a browser, every code block of README.md and docs/
# make lint        ruff and mypy
# make clean       remove .venv, build products and caches; runs/ and the user's cache of Horovod wheels stay

PYTHON ?= python3
NP ?= 2
# What is empty is left to the example, and by the example to the library.
DATA ?=
COMPRESSION ?=
DENSITY ?=
EXCHANGE ?=
MERGING ?=
EPOCHS ?=
ARGS ?=
LAUNCHER ?= torchrun
# What a job alone can have leads to a job.
JOB ?= $(if $(strip $(DATA)$(DENSITY)$(EXCHANGE)$(MERGING)$(EPOCHS)$(ARGS)$(filter-out torchrun,$(LAUNCHER))),digits,promise)

VENV := .venv
RUN := $(VENV)/bin/python
# What is installed is compiled when it is first imported, by whichever process: to compile all of it takes a minute.
PIP := $(RUN) -m pip --disable-pip-version-check install --quiet --no-input --no-compile
export PYTHONDONTWRITEBYTECODE :=

# A set-up is known by what it was made from: the files' content, the Python, and the place (the package is
# installed editable). Its stamp is written last, so what was interrupted has none and is made again.
ABOUT := import sys; print(sys.version, sys.base_prefix)
KERNEL := $(wildcard sparsifiers/csrc/*.[ch])
stamp = $(VENV)/.$(1)-$(shell { $(PYTHON) -c "$(ABOUT)"; pwd -P; cat $(2); } 2>&1 | cksum | cut -d ' ' -f 1)
BASE := $(call stamp,base,requirements.txt setup.py $(KERNEL))
EXAMPLES := $(call stamp,examples,requirements.txt setup.py $(KERNEL) requirements-examples.txt)
TEST := $(call stamp,test,requirements.txt setup.py $(KERNEL) requirements-examples.txt requirements-test.txt)
TRITON := $(call stamp,triton,requirements.txt setup.py $(KERNEL) requirements-test.txt requirements-triton.txt)
DOCS := $(call stamp,docs,requirements.txt setup.py $(KERNEL) requirements-examples.txt requirements-test.txt requirements-docs.txt)
PROVE := $(call stamp,prove,requirements.txt setup.py $(KERNEL) requirements-prove.txt)
HOROVOD := $(call stamp,horovod,requirements.txt setup.py $(KERNEL) requirements-horovod.txt agmerge/cli/build_horovod.py)
# The settings of Horovod's own build count too.
HOROVOD := $(HOROVOD)-$(shell env | grep '^HOROVOD_' | sort | cksum | cut -d ' ' -f 1)

# The programs of .venv come first: horovodrun looks for mpirun on PATH.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
LAUNCH_torchrun = $(RUN) -m torch.distributed.run --standalone --nproc_per_node=$(NP)
LAUNCH_horovodrun = $(IN_VENV) $(VENV)/bin/horovodrun -np $(NP) $(RUN)
LAUNCH_mpirun = $(IN_VENV) $(VENV)/bin/mpirun --allow-run-as-root --oversubscribe --bind-to none -np $(NP) $(RUN)
NEEDS_JOB = $(if $(filter promise digits gpt-stdlib,$(JOB)),,$(EXAMPLES))
NEEDS_horovodrun := $(HOROVOD)
NEEDS_mpirun := $(HOROVOD)

flag = $(if $(2),--$(1) $(2))

# Two pips must not write into one .venv.
.NOTPARALLEL:
.PHONY: help train small unit check test test-all mutants bench prove gpu docs docs-check lint clean
help:
	@sed -n '/^# make/s/^# //p' Makefile

train: $(BASE) $(NEEDS_JOB) $(NEEDS_$(LAUNCHER))
	$(if $(LAUNCH_$(LAUNCHER)),,$(error LAUNCHER=$(LAUNCHER): choose torchrun, horovodrun or mpirun))
ifeq ($(JOB),promise)
	$(RUN) examples/promise.py --workers $(NP) $(call flag,compression,$(COMPRESSION))
else
	OMP_NUM_THREADS=1 $(LAUNCH_$(LAUNCHER)) \
	    examples/train.py $(JOB) $(call flag,data,$(DATA)) \
	    $(call flag,compression,$(COMPRESSION)) $(call flag,density,$(DENSITY)) \
	    $(call flag,exchange,$(EXCHANGE)) $(call flag,merging,$(MERGING)) $(call flag,epochs,$(EPOCHS)) $(ARGS)
endif

small: $(EXAMPLES)
	$(if $(DATA),,$(error DATA=DIR: the folder that small data is written to))
	$(RUN) examples/data/small.py $(DATA)

unit: $(TEST)
	$(RUN) -m pytest -m "unit and not slow and not long" --hypothesis-profile=once --processes 2 --ignore tests/distributed $(ARGS)

check: $(TEST)
	$(RUN) -m pytest --once --hypothesis-profile=once --processes 2 --ignore tests/distributed $(ARGS)

# The last line sums it up. ARGS goes to pytest.
test: $(TEST) $(HOROVOD)
	$(RUN) tests/run_tests.py $(ARGS)

test-all: $(TEST) $(HOROVOD) $(TRITON)
	$(RUN) tests/run_tests.py --all $(ARGS)

mutants: $(TEST)
	$(RUN) tests/mutants/run.py $(ARGS)

bench: $(TEST) $(HOROVOD)
	OMP_NUM_THREADS=1 $(RUN) benchmarks/step_time.py $(ARGS)

prove: $(PROVE)
	$(RUN) benchmarks/prove.py $(ARGS)

gpu: $(BASE)
	$(RUN) benchmarks/gpu_report.py $(ARGS)

docs: $(DOCS)
	$(RUN) -m sphinx --jobs auto -b html docs build/site

docs-check: $(DOCS)
	$(RUN) -m sphinx --fresh-env --fail-on-warning --keep-going --jobs auto -b html docs build/site
	$(RUN) tests/support/site_search.py build/site
	$(RUN) tests/support/site_pictures.py build/site build/site-pictures
	$(RUN) -m pytest --processes 2 tests/test_docs_blocks.py tests/test_docs_names.py tests/test_readme.py $(ARGS)

lint: $(TEST)
	$(RUN) -m ruff check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info sparsifiers/_kernel*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find agmerge sparsifiers merging examples benchmarks tests -name __pycache__ -type d -exec rm -rf {} +

$(BASE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo 'agmerge needs Python 3.10 or newer; name one: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo 'Setting up $(VENV) from requirements.txt (minutes the first time)'
	@rm -f $(VENV)/.base-* $(VENV)/.prove-* $(VENV)/.triton-* $(VENV)/.docs-* $(VENV)/.examples-* $(VENV)/.test-* $(VENV)/.horovod-*
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --editable .
	$(RUN) -c 'import agmerge, torch._dynamo'
	@touch $@

$(EXAMPLES): $(BASE)
	@echo 'Adding requirements-examples.txt to $(VENV)'
	@rm -f $(VENV)/.examples-*
	$(PIP) -r requirements-examples.txt
	@touch $@

$(TEST): $(BASE)
	@echo 'Adding requirements-test.txt to $(VENV)'
	@rm -f $(VENV)/.test-*
	$(PIP) -r requirements-test.txt
	@touch $@

$(DOCS): $(TEST)
	@echo 'Adding requirements-docs.txt to $(VENV)'
	@rm -f $(VENV)/.docs-*
	$(PIP) -r requirements-docs.txt
	@touch $@

$(TRITON): $(TEST)
	@echo 'Adding requirements-triton.txt to $(VENV)'
	@rm -f $(VENV)/.triton-*
	$(PIP) -r requirements-triton.txt
	@touch $@

$(PROVE): $(BASE)
	@echo 'Adding requirements-prove.txt to $(VENV)'
	@rm -f $(VENV)/.prove-*
	$(PIP) -r requirements-prove.txt
	@touch $@

$(HOROVOD): $(BASE)
	@echo 'Adding Open MPI, mpi4py and Horovod to $(VENV) (minutes, unless a wheel of Horovod is in your cache)'
	@rm -f $(VENV)/.horovod-*
	$(PIP) -r requirements-horovod.txt
	$(RUN) -m agmerge build-horovod
	@touch $@
