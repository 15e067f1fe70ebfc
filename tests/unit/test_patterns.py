"""Patterns as sources: which topics match, which must not, and how a session and Spark treat them, without Kafka."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import eos
import eos.testing
from eos import App, Out, Record, TransactSession
from eos.errors import CallFailed, ConfigurationError, InputGone, NotAuthorised, Unavailable
from eos.kafka.admin.topic_ids import TopicIds
from eos.kafka.admin.watcher import Watcher
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL, World
from eos.session.consumer.assignment import Assignment
from eos.session.outcomes import Listener
from eos.testing import online
from eos.worker import new_topics
from eos.worker.new_topics import NewTopics, find_missing_dead_letter_topics, require_topics
from eos.worker.worker import Worker
from tests.support.sessions import give_producer

SETTINGS = {"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t"}


def copied(value: bytes) -> bytes:
    return value


def other(value: bytes) -> bytes:
    return value


def app_of(*definitions: tuple[str | list[str], str | list[str]], on_error: eos.Policy = eos.stop) -> App:
    """Return an App whose first function is `copied` and whose second is `other`."""
    app = App("app")
    for function, (topics, to) in zip((copied, other), definitions, strict=False):
        app.process(topics, to=to, on_error=on_error)(function)
    return app


# ---- definitions -----------------------------------------------------------------------------------------------------


def test_source_starting_with_a_caret_is_a_pattern() -> None:
    app = App("app")

    @app.process(["^flights-.*", "delays"], to="out")
    def single(value: bytes) -> bytes:
        return value

    @app.process_batch("^b[0-9]", to="out")
    def batch(records: list[Record]) -> list[Out]:
        return []

    assert app.topics == ["delays"], "no topic matches before add_topics"
    assert [pattern.pattern for pattern in app.patterns] == ["^flights-.*", "^b[0-9]"]
    assert [route.name for route in app.functions] == ["single", "batch"]
    assert app.add_topics(["flights-2", "b1", "delays", "xflights-3", "flights-1", "b12"]) == [
        "b1",
        "flights-1",
        "flights-2",
    ]
    assert app.topics == ["delays", "b1", "flights-1", "flights-2"]
    assert app.routes["flights-1"] is app.routes["delays"]
    assert app.routes["b1"].batch
    assert app.add_topics(["flights-1", "b1"]) == [], "no topic is new twice"
    assert repr(app) == "App('app', [<Route single: ^flights-.*, delays -> out>, <Route batch: ^b[0-9] -> out>])"


def test_pattern_must_match_the_whole_name() -> None:
    app = app_of(("^a|bc", "out"))
    assert app.add_topics(["a", "ab", "bc", "bcd", "abc"]) == ["a", "bc"]


@pytest.mark.parametrize("pattern", ["^(", "^a{99999999999}", "^*", "^[a"])
def test_invalid_regular_expression_is_refused_at_definition(pattern: str) -> None:
    for decorate in (App("app").process, App("app").process_batch):
        with pytest.raises(ConfigurationError, match=re.escape(f"the pattern {pattern!r} is not a regular expression")):
            decorate(pattern, to="out")


def test_pattern_is_refused_as_destination() -> None:
    with pytest.raises(ConfigurationError, match="a destination topic must be"):
        App("app").process("in", to="^out-.*")


def test_app_with_only_patterns_passes_its_check() -> None:
    app_of(("^in-.*", "out")).check()


def test_explicit_topic_wins_over_a_pattern_in_any_order() -> None:
    for definitions in ((("^in-.*", "out"), ("in-1", "out")), (("in-1", "out"), ("^in-.*", "out"))):
        app = app_of(*definitions)
        assert app.add_topics(["in-1", "in-2"]) == ["in-2"]
        assert app.routes["in-1"] is not app.routes["in-2"]
        assert app.routes["in-1"].sources == ("in-1",)


def test_topic_matched_by_two_functions_is_refused() -> None:
    app = app_of(("^in-.*", "out"), ("^.*-b", "out"))
    assert app.add_topics(["in-a", "x-b"]) == ["in-a", "x-b"]
    with pytest.raises(
        ConfigurationError,
        match="'in-b' matches the patterns of two functions, copied and other: a topic has one function",
    ):
        app.add_topics(["in-c", "in-b"])
    assert app.topics == ["in-a", "x-b"]


def test_two_patterns_of_one_function_may_match_one_topic() -> None:
    assert app_of((["^in-.*", "^.*-b"], "out")).add_topics(["in-b"]) == ["in-b"]


def test_pattern_of_two_functions_is_refused_at_definition() -> None:
    with pytest.raises(ConfigurationError, match=r"the pattern '\^in-\.\*' has two functions, copied and other"):
        app_of(("^in-.*", "out"), ("^in-.*", "out"))


def test_internal_topics_and_dead_letters_are_never_added() -> None:
    app = App("app")
    app.process("^.*", on_error=eos.dlq)(lambda record: None)
    assert app.add_topics(["__consumer_offsets", "__own", "in", "in.dlq", "others.dlq", "_in"]) == ["_in", "in"]
    assert app.destinations == {"in.dlq", "_in.dlq"}


def test_pattern_that_matches_a_destination_is_refused_in_any_order() -> None:
    sentence = r"the pattern '\^a-\.\*' matches 'a-out', a destination of the App 'app': its records could loop forever"
    for definitions in (
        [("^a-.*", "a-out")],
        [("^a-.*", "out"), ("in", ["x", "a-out"])],
        [("in", "a-out"), ("^a-.*", "out")],
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            app_of(*definitions)  # type: ignore[arg-type]
    app = app_of(("^b-.*", "a-out"))
    with pytest.raises(ConfigurationError, match=sentence):
        app.process("^a-.*", to="out")(other)
    assert [pattern.pattern for pattern in app.patterns] == ["^b-.*"], "a refused function leaves the App as it was"


def test_pattern_does_not_match_dead_letter_topics_of_the_app() -> None:
    app = app_of(("^in.*", "out"), on_error=eos.dlq)
    app.process("in-1", to="in-2.dlq", on_error=eos.dlq)(other)
    assert app.add_topics(["in-1.dlq", "in-2.dlq", "in-1", "in-2"]) == ["in-2"]


def test_topics_added_to_a_copy_are_not_added_to_the_app() -> None:
    app = app_of(("^in-.*", "out"))
    assert copy.copy(app).add_topics(["in-1"]) == ["in-1"]
    assert app.topics == []
    worker = Worker(app, Settings({"bootstrap.servers": "127.0.0.1:9"}))
    worker.app.add_topics(["in-1"])
    assert (app.topics, worker.app.topics) == ([], ["in-1"])


pickled = app_of((["^in-.*", "in"], "out"))
pickled.add_topics(["in-1"])


def test_app_with_patterns_keeps_added_topics_when_pickled() -> None:
    again = copy.deepcopy(pickled)  # by __reduce__, like pickle, which cannot import this test module by name
    assert again.topics == ["in", "in-1"]
    assert again.routes["in"] is again.routes["in-1"] is next(iter(again.patterns.values()))
    assert again.routes["in"].sources == ("^in-.*", "in")
    assert again.add_topics(["in-1", "in-2"]) == ["in-2"]


# ---- the search for new topics --------------------------------------------------------------------------------


def test_dead_letter_topic_is_missing_only_if_a_function_uses_it() -> None:
    app = app_of(("^in-.*", "out"), on_error=eos.dlq)
    app.process("^x-.*", to="out")(other)
    assert find_missing_dead_letter_topics(app, {"in-1", "in-2", "in-2.dlq", "x-1"}) == {"in-1": "in-1.dlq"}


def test_app_whose_patterns_match_no_topic_is_unavailable() -> None:
    sentence = r"no topic at b:9092 matches '\^in-\.\*' or '\^x', and the App 'app' names none"
    with pytest.raises(Unavailable, match=sentence) as raised:
        require_topics(app_of(("^in-.*", "out"), ("^x", "out")), "b:9092")
    assert raised.value.exit_code == 69
    require_topics(app_of(("^in-.*", "out"), ("x", "out")), "b:9092")
    with pytest.raises(Unavailable, match=r"topic in-1 matches .* its dead-letter topic in-1\.dlq does not"):
        require_topics(app_of(("^in-.*", "out"), on_error=eos.dlq), "b:9092", {"in-1": "in-1.dlq"})


class Brokers:
    """Stands for ClusterAdmin: `there` are the topics, of which `late` are not known to every broker yet."""

    def __init__(self, *topics: str) -> None:
        self.there, self.late = set(topics), set[str]()

    def topics(self) -> set[str]:
        return set(self.there)

    def known_to_all_brokers(self, topics: Iterable[str]) -> set[str]:
        return set(topics) - self.late


def new_topics_of(app: App, world: World = REAL, **settings: object) -> NewTopics:
    return NewTopics(Settings({"topic.metadata.refresh.interval.ms": 60_000, **settings}), app, world)


def test_new_topic_is_reported_once() -> None:
    brokers: Any = Brokers("in-1", "in-2", "x")
    new = new_topics_of(app_of(("^in-.*", "out")))
    assert new._search(brokers) == 60.0
    assert new.arrived() == ["in-1", "in-2"]
    new._search(brokers)
    assert new.arrived() == []
    brokers.there.add("in-3")
    new._search(brokers)
    assert new.arrived() == ["in-3"]


def test_topic_unknown_to_a_broker_is_checked_again_soon() -> None:
    """librdkafka reports a topic unknown to the queried broker as an error, which would end the worker."""
    brokers: Any = Brokers("in-1", "in-2")
    brokers.late = {"in-2"}
    new = new_topics_of(app_of(("^in-.*", "out")))
    assert new._search(brokers) == 0.5
    assert new.arrived() == ["in-1"]
    brokers.late = set()
    assert new._search(brokers) == 60.0
    assert new.arrived() == ["in-2"]


def test_topic_without_its_dead_letter_topic_waits_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    brokers: Any = Brokers("in-1")
    new = new_topics_of(app_of(("^in-.*", "out"), on_error=eos.dlq))
    with caplog.at_level(logging.WARNING, "eos"):
        for _ in range(3):
            new._search(brokers)
    assert new.arrived() == []
    assert caplog.text.count("its dead-letter topic in-1.dlq does not exist") == 1
    brokers.there.add("in-1.dlq")
    new._search(brokers)
    assert new.arrived() == ["in-1"]


def test_missing_dead_letter_topics_are_created_if_configured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    brokers: Any = Brokers("in-1")
    made: list[Mapping[str, int]] = []
    known = SimpleNamespace(topics={"in-1": SimpleNamespace(partitions={0: None, 1: None})}, brokers={0: None})
    monkeypatch.setattr(new_topics, "connect", lambda *_: None)
    monkeypatch.setattr(new_topics, "cluster_metadata", lambda *_: known)

    def create(settings: Settings, wanted: Mapping[str, int], count: int, world: World) -> None:
        made.append(wanted)
        if len(made) < 3:
            raise NotAuthorised("topic in-1.dlq cannot be created")

    monkeypatch.setattr(new_topics, "create_topics", create)
    new = new_topics_of(app_of(("^in-.*", "out"), on_error=eos.dlq), **{"eos.create.topics": "true"})
    with caplog.at_level(logging.WARNING, "eos"):
        new._search(brokers)
        new._search(brokers)
    assert new.arrived() == []
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    new._search(brokers)
    assert new.arrived() == ["in-1"]
    assert made == [{"in-1.dlq": 2}] * 3


def test_worker_refuses_a_topic_that_matches_two_functions() -> None:
    brokers: Any = Brokers("in-b")
    new = new_topics_of(app_of(("^in-.*", "out"), ("^.*-b", "out")))
    with pytest.raises(ConfigurationError) as raised:
        new._search(brokers)
    assert new._on_error(raised.value) is None
    with pytest.raises(ConfigurationError, match="'in-b' matches the patterns of two functions"):
        new.arrived()


def test_disabled_metadata_refresh_disables_the_search() -> None:
    started: list[str] = []
    watcher = Watcher(Settings(SETTINGS), World(background=lambda name, run: started.append(name)))
    for interval_ms in (-1, 1):
        new_topics_of(app_of(("^in-.*", "out")), **{"topic.metadata.refresh.interval.ms": interval_ms}).watch(watcher)
        assert started == ([] if interval_ms < 0 else ["eos-watcher"])


def test_added_topic_is_checked_for_recreation() -> None:
    ids = {"in": "1", "new": "1"}
    admin: Any = SimpleNamespace(topic_ids=lambda topics: {topic: ids[topic] for topic in topics})
    watch = TopicIds(Settings({}), ["in"], lambda gone: None)
    assert watch._find_changed(admin) is None
    watch.watch(["in", "new"])
    assert watch._find_changed(admin) is None
    ids["new"] = "2"
    assert "topic new was deleted and recreated" in str(watch._find_changed(admin))


def test_missing_changelog_is_reported_after_a_short_wait() -> None:
    """A broker that has just started may not know it, and a topic without the right to describe it is not missing."""
    ids, clock, unknown = {"in": "1", "log": "1"}, SimpleNamespace(now=0.0), {"log"}
    admin: Any = SimpleNamespace(topic_ids=lambda topics: ids, missing_topics=lambda topics: unknown & set(topics))
    world = World(
        now=lambda: clock.now,
        sleep=lambda seconds: vars(clock).update(now=clock.now + seconds),
        admin=lambda settings, timeout_ms: contextlib.nullcontext(admin),
    )
    watch = TopicIds(Settings({}), ["in"], lambda gone: None, world, changelogs=["log"])
    watch.learn_changelog_ids(admin)
    ids = {}
    unknown = set()
    watch.check_now()
    unknown = {"log"}
    assert watch._find_changed(admin) is None
    with pytest.raises(InputGone, match=r"the changelog log was deleted while this worker ran: .*--accept-changelog"):
        watch.check_now()
    assert 4 < clock.now < 6
    ids = {"log": "2"}
    with pytest.raises(InputGone, match="the changelog log was deleted and recreated"):
        watch.check_now()


# ---- the session -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransactSession(SETTINGS, ["in", "^in-.*"]),
        lambda: TransactSession(SETTINGS | {"eos.input.topics": "in, ^in-.*"}),
    ],
)
def test_session_refuses_a_pattern_as_topic(make: Callable[[], TransactSession]) -> None:
    with pytest.raises(ConfigurationError, match=r"topics by their names, not by the pattern '\^in-\.\*'") as raised:
        make()
    assert raised.value.exit_code == 78


class RecordingMembership:
    """Stands for a session's membership and records its calls in order."""

    assignment = Assignment()
    start_offsets: Any = SimpleNamespace(locate=lambda assignment: None)

    def __init__(self, error: CallFailed | None = None) -> None:
        self.calls: list[object] = []
        self._error = error

    def subscribe(self, topics: list[str]) -> None:
        self.calls.append(list(topics))
        if self._error is not None:
            raise self._error


