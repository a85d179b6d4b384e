# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo docs pictures test test-prices test-slow test-kernels test-all lint check ci install install-all clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# All that any test needs: every framework and service that chipwise reads, writes or is compared with
install-all: install $(VENV)/.installed-all

$(VENV)/.installed-all: pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]'
	-npm install --no-save --silent axe-core  # pages are looked over with it, where npm is
	touch $@

demo: install  ## train on 1 and on 8 simulated devices, compare, plan, write a job, report
	$(BIN)/chipwise devices
	$(BIN)/python examples/demo.py

# Not --quiet, with which MkDocs counts no warning, so that a broken link would not fail it
docs: install  ## the documentation as a site, in build/site
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/site/index.html"

pictures: install  ## the pictures of docs/: trains, plans and draws them again; needs Chromium
	$(BIN)/python tools/docs_pictures.py

# Three workers for two cores, since some tests wait; a file's tests stay together, and share what fixtures made
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# A slow test ends within ten minutes. What needs a compiler for GPUs is test-kernels
SLOW := -m slow --timeout=600 --durations=40
KERNELS := tests/run/test_gpu_kernels.py
ALL_BUT_KERNELS := $(SLOW) -n 2 --dist loadfile --ignore=$(KERNELS)
# For more of pytest's options: `make test OPTIONS="-x"`
OPTIONS :=

test: install  ## the default suite: minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL) --durations=40 $(OPTIONS)

# gpuhunt installs a package `tests`, which would take the name of ours: it is read from a folder of its own
test-prices: install  ## the clouds' prices of today, by gpuhunt's own classes
	rm -rf build/prices
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --target build/prices gpuhunt
	PYTHONPATH=build/prices $(BIN)/python -c 'import gpuhunt'
	PYTHONPATH=build/prices $(BIN)/python -m pytest tests/chips/test_live_prices.py $(OPTIONS)

test-slow: install-all  ## kills, long runs, models of other frameworks; of each corpus the part that HEAD draws
	$(BIN)/python -m pytest $(ALL_BUT_KERNELS) --draw=$(shell git rev-parse HEAD) $(OPTIONS)

test-all: install-all test-kernels  ## the slow suite with every corpus whole: hours
	$(BIN)/python -m pytest $(ALL_BUT_KERNELS) $(OPTIONS)

test-kernels: install  ## the programs of the built-in recipes, as the compiler for GPUs makes them
	CHIPWISE_COMPILES=cuda $(BIN)/python -m pytest $(SLOW) $(KERNELS) $(OPTIONS)

lint: install  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## what must pass before anything else

ci: # what a merge runs, on a fresh clone of HEAD
	rm -rf build/clone && git clone --quiet . build/clone/chipwise
	ln -sfn "$(abspath ../shared)" build/clone/shared
	CI=true bash build/clone/chipwise/.ci/run

clean:
	rm -rf $(VENV) demo build dist src/*.egg-info
