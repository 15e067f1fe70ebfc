"""`eos dlq list | replay`: what lies in dead letters, and bringing them back, exactly once.

Owns the options and what is printed; eos.worker.replay does it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from eos import log
from eos.app.definition import App, is_topic_name
from eos.app.policies import DEAD_LETTER_SUFFIX, dead_letter_topic
from eos.cli.options import BootstrapServers, Json, Set, load_settings, print_json, print_table
from eos.errors import UsageError
from eos.kafka.settings import Settings
from eos.worker import replay
from eos.worker.loading import load_app, refuse_ids
from eos.worker.new_topics import topic_names
from eos.worker.replay import Letter, Place, Replay

_TIMEOUT_S = 5.0
_MESSAGE = 80

app = typer.Typer(no_args_is_help=True, help="Dead letters: what lies there and why, and bring them back exactly once.")
LettersOf = Annotated[
    str | None, typer.Option("--letters-of", metavar="APP", help="Letters of the App of this id, not of this one.")
]
Topics = Annotated[list[str] | None, typer.Option("--topic", help="Only of this source topic; repeatable.")]


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
        loaded = _app(target, settings)
        whose = letters_of or loaded.id
        place = Place(settings, replay.group_of(whose))
        try:
            for name in _sources(loaded, topic or []):
                found = replay.letters(settings, dead_letter_topic(name), place, _tell)
                rows += _kinds(name, (letter for letter in found if letter.is_of(whose)))
        finally:
            place.close()
    else:
        if topic or not is_topic_name(target):
            raise UsageError(
                "eos dlq list needs MODULE:APP, with --topic if only one is wanted, or the name of a topic"
            )
        name = target.removesuffix(DEAD_LETTER_SUFFIX)
        rows += _kinds(name, replay.letters(settings, dead_letter_topic(name), None))
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


@app.command("replay")
def replay_(
    target: Annotated[str, typer.Argument(metavar="MODULE:APP", help="The App whose function failed.")],
    topic: Topics = None,
    function: Annotated[str | None, typer.Option(help="Another function of the App than the one that failed.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many of each topic.")] = None,
    letters_of: LettersOf = None,
    from_: Annotated[
        str | None, typer.Option("--from", metavar="earliest", help="Old letters whose replay was forgotten, too.")
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Run the function on its dead letters; outputs and the replay's place are one commit. What fails again is a dead
    letter again, for another replay."""
    log.configure("human", "warning")
    if from_ not in (None, "earliest"):
        raise UsageError(f"--from {from_}: only `earliest` can be said here")
    settings = load_settings(bootstrap_servers, set_)
    refuse_ids(settings, "eos dlq replay", "the App's id with -dlq-replay")
    loaded = _app(target, settings)
    sources = _sources(loaded, topic or [])
    for name in sources:
        replay.route_of(loaded, name, function)
    with Replay(loaded, settings, letters_of) as running:
        for name in sources:
            told = running.topic(name, function, limit, from_ == "earliest")
            failed = sum(told.failed.values())
            print(
                f"{dead_letter_topic(name)}: {told.handled + failed} replayed, {told.handled} handled "
                f"({told.outputs} outputs), {failed} failed again",
                flush=True,
            )
            for kind, count in told.failed.items():
                print(f"{dead_letter_topic(name)}: {count} times {log.printable(kind)}", file=sys.stderr)
            for whose, count in told.strangers.items():
                sentence = f"{count} of App {log.printable(whose)} left to its own replay (--letters-of takes them)"
                print(f"{dead_letter_topic(name)}: {sentence}", file=sys.stderr)


def _tell(sentence: str) -> None:
    print(f"eos: {sentence}", file=sys.stderr)


def _app(target: str, settings: Settings) -> App:
    loaded = load_app(target)
    loaded.check()
    if loaded.patterns:
        loaded.take_in(topic_names(settings, _TIMEOUT_S))
    return loaded


def _sources(loaded: App, named: list[str]) -> list[str]:
    strangers = [name for name in named if name not in loaded.routes]
    if strangers:
        raise UsageError(f"--topic {strangers[0]}: not a source of {loaded.id} ({', '.join(loaded.topics)})")
    sources = named or replay.sources_of(loaded)
    if not sources:
        raise UsageError(f"no function of {loaded.id} has on_error=eos.dlq: name the source with --topic")
    return list(dict.fromkeys(sources))


def _kinds(topic: str, letters: Iterable[Letter]) -> list[Kind]:
    found: dict[tuple[str, str], Kind] = {}
    for letter in letters:
        where = f"{letter.record.topic}[{letter.record.partition}]@{letter.record.offset}"
        new = Kind(topic, letter.app, letter.exception, 0, where, where, 0, "")
        kind = found.setdefault((letter.app, letter.exception), new)
        kind.letters += 1
        kind.last, kind.message = where, letter.message[:_MESSAGE]
        kind.most_replays = max(kind.most_replays, letter.replays)
    return sorted(found.values(), key=lambda kind: -kind.letters)
