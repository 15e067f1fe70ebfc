"""`eos dlq list | export | replay | drop`: what lies in dead letters, and bringing them back, exactly once.

Owns the options and what is printed; eos.worker.replay does it, eos.cli.chosen says which.
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
from eos.cli.chosen import Choice, read_changes, row_of
from eos.cli.options import BootstrapServers, Json, Set, load_settings, print_json, print_table, until_hung_up
from eos.encoding.dead_letters import DEAD_LETTER_SUFFIX, dead_letter_topic
from eos.errors import UsageError
from eos.kafka.client.settings import Settings
from eos.records import is_topic_name
from eos.worker import replay
from eos.worker.letters import Letter, Place, group_of, letters
from eos.worker.loading import load_app, refuse_ids
from eos.worker.new_topics import topic_names
from eos.worker.replay import DROPPING, Replay, Settling, Told

_TIMEOUT_S = 5.0
_MESSAGE = 80

app = typer.Typer(
    no_args_is_help=True, help="Dead letters: what lies there and why; bring them back exactly once, mend or drop them."
)
Target = Annotated[str, typer.Argument(metavar="MODULE:APP", help="The App whose function failed.")]
LettersOf = Annotated[
    str | None, typer.Option("--letters-of", metavar="APP", help="Letters of the App of this id, not of this one.")
]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="Only of this source topic; repeatable.")]
Places = Annotated[
    list[str] | None,
    typer.Option("--letter", metavar="PLACE", help="Only the letter of this record, e.g. orders[0]@3; repeatable."),
]
Exceptions = Annotated[
    list[str] | None, typer.Option("--exception", metavar="CLASS", help="Only letters of this exception; repeatable.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Take at most this many of each topic.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="earliest", help="Old letters whose place was forgotten, too.")
]


@dataclass
class Kind:
    """Dead letters of one topic, one App ("": not told) and one exception."""

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
        str, typer.Argument(metavar="MODULE:APP|TOPIC", help="An App: what it has not replayed. A topic: all there is.")
    ],
    topic: Topics = None,
    letters_of: LettersOf = None,
    json: Json = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Dead letters by exception: how many, the first and the last place, and what the last one said."""
    settings = load_settings(bootstrap_servers, set_)
    rows: list[Kind] = []
    if ":" in target or target.endswith(".py"):
        for name, found in _waiting(_app(target, settings), settings, topic, letters_of):
            rows += _kinds(name, found)
    else:
        if topic or not is_topic_name(target):
            raise UsageError(
                "eos dlq list needs MODULE:APP, with --topic if only one is wanted, or the name of a topic"
            )
        name = target.removesuffix(DEAD_LETTER_SUFFIX)
        rows += _kinds(name, letters(settings, dead_letter_topic(name), None))
    if json:
        print_json(rows)
        return
    if not rows:
        print("no dead letter")
        return
    table = Table("topic", "app", "exception", "letters", "first", "last", "replays", "the last one says")
    for row in rows:
        numbers = (row.first, row.last, str(row.most_replays))
        words = (row.topic, row.app or "-", row.exception, str(row.letters), *numbers, row.message)
        table.add_row(*map(escape, words))
    print_table(table)


