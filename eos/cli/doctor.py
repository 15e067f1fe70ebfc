"""`eos doctor [MODULE:APP]`: the preflight alone, as a table, with the open and hanging transactions of the topics."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from eos import settings
from eos.admin import preflight
from eos.admin.cluster import ClusterAdmin
from eos.admin.preflight import Finding, Level, Need
from eos.admin.transactions import OpenTransaction, Verdict, find_open, place
from eos.cli.options import BootstrapServers, Json, Set, flags_of, print_json, print_table
from eos.cli.run import load_app
from eos.cli.txn import heal_command
from eos.errors import EosError
from eos.settings import Settings

_TIMEOUT_S = 5.0
_COLOURS = {Level.OK: "green", Level.UNKNOWN: "yellow", Level.WARNING: "yellow", Level.FAILED: "red"}


def doctor(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODULE:APP]", help="The App; without it the cluster.")
    ] = None,
    instance: Annotated[str | None, typer.Option(help="As for `eos run`.")] = None,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> int:
    """Is this cluster fit for this App? The checks of `eos run`, and open or hanging transactions."""
    flags = flags_of(bootstrap_servers, set_) | ({"eos.instance": instance} if instance is not None else {})
    loaded = settings.load(flags)
    need = _need(target, loaded)
    findings = preflight.look(loaded, need, _TIMEOUT_S)
    if not any(f.level is Level.FAILED for f in findings):
        findings += _transactions(loaded, need)
    if json:
        print_json([_finding(f) for f in findings])
    else:
        print_table(table(findings))
    failed = [f for f in findings if f.level is Level.FAILED]
    return failed[0].error.exit_code if failed else 0


def _need(target: str | None, loaded: Settings) -> Need:
    if target is None:
        return preflight.need_of(loaded, (), ())
    app = load_app(target)
    app.check()
    named = loaded.with_values(**{"group.id": app.id, "transactional.id": f"{app.id}-{loaded.instance}"})
    return preflight.need_of(named, app.topics, app.destinations)


def _transactions(loaded: Settings, need: Need) -> list[Finding]:
    """Of the App's topics and of the offsets log; without an App of all topics."""
    try:
        with ClusterAdmin(loaded) as admin:
            found = find_open(admin, need.topics or None)
            found += _offsets_log(admin) if need.topics else []
    except EosError as error:
        return [Finding("transactions", Level.UNKNOWN, str(error))]
    if not found:
        return [Finding("transactions", Level.OK, "none is open")]
    return [_as_finding(t) for t in found]


def _offsets_log(admin: ClusterAdmin) -> list[OpenTransaction]:
    from eos.admin.cluster import OFFSETS_LOG

    return find_open(admin, [OFFSETS_LOG])


def _as_finding(t: OpenTransaction) -> Finding:
    who = t.transactional_id or f"producer id {t.producer.producer_id}"
    sentence = f"{place(t.partition)}: transaction of {who} is {t.verdict.value}: {t.reason}"
    if t.verdict is Verdict.HANGING:
        return Finding("transactions", Level.FAILED, f"{sentence}; {t.held_back} offsets wait", heal_command(t))
    level = Level.UNKNOWN if t.verdict is Verdict.UNKNOWN else Level.OK
    return Finding("transactions", level, sentence)


def table(findings: list[Finding]) -> Table:
    found = Table("check", "", "found", "what to change")
    for f in findings:
        colour = _COLOURS[f.level]
        found.add_row(f.check, f"[{colour}]{f.level.value}[/]", escape(f.sentence), escape(f.remedy))
    return found


def _finding(f: Finding) -> dict[str, object]:
    code = f.error.exit_code if f.level is Level.FAILED else 0
    return {"check": f.check, "level": f.level.value, "found": f.sentence, "change": f.remedy, "exit_code": code}
