"""One line per event, for people and for machines."""

from __future__ import annotations

import datetime
import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from eos import log
from eos.cli.options import print_table


def written(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    log.configure(log_format, level, stream)
    return stream


def test_human_line_has_time_level_event_and_fields() -> None:
    stream = written("human")
    log.info("committed", transactional_id="app-1", epoch=3)
    pattern = r"\d\d:\d\d:\d\d\.\d{3} info    committed transactional_id=app-1 epoch=3\n"
    assert re.fullmatch(pattern, stream.getvalue())


def test_json_line_has_same_members_and_utc_time() -> None:
    stream = written("json")
    log.warning("fenced", transactional_id="app-1", producer_id=4007, epoch=3, state="Fenced")
    (line,) = stream.getvalue().splitlines()
    members = json.loads(line)
    stamp = datetime.datetime.fromisoformat(members.pop("time"))
    assert abs(datetime.datetime.now(datetime.UTC) - stamp) < datetime.timedelta(minutes=1)
    assert members == {
        "level": "warning",
        "event": "fenced",
        "transactional_id": "app-1",
        "producer_id": 4007,
        "epoch": 3,
        "state": "Fenced",
    }


def test_json_event_is_one_line_for_any_fields() -> None:
    stream = written("json")
    log.info("stopped", reason="two\nlines \u2028 and \x00", at=Path("/data"), error=ValueError("no"), nothing=None)
    (line,) = stream.getvalue().split("\n")[:-1]
    members = json.loads(line)
    assert (members["reason"], members["at"], members["error"]) == ("two\nlines \u2028 and \x00", "/data", "no")
    assert members["nothing"] is None


@pytest.mark.parametrize("log_format", ["human", "json"])
def test_event_is_exactly_one_line(log_format: str) -> None:
    stream = written(log_format, "debug")
    for number in range(20):
        log.event(logging.INFO, "event", number=number, error="outside allowed range\n")
    log.debug("the last")
    assert len(stream.getvalue().splitlines()) == 21


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", ["d", "i", "w"]), ("info", ["i", "w"]), ("warning", ["w"]), ("error", [])],
)
def test_level_selects_the_logged_events(level: str, shown: list[str]) -> None:
    stream = written("json", level)
    log.debug("d")
    log.info("i")
    log.warning("w")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == shown


def test_percent_sign_in_event_is_text() -> None:
    stream = written("human")
    log.info("100 %s done")
    assert "100 %s done" in stream.getvalue()


def test_librdkafka_lines_show_only_on_debug() -> None:
    stream = written("human", "info")
    log.client_logger.error("%3|FAIL|rdkafka")
    assert stream.getvalue() == ""
    stream = written("human", "debug")
    log.client_logger.error("FAIL rdkafka")
    assert "error   FAIL rdkafka" in stream.getvalue()


def test_configuring_twice_writes_each_line_once() -> None:
    first, second = written("human"), written("human")
    log.info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_events_without_configuration_are_records_of_logger_eos(caplog: pytest.LogCaptureFixture) -> None:
    log.logger.propagate = True
    with caplog.at_level(logging.INFO, logger="eos"):
        log.info("committed", epoch=3)
    (record,) = [r for r in caplog.records if r.name == "eos"]
    assert (record.getMessage(), vars(record)["fields"]) == ("committed epoch=3", {"epoch": 3})


@pytest.mark.parametrize(
    ("configured", "heard"),
    [
        ("pass", "lost 3 n=1\n"),
        ("logging.getLogger('eos').addHandler(logging.NullHandler())", ""),
        ("logging.basicConfig(level='INFO')", "INFO:eos:began\nWARNING:eos:lost 3 n=1\n"),
    ],
)
def test_unconfigured_program_prints_warnings(configured: str, heard: str) -> None:
    program = f"import logging; from eos import log; {configured}; log.info('began'); log.warning('lost 3', n=1)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (ran.stdout, ran.stderr) == ("", heard)


def test_foreign_text_does_not_move_terminal_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure()
    log.warning("dead letter", error="\x1b[2J\x1b]0;owned\x07 \u202e")
    table = Table("message")
    table.add_row("two\nlines \x1b[31m")
    print_table(table)
    captured = capsys.readouterr()
    assert "error=\\x1b[2J\\x1b]0;owned\\x07 \\u202e" in captured.err
    assert "lines \\x1b[31m" in captured.out
    assert "\x1b" not in captured.err + captured.out


def test_library_debug_lines_are_hidden_at_any_level(caplog: pytest.LogCaptureFixture) -> None:
    """A user's module may set the level of the root logger or of the library's own."""
    below = logging.getLogger("secretive.net.connection")
    for name in (None, "secretive", "secretive.net.connection"):
        caplog.set_level(logging.DEBUG, name)
    log.hide_debug_lines("secretive")
    below.debug("the password")
    logging.getLogger("secretive.later").debug("the token")
    caplog.set_level(logging.DEBUG, "secretive")
    below.debug("the password again")
    below.info("connected")
    logging.getLogger("secretively").debug("another library")
    assert caplog.messages == ["connected", "another library"]


def test_hiding_debug_lines_never_lowers_a_level(caplog: pytest.LogCaptureFixture) -> None:
    log.hide_debug_lines("reticent")
    logging.getLogger("reticent").info("connected")
    assert caplog.messages == []