def session_with_new_topic(
    monkeypatch: pytest.MonkeyPatch, error: CallFailed | None = None
) -> tuple[TransactSession, RecordingMembership]:
    class Finds(Listener):
        def find_new_topics(self) -> list[str]:
            return ["new"]

    session, membership = TransactSession(SETTINGS, ["in"], listener=Finds()), RecordingMembership(error)
    producer: Any = SimpleNamespace(poll=lambda timeout_s: None)
    session._parts.fetcher._group_consumer = membership  # type: ignore[assignment]
    give_producer(session, producer)
    monkeypatch.setattr(session._loop, "_recover", membership.calls.append)
    monkeypatch.setattr(session._parts.fetcher, "gather", lambda: None)
    return session, membership


def test_new_topic_is_subscribed_between_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    session, membership = session_with_new_topic(monkeypatch)
    with session._loop._recovering():
        session._loop._gather()
    assert membership.calls == [["in", "new"]]
    assert session.topics == ["in", "new"], "a later consumer of this session reads it too"
    assert session._parts.fetcher._handover.from_beginning == {"new"}


def test_failed_subscribe_leads_to_a_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = CallFailed("consume", eos.errors.Action.REJOIN, RuntimeError("fatal"))
    session, membership = session_with_new_topic(monkeypatch, failed)
    with session._loop._recovering():
        session._loop._gather()
    assert membership.calls[-1] is failed


