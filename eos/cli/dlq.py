"""Define `eos dlq list | export | replay | drop`, which inspect dead letters and replay them exactly once.

The module owns the options and the printed text. eos.worker.replay replays and drops dead letters, and
eos.cli.dead_letter_selection selects them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from eos import log
from eos.app.definition import App
from eos.cli.dead_letter_selection import Selection, export_row, read_changes
from eos.cli.options import BootstrapServers, Json, Set, load_settings, print_json, print_table, until_output_closed
from eos.encoding.dead_letters import DEAD_LETTER_SUFFIX, dead_letter_topic
from eos.errors import UsageError
from eos.kafka.client.settings import Settings
from eos.records import is_topic_name
from eos.worker import replay
from eos.worker.dead_letters import DeadLetter, ReplayProgress, group_of, read_dead_letters
from eos.worker.loading import load_app, refuse_ids
from eos.worker.new_topics import topic_names
from eos.worker.replay import DROPPING, Replay, ReplayResult, Settling

_TIMEOUT_S = 5.0
_MESSAGE_LENGTH = 80

app = typer.Typer(
    no_args_is_help=True, help="List dead letters with their errors; repair, replay or drop them exactly once."
)
Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="The App whose function failed.")]
LettersOf = Annotated[
    str | None,
    typer.Option("--letters-of", metavar="APP", help="Take the dead letters of the App with this id instead."),
]
Topics = Annotated[
    list[str] | None, typer.Option("--topic", help="Only dead letters of this source topic; repeatable.")
]
Positions = Annotated[
    list[str] | None,
    typer.Option(
        "--letter", metavar="RECORD", help="Only the dead letter of this record, e.g. orders[0]@3; repeatable."
    ),
]
Exceptions = Annotated[
    list[str] | None,
    typer.Option("--exception", metavar="CLASS", help="Only dead letters with this exception; repeatable."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Take at most this many dead letters of each topic.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="earliest",
        help="Begin at the oldest dead letter if the replay's committed offset has expired.",
    ),
]


@dataclass
class LetterGroup:
    """Describe the dead letters of one topic, one App ("" if the record names none) and one exception."""

    topic: str
    app: str
    exception: str
    letters: int
    first: str
    last: str
    most_replays: int
    message: str


@app.command("list")
def list_(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:APP|TOPIC",
            help="An App: dead letters it has not replayed. A topic: all of its dead letters.",
        ),
    ],
    topic: Topics = None,
    letters_of: LettersOf = None,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Count dead letters by exception, with the first and the last record and the last message."""
    settings = load_settings(bootstrap_servers, set_)
    rows: list[LetterGroup] = []
    if ":" in target or target.endswith(".py"):
        for name, found in _read_pending(_app(target, settings), settings, topic, letters_of):
            rows += _group_by_exception(name, found)
    else:
        if topic or not is_topic_name(target):
            raise UsageError(
                "eos dlq list needs MODULE:APP, with --topic for one of its topics, or the name of a topic"
            )
        name = target.removesuffix(DEAD_LETTER_SUFFIX)
        rows += _group_by_exception(name, read_dead_letters(settings, dead_letter_topic(name), None))
    if json:
        print_json(rows)
        return
    if not rows:
        print("no dead letters")
        return
    table = Table("topic", "app", "exception", "letters", "first", "last", "replays", "last message")
    for row in rows:
        numbers = (row.first, row.last, str(row.most_replays))
        words = (row.topic, row.app or "-", row.exception, str(row.letters), *numbers, row.message)
        table.add_row(*map(escape, words))
    print_table(table)