@app.command()
def export(
    target: Target,
    topic: Topics = None,
    letter: Places = None,
    exception: Exceptions = None,
    letters_of: LettersOf = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Each letter that waits, as a line of JSON with all that is known of it: to read, or to mend for
    `eos dlq replay --file`."""
    settings, choice = load_settings(bootstrap_servers, set_), Choice(letter or (), exception or ())
    with until_hung_up():
        for _, found in _waiting(_app(target, settings), settings, topic, letters_of):
            for each in filter(choice, found):
                print_json(row_of(each))
        _tell_unmet(choice)


@app.command("replay")
def replay_(
    target: Target,
    topic: Topics = None,
    function: Annotated[str | None, typer.Option(help="Another function of the App than the one that failed.")] = None,
    letter: Places = None,
    exception: Exceptions = None,
    file: Annotated[
        Path | None, typer.Option(help="Only the letters of an exported file, with what was mended there.")
    ] = None,
    limit: Limit = None,
    letters_of: LettersOf = None,
    from_: From = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Run the function on its dead letters; outputs and which letters are done are one commit. What fails again is a
    dead letter again, for another replay."""
    choice = Choice(letter or (), exception or (), None if file is None else read_changes(f"--file {file}", file))
    settings = _settings_of("replay", choice, from_, bootstrap_servers, set_)
    loaded = _app(target, settings)
    sources = _sources(loaded, topic or [])
    for name in sources:
        replay.route_of(loaded, name, function)
    with Replay(loaded, settings, letters_of) as running:
        for name in sources:
            with _told(_replayed, name) as told:
                running.topic(name, function, choice, limit, from_ == "earliest", told)
    _tell_unmet(choice, limit)


@app.command()
def drop(
    target: Target,
    topic: Topics = None,
    letter: Places = None,
    exception: Exceptions = None,
    every: Annotated[bool, typer.Option("--all", help="All that wait.")] = False,
    limit: Limit = None,
    letters_of: LettersOf = None,
    from_: From = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Let dead letters be done without a function: no replay takes them any more. They stay in their topic until its
    retention removes them."""
    choice = Choice(letter or (), exception or ())
    if choice.is_of_all != every:
        raise UsageError("eos dlq drop needs --letter or --exception, or --all alone")
    settings = _settings_of("drop", choice, from_, bootstrap_servers, set_)
    loaded = _app(target, settings)
    with Settling(letters_of or loaded.id, settings) as settling:
        for name in _sources(loaded, topic or []):
            with _told(lambda told: f"{told.handled} dropped", name) as told:
                settling.topic(name, DROPPING, choice, limit, from_ == "earliest", told)
    _tell_unmet(choice, limit)


def _settings_of(
    command: str, choice: Choice, from_: str | None, bootstrap_servers: str | None, set_: list[str] | None
) -> Settings:
    """Of a command that settles letters."""
    log.configure("human", "warning")
    if from_ not in (None, "earliest"):
        raise UsageError(f"--from {from_}: only `earliest` can be said here")
    if from_ and not choice.is_of_all:
        # The others would count as letters that nobody has replayed.
        raise UsageError("--from earliest is about all letters: it cannot stand beside --letter, --exception or --file")
    settings = load_settings(bootstrap_servers, set_)
    refuse_ids(settings, f"eos dlq {command}", "the App's id with -dlq-replay")
    return settings


def _waiting(
    loaded: App, settings: Settings, topic: list[str] | None, letters_of: str | None
) -> Iterator[tuple[str, Iterator[Letter]]]:
    """Of each source topic the letters of the App that are not done."""
    whose = letters_of or loaded.id
    place = Place(settings, group_of(whose))
    try:
        for name in _sources(loaded, topic or []):
            found = letters(settings, dead_letter_topic(name), place, _tell)
            yield name, (letter for letter in found if letter.is_of(whose))
    finally:
        place.close()


@contextmanager
def _told(summary: Callable[[Told], str], source: str) -> Iterator[Told]:
    """Says what became of a topic's letters, also of those that were committed before an error."""
    told, topic, ended = Told(), dead_letter_topic(source), False
    try:
        yield told
        ended = True
    finally:
        if ended or told.handled or told.failed:
            print(f"{topic}: {summary(told)}", flush=True)
        for kind, count in told.failed.items():
            print(f"{topic}: {count} of {log.printable(kind)}", file=sys.stderr)
        for whose, count in told.strangers.items():
            sentence = f"{count} of App {log.printable(whose)} left to its own replay (--letters-of takes them)"
            print(f"{topic}: {sentence}", file=sys.stderr)


def _replayed(told: Told) -> str:
    failed = sum(told.failed.values())
    return f"{told.handled + failed} replayed, {told.handled} handled ({told.outputs} outputs), {failed} failed again"


def _tell_unmet(choice: Choice, limit: int | None = None) -> None:
    """An error where nothing at all was chosen: a place that was mistyped and one that is done look alike."""
    sentences = [f"no letter of {log.printable(place)} waits here" for place in sorted(choice.unmet)]
    if choice.met or choice.is_of_all:
        for sentence in sentences if limit is None else ():  # with a limit not all was read
            _tell(sentence)
        return
    more = f", nor of {len(sentences) - 1} others" if len(sentences) > 1 else ""
    raise UsageError(f"{sentences[0]}{more}" if sentences else "no letter that waits here is what was asked for")


def _tell(sentence: str) -> None:
    print(f"eos: {sentence}", file=sys.stderr)


def _app(target: str, settings: Settings) -> App:
    loaded = load_app(target)
    loaded.check()
    if loaded.patterns:
        loaded.add_topics(topic_names(settings, _TIMEOUT_S))
    return loaded


def _sources(loaded: App, named: list[str]) -> list[str]:
    strangers = [name for name in named if name not in loaded.routes]
    if strangers:
        raise UsageError(f"--topic {strangers[0]}: not a source of {loaded.id} ({', '.join(loaded.topics)})")
    sources = named or replay.sources_of(loaded)
    if not sources:
        raise UsageError(f"no function of {loaded.id} has on_error=eos.dlq: name the source with --topic")
    return list(dict.fromkeys(sources))


def _kinds(topic: str, found: Iterable[Letter]) -> list[Kind]:
    newest: dict[tuple[str, str, int], tuple[str, str, str, int, tuple[int, int]]] = {}
    copies: Counter[tuple[str, str]] = Counter()
    for letter in found:
        which = letter.app, letter.source
        # One that failed again stands in the place of the one before; a record may also have become one twice.
        copies[which] += not (letter.replays and copies[which])
        at = letter.record.partition, letter.record.offset
        newest[*which, copies[which]] = letter.source, letter.exception, letter.message[:_MESSAGE], letter.replays, at
    kinds: dict[tuple[str, str], Kind] = {}
    for (app_id, *_), (source, exception, message, replays, _) in sorted(newest.items(), key=lambda one: one[1][-1]):
        kind = kinds.setdefault((app_id, exception), Kind(topic, app_id, exception, 0, source, source, 0, ""))
        kind.letters += 1
        kind.last, kind.message = source, message
        kind.most_replays = max(kind.most_replays, replays)
    return sorted(kinds.values(), key=lambda kind: -kind.letters)
