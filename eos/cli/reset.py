"""`eos reset MODULE:APP --from ...`: replay an App's input, or step past a record; only while no worker lives.

Owns what becomes of the metadata of an offset that moves.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.table import Table

from eos.app import lineage
from eos.cli.options import BootstrapServers, Set, Yes, confirm, load_settings, print_table
from eos.errors import UsageError
from eos.kafka.reset import STAY, GroupOffsets, Move, parse_skip, parse_target, require_one_each
from eos.kafka.settings import Settings
from eos.records import noted
from eos.state import notes
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
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="For members to be gone.")] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be moved.")] = False,
    yes: Yes = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Move a group's committed offsets. Refuses while members live; asks before it acts."""
    if from_ and skip:
        raise UsageError("--from and --skip exclude each other")
    stays = accept_changelog and not from_ and not skip
    where = STAY if stays else parse_skip(skip) if skip else parse_target(from_ or [])
    loaded = load_settings(bootstrap_servers, set_)
    name, topics = _group(loaded, target, group, topic or [], moving=bool(from_))
    offsets = GroupOffsets(loaded, name, topics)
    offsets.require_nobody(wait)
    moves = [with_metadata(move, bool(skip), accept_changelog) for move in offsets.plan(where)]
    if not moves:
        raise UsageError(f"group {name} has no committed offset of {', '.join(topics)}")
    if skip:
        require_one_each(loaded, moves)
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


def _group(
    loaded: Settings, target: str | None, group: str | None, topics: list[str], moving: bool
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
    if app.stateful and moving:
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


def with_metadata(move: Move, skipping: bool, accept_changelog: bool) -> Move:
    """Return the move with the metadata that is true at its new offset. A record that `--skip` steps past counts as
    handled without outputs; after any other move lineage starts its count again."""
    found = noted(move.metadata)
    tally = lineage.tally_of(move.metadata)
    if accept_changelog and (found or not move.metadata):  # what another program wrote stays
        found[notes.KEY] = notes.ACCEPTED
    if tally is not None and move.after != move.before:
        del found[lineage.KEY]
        if skipping:
            found[lineage.KEY] = [tally.begin, tally.inputs + 1, tally.outputs]
    if found == noted(move.metadata):
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