# ---- tests of users, Spark -------------------------------------------------------------------------------------------


def test_offline_run_handles_records_of_matching_topics() -> None:
    app = app_of(("^in-.*", "out"), on_error=eos.dlq)

    @app.process("^bad-.*", on_error=eos.dlq)
    def fails(value: bytes) -> None:
        raise ValueError("no")

    ran = eos.testing.run(app, [("in-1", "a"), ("bad-1", "b"), ("in-2", "c")])
    assert ran.values("out") == [b"a", b"c"]
    assert ran.values("bad-1.dlq") == [b"b"]
    assert app.topics == [], "the run leaves the App unchanged"
    with pytest.raises(ConfigurationError, match=r"gets records of the topic 'in-1\.dlq'"):
        eos.testing.run(app, [("in-1.dlq", "a")])


def test_test_run_without_records_for_a_pattern_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no pattern matches"):
        online.run_on("127.0.0.1:9", app_of(("^in-.*", "out")), [("x", "a")])


def test_spark_refuses_a_pattern() -> None:
    pytest.importorskip("pyspark")
    from spark_connector.run import Run, check

    with pytest.raises(ConfigurationError, match=r"pattern '\^in-\.\*': on Spark a query reads topics by their") as e:
        check(Run(app_of(("^in-.*", "out")), Settings({}), None, True, 0, {}))
    assert e.value.exit_code == 78


