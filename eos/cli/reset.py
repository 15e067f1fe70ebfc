"""`eos reset MODULE:APP --from ...`: replay an App's input, or step past a record; only while no worker lives."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from eos.cli.options import BootstrapServers, Set, Yes, confirm, load_settings, print_table
from eos.errors import UsageError
from eos.kafka.reset import GroupOffsets, Move, parse_skip, parse_target, require_one_each
from eos.kafka.settings import Settings
from eos.worker.loading import load_app
from eos.worker.new_topics import require_topics, topic_names

_TIMEOUT_S = 5.0


def reset(
    target: Annotated[str | None, typer.Argument(metavar="[MODULE:APP]", help="The App whose group is moved.")] = None,
    from_: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="WHERE",
            help="earliest, latest, a time (2013-07-04T12:00), or TOPIC[PARTITION]@OFFSET (repeatable).",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="PLACE", help="Step past this record, as TOPIC[PARTITION]@OFFSET; repeatable."),
    ] = None,
    group: Annotated[str | None, typer.Option(help="A group, instead of an App; needs --topic.")] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic of the App; repeatable.")] = None,
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="For members to be gone.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved.")] = False,
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Move a group's committed offsets. Refuses while members live; asks before it acts."""
    if from_ and skip:
        raise UsageError("--from and --skip exclude each other")
    where = parse_skip(skip) if skip else parse_target(from_ or [])
    loaded = load_settings(bootstrap_servers, set_)
    name, topics = _group(loaded, target, group, topic or [], skipping=bool(skip))
    offsets = GroupOffsets(loaded, name, topics)
    offsets.require_nobody(wait)
    moves = offsets.plan(where)
    if skip:
        require_one_each(loaded, moves)
    print_table(_table(moves))
    if dry_run:
        return
    confirm(f"move {len(moves)} committed offsets of group {name}", yes)
    offsets.commit(moves)
    print(f"group {name}: {len(moves)} offsets set")


def _group(
    loaded: Settings, target: str | None, group: str | None, topics: list[str], skipping: bool
) -> tuple[str, list[str]]:
    if (target is None) == (group is None):
        raise UsageError("eos reset needs MODULE:APP, or --group with --topic")
    if target is None:
        assert group is not None
        if not topics:
            raise UsageError("--group needs --topic: which of its offsets are to be moved")
        return group, topics
    app = load_app(target)
    app.check()
    if app.stateful and not skipping:
        names = ", ".join(route.name for route in app.stateful)
        raise UsageError(
            f"{names} of {app.id} has state, which stays as it is: what is read again would change it once more",
            remedy="give the App another id to begin anew; --skip steps past a record; `eos reset --group` moves the "
            "offsets alone",
        )
    if app.patterns:
        app.take_in(topic_names(loaded, _TIMEOUT_S))
        require_topics(app, loaded.bootstrap_servers)
    strangers = sorted(set(topics) - set(app.topics))
    if strangers:
        raise UsageError(f"--topic {strangers[0]}: not a source of {app.id} ({', '.join(app.topics)})")
    return app.id, topics or app.topics


def _table(moves: list[Move]) -> Table:
    table = Table("topic", "partition", "was", "will be", "meaning", "readable")
    for m in moves:
        was = m.low if m.before is None else m.before
        change = m.after - was
        meaning = "stays" if not change else f"{'skips' if change > 0 else 'repeats'} up to {abs(change)}"
        before = "-" if m.before is None else str(m.before)
        table.add_row(m.partition[0], str(m.partition[1]), before, str(m.after), meaning, f"{m.low} to {m.end}")
    return table
