"""Provides `eos.run`, which runs an App like the command `eos run`, from your own script, notebook or debugger."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from eos.app.definition import App
from eos.kafka.admin import preflight
from eos.kafka.client.settings import Settings, to_settings
from eos.signals import StopSignals
from eos.worker import chains, positions
from eos.worker.loading import refuse_ids
from eos.worker.worker import Worker


def run(app: App, settings: Settings | Mapping[str, Any] | None = None, *, until_end: bool = False) -> None:
    """Run an App in this process with exactly-once processing, as the command `eos run` does.

    `settings`: Kafka's and `eos.*` names (docs/reference/settings.md); the environment and eos.toml supply the rest.

    The call returns when SIGTERM or SIGINT (Ctrl-C, a notebook's interrupt) stops it. With `until_end` it also returns
    when the group has handled all records that were readable at the start. Python delivers signals to the main thread
    only. In another thread only the end of the input or of the process stops the run.

    Raises a subclass of EosError (eos/errors.py), whose `exit_code` is the exit code of `eos run`; an `on_start`
    function that raises ends the run with HookFailed.
    """
    values = to_settings(settings or {})
    refuse_ids(values, "eos.run")
    worker = Worker(app, values, until_end=until_end)
    prepare(worker)
    in_main = threading.current_thread() is threading.main_thread()
    timeout_s = worker.settings["eos.shutdown.timeout.ms"] / 1000
    with StopSignals(worker.session, timeout_s) if in_main else contextlib.nullcontext():
        worker.run()


def prepare(worker: Worker) -> None:
    """Find the topics that patterns match, create the topics that hold the positions of sources, and check the cluster.

    Raise the error of the first check that fails.
    """
    worker.find_topics()
    app, values = worker.app, worker.settings
    positions.create_topics(values, app)
    outputs = app.destinations | app.sources.keys()
    seen = preflight.require_fit_cluster(values, preflight.requirements_of(values, app.topics, outputs))
    chains.require_own(values, app)
    worker.warn_of_input(seen.topics)
