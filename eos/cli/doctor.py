"""Define `eos doctor [MODULE:APP]`, which prints the preflight checks and the open and hanging transactions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from eos.app.definition import App
from eos.cli.options import BootstrapServers, Json, Set, collect_flags, print_json, print_table
from eos.cli.txn import abort_command
from eos.errors import ConfigurationError, EosError, NotAuthorised, Unavailable
from eos.kafka.admin import facts, preflight
from eos.kafka.admin.facts import Facts
from eos.kafka.admin.preflight import Finding, Level, Requirements
from eos.kafka.admin.transactions import OpenTransaction, Verdict, find_open
from eos.kafka.client import settings
from eos.kafka.client.cluster import OFFSETS_LOG, ClusterAdmin
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL
from eos.records import format_position
from eos.state import changelog, notes
from eos.worker import chains, partitioners
from eos.worker.loading import load_app
from eos.worker.new_topics import explain_unread, find_missing_dead_letter_topics, require_topics, topic_names
from eos.worker.sources import check_source
from eos.worker.writers import check_database, databases_of

_TIMEOUT_S = 5.0
_SAMPLES_S = 5.0
_COLOURS = {Level.OK: "green", Level.UNKNOWN: "yellow", Level.WARNING: "yellow", Level.FAILED: "red"}


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODULE:APP]", help="The App; without it only the cluster is checked.")
    ] = None,
    instance: Annotated[str | None, typer.Option(help="As for `eos run`.")] = None,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> int:
    """Check whether this cluster is ready for this App, as `eos run` does, and show open and hanging transactions."""
    flags = collect_flags(bootstrap_servers, set_, instance)
    loaded = settings.load(flags)
    findings = _findings(loaded, None if target is None else load_app(target))
    if json:
        print_json([_finding_json(f) for f in findings])
    else:
        print_table(table(findings))
    failed = [f for f in findings if f.level is Level.FAILED]
    return failed[0].error.exit_code if failed else 0


def _need_of(app: App | None, loaded: Settings) -> Requirements:
    if app is None:
        return preflight.requirements_of(loaded, (), ())
    named = loaded.with_values(**{"group.id": app.id, "transactional.id": f"{app.id}-{loaded.instance}"})
    # A worker creates the topics of its sources at its start.
    inputs = [topic for topic in app.topics if topic not in app.sources]
    return preflight.requirements_of(named, inputs, app.destinations)


def _findings(loaded: Settings, app: App | None) -> list[Finding]:
    """Return all findings. An unavailable cluster is a finding too, so that the JSON output contains it."""
    try:
        by_pattern = [] if app is None else _add_matching_topics(loaded, app)
        need = _need_of(app, loaded)
        known = preflight.gather_facts(loaded, need, _TIMEOUT_S)
    except (Unavailable, NotAuthorised) as error:
        check = "brokers" if isinstance(error, Unavailable) else "authorised"
        return [Finding(check, Level.FAILED, str(error.args[0]), error.remedy, type(error))]
    states = (
        []
        if app is None
        else [
            *_state_findings(loaded, app),
            *_chain_findings(loaded, app),
            *_partitioner_findings(loaded, app, known),
            *_database_findings(app),
        ]
    )
    return [*preflight.judge(need, known), *by_pattern, *states, *_transactions(loaded, need, known)]


def _state_findings(loaded: Settings, app: App) -> list[Finding]:
    """Return a finding about the changelog of each function with state."""
    found: list[Finding] = []
    try:
        changelog.changelogs_of(app.id, app.stateful)
        if app.stateful:
            with ClusterAdmin(loaded) as admin:
                notes.require_all_offset_notes(
                    {route.sources[0]: route for route in app.stateful}, admin.metadata_by_partition(app.id)
                )
        client = facts.connect(loaded, _TIMEOUT_S) if app.stateful else None
        for route in app.stateful:
            fit = changelog.check_fit(client, app.id, route)
            state = f"will be created at start with {fit.partitions} partitions" if fit.missing else "exists"
            found.append(Finding("state", Level.OK, f"{route.name}: its changelog {fit.topic} {state}"))
    except (ConfigurationError, Unavailable, NotAuthorised) as error:
        found.append(Finding("state", Level.FAILED, str(error.args[0]), error.remedy, type(error)))
    return found


def _chain_findings(loaded: Settings, app: App) -> list[Finding]:
    """Return a finding about the topics between two functions, which only this App may write."""
    if not app.chained:
        return []
    good = f"{', '.join(sorted(app.chained))}: written by this App only, or empty"
    return [_judge("between", lambda: chains.check_own(loaded, app), good)]


def _partitioner_findings(loaded: Settings, app: App, known: Facts) -> list[Finding]:
    """Return a finding about the partitioner of each input topic whose last keys show it, within a few seconds."""
    found: list[Finding] = []
    deadline = REAL.now() + _SAMPLES_S
    inputs = {name: known.topics[name] for name in app.topics if name in known.topics}
    examined = {
        name: topic.partitions for name, topic in inputs.items() if topic.partitions > 1 and not topic.leaderless
    }
    for number, (name, partitions) in enumerate(examined.items()):
        if REAL.now() > deadline:
            left = f"{len(examined) - number} of {len(examined)} topics were not examined within {_SAMPLES_S:g} s"
            return [*found, Finding("partitioner", Level.UNKNOWN, left)]
        try:
            places = partitioners.sample_places(loaded, name, partitions, deadline)
        except EosError as error:
            found.append(Finding("partitioner", Level.UNKNOWN, str(error)))
            continue
        recognised = partitioners.recognise(places, partitions)
        if recognised is not None:
            found.append(partitioners.judge(app, loaded, known.topics, name, recognised))
    return found


def _database_findings(app: App) -> list[Finding]:
    """Return a finding about each database that functions of the App write to, and each table that they read."""
    found: list[Finding] = []
    for database, targets in databases_of(app).items():
        tables = ", ".join(target.table.name for target in targets if target.table is not None) or "its own SQL"
        found.append(_judge("database", partial(check_database, database, targets), f"{database}: {tables}"))
    for topic, route in app.sources.items():
        assert route.source is not None
        rows = f"rows of table {route.source.table}, with the position in the topic {topic}"
        found.append(_judge("database", partial(check_source, route), f"{route.source.database}: {rows}"))
    return found


def _judge(name: str, check: Callable[[], object], good: str) -> Finding:
    """Return the finding of a check, which raises if it fails. `good`: the sentence if it does not."""
    try:
        check()
    except (ConfigurationError, Unavailable, NotAuthorised) as error:
        return Finding(name, Level.FAILED, str(error.args[0]), error.remedy, type(error))
    return Finding(name, Level.OK, good)


def _add_matching_topics(loaded: Settings, app: App) -> list[Finding]:
    """Add the matching topics that a worker would read now, and return why it would not read the others."""
    app.check()
    if not app.patterns:
        return []
    existing = topic_names(loaded, _TIMEOUT_S)
    waiting = find_missing_dead_letter_topics(app, existing)
    app.add_topics(existing - waiting.keys())
    found = [
        Finding("topics", Level.WARNING, explain_unread(topic, letters), f"create {letters}")
        for topic, letters in waiting.items()
    ]
    try:
        require_topics(app, loaded.bootstrap_servers, waiting)
    except Unavailable as error:
        found.append(Finding("topics", Level.FAILED, str(error), "create one"))
    return found


def _transactions(loaded: Settings, need: Requirements, known: Facts) -> list[Finding]:
    """Return findings about open transactions on the App's topics and the offsets log; without an App on all topics."""
    searched: list[list[str] | None] = [None]
    if need.topics:
        existing = [name for name in need.topics if known.topics[name].exists]
        log = [OFFSETS_LOG] if known.topics[OFFSETS_LOG].exists is not False else []
        searched = [topics for topics in (existing, log) if topics]
    try:
        with ClusterAdmin(loaded) as admin:
            found = [finding for topics in searched for finding in _transaction_findings(admin, topics)]
    except EosError as error:
        return [Finding("transactions", Level.UNKNOWN, str(error))]
    return found or [Finding("transactions", Level.OK, "none is open")]