def test_dead_letter_topics_of_patterns_are_not_sources() -> None:
    app = app_of(("^in-.*", "out"), ("in-1.dlq", "out"), on_error=eos.dlq)
    assert app.match_topics(["in-2"]).keys() == {"in-2"}
    with pytest.raises(ConfigurationError, match=r"'in-1\.dlq' is a source of the App 'app', and would get the dead"):
        app.add_topics(["in-1", "in-2"])
    assert "in-2" not in app.routes


def test_topic_without_leaders_is_logged_once_and_checked_less_often(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("eos"), "propagate", True)
    new = NewTopics(Settings(SETTINGS), app_of(("^in-.*", "out")))
    admin: Any = SimpleNamespace(topics=lambda: {"in-1"}, known_to_all_brokers=lambda topics: set())
    pauses = [new._search(admin) for _ in range(30)]
    assert set(pauses[:19]) == {new_topics._SOON_S}
    assert set(pauses[19:]) == {new_topics._REFRESH_MS / 1000}
    assert [record.getMessage().count("in-1") for record in caplog.records] == [1]


def test_worker_with_a_batch_function_polls_whole_batches() -> None:
    app = App("app")
    app.process_batch("in", to="out")(lambda records: [])
    assert Worker(app, Settings(SETTINGS)).session._parts.pacing.handled_at_once == 1_000
    assert Worker(app_of(("in", "out")), Settings(SETTINGS)).session._parts.pacing.handled_at_once == 1
