"""Define `eos reset MODULE:APP --from ...`, which replays an App's input or skips a record while no worker runs.

The module owns the rule for the metadata of an offset that moves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated

import typer
from rich.table import Table

from eos.app.definition import App
from eos.app.routes import changelog_of
from eos.cli.options import BootstrapServers, Set, Yes, confirm, load_settings, print_table
from eos.encoding import lineage
from eos.errors import UsageError
from eos.kafka.admin.facts import connect, describe_topic
from eos.kafka.admin.reset import UNCHANGED, GroupOffsets, Move, Target, parse_skip, parse_target, require_exact_skips
from eos.kafka.admin.tail import OffsetRange, topic_offsets_with
from eos.kafka.client.settings import Settings
from eos.records import merge_metadata, parse_metadata
from eos.state import notes
from eos.state.full_reset import FullReset
from eos.worker import positions
from eos.worker.loading import load_app
from eos.worker.new_topics import require_topics, topic_names
from eos.worker.writers import move_offsets

_TIMEOUT_S = 5.0


def reset(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODULE:APP]", help="The App whose committed offsets to move.")
    ] = None,
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
        typer.Option(metavar="RECORD", help="Skip this record, given as TOPIC[PARTITION]@OFFSET; repeatable."),
    ] = None,
    group: Annotated[str | None, typer.Option(help="A group instead of an App; needs --topic.")] = None,
    topic: Annotated[list[str] | None, typer.Option(help="Only this topic of the App; repeatable.")] = None,
    accept_changelog: Annotated[
        bool,
        typer.Option(
            "--accept-changelog",
            help="Accept the changelogs as complete, though they have lost records; works without --from too.",
        ),
    ] = False,
    with_state: Annotated[
        bool,
        typer.Option(
            "--with-state",
            help="With --from: start the App over. Empties its state and the topics between its functions.",
        ),
    ] = False,
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Wait this long for members to leave.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the changes.")] = False,
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Move a group's committed offsets. Refuses while the group has members, and asks for confirmation."""
    if from_ and skip:
        raise UsageError("--from and --skip cannot be used together")
    if with_state:
        if target is None or not from_ or skip or topic or accept_changelog:
            raise UsageError("--with-state restarts the whole App: it needs MODULE:APP and --from, and nothing else")
        _restart_app(load_settings(bootstrap_servers, set_), _app(target), parse_where(from_), wait, dry_run, yes)
        return
    stays = accept_changelog and not from_ and not skip
    where = UNCHANGED if stays else parse_skip(skip) if skip else parse_where(from_ or [])
    loaded = load_settings(bootstrap_servers, set_)
    app = None if target is None else _app(target)
    name, topics = _group(loaded, app, group, topic or [])
    sources = []
    if app is not None and not stays:
        sources = positions.sources_to_reset(app, topics, "--skip" if skip else where.name)
        positions.create_topics(loaded, app)
    offsets = GroupOffsets(loaded, name, topics)
    offsets.require_no_members(wait)
    moves = [update_metadata(move, bool(skip), accept_changelog) for move in offsets.plan(where)]
    if not moves:
        raise UsageError(f"group {name} has no committed offset of {', '.join(topics)}")
    if skip:
        require_exact_skips(loaded, moves)
    if app is not None and from_:
        moves = _with_notes_of_state(loaded, app, moves)
    print_table(_table(moves))
    if accept_changelog:
        print(
            f"group {name}: the next start accepts the changelogs as complete "
            f"(noted in the metadata of {len(moves)} offsets)"
        )
    if dry_run:
        return
    confirm(f"set {len(moves)} committed offsets of group {name}", yes)
    # Move the database's offsets first, because they take precedence over those of the group.
    if app is not None and (count := move_offsets(app, {move.partition: move.after for move in moves})):
        print(f"database: {count} offsets set; rows of records that are read again are written again")
    if app is not None and sources:
        positions.restart(loaded, app, sources)
        print(f"positions: {len(sources)} set before the first row; all rows of these tables are sent again")
    offsets.commit(moves)
    print(f"group {name}: {len(moves)} offsets set")


def parse_where(from_: list[str]) -> Target:
    """Parse the values of `--from`. Print a time with its zone: a time without one is in this machine's zone."""
    where = parse_target(from_)
    if where.timestamp_ms is not None:
        print(f"from {where.name}")
    return where


