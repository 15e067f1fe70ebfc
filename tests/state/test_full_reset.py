"""Reset state completely: it is refused without a request, and leads to right results with one."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient, NewPartitions

import eos
from eos import App, Out, State
from eos.broker import LocalKafka
from eos.errors import ConfigurationError, InputGone, UsageError
from eos.kafka.admin.reset import GroupOffsets, parse_target
from eos.kafka.client.settings import Settings, to_settings
from eos.kafka.client.world import REAL
from eos.state import changelog
from eos.state.begin_empty import EmptyStates
from eos.state.full_reset import FullReset
from tests.support import forked
from tests.support.reading import create_topic, settled_records, wait_until

Names = Callable[[str], str]
LINES = ["to be", "or not", "to be", "that is", "the question"]
WORDS = Counter(word for line in LINES for word in line.split())


class Words:
    """Run an App that counts words: an intermediate topic and state. `name`, `was` and the rest describe the second
    function."""

    def __init__(self, kafka: LocalKafka, names: Names, folder: Path) -> None:
        self.servers, self.id = kafka.bootstrap_servers, names("app")
        self.source, self.between, self.out = names("in"), names("between"), names("out")
        for topic in (self.source, self.between, self.out):
            create_topic(self.servers, topic, partitions=2)
        self.settings: Settings = to_settings(
            {"bootstrap.servers": self.servers, "eos.state.dir": str(folder / "state"), "eos.instance": "one"}
        )

    def send(self) -> None:
        with eos.transaction({"bootstrap.servers": self.servers, "transactional.id": f"{self.id}-send"}) as txn:
            for line in LINES:
                txn.send(self.source, line, key=line)

    def app(self, id: str = "", state: str = "seen", **how: Any) -> App:
        app = App(id or self.id)

        @app.process(self.source, to=self.between)
        def by_word(line: str) -> list[Out]:
            return [Out(word, key=word) for word in line.split()]

        def seen(word: str, seen: State[int]) -> str:
            seen.set(seen.get(0) + 1)
            return f"{word} {seen.get()}"

        def total(word: str, total: State[int]) -> str:
            total.set(total.get(0) + 1)
            return f"{word} {total.get()}"

        app.process(self.between, to=self.out, **({"name": "count"} | how))({"seen": seen, "total": total}[state])
        return app

    def run(self, app: App) -> None:
        eos.run(app, self.settings.values, until_end=True)

    def state(self, function: str = "count") -> dict[str, dict[str, int]]:
        """Return the state by name and by word."""
        found: dict[str, dict[str, int]] = {}
        for _, keys in changelog.read_state(self.settings, f"{self.id}-{function}-changelog"):
            for key, rows in keys:
                for name, ((_, value),) in rows.items():
                    found.setdefault(name, {})[key.decode()] = int(value)
        return found

    def topics(self) -> set[str]:
        return {name for name in AdminClient({"bootstrap.servers": self.servers}).list_topics().topics if name}

    def begin(self, app: App) -> None:
        (route,) = app.stateful
        offsets = GroupOffsets(self.settings, app.id, route.sources)
        EmptyStates(self.settings, app, route, offsets).carry_out()


@pytest.fixture
def words(kafka: LocalKafka, names: Names, tmp_path: Path) -> Words:
    words = Words(kafka, names, tmp_path)
    words.send()
    return words


def test_renamed_state_and_function_keep_their_entries(words: Words) -> None:
    words.run(words.app())
    assert words.state() == {"seen": WORDS}
    with pytest.raises(ConfigurationError, match=r"kept the state seen, but the code has total .* begin empty"):
        words.run(words.app(state="total"))
    with pytest.raises(ConfigurationError, match=r"the function count kept state for records of .* with tally"):
        words.run(words.app(name="tally"))
    assert f"{words.id}-tally-changelog" not in words.topics(), "a topic was created without a request"
    words.send()
    words.run(words.app(state="total", was={"total": "seen"}))
    doubled = {word: 2 * count for word, count in WORDS.items()}
    assert words.state() == {"seen": doubled}
    with pytest.raises(UsageError, match=r"has the states that it kept \(seen\)"):
        words.begin(words.app())
    # With a request, state that the function no longer has is deleted, and does not return under its old name.
    words.begin(words.app(state="total"))
    assert words.state() == {}
    words.send()
    words.run(words.app(state="total"))
    assert words.state() == {"total": WORDS}
    words.begin(words.app(name="tally"))
    words.send()
    words.run(words.app(name="tally"))
    assert words.state("tally") == {"seen": WORDS}
    admin, topic = AdminClient({"bootstrap.servers": words.servers}), f"{words.id}-tally-changelog"
    admin.delete_topics([topic])[topic].result(30)
    wait_until("the topic is deleted on all brokers", lambda: topic not in words.topics(), 30)
    with pytest.raises(InputGone, match="state is gone"):
        words.begin(words.app(name="tally", state="total"))


def test_app_under_a_new_id_skips_intermediate_records(words: Words, tmp_path: Path) -> None:
    words.run(words.app())
    other = words.app(f"{words.id}-b")
    with pytest.raises(ConfigurationError, match=f"{words.between} between functions of {other.id} holds records"):
        words.run(other)
    (tmp_path / "other.py").write_text(
        "from tests.state.test_full_reset import Words\nwords = object.__new__(Words)\n"
        f"vars(words).update({ {'source': words.source, 'between': words.between, 'out': words.out}!r})\n"
        f"app = words.app({other.id!r})\n"
    )
    where = "--topic", words.between, "--from", "latest", "--bootstrap-servers", words.servers
    done = forked.run(["eos", "reset", "other:app", *where, "--yes"], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    words.run(other)
    words.id = other.id
    assert words.state() == {"seen": WORDS}
    done = forked.run(["eos", "reset", "other:app", *where, "--yes"], cwd=tmp_path)
    assert (done.returncode, "count of" in done.stderr) == (64, True), done.stderr


class Died(Exception):
    """Stand in for a kill of the process."""


class Dying(AdminClient):
    """Raise Died before or after the change number `last`."""

    made: list[str]
    last = 0
    before = True

    def _change(self, name: str, *arguments: Any, **more: Any) -> Any:
        self.made.append(name)
        dies = len(self.made) == self.last
        if dies and self.before:
            raise Died
        answer = getattr(super(), name)(*arguments, **more)
        if dies:
            for future in answer.values():
                future.result(30)
            raise Died
        return answer

    def alter_consumer_group_offsets(self, *arguments: Any, **more: Any) -> Any:
        return self._change("alter_consumer_group_offsets", *arguments, **more)

    def delete_topics(self, *arguments: Any, **more: Any) -> Any:
        return self._change("delete_topics", *arguments, **more)

    def create_topics(self, *arguments: Any, **more: Any) -> Any:
        return self._change("create_topics", *arguments, **more)

    def delete_records(self, *arguments: Any, **more: Any) -> Any:
        return self._change("delete_records", *arguments, **more)


def full_reset_until(words: Words, last: int = 0, before: bool = True) -> list[str]:
    """Run a full reset, and return the changes made until it finished or died."""
    made: list[str] = []

    def client(config: dict[str, Any]) -> AdminClient:
        dying = Dying(config)
        dying.made, dying.last, dying.before = made, last, before
        return dying

    world, app = dataclasses.replace(REAL, client=client), words.app()
    offsets = GroupOffsets(words.settings, app.id, [words.source], world=world)
    plan = FullReset(words.settings, app, parse_target(["earliest"]), offsets, world)
    try:
        plan.carry_out()
    except Died:
        assert len(made) == last
    return made


def test_full_reset_killed_at_any_step_can_be_repeated(words: Words) -> None:
    words.run(words.app())
    admin = AdminClient({"bootstrap.servers": words.servers})
    admin.create_partitions([NewPartitions(words.between, 4)])[words.between].result(30)

    def grown() -> bool:
        (found,) = admin.describe_topics(TopicCollection([words.between])).values()
        return len(found.result(10).partitions) == 4

    wait_until("it has more partitions", grown, 30)
    with pytest.raises(ConfigurationError, match=r"has 2 partitions, and .* has 4, so keys are in other partitions"):
        words.run(words.app())
    moves, seen = "alter_consumer_group_offsets", set[str]()
    for number in itertools.count(2):
        change, before = number // 2, number % 2 == 0
        made = full_reset_until(words, change, before)
        seen |= set(made)
        if (moved := made.count(moves)) == 2 and not before:
            break  # the last change is done
        if moved > before:
            with pytest.raises(ConfigurationError, match=r"--with-state` was interrupted.*: run it again"):
                words.run(words.app())
    assert seen == {moves, "delete_topics", "create_topics", "delete_records"}
    words.run(words.app())
    assert words.state() == {"seen": WORDS}
    outputs = sum(map(len, settled_records(words.servers, words.out).values()))
    assert outputs == 2 * WORDS.total(), "readers of intermediate topics must get the records again"
    full_reset_until(words)
    words.run(words.app())
    assert words.state() == {"seen": WORDS}
