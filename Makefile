# Two commands do everything on a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo docs test test-slow check install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install  ## train on 1 and on 8 simulated devices, compare, plan, write a job, report
	$(BIN)/chipwise devices
	$(BIN)/python examples/demo.py

docs: install  ## the documentation as a site, in build/site
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

# Three workers for two cores, since some tests wait; a file's tests stay together, and share what fixtures made
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

test: install  ## the default suite: minutes on two cores
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: install  ## kills, long runs, models of other frameworks
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs,frameworks,huggingface,notebook,wandb,mlflow]'
	-npm install --no-save --silent axe-core  # pages are looked over with it, where npm is
	$(BIN)/python -m pytest -m slow --timeout=3600
	CHIPWISE_COMPILES=cuda $(BIN)/python -m pytest -m slow --timeout=3600 tests/engine/test_gpu_kernels.py

check: install  ## lint, types, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PARALLEL)

clean:
	rm -rf $(VENV) demo build dist src/*.egg-info
