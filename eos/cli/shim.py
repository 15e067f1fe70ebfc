"""`eos shim`: a Kafka-wire proxy in front of real brokers; shows transactions and protects them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from eos import log
from eos.cli.options import LogFormat, LogLevel, check_choice, check_log
from eos.errors import ConfigurationError, UsageError
from eos.shim import ShimSettings
from eos.shim.chain import Chain
from eos.shim.faults import Plan, read_plan
from eos.shim.guard import GuardJob, read_policy
from eos.shim.health import CountingJob, HealthServer, Sources
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
# Ports, files, the page and whoever asks for health.
_OTHER_DESCRIPTORS = 64


def shim(
    upstream: Annotated[str, typer.Option(metavar="HOST:PORT[,...]", help="The brokers to begin with.")],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients connect; more brokers get the next ports.")
    ] = "127.0.0.1:19092",
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="What clients are told instead of --listen (containers, NAT)."),
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(help="PEM certificate chain: clients connect with TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="PEM key of --tls-cert, if it is not in the same file.")] = None,
    client_ca: Annotated[
        str | None, typer.Option(help="PEM file of CAs: only clients with a certificate of theirs (with --tls-cert).")
    ] = None,
    trust_clients: Annotated[
        bool, typer.Option("--trust-clients", help="Whoever reaches the shim may use --upstream-cert.")
    ] = False,
    upstream_tls: Annotated[bool, typer.Option("--upstream-tls", help="Connect to the brokers with TLS.")] = False,
    upstream_ca: Annotated[
        str | None, typer.Option(help="PEM file of CAs that sign the brokers' certificates.")
    ] = None,
    upstream_cert: Annotated[str | None, typer.Option(help="PEM client certificate for the brokers.")] = None,
    upstream_key: Annotated[str | None, typer.Option(help="PEM key of --upstream-cert.")] = None,
    max_frame_bytes: Annotated[int, typer.Option(help="Larger requests and answers end the connection.")] = (
        LARGEST_FRAME_BYTES
    ),
    max_control_bytes: Annotated[
        int, typer.Option(help="Larger requests other than Produce end the connection, where they are read whole.")
    ] = CONTROL_BYTES,
    max_connections: Annotated[int, typer.Option(help="Clients' connections at once.")] = MOST_CONNECTIONS,
    max_connections_per_address: Annotated[
        int | None,
        typer.Option(help="Of one address (IPv6: of its /64).", show_default="three quarters of --max-connections"),
    ] = None,
    login_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Until a broker answers more than what comes before a login.")
    ] = LOGIN_TIMEOUT_S,
    idle_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Without a byte and without a request that a broker still owes.")
    ] = IDLE_TIMEOUT_S,
    trace: Annotated[bool, typer.Option("--trace", help="Show the steps of every transaction on stdout.")] = False,
    trace_format: Annotated[str, typer.Option(help="text or json (lines)")] = "text",
    trace_html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep a page of sequence diagrams there, up to date.")
    ] = None,
    protect: Annotated[
        bool,
        typer.Option(
            "--protect/--no-protect",
            help="Keep late requests out of the next transaction (KIP-890 part 2 for all clients).",
        ),
    ] = True,
    require_protection: Annotated[
        bool,
        typer.Option(
            "--require-protection",
            help="Where the brokers do not allow protection transactions wait, and are not passed.",
        ),
    ] = False,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Clients outlive a restart of the shim between their transactions."),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(metavar="PLAN.toml", help="What breaks when; a rule that never fires fails the run.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(metavar="POLICY.toml", help="What clients may not do; nothing else is refused.")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="/livez, /readyz and /metrics there (extra: metrics).")
    ] = None,
    log_format: LogFormat = "human",
    log_level: LogLevel = "info",
) -> int:
    """Stand between Kafka clients and brokers: any client of any language connects here as to Kafka."""
    check_log(log_format, log_level)
    check_choice("--trace-format", trace_format, ("text", "json"))
    log.configure(log_format, log_level)
    if trace_html is not None and not trace_html.absolute().parent.is_dir():
        raise ConfigurationError(f"--trace-html {trace_html}: there is no such directory")
    history = History()
    printer = Printer(sys.stdout) if trace else None
    line = text.json_line if trace_format == "json" else text.line
    sinks = [] if printer is None else [lambda step: printer.print(line(step))]
    if journal is not None and not protect:
        raise UsageError("--journal has nothing to keep with --no-protect")
    if require_protection and not protect:
        raise UsageError("--require-protection and --no-protect exclude each other")
    counting = CountingJob() if http else None
    jobs: list[Job] = [] if counting is None else [counting]
    jobs += [TraceJob(history, *sinks)] if sinks or trace_html else []
    kept: Journal | None = None
    try:
        if policy is not None:
            jobs.append(GuardJob(read_policy(policy)))
        if protect:
            kept = None if journal is None else Journal(journal)
            jobs.append(ProtectJob(journal=kept, required=require_protection))
        plan = None if faults is None else read_plan(faults)
        listening = parse_address(listen, "--listen")
        check_relay(upstream_cert, client_ca, trust_clients)
        settings = ShimSettings(
            upstream=tuple(parse_address(part, "--upstream") for part in upstream.split(",") if part.strip()),
            listen=listening,
            advertise=None if advertise is None else parse_address(advertise, "--advertise", listening[1]),
            tls=server_tls(tls_cert, tls_key, client_ca),
            upstream_tls=client_tls(upstream_tls, upstream_ca, upstream_cert, upstream_key),
            largest_frame=max_frame_bytes,
            largest_control=max_control_bytes,
            most_connections=max_connections,
            most_of_an_address=max_connections_per_address,
            login_timeout_s=login_timeout,
            idle_timeout_s=idle_timeout,
        )
        settings = replace(settings, most_connections=_with_descriptors(max_connections, plan))
        html = None if trace_html is None else _Page(trace_html, history, upstream)
        health = None if http is None else parse_address(http, "--http")
        asyncio.run(_serve(Chain(settings, jobs, plan), html, health, partial(_sources, jobs, plan)))
    finally:
        if kept is not None:
            kept.close()
        if printer is not None:
            printer.close()
    return 0 if plan is None else _tell_faults(plan)


def _with_descriptors(wanted: int, plan: Plan | None) -> int:
    """So many connections as there are descriptors for: two for each, in each of the shims that faults stand in."""
    each = 2 * (1 if plan is None else 3)
    needed = wanted * each + _OTHER_DESCRIPTORS
    limit = allow_open_files(needed)
    if limit >= needed:
        return wanted
    allowed = max(1, (limit - _OTHER_DESCRIPTORS) // each)
    log.warning(
        "fewer connections than --max-connections", connections=allowed, reason=f"{limit} open files are allowed"
    )
    return allowed


async def _serve(
    server: Chain, html: _Page | None, health: Address | None, sources: Callable[[Chain], Sources]
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # Not the loop's own handlers: a forked child would wake this process through their pipe.
    with Handlers(lambda *_: loop.call_soon_threadsafe(stop.set)):
        await _serve_until(stop, server, html, health, sources)


async def _serve_until(
    stop: asyncio.Event,
    server: Chain,
    html: _Page | None,
    health: Address | None,
    sources: Callable[[Chain], Sources],
) -> None:
    # Before the brokers are asked: a shim that waits for them is alive and not ready.
    http = None
    if health is not None:
        http = HealthServer(health, asyncio.get_running_loop(), lambda: server.not_ready, sources(server))
        log.info("health", address=f"{health[0]}:{http.port}")
    await server.start()
    writing = None if html is None else asyncio.create_task(html.keep_written())
    await stop.wait()
    log.info("stopping", connections=server.connections)
    await server.stop()
    if http is not None:
        http.close()
    if html is not None and writing is not None:
        writing.cancel()
        await html.write()


def _sources(jobs: Sequence[Job], plan: Plan | None, server: Chain) -> Sources:
    """Where the metrics are read from; a job that is not there has counted nothing."""
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


def _tell_faults(plan: Plan) -> int:
    """The last sentence of a run with faults; 1 when it did not test what it was meant to."""
    complaints = plan.complaints()
    for complaint in complaints:
        print(f"eos: {complaint}", file=sys.stderr)
    done = "" if complaints else ", every rule as planned"
    print(f"eos: faults: {plan.fired} fired by {len(plan.rules)} rules, seed {plan.seed}{done}", file=sys.stderr)
    return 1 if complaints else 0


class _Page:
    """The file of --trace-html: written at the start, every few seconds when something passed, and at the end."""

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
        # On a thread: neither a slow disk nor a page of 200 long transactions, a second's work, must stop the traffic.
        try:
            await asyncio.to_thread(_write_page, self._path, self._history.snapshot(), self._title)
        except OSError as error:
            log.warning("the trace page could not be written", file=self._path, reason=error)


def _write_page(path: Path, history: History, title: str) -> None:
    page.write(path, page.render(history, title))