def _restart_app(loaded: Settings, app: App, where: Target, wait: float, dry_run: bool, yes: bool) -> None:
    if not app.stateful and not app.chained:
        raise UsageError(f"{app.id} has no state and no topic between its functions: use --from without --with-state")
    _add_matching_topics(loaded, app)
    offsets = GroupOffsets(loaded, app.id, set(app.topics) - app.chained)
    offsets.require_no_members(wait)
    plan = FullReset(loaded, app, where, offsets)
    print_table(_table(plan.moves))
    for topic in plan.changelogs:
        print(f"to be emptied: {topic}, a changelog")
    for topic in plan.between:
        print(f"to be emptied: {topic}, between functions")
    if outputs := sorted(app.destinations - app.chained):
        count = plan.offsets_read_again
        print(f"unchanged: {', '.join(outputs)}; its readers get the outputs of {count} input records again")
    if dry_run:
        return
    confirm(f"delete the state of {app.id} and handle its input again", yes)
    plan.carry_out()
    print(f"{app.id} starts over at its next start")


def _app(target: str) -> App:
    app = load_app(target)
    app.check()
    return app


def _add_matching_topics(loaded: Settings, app: App) -> None:
    if app.patterns:
        app.add_topics(topic_names(loaded, _TIMEOUT_S))
        require_topics(app, loaded.bootstrap_servers)


def _group(loaded: Settings, app: App | None, group: str | None, topics: list[str]) -> tuple[str, list[str]]:
    if (app is None) == (group is None):
        raise UsageError("eos reset needs either MODULE:APP, or --group with --topic")
    if app is None:
        assert group is not None
        if not topics:
            raise UsageError("--group needs --topic: name the topics whose offsets move")
        return group, topics
    _add_matching_topics(loaded, app)
    unknown = sorted(set(topics) - set(app.topics))
    if unknown:
        raise UsageError(f"--topic {unknown[0]}: not a source of {app.id} ({', '.join(app.topics)})")
    return app.id, topics or app.topics


def _with_notes_of_state(loaded: Settings, app: App, moves: list[Move]) -> list[Move]:
    """Return the moves, with the metadata of a new worker on the offsets of functions with state.

    Raises UsageError if such a function has handled records.
    """
    if not any(app.routes[move.partition[0]].has_state for move in moves):
        return moves
    client = connect(loaded, _TIMEOUT_S)

    @cache
    def kept(changelog: str) -> Mapping[int, OffsetRange]:
        return topic_offsets_with(client, loaded, changelog) if describe_topic(client, changelog).exists else {}

    @cache
    def partitions(topic: str) -> int:
        return describe_topic(client, topic).partitions

    def with_notes(move: Move) -> Move:
        (topic, partition), route = move.partition, app.routes[move.partition[0]]
        if not route.has_state:
            return move
        span = kept(changelog_of(app.id, route)).get(partition)
        if move.before is None and (span is None or span.low == span.end):
            note = notes.make_offset_note(route, 0, partitions(topic)).entries()
            return dataclasses.replace(move, metadata=merge_metadata(move.metadata, note))
        raise UsageError(
            f"{route.name} of {app.id} has state, and records that are read again would change it a second time",
            remedy="--with-state empties the state too; --skip skips a record; `eos reset --group` moves only the "
            "offsets",
        )

    return [with_notes(move) for move in moves]


def update_metadata(move: Move, skipping: bool, accept_changelog: bool) -> Move:
    """Return the move with metadata that is correct at its new offset.

    A record that `--skip` skips counts as handled without outputs. After any other move lineage starts its count again.
    """
    found = parse_metadata(move.metadata)
    tally = lineage.tally_of(move.metadata)
    if accept_changelog and (found or not move.metadata):  # metadata that another program wrote stays as it is
        found[notes.KEY] = notes.ACCEPTED
    if tally is not None and move.after != move.before:
        del found[lineage.KEY]
        if skipping:
            found[lineage.KEY] = [tally.begin, tally.inputs + 1, tally.outputs]
    if found == parse_metadata(move.metadata):
        return move
    return dataclasses.replace(move, metadata=json.dumps(found, separators=(",", ":")))


def _table(moves: list[Move]) -> Table:
    table = Table("topic", "partition", "was", "will be", "effect", "readable")
    for m in moves:
        was = m.low if m.before is None else m.before
        change = m.after - was
        effect = "stays" if not change else f"{'skips' if change > 0 else 'repeats'} up to {abs(change)}"
        before = "-" if m.before is None else str(m.before)
        table.add_row(m.partition[0], str(m.partition[1]), before, str(m.after), effect, f"{m.low} to {m.end}")
    return table
