"""`eos reset MODULE:APP --from ...`: replay an App's input, or step past a record; only while no worker lives.

Owns what becomes of the metadata of an offset that moves.
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
    accept_changelog: Annotated[
        bool,
        typer.Option(
            "--accept-changelog",
            help="Go on with the state that the changelogs hold now, though they held more once; also without --from.",
        ),
    ] = False,
    with_state: Annotated[
        bool,
        typer.Option(
            "--with-state",
            help="With --from: start the App over. Empty its state and the topics between its functions.",
        ),
    ] = False,
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="For members to be gone.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved.")] = False,
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Move a group's committed offsets. Refuses while members live; asks before it acts."""
    if from_ and skip:
        raise UsageError("--from and --skip exclude each other")
    if with_state:
        if target is None or not from_ or skip or topic or accept_changelog:
            raise UsageError("--with-state begins all of an App anew: it takes MODULE:APP and --from alone")
        _begin_anew(load_settings(bootstrap_servers, set_), _app(target), where_to_go(from_), wait, dry_run, yes)
        return
    stays = accept_changelog and not from_ and not skip
    where = UNCHANGED if stays else parse_skip(skip) if skip else where_to_go(from_ or [])
    loaded = load_settings(bootstrap_servers, set_)
    app = None if target is None else _app(target)
    name, topics = _group(loaded, app, group, topic or [])
    offsets = GroupOffsets(loaded, name, topics)
    offsets.require_no_members(wait)
    moves = [with_metadata(move, bool(skip), accept_changelog) for move in offsets.plan(where)]
    if not moves:
        raise UsageError(f"group {name} has no committed offset of {', '.join(topics)}")
    if skip:
        require_exact_skips(loaded, moves)
    if app is not None and from_:
        moves = _with_notes_of_state(loaded, app, moves)
    print_table(_table(moves))
    if accept_changelog:
        print(
            f"group {name}: the next start takes what the changelogs hold "
            f"as complete (noted beside {len(moves)} offsets)"
        )
    if dry_run:
        return
    confirm(f"set {len(moves)} committed offsets of group {name}", yes)
    offsets.commit(moves)
    print(f"group {name}: {len(moves)} offsets set")


def where_to_go(from_: list[str]) -> Target:
    """Return what `--from` says, and print the moment of a time: one without a zone is in this machine's."""
    where = parse_target(from_)
    if where.timestamp_ms is not None:
        print(f"from {where.name}")
    return where


def _begin_anew(loaded: Settings, app: App, where: Target, wait: float, dry_run: bool, yes: bool) -> None:
    if not app.stateful and not app.chained:
        raise UsageError(f"{app.id} has no state, and no topic between its functions: --from alone begins it anew")
    _take_in(loaded, app)
    offsets = GroupOffsets(loaded, app.id, set(app.topics) - app.chained)
    offsets.require_no_members(wait)
    plan = FullReset(loaded, app, where, offsets)
    print_table(_table(plan.moves))
    for topic in plan.changelogs:
        print(f"will be emptied: {topic}, which keeps state")
    for topic in plan.between:
        print(f"will be emptied: {topic}, between functions")
    if outputs := sorted(app.destinations - app.chained):
        print(f"stays as it is: {', '.join(outputs)}; its readers get the outputs of {plan.again} input records again")
    if dry_run:
        return
    confirm(f"delete the state of {app.id} and handle its input again", yes)
    plan.carry_out()
    print(f"{app.id} begins anew at its next start")


def _app(target: str) -> App:
    app = load_app(target)
    app.check()
    return app


def _take_in(loaded: Settings, app: App) -> None:
    if app.patterns:
        app.add_topics(topic_names(loaded, _TIMEOUT_S))
        require_topics(app, loaded.bootstrap_servers)


def _group(loaded: Settings, app: App | None, group: str | None, topics: list[str]) -> tuple[str, list[str]]:
    if (app is None) == (group is None):
        raise UsageError("eos reset needs MODULE:APP, or --group with --topic")
    if app is None:
        assert group is not None
        if not topics:
            raise UsageError("--group needs --topic: which of its offsets are to be moved")
        return group, topics
    _take_in(loaded, app)
    strangers = sorted(set(topics) - set(app.topics))
    if strangers:
        raise UsageError(f"--topic {strangers[0]}: not a source of {app.id} ({', '.join(app.topics)})")
    return app.id, topics or app.topics


def _with_notes_of_state(loaded: Settings, app: App, moves: list[Move]) -> list[Move]:
    """Return the moves; those of a function with state get the metadata of a worker that has handled nothing yet.
    Raises UsageError if it has handled records."""
    if not any(app.routes[move.partition[0]].stores for move in moves):
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
        if not route.stores:
            return move
        span = kept(changelog_of(app.id, route)).get(partition)
        if move.before is None and (span is None or span.low == span.end):
            note = notes.make_offset_note(route, 0, partitions(topic)).entries()
            return dataclasses.replace(move, metadata=merge_metadata(move.metadata, note))
        raise UsageError(
            f"{route.name} of {app.id} has state, which stays as it is: what is read again would change it once more",
            remedy="--with-state empties the state too; --skip steps past a record; `eos reset --group` moves the "
            "offsets alone",
        )

    return [with_notes(move) for move in moves]


def with_metadata(move: Move, skipping: bool, accept_changelog: bool) -> Move:
    """Return the move with the metadata that is true at its new offset. A record that `--skip` steps past counts as
    handled without outputs; after any other move lineage starts its count again."""
    found = parse_metadata(move.metadata)
    tally = lineage.tally_of(move.metadata)
    if accept_changelog and (found or not move.metadata):  # what another program wrote stays
        found[notes.KEY] = notes.ACCEPTED
    if tally is not None and move.after != move.before:
        del found[lineage.KEY]
        if skipping:
            found[lineage.KEY] = [tally.begin, tally.inputs + 1, tally.outputs]
    if found == parse_metadata(move.metadata):
        return move
    return dataclasses.replace(move, metadata=json.dumps(found, separators=(",", ":")))


def _table(moves: list[Move]) -> Table:
    table = Table("topic", "partition", "was", "will be", "meaning", "readable")
    for m in moves:
        was = m.low if m.before is None else m.before
        change = m.after - was
        meaning = "stays" if not change else f"{'skips' if change > 0 else 'repeats'} up to {abs(change)}"
        before = "-" if m.before is None else str(m.before)
        table.add_row(m.partition[0], str(m.partition[1]), before, str(m.after), meaning, f"{m.low} to {m.end}")
    return table