@app.command()
def export(
    target: Target,
    topic: Topics = None,
    letter: Positions = None,
    exception: Exceptions = None,
    letters_of: LettersOf = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Print each pending dead letter as a line of JSON, to read, or to edit for `eos dlq replay --file`."""
    settings, selection = load_settings(bootstrap_servers, set_), Selection(letter or (), exception or ())
    with until_output_closed():
        for _, found in _read_pending(_app(target, settings), settings, topic, letters_of):
            for one in filter(selection, found):
                print_json(export_row(one))
        _report_missing(selection)


@app.command("replay")
def replay_(
    target: Target,
    topic: Topics = None,
    function: Annotated[
        str | None, typer.Option(help="Run this function of the App instead of the one that failed.")
    ] = None,
    letter: Positions = None,
    exception: Exceptions = None,
    file: Annotated[
        Path | None, typer.Option(help="Only the dead letters in this exported file, with the edits made there.")
    ] = None,
    limit: Limit = None,
    letters_of: LettersOf = None,
    from_: From = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Run the function on its dead letters and commit each with its outputs. A record that fails again becomes a dead
    letter for another replay."""
    selection = Selection(letter or (), exception or (), None if file is None else read_changes(f"--file {file}", file))
    settings = _load_replay_settings("replay", selection, from_, bootstrap_servers, set_)
    loaded = _app(target, settings)
    sources = _sources(loaded, topic or [])
    for name in sources:
        replay.route_of(loaded, name, function)
    with Replay(loaded, settings, letters_of) as running:
        for name in sources:
            with _report_outcome(_replay_summary, name) as counts:
                running.topic(name, function, selection, limit, from_ == "earliest", counts)
    _report_missing(selection, limit)


@app.command()
def drop(
    target: Target,
    topic: Topics = None,
    letter: Positions = None,
    exception: Exceptions = None,
    every: Annotated[bool, typer.Option("--all", help="Drop all pending dead letters.")] = False,
    limit: Limit = None,
    letters_of: LettersOf = None,
    from_: From = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Mark dead letters as done without running a function, so that no replay takes them. They stay in their topic
    until retention removes them."""
    selection = Selection(letter or (), exception or ())
    if selection.selects_all != every:
        raise UsageError("eos dlq drop needs --letter or --exception, or else --all alone")
    settings = _load_replay_settings("drop", selection, from_, bootstrap_servers, set_)
    loaded = _app(target, settings)
    with Settling(letters_of or loaded.id, settings) as settling:
        for name in _sources(loaded, topic or []):
            with _report_outcome(lambda counts: f"{counts.handled} dropped", name) as counts:
                settling.topic(name, DROPPING, selection, limit, from_ == "earliest", counts)
    _report_missing(selection, limit)


def _load_replay_settings(
    command: str, selection: Selection, from_: str | None, bootstrap_servers: str | None, set_: list[str] | None
) -> Settings:
    """Return the settings of a command that replays or drops dead letters. Raises UsageError."""
    log.configure("human", "warning")
    if from_ not in (None, "earliest"):
        raise UsageError(f"--from {from_}: must be `earliest`")
    if from_ and not selection.selects_all:
        # Dead letters that are not selected would count as not replayed.
        raise UsageError(
            "--from earliest takes all dead letters: it cannot be used with --letter, --exception or --file"
        )
    settings = load_settings(bootstrap_servers, set_)
    refuse_ids(settings, f"eos dlq {command}", "the App's id with the suffix -dlq-replay")
    return settings


def _read_pending(
    loaded: App, settings: Settings, topic: list[str] | None, letters_of: str | None
) -> Iterator[tuple[str, Iterator[DeadLetter]]]:
    """Yield each source topic with the App's pending dead letters."""
    app_id = letters_of or loaded.id
    progress = ReplayProgress(settings, group_of(app_id))
    try:
        for name in _sources(loaded, topic or []):
            found = read_dead_letters(settings, dead_letter_topic(name), progress, _warn)
            yield name, (letter for letter in found if letter.is_of(app_id))
    finally:
        progress.close()


@contextmanager
def _report_outcome(summary: Callable[[ReplayResult], str], source: str) -> Iterator[ReplayResult]:
    """Print the outcome of a topic's dead letters, including those committed before an error."""
    counts, topic, completed = ReplayResult(), dead_letter_topic(source), False
    try:
        yield counts
        completed = True
    finally:
        if completed or counts.handled or counts.failed:
            print(f"{topic}: {summary(counts)}", flush=True)
        for exception, count in counts.failed.items():
            print(f"{topic}: {count} of {log.printable(exception)}", file=sys.stderr)
        for owner, count in counts.of_other_apps.items():
            name = log.printable(owner)
            print(f"{topic}: skipped {count} of App {name} (--letters-of {name} takes them)", file=sys.stderr)


def _replay_summary(counts: ReplayResult) -> str:
    failed = sum(counts.failed.values())
    replayed = counts.handled + failed
    return f"{replayed} replayed, {counts.handled} handled ({counts.outputs} outputs), {failed} failed again"


def _report_missing(selection: Selection, limit: int | None = None) -> None:
    """Print the requested records without a pending dead letter. Raises UsageError if no dead letter was selected."""
    sentences = [f"no pending dead letter of {log.printable(place)}" for place in sorted(selection.missing)]
    if selection.selected or selection.selects_all:
        for sentence in sentences if limit is None else ():  # with a limit, some dead letters were not read
            _warn(sentence)
        return
    more = f", nor of {len(sentences) - 1} other records" if len(sentences) > 1 else ""
    raise UsageError(f"{sentences[0]}{more}" if sentences else "no pending dead letter matches these options")


def _warn(sentence: str) -> None:
    print(f"eos: {sentence}", file=sys.stderr)


def _app(target: str, settings: Settings) -> App:
    loaded = load_app(target)
    loaded.check()
    if loaded.patterns:
        loaded.add_topics(topic_names(settings, _TIMEOUT_S))
    return loaded


def _sources(loaded: App, named: list[str]) -> list[str]:
    unknown = [name for name in named if name not in loaded.routes]
    if unknown:
        raise UsageError(f"--topic {unknown[0]}: not a source of {loaded.id} ({', '.join(loaded.topics)})")
    sources = named or replay.sources_of(loaded)
    if not sources:
        raise UsageError(f"no function of {loaded.id} has on_error=eos.dlq: name the source topic with --topic")
    return list(dict.fromkeys(sources))


def _group_by_exception(topic: str, found: Iterable[DeadLetter]) -> list[LetterGroup]:
    newest: dict[tuple[str, str, int], tuple[str, str, str, int, tuple[int, int]]] = {}
    copies: Counter[tuple[str, str]] = Counter()
    for letter in found:
        origin = letter.app, letter.source
        # Count the dead letters of each record. The dead letter of a failed replay replaces the earlier one and does
        # not count again.
        copies[origin] += not (letter.replays and copies[origin])
        at = letter.record.partition, letter.record.offset
        newest[*origin, copies[origin]] = (
            letter.source,
            letter.exception,
            letter.message[:_MESSAGE_LENGTH],
            letter.replays,
            at,
        )
    groups: dict[tuple[str, str], LetterGroup] = {}
    for (app_id, *_), (source, exception, message, replays, _) in sorted(newest.items(), key=lambda one: one[1][-1]):
        group = groups.setdefault((app_id, exception), LetterGroup(topic, app_id, exception, 0, source, source, 0, ""))
        group.letters += 1
        group.last, group.message = source, message
        group.most_replays = max(group.most_replays, replays)
    return sorted(groups.values(), key=lambda group: -group.letters)
