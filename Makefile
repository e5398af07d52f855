# Two doors, each enough on a fresh clone: `make demo` shows the library, `make test` proves it.
# Both make .venv when it is missing or out of date.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# One intra-op thread per test process: the suite must not depend on the machine's core count.
TEST_ENV := OMP_NUM_THREADS=1
FAST     := not slow and not spmd and not gpu and not examples
REST     := (slow or spmd or examples) and not gpu

.PHONY: help demo test lint fast slow wheel notebook format clean
.NOTPARALLEL:

help:
	@echo "make demo      the tutorial on two replicas, then a training run on handwritten digits"
	@echo "make test      lint + fast + slow + wheel: all that must hold before a change lands"
	@echo "make lint      format, lint, spelling, types"
	@echo "make fast      the tests to run while editing (under a minute)"
	@echo "make slow      slow tests, several processes, examples, notebook"
	@echo "make wheel     build the wheel, install it in an empty folder, use it from there"
	@echo "make format    rewrite the sources the way lint wants them"
	@echo "make notebook  make the notebook from its script again"
	@echo "make clean     remove what the above made, .venv included"

# setuptools first, and no build isolation: one pinned set of packages for everything.
$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV), about a minute (longer if PyTorch must be downloaded)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt 'setuptools>=77'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

# Passive: torch's own idle threads would otherwise spin on the cores that the replicas need. The
# plain module, which is timed beside them, runs about a fifth slower for it.
demo: $(STAMP)
	@echo "== the tutorial, on two replicas"
	$(BIN)/samestep tutorial --replicas 2
	@echo
	@echo "== handwritten digits, on two replicas and plain (OMP_WAIT_POLICY=passive)"
	OMP_WAIT_POLICY=passive $(BIN)/python examples/digits.py

test: lint fast slow wheel
	@echo "== all passed"

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell src tests examples docs *.md
	$(BIN)/mypy

fast: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "$(FAST)"

slow: $(STAMP)
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "$(REST)"
	$(TEST_ENV) $(BIN)/python -m pytest -q -m "$(FAST)" --copies tests/conformance

# The current folder is build/, so that nothing but the wheel can provide the package.
wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation -w build/dist .
	$(BIN)/python -m pip install --quiet --no-deps --target build/fresh build/dist/samestep-*.whl
	cd build && PYTHONPATH=fresh ../$(BIN)/python -c \
	  "import pathlib, samestep; home = pathlib.Path(samestep.__file__).parent; \
	  assert home == pathlib.Path('fresh/samestep').resolve(), home; \
	  assert (home / 'py.typed').exists(), 'the wheel lacks py.typed'"
	cd build && PYTHONPATH=fresh ../$(BIN)/python -m samestep tutorial --replicas 3 --rows 10 --batch 10
	test -x build/fresh/bin/samestep

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebook: $(STAMP)
	$(BIN)/python examples/make_notebook.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
