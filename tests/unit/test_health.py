"""Health without Kafka: liveness and readiness, incidents, metrics and the HTTP server."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eos import log
from eos.errors import ConfigurationError, UsageError
from eos.health import metrics
from eos.health.board import Board
from eos.health.incidents import Incidents, describe_event
from eos.health.server import parse_address, serve
from eos.health.status import (
    Distribution,
    FunctionState,
    FunctionTime,
    PartitionLag,
    Sample,
    Status,
    judge,
    judge_report,
    stuck_after_s,
)
from eos.kafka.client.settings import Settings
from eos.observe import Histogram, Pulse
from eos.probes import render_metrics

ROOT = Path(__file__).parents[2]
WELL = Sample(in_group=True, unresolved=0, lags=[])
LIMIT_S = 60.0


def a_status(**more: object) -> Status:
    values: dict[str, object] = {"app": "a", "instance": "i", "pid": 1, "started_at": 1.0, "at": 2.0, "ready": True}
    return Status(**(values | more))  # type: ignore[arg-type]


# ---- live and ready ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("doing", "what", "since", "moved", "sample", "live", "ready", "reason"),
    [
        ("polling", "", 0.0, 99.9, WELL, True, True, "running"),
        ("handling", "", 41.0, 41.0, WELL, True, True, "handling records"),
        ("handling", "", 39.0, 39.0, WELL, False, False, "stuck for 61 s while handling records at f (x.py:3)"),
        ("calling", "commit", 0.0, 39.0, WELL, False, False, "stuck for 61 s while calling commit at f (x.py:3)"),
        ("calling", "commit", 98.0, 98.0, WELL, True, True, "running"),
        ("calling", "commit", 10.0, 95.0, WELL, True, False, "waiting for the cluster for 90 s (commit)"),
        ("polling", "", 0.0, 99.9, None, True, False, "not in its group yet, or the cluster does not answer"),
        ("polling", "", 0.0, 99.9, Sample(False, 0, []), True, False, "not in its group yet"),
        (
            "polling",
            "",
            0.0,
            99.9,
            Sample(True, 3, []),
            True,
            False,
            "waiting for the committed offsets of 3 partitions",
        ),
        ("polling", "", 0.0, 99.9, Sample(True, 0, [], 2), True, False, "restoring the state of 2 partitions"),
        ("starting", "", 0.0, 0.0, None, True, False, "starting"),
        ("stopping", "", 99.0, 99.0, WELL, True, False, "stopping"),
        ("stopping", "", 30.0, 30.0, WELL, False, False, "stuck for 70 s while stopping"),
        ("stopped", "", 99.0, 99.0, WELL, False, False, "stopped"),
    ],
)
def test_liveness_needs_progress_and_readiness_a_group_and_a_cluster(
    doing: str, what: str, since: float, moved: float, sample: Sample | None, live: bool, ready: bool, reason: str
) -> None:
    verdict = judge((doing, what, since, moved), 100.0, LIMIT_S, sample, "f (x.py:3)")
    assert (verdict.live, verdict.ready) == (live, ready)
    assert verdict.reason.startswith(reason)


def test_pulse_records_when_an_activity_began_and_last_progressed() -> None:
    pulse = Pulse()
    pulse.beat("calling", "commit")
    _, _, since, moved = pulse.now
    time.sleep(0.01)
    pulse.beat("calling", "commit")
    assert pulse.now[2] == since
    assert pulse.now[3] > moved
    pulse.beat("calling", "flush")
    assert pulse.now[2] > since


def test_other_thread_does_not_make_stuck_thread_look_alive() -> None:
    pulse = Pulse()
    before = pulse.now
    committer = threading.Thread(target=pulse.beat, args=("calling", "commit"))
    committer.start()
    committer.join()
    assert pulse.now == before


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [
        ({}, 60),
        ({"eos.liveness.timeout.ms": 5_000}, 15),
        ({"eos.liveness.timeout.ms": 5_000, "eos.call.timeout.ms": 1_000, "transaction.timeout.ms": 5_000}, 11),
        ({"transaction.timeout.ms": 300_000}, 300),
        ({"eos.call.timeout.ms": 90_000}, 100),
    ],
)
def test_stuck_limit_covers_transaction_and_call_timeouts(given: dict[str, int], limit_s: float) -> None:
    assert stuck_after_s(Settings(given)) == limit_s


@pytest.mark.parametrize(
    ("silent_s", "live", "ready", "reason"),
    [(1.0, True, True, "starting"), (6.0, True, False, "has not reported"), (61.0, False, False, "has not reported")],
)
def test_silent_supervised_worker_is_not_ready_and_later_not_live(
    silent_s: float, live: bool, ready: bool, reason: str
) -> None:
    verdict = judge_report(a_status(), silent_s)
    assert (verdict.live, verdict.ready) == (live, ready)
    assert verdict.reason.startswith(reason)


# ---- incidents ---------------------------------------------------------------------------------------------


def test_incidents_are_warnings_and_notable_events_at_any_level(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.configure(level="error")
    with Incidents() as incidents:
        log.info("nothing to tell", number=1)
        log.info("producer replaced", reason="abort", transactional_id="a-1", epoch=4, state="Ready")
        log.warning("transaction aborted", reason="send_offsets: the group moved on", transactional_id="a-1", tries=2)
    assert [(i.level, i.text) for i in incidents.last()] == [
        ("info", "producer replaced: abort"),
        ("warning", "transaction aborted: send_offsets: the group moved on (tries 2)"),
    ]
    assert capsys.readouterr().err == "", "the log itself keeps its level"
    assert log.logger.level == logging.ERROR
    log.configure()


def test_long_incident_is_cut() -> None:
    incidents = Incidents()
    incidents.note(1.0, "warning", "x" * 1_000_000)
    (kept,) = incidents.last()
    assert kept.text == "x" * 2_000 + "..."


def test_event_description_lists_fields_without_reason() -> None:
    assert describe_event("worker stuck", {"seconds": 3, "group": "g"}) == "worker stuck (seconds 3)"


# ---- metrics -----------------------------------------------------------------------------------------------


def full_status() -> Status:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.1, 0.11, 5.0):
        histogram.observe(seconds)
    seen = Distribution(histogram.bounds, tuple(histogram.counts), histogram.total)
    return a_status(
        records_in=7,
        aborts={"rebalance": 2, "seek": 1},
        poison={"stop": 0, "dlq": 3, "skip": 0},
        commit_seconds=seen,
        lags=[PartitionLag("t", 0, 5), PartitionLag("t", 1, None)],
        times=[FunctionTime("count", 1_000, 3, 1)],
        late=2,
        duplicates=1,
        states=[FunctionState("count", 12, 4096, 3)],
    )


STATES = ("values", "bytes", "to_restore_records")


def samples(*statuses: Status) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    _, text, content_type = render_metrics(lambda: metrics.collect_metrics(statuses))
    assert content_type.startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} twice"
            found[key] = sample.value
    return found


def test_scrape_parses_and_matches_status() -> None:
    mine = {("app", "a"), ("worker", "i")}
    found = samples(full_status())
    assert found["eos_records_in_total", frozenset(mine)] == 7
    assert found["eos_transactions_aborted_total", frozenset(mine | {("cause", "rebalance")})] == 2
    assert found["eos_transactions_aborted_total", frozenset(mine | {("cause", "seek")})] == 1
    assert found["eos_transactions_aborted_total", frozenset(mine | {("cause", "refused")})] == 0, (
        "rate() needs the zero"
    )
    assert found["eos_poison_records_total", frozenset(mine | {("policy", "dlq")})] == 3
    assert found["eos_lag_records", frozenset(mine | {("topic", "t"), ("partition", "0")})] == 5
    assert not any("1" in dict(labels).get("partition", "") for name, labels in found if name == "eos_lag_records")
    state = {name: found[f"eos_state_{name}", frozenset(mine | {("function", "count")})] for name in STATES}
    assert state == {"values": 12, "bytes": 4096, "to_restore_records": 3}
    buckets = [found["eos_commit_seconds_bucket", frozenset(mine | {("le", le)})] for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [1, 2, 3]
    assert found["eos_commit_seconds_count", frozenset(mine)] == 3
    assert found["eos_commit_seconds_sum", frozenset(mine)] == pytest.approx(5.21)


def test_metrics_label_each_worker_and_omit_unreported_ones() -> None:
    found = samples(full_status(), a_status(instance="j"), a_status(app="", instance="k"))
    assert {dict(labels)["worker"] for name, labels in found if name == "eos_ready"} == {"i", "j"}


def test_metrics_use_base_units_and_listed_names() -> None:
    shown = {name for name, _ in samples(full_status())}
    assert shown == metrics.metric_names()
    assert len(shown) > 20
    assert not [name for name in shown if name.endswith(("_ms", "_millis", "_kb"))]


def test_dashboard_and_docs_name_existing_metrics() -> None:
    dashboard = json.loads((ROOT / "docs/grafana-dashboard.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [str(variable["query"]) for variable in dashboard["templating"]["list"]]
    named = {name for text in asked for name in re.findall(r"\beos_\w+", text)}
    assert len(named) > 15
    assert named <= metrics.metric_names(), named - metrics.metric_names()
    documented = set(re.findall(r"\beos_[a-z_]+\b", (ROOT / "docs/reference/metrics.md").read_text()))
    known = {re.sub("_(bucket|sum|count)$", "", name) for name in metrics.metric_names()}
    assert documented == known


def test_response_names_the_package_that_metrics_need() -> None:
    program = (
        "import sys; sys.modules['prometheus_client'] = None; sys.modules['watchfiles'] = None\n"
        "import eos.cli.run, http.client\n"
        "from eos.health.board import Board; from eos.health.server import serve\n"
        "with serve(('127.0.0.1', 0), Board(list)) as server:\n"
        "    ask = http.client.HTTPConnection('127.0.0.1', server.port); ask.request('GET', '/metrics')\n"
        "    answer = ask.getresponse(); print(answer.status, answer.read().decode())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.startswith("501 metrics need prometheus-client: pip install 'eos-kafka[metrics]'"), ended


# ---- the server --------------------------------------------------------------------------------------------


class Answers:
    """Return a server over statuses that a test can change."""

    def __init__(self) -> None:
        self.statuses = [a_status()]
        self.port = 0

    def ask(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers()
    with serve(("127.0.0.1", 0), Board(lambda: made.statuses)) as server:
        made.port = server.port
        yield made


def test_probes_answer_200_only_if_all_workers_pass(answers: Answers) -> None:
    assert answers.ask("/livez") == (200, "ok i: starting\n")
    answers.statuses = [a_status(), a_status(instance="j", ready=False, reason="joining")]
    assert answers.ask("/livez")[0] == 200
    assert answers.ask("/readyz") == (503, "ok i: starting\nNOT OK j: joining\n")
    answers.statuses = [a_status(live=False, ready=False, reason="stuck")]
    assert answers.ask("/livez") == (503, "NOT OK i: stuck\n")


def test_http_errors_and_head_requests_are_answered(answers: Answers) -> None:
    assert answers.ask("/nope")[0] == 404
    assert answers.ask("/status.json?since=yesterday")[0] == 400
    assert answers.ask("/livez", "HEAD") == (200, "")
    assert answers.ask("/livez", "POST")[0] == 501


def test_status_page_loads_no_external_resource(answers: Answers) -> None:
    code, page = answers.ask("/")
    assert code == 200
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", page)
    assert not re.search(r"@import|url\(", page)
    assert "innerHTML" not in page, "a topic's name is text and never markup"


def test_board_returns_only_new_points() -> None:
    board = Board(lambda: [a_status(records_in=5)])
    board.note([a_status(records_in=5)])
    (point,) = board.view().history["i"]
    assert point[1:] == (5, 0, 0)
    assert board.view(point[0]).history["i"] == []


def test_silent_clients_are_limited_and_do_not_block_probes(answers: Answers) -> None:
    silent = [socket.create_connection(("127.0.0.1", answers.port)) for _ in range(40)]
    deadline = time.monotonic() + 30
    while True:
        try:
            assert answers.ask("/livez")[0] == 200
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < deadline, "silent clients hold the server"
            time.sleep(0.1)
    assert threading.active_count() < 60
    for connection in silent:
        connection.close()


def test_used_port_is_configuration_error_with_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        taken_port = pytest.raises(ConfigurationError, match=f"--http-port 127.0.0.1:{port}: Address already in use")
        with taken_port, serve(("127.0.0.1", port), Board(list)):
            pass


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("8080", ("", 8080)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9", ("::1", 9)),
        ("localhost:9", ("localhost", 9)),
    ],
)
def test_address_is_port_or_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "http", "host:", "70000", "-1", "1.5"])
def test_invalid_address_is_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="expected PORT or HOST:PORT"):
        parse_address(text)
