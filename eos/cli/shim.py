"""Define `eos shim`, a Kafka wire proxy in front of real brokers that shows transactions and protects them."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from eos import log
from eos.cli.options import LogFormat, LogLevel, check_choice, check_log_options
from eos.errors import ConfigurationError, UsageError
from eos.shim import ShimSettings
from eos.shim.chain import Chain
from eos.shim.faults import Plan, read_plan
from eos.shim.guard import GuardJob, read_policy
from eos.shim.health import CountingJob, Sources
from eos.shim.health import serve as serve_health
from eos.shim.pipeline import Job
from eos.shim.protect import Journal, ProtectJob
from eos.shim.settings import (
    CONTROL_BYTES,
    IDLE_TIMEOUT_S,
    LARGEST_FRAME_BYTES,
    LOGIN_TIMEOUT_S,
    MOST_CONNECTIONS,
    Address,
    check_relay,
    client_tls,
    parse_address,
    server_tls,
)
from eos.shim.trace import History, TraceJob, page, text
from eos.shim.trace.printer import Printer
from eos.signals import Handlers
from eos.state.files import allow_open_files

_PAGE_INTERVAL_S = 2.0
# Descriptors for listening ports, files, the page and health requests.
_OTHER_DESCRIPTORS = 64


@dataclass(frozen=True)
class Options:
    """Hold the options of `eos shim`, one field each, in the order of the help."""

    upstream: Annotated[str, typer.Option(metavar="HOST:PORT[,...]", help="Brokers to connect to first.")]
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listen here for clients. Further brokers get the next ports.")
    ] = "127.0.0.1:19092"
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Give clients this address instead of --listen (containers, NAT)."),
    ] = None
    tls_cert: Annotated[str | None, typer.Option(help="PEM certificate chain: clients connect with TLS.")] = None
    tls_key: Annotated[str | None, typer.Option(help="PEM key of --tls-cert, if it is not in the same file.")] = None
    client_ca: Annotated[
        str | None,
        typer.Option(
            help="PEM file of CAs: refuse clients without a certificate signed by one of them (with --tls-cert)."
        ),
    ] = None
    trust_clients: Annotated[
        bool, typer.Option("--trust-clients", help="Let every client that can reach the shim use --upstream-cert.")
    ] = False
    upstream_tls: Annotated[bool, typer.Option("--upstream-tls", help="Connect to the brokers with TLS.")] = False
    upstream_ca: Annotated[str | None, typer.Option(help="PEM file of CAs that sign the brokers' certificates.")] = None
    upstream_cert: Annotated[str | None, typer.Option(help="PEM client certificate for the brokers.")] = None
    upstream_key: Annotated[str | None, typer.Option(help="PEM key of --upstream-cert.")] = None
    max_frame_bytes: Annotated[
        int, typer.Option(help="Close a connection that sends a larger request or response.")
    ] = LARGEST_FRAME_BYTES
    max_control_bytes: Annotated[
        int,
        typer.Option(
            help="Largest request other than Produce that the shim buffers whole; a larger one closes its connection."
        ),
    ] = CONTROL_BYTES
    max_connections: Annotated[int, typer.Option(help="Allow this many client connections at a time.")] = (
        MOST_CONNECTIONS
    )
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(
            help="Allow this many connections from one address (IPv6: from one /64).",
            show_default="three quarters of --max-connections",
        ),
    ] = None
    login_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Close a connection that does not complete its login in this time.")
    ] = LOGIN_TIMEOUT_S
    idle_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Close a connection without traffic, unless a response is pending."),
    ] = IDLE_TIMEOUT_S
    trace: Annotated[bool, typer.Option("--trace", help="Print the steps of every transaction on stdout.")] = False
    trace_format: Annotated[str, typer.Option(help="text or json (one object per line)")] = "text"
    trace_html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep an up-to-date page of sequence diagrams in this file.")
    ] = None
    protect: Annotated[
        bool,
        typer.Option(
            "--protect/--no-protect",
            help="Reject late requests of an earlier transaction (KIP-890 part 2 for all clients).",
        ),
    ] = True
    require_protection: Annotated[
        bool,
        typer.Option(
            "--require-protection",
            help="Make transactions wait if the brokers do not support protection, instead of forwarding them.",
        ),
    ] = False
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Store epochs here, so that clients between transactions survive a restart of the shim.",
        ),
    ] = None
    faults: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.toml", help="Inject the faults of this plan. A rule that never fires fails the run."
        ),
    ] = None
    policy: Annotated[
        Path | None,
        typer.Option(metavar="POLICY.toml", help="Reject the requests that this policy forbids. Others are allowed."),
    ] = None
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve /livez, /readyz and /metrics here (extra: metrics).")
    ] = None
    log_format: LogFormat = "human"
    log_level: LogLevel = "info"


def shim(**values: Any) -> int:
    """Run a proxy between Kafka clients and brokers. Clients of any language connect to it as to Kafka."""
    options = Options(**values)
    _check(options)
    log.configure(options.log_format, options.log_level)
    history = History()
    with ExitStack() as cleanup:
        jobs = list(_create_jobs(options, history, cleanup))
        plan = None if options.faults is None else read_plan(options.faults)
        settings = _settings(options)
        settings = replace(settings, most_connections=_limit_connections(options.max_connections, plan))
        html = None if options.trace_html is None else _Page(options.trace_html, history, options.upstream)
        health = None if options.http is None else parse_address(options.http, "--http")
        asyncio.run(_serve(Chain(settings, jobs, plan), html, health, partial(_sources, jobs, plan)))
    return 0 if plan is None else _report_faults(plan)


shim.__signature__ = inspect.signature(Options, eval_str=True)  # type: ignore[attr-defined] # typer reads it


def _check(options: Options) -> None:
    """Raise UsageError or ConfigurationError for options that contradict each other."""
    check_log_options(options.log_format, options.log_level)
    check_choice("--trace-format", options.trace_format, ("text", "json"))
    if options.trace_html is not None and not options.trace_html.absolute().parent.is_dir():
        raise ConfigurationError(f"--trace-html {options.trace_html}: the directory does not exist")
    if options.journal is not None and not options.protect:
        raise UsageError("--journal needs protection: remove --no-protect")
    if options.require_protection and not options.protect:
        raise UsageError("--require-protection and --no-protect cannot be used together")


def _create_jobs(options: Options, history: History, cleanup: ExitStack) -> Iterator[Job]:
    """Create the jobs in the order in which they see a request. `cleanup` closes their outputs."""
    if options.http:
        yield CountingJob()
    if options.trace:
        printer = Printer(sys.stdout)
        cleanup.callback(printer.close)
        line = text.json_line if options.trace_format == "json" else text.line
        yield TraceJob(history, lambda step: printer.print(line(step)))
    elif options.trace_html:
        yield TraceJob(history)
    if options.policy is not None:
        yield GuardJob(read_policy(options.policy))
    if options.protect:
        journal = None if options.journal is None else Journal(options.journal)
        if journal is not None:
            cleanup.callback(journal.close)
        yield ProtectJob(journal=journal, required=options.require_protection)


def _settings(options: Options) -> ShimSettings:
    listen = parse_address(options.listen, "--listen")
    check_relay(options.upstream_cert, options.client_ca, options.trust_clients)
    return ShimSettings(
        upstream=tuple(parse_address(part, "--upstream") for part in options.upstream.split(",") if part.strip()),
        listen=listen,
        advertise=None if options.advertise is None else parse_address(options.advertise, "--advertise", listen[1]),
        tls=server_tls(options.tls_cert, options.tls_key, options.client_ca),
        upstream_tls=client_tls(options.upstream_tls, options.upstream_ca, options.upstream_cert, options.upstream_key),
        largest_frame=options.max_frame_bytes,
        largest_control=options.max_control_bytes,
        most_connections=options.max_connections,
        most_per_address=options.max_connections_per_address,
        login_timeout_s=options.login_timeout,
        idle_timeout_s=options.idle_timeout,
    )


def _limit_connections(wanted: int, plan: Plan | None) -> int:
    """Return the number of connections that the limit of open files allows.

    Each connection needs two descriptors in each shim; a run with faults has three shims.
    """
    each = 2 * (1 if plan is None else 3)
    needed = wanted * each + _OTHER_DESCRIPTORS
    limit = allow_open_files(needed)
    if limit >= needed:
        return wanted
    allowed = max(1, (limit - _OTHER_DESCRIPTORS) // each)
    log.warning("connection limit lowered", connections=allowed, reason=f"the process may open only {limit} files")
    return allowed


async def _serve(
    server: Chain, html: _Page | None, health: Address | None, sources: Callable[[Chain], Sources]
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # Do not use the loop's own signal handlers, because a forked child would wake this process through their pipe.
    with Handlers(lambda *_: loop.call_soon_threadsafe(stop.set)):
        await _serve_until(stop, server, html, health, sources)


async def _serve_until(
    stop: asyncio.Event,
    server: Chain,
    html: _Page | None,
    health: Address | None,
    sources: Callable[[Chain], Sources],
) -> None:
    with ExitStack() as around:
        # Start the health endpoint first, because a shim that waits for its brokers is live and not ready.
        if health is not None:
            loop = asyncio.get_running_loop()
            http = around.enter_context(serve_health(health, loop, lambda: server.not_ready_reason, sources(server)))
            log.info("health server started", address=f"{health[0]}:{http.port}")
        await server.start()
        writing = None if html is None else asyncio.create_task(html.keep_written())
        await stop.wait()
        log.info("shim stopping", connections=server.connections)
        await server.stop()
    if html is not None and writing is not None:
        writing.cancel()
        await html.write()


def _sources(jobs: Sequence[Job], plan: Plan | None, server: Chain) -> Sources:
    """Return the functions that read the metrics. The counts of a job that does not run are empty."""
    counting = next(job for job in jobs if isinstance(job, CountingJob))
    guard = next((job for job in jobs if isinstance(job, GuardJob)), None)
    protection = next((job for job in jobs if isinstance(job, ProtectJob)), None)
    kinds = ("challenged", "fenced")
    return Sources(
        connections=lambda: (server.connections, server.connections_made),
        traffic=lambda: {"request": server.traffic.requests, "answer": server.traffic.answers},
        errors=lambda: counting.errors,
        ends=lambda: counting.ends,
        protecting=lambda: protection is not None and protection.active,
        challenges=lambda: {} if protection is None else {kind: protection.counts[kind] for kind in kinds},
        refusals=lambda: {} if guard is None else guard.refused,
        faults=lambda: {} if plan is None else plan.fired_by_action(),
    )


def _report_faults(plan: Plan) -> int:
    """Print the summary of a run with faults. Return 1 if a rule did not fire as planned, else 0."""
    complaints = plan.complaints()
    for complaint in complaints:
        print(f"eos: {complaint}", file=sys.stderr)
    suffix = "" if complaints else ", every rule as planned"
    print(f"eos: faults: {plan.fired} fired by {len(plan.rules)} rules, seed {plan.seed}{suffix}", file=sys.stderr)
    return 1 if complaints else 0


class _Page:
    """Write the file of --trace-html at the start, every few seconds if the trace has new steps, and at the end."""

    def __init__(self, path: Path, history: History, upstream: str) -> None:
        self._path, self._history = path, history
        self._title = f"Transactions through the shim to {upstream}"

    async def keep_written(self) -> None:
        written = -1
        while True:
            if self._history.counts["steps"] != written:
                written = self._history.counts["steps"]
                await self.write()
            await asyncio.sleep(_PAGE_INTERVAL_S)

    async def write(self) -> None:
        # Run on a thread, because a slow disk or a page of 200 long transactions (a second of work) must not stop
        # traffic.
        try:
            await asyncio.to_thread(_write_page, self._path, self._history.snapshot(), self._title)
        except OSError as error:
            log.warning("trace page write failed", file=self._path, reason=error)


def _write_page(path: Path, history: History, title: str) -> None:
    page.write(path, page.render(history, title))
