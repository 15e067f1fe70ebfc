"""Handle a record with a header name that is not UTF-8: it follows the policy, and every tool shows its offset."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import ModuleType

import pytest

import eos
from eos import App, TransactSession, cli, hotloop
from eos.broker import LocalKafka
from eos.errors import PoisonRecord
from eos.hotloop import python
from eos.testing.history import read_topic
from eos.worker.worker import Worker
from tests.support.reading import create_topic, visible_values
from tests.support.wire import produce_raw

BAD = [(b"gr\xf6\xdfe", b"12"), (b"b", b"2")]
WHY = "the name of header 1 of 2 is not UTF-8"


@pytest.fixture(params=[pytest.param(python, id="python"), pytest.param(hotloop, id="as installed")])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    loop: ModuleType = request.param
    for name in ("records_of", "fetched_of"):
        monkeypatch.setattr(hotloop, name, getattr(loop, name))


@pytest.fixture
def source(kafka: LocalKafka, names: Callable[[str], str]) -> str:
    """Create a topic with five records, the third of which has such a header name."""
    topic = names("in")
    create_topic(kafka.bootstrap_servers, topic)
    records = [(b"v%d" % number, BAD if number == 2 else [(b"h", b"1")]) for number in range(5)]
    produce_raw(kafka.bootstrap_servers, topic, records, int(time.time() * 1000))
    return topic


@pytest.mark.usefixtures("form")
def test_record_with_unreadable_headers_follows_the_policy(
    kafka: LocalKafka, source: str, names: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    servers, target, dlq_topic = kafka.bootstrap_servers, names("out"), f"{source}.dlq"
    for topic in (target, dlq_topic):
        create_topic(servers, topic)
    settings = eos.Settings({"bootstrap.servers": servers, "eos.instance": "one"})
    name = names("app")

    def worker(policy: str) -> Worker:
        app = App(name)
        app.process(source, to=target, on_error=policy)(_copied)
        return Worker(app, settings, until_end=True)

    with pytest.raises(PoisonRecord, match=rf"failed on {source}\[0\]@2: DecodeError: {WHY}"):
        worker("stop").run()
    assert visible_values(servers, target)[0] == [b"v0", b"v1"]
    worker("dlq").run()
    assert visible_values(servers, target)[0] == [b"v0", b"v1", b"v3", b"v4"]
    assert visible_values(servers, dlq_topic)[0] == [b"v2"]
    assert read_topic(servers, dlq_topic, header="b").headers == [b"2"]
    assert read_topic(servers, dlq_topic, header="eos-dlq-message").headers == [WHY.encode()]
    assert read_topic(servers, source, header="b").headers == [None, None, b"2", None, None]

    capfd.readouterr()
    for arguments in ([], ["--json"], ["--uncommitted"]):
        assert cli.invoke(["topic", "tail", source, "--bootstrap-servers", servers, *arguments]) == 0
        shown = capfd.readouterr().out.splitlines()
        assert len(shown) == 5
        assert WHY in shown[2]
        if arguments == ["--json"]:
            assert json.loads(shown[2])["headers"] == [["b", "2"]]


def _copied(value: str) -> str:
    return value


def test_session_loop_gets_the_record_and_can_omit_its_headers(
    kafka: LocalKafka, source: str, names: Callable[[str], str]
) -> None:
    servers, dlq_topic, group = kafka.bootstrap_servers, f"{source}.dlq", names("g")
    create_topic(servers, dlq_topic)
    settings = {"bootstrap.servers": servers, "group.id": group, "transactional.id": group}
    values = []
    with TransactSession(settings, [source], until_end=True) as session:
        for txn in session:
            for record in txn.records:
                values.append(record.value)
                try:
                    list(record.headers)
                except ValueError as error:
                    txn.dead_letter(record, error)
    assert values == [b"v0", b"v1", b"v2", b"v3", b"v4"]
    assert visible_values(servers, dlq_topic)[0] == [b"v2"]
