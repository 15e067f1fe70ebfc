"""Which batches the driver tries to write itself, given the previous batches."""

from __future__ import annotations

import pytest

from eos.app.definition import App
from eos.kafka.client.settings import Settings
from spark_connector import sink as sink_module
from spark_connector.attempt import Recent
from spark_connector.options import Options
from spark_connector.run import Run, sink


def note(recent: Recent, small: bool, gives_up: bool = False, row_bytes: float | None = 100.0) -> bool:
    """Note one batch, and return whether the driver tried it."""
    tried = recent.tries
    recent.record_batch(small, row_bytes, tried, by_driver=tried and not gives_up)
    return tried


def test_driver_tries_neither_first_batch_nor_batch_after_a_large_one() -> None:
    recent = Recent()
    assert [note(recent, small) for small in (True, True, False, True, True)] == [False, True, True, False, True]


def test_driver_tries_less_often_after_giving_up() -> None:
    recent = Recent()
    tried = [number for number in range(400) if note(recent, small=True, gives_up=True)]
    assert tried == [1, 3, 6, 11, 20, 37, 70, 135, 200, 265, 330, 395]
    while not note(recent, small=True):
        pass
    assert note(recent, small=True), "a batch written by the driver ends the pauses"


@pytest.mark.parametrize(
    ("row_bytes", "most"), [(0.5, 1 << 20), (100.0, 16_384), (100_000.0, 64), (10.0**7, 64), (None, 2_048)]
)
def test_driver_fetches_four_times_the_rows_that_it_would_write(row_bytes: float | None, most: int) -> None:
    recent = Recent()
    note(recent, small=True, row_bytes=row_bytes)
    note(recent, small=True, row_bytes=None)
    assert recent.most_rows(256_000) == most


def test_driver_bytes_setting_reaches_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_module, "exactly_once_sink", lambda **given: given["settings"])
    app = App("app")
    app.process("in", to="out")(lambda value: value)
    for given, passed in (({}, "256000"), ({"eos.spark.driver.bytes": "0"}, "0")):
        settings = sink(Run(app, Settings({"bootstrap.servers": "127.0.0.1:9", **given})))
        assert settings["eos.spark.driver.bytes"] == passed
        assert Options.of("out", "id", "127.0.0.1:9", settings, "none").driver_bytes == int(passed)