def _transaction_findings(admin: ClusterAdmin, topics: list[str] | None) -> list[Finding]:
    try:
        return [_transaction_finding(t) for t in find_open(admin, topics)]
    except EosError as error:
        return [Finding("transactions", Level.UNKNOWN, str(error))]


def _transaction_finding(t: OpenTransaction) -> Finding:
    who = t.transactional_id or f"producer id {t.producer.producer_id}"
    sentence = f"{format_position(*t.partition)}: transaction of {who} is {t.verdict.value}: {t.reason}"
    if t.verdict is Verdict.HANGING:
        return Finding(
            "transactions", Level.FAILED, f"{sentence}; {t.held_back} offsets are held back", abort_command(t)
        )
    level = Level.UNKNOWN if t.verdict is Verdict.UNKNOWN else Level.OK
    return Finding("transactions", level, sentence)


def table(findings: list[Finding]) -> Table:
    found = Table("check", "", "found", "what to change")
    for f in findings:
        colour = _COLOURS[f.level]
        found.add_row(f.check, f"[{colour}]{f.level.value}[/]", escape(f.sentence), escape(f.remedy))
    return found


def _finding_json(f: Finding) -> dict[str, object]:
    code = f.error.exit_code if f.level is Level.FAILED else 0
    return {"check": f.check, "level": f.level.value, "found": f.sentence, "change": f.remedy, "exit_code": code}
