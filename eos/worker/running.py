"""`eos.run`: what `eos run` does, from a program of one's own: a script, a notebook, a debugger."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from eos.app.definition import App
from eos.kafka.admin import preflight
from eos.kafka.client.settings import Settings, settings_of
from eos.session.stopping import StopSignals
from eos.worker import chains
from eos.worker.loading import refuse_ids
from eos.worker.worker import Worker


def run(app: App, settings: Settings | Mapping[str, Any] | None = None, *, until_end: bool = False) -> None:
    """Runs an App in this process, exactly once, as `eos run` does; what that ends with is raised (`error.exit_code`).

    `settings`: Kafka's and `eos.*` names (docs/reference/settings.md), completed by the environment and
    eos.toml. Returns when it was stopped by SIGTERM or SIGINT (Ctrl-C, a notebook's interrupt), or, with `until_end`,
    when the group has handled all that was readable at the start. Signals come to the main thread alone: elsewhere
    only the end of the input, or of the process, stops it.
    Raises EosError's subclasses (eos/errors.py), and what `on_start` raises.
    """
    values = settings_of(settings or {})
    refuse_ids(values, "eos.run")
    worker = Worker(app, values, until_end=until_end)
    prepare(worker)
    in_main = threading.current_thread() is threading.main_thread()
    with StopSignals(worker.session) if in_main else contextlib.nullcontext():
        worker.run()


def prepare(worker: Worker) -> None:
    """Finds the topics of patterns, and looks whether the cluster is fit. Raises the first thing that is not."""
    worker.find_topics()
    app, values = worker.app, worker.settings
    seen = preflight.require(values, preflight.need_of(values, app.topics, app.destinations))
    chains.require_own(values, app)
    worker.warn_of_retention(seen.topics)
