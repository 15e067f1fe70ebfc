"""Define `eos run MODULE:APP`, which runs an App until it is stopped, as one worker here or as several processes.

The module owns the options and the worker's surroundings: signals, health, the live line. The supervisor loads no App.
rich and the HTTP server are imported only where they are used: most workers have no terminal and no port, and the
outputs of a killed worker wait until it has restarted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from eos import log
from eos.cli.options import (
    BootstrapServers,
    LogFormat,
    LogLevel,
    Set,
    Target,
    UntilEnd,
    check_log_options,
    collect_flags,
)
from eos.errors import Interruption, PoisonRecord, UsageError
from eos.health.board import Board
from eos.health.observer import Observer
from eos.health.report import Reporter, supervisor_pipe
from eos.health.status import Status
from eos.kafka.client import settings
from eos.records import format_position
from eos.signals import Handlers, StopSignals
from eos.worker.loading import load_app, refuse_ids
from eos.worker.running import prepare
from eos.worker.supervisor import Supervisor, prefix_own_output, take_worker_name
from eos.worker.worker import Worker


def run(
    target: Target,
    instance: Annotated[
        str | None,
        typer.Option(help="Suffix of the transactional.id. Keep it stable across restarts. Default: host name."),
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    until_end: UntilEnd = False,
    create_topics: Annotated[bool, typer.Option("--create-topics", help="Create missing topics at the start.")] = False,
    create_tables: Annotated[
        bool, typer.Option("--create-tables", help="Create missing tables of functions that write rows.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(help="Run this many processes under a supervisor, instances INSTANCE-0, INSTANCE-1, ..."),
    ] = None,
    reload: Annotated[bool, typer.Option("--reload", help="For development: restart when a .py file changes.")] = False,
    http_port: Annotated[
        str | None,
        typer.Option(metavar="[HOST:]PORT", help="Serve /livez, /readyz, /metrics and a status page here."),
    ] = None,
    set_: Set = None,
    log_format: LogFormat = "human",
    log_level: LogLevel = "info",
) -> int:
    """Run an App: consume, transform, produce, exactly once."""
    check_log_options(log_format, log_level)
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: must be at least 1")
    address = None
    if http_port is not None:
        from eos.health.server import parse_address

        address = parse_address(http_port)
    flags = collect_flags(bootstrap_servers, set_, instance)
    if create_topics:
        flags["eos.create.topics"] = "true"
    if create_tables:
        flags["eos.create.tables"] = "true"
    worker = take_worker_name()
    if log_format == "human":
        prefix_own_output(worker)
    pipe = supervisor_pipe()
    show = log_format == "human" and sys.stderr.isatty() and pipe is None
    log.configure(log_format, log_level, sys.stderr, worker)
    loaded = settings.load(flags)
    refuse_ids(loaded, "eos run")
    with _stop_before_start() as started:
        if workers is not None or reload:
            command = ["run", target, "--log-format", log_format, "--log-level", log_level]
            command += ["--until-end"] if until_end else []
            command += [word for item in flags.items() if item[0] != "eos.instance" for word in ("-X", "=".join(item))]
            watched = source_folders(target) if reload else []
            _warn_of_random_host_name(loaded)  # warn here, because the worker processes get an explicit --instance
            return _supervise(command, loaded, workers, address, show, watched, started)
        app = load_app(target)
        _warn_of_random_host_name(loaded)
        try:
            _run_worker(Worker(app, loaded, until_end=until_end), pipe, address, show, started)
        except PoisonRecord as poison:
            poison.remedy = poison.remedy or suggest_remedy(poison, target, bootstrap_servers)
            raise
    return 0


def suggest_remedy(poison: PoisonRecord, target: str, servers: str | None = None) -> str:
    """Return advice with the command that skips the record, or "" for an output that a function sent by itself.

    The command waits until this worker's membership in the group has expired.
    """
    if poison.offset < 0:
        return ""
    skip = f"eos reset {target} --skip '{format_position(poison.topic, poison.partition, poison.offset)}' --wait 30"
    skip += f" --bootstrap-servers {servers}" if servers else ""
    return f"`{skip}` skips it, on_error=eos.dlq writes such records to a dead-letter topic (docs/howto/failures.md)"


class _StoppedBeforeStart(Interruption):
    """Report a request to stop before the worker had anything to finish."""


@contextlib.contextmanager
def _stop_before_start() -> Iterator[Callable[[], None]]:
    """End the block at once, without an error, on SIGTERM or SIGINT.

    The block calls the yielded function when a worker or supervisor handles the signals; from then on nothing happens
    here.
    """
    starting = True

    def on_signal(number: int, _: Any) -> None:
        if starting:
            raise _StoppedBeforeStart(signal.Signals(number).name)

    def started() -> None:
        nonlocal starting
        starting = False

    with Handlers(on_signal):
        try:
            yield started
        except _StoppedBeforeStart as stopped:
            log.info("worker stopped before start", signal=str(stopped))


def _run_worker(
    worker: Worker, pipe: int | None, address: tuple[str, int] | None, show: bool, started: Callable[[], None]
) -> None:
    """Run the worker in this process. It has an observer only if something reads its status."""
    stop_s = worker.settings["eos.shutdown.timeout.ms"] / 1000
    with contextlib.ExitStack() as around:
        if pipe is not None or address is not None or show:
            observer = Observer(worker)

            def statuses() -> list[Status]:
                return [observer.status()]

            if address is not None:
                from eos.health.server import serve

                around.enter_context(serve(address, Board(statuses)))
            if pipe is not None:
                around.enter_context(Reporter(pipe, observer.status, stop_s))
            if show:
                from eos.cli.live import line, live_view

                around.enter_context(live_view(statuses, line))
            around.enter_context(observer)
        prepare(worker)
        with StopSignals(worker.session, stop_s):
            started()
            worker.run()


def _supervise(
    command: list[str],
    loaded: settings.Settings,
    workers: int | None,
    address: tuple[str, int] | None,
    show: bool,
    watched: list[Path],
    started: Callable[[], None],
) -> int:
    """Run workers as processes, each with `command` and its instance. --reload watches the folders `watched`."""
    names = [loaded.instance] if workers is None else [f"{loaded.instance}-{number}" for number in range(workers)]
    with contextlib.ExitStack() as around:
        supervisor = Supervisor(
            names,
            lambda name: [sys.executable, "-P", "-m", "eos", *command, "--instance", name],
            stop_s=loaded["eos.shutdown.timeout.ms"] / 1000,
            forward=show,
            keep=bool(watched),
        )
        if address is not None:
            from eos.health.server import serve

            around.enter_context(serve(address, Board(supervisor.statuses, supervisor.incidents)))
        if show:
            from eos.cli.live import live_view, table

            around.enter_context(live_view(supervisor.statuses, table))
        if watched:
            around.enter_context(reloading(watched, supervisor.reload))
        with supervisor.hearing_signals():
            started()
            return supervisor.run()


def _warn_of_random_host_name(loaded: settings.Settings) -> None:
    in_container = Path("/.dockerenv").exists() or "KUBERNETES_SERVICE_HOST" in os.environ
    if in_container and not loaded["eos.instance"]:
        log.warning(
            "host names of containers are random, so a restarted container cannot end the transaction that this one "
            "leaves open; set --instance to a stable name (a StatefulSet's pod name, EOS_INSTANCE in compose)"
        )


def source_folders(target: str) -> list[Path]:
    """Return the folders with the source of a target: the working directory and the file's folder."""
    file = Path(target.partition(":")[0])
    folders = {Path.cwd()}
    if file.suffix == ".py":
        folders.add(file.parent.resolve())
    return sorted(folders)


@contextlib.contextmanager
def reloading(folders: Sequence[Path], changed: Callable[[], None]) -> Iterator[None]:
    """Call `changed` on a daemon thread when a .py file below `folders` changes. UsageError without watchfiles."""
    try:
        import watchfiles
    except ImportError as error:
        raise UsageError("--reload needs watchfiles: pip install 'eos-kafka[reload]'") from error
    stopping = threading.Event()

    def watch() -> None:
        for changes in watchfiles.watch(
            *folders, watch_filter=watchfiles.PythonFilter(), stop_event=stopping, raise_interrupt=False
        ):
            names = ", ".join(sorted({os.path.relpath(path) for _, path in changes})[:3])
            log.info("workers restarting", changed=names)
            changed()

    log.info("reload watching", folders=",".join(map(str, folders)))
    thread = threading.Thread(target=watch, name="eos-reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(2)
