"""The notes in a checkpoint: which changes of a function its stored state survives."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from eos import App, State, Timers, tumbling
from eos.errors import ConfigurationError
from spark_connector.checkpoint import check_note, make_note

MINUTE = timedelta(minutes=1)


def add(value: int, total: State[int]) -> None: ...


def add_later(value: int, total: State[int], due: Timers) -> None: ...


def copy(value: bytes) -> bytes:
    return value


def app_of(function: Callable[..., Any], **how: Any) -> App:
    app = App("sums")
    app.process("in", to="out", **{"name": "add", **how})(function)
    if function is add_later:
        app.on_timer(function, "due")(lambda key: None)
    return app


WINDOW = {"window": tumbling(MINUTE), "grace": timedelta(0)}


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            app_of(add, **WINDOW),
            app_of(add, **WINDOW | {"grace": MINUTE}),
            "per tumbling window of 0:01:00, grace 0:00:00",
        ),
        (app_of(add, **WINDOW), app_of(add, **WINDOW | {"window": tumbling(2 * MINUTE)}), "was a State per tumbling"),
        (app_of(add), app_of(add, **WINDOW), "the state total of add was a State when it was stored"),
        (app_of(add), app_of(add, ttl=MINUTE), "add uses ttl=, once=, timers or windows in another way"),
        (app_of(add_later), app_of(add), "add uses ttl=, once=, timers or windows in another way"),
        (app_of(add), app_of(add_later), "add uses ttl=, once=, timers or windows in another way"),
        (app_of(add), app_of(copy), "add kept the state total, which the code no longer has"),
        (app_of(copy), app_of(add), "the state total of add is new, and would begin empty"),
        (app_of(copy), app_of(copy, once=str, within=MINUTE), "the state @once of add is new"),
        (app_of(add), app_of(add, name="sum"), "the state in the checkpoint belongs to the function add"),
    ],
)
def test_function_that_does_not_fit_its_stored_state_is_refused(before: App, now: App, message: str) -> None:
    note = make_note("sums", before.routes["in"])
    check_note("sums", before.routes["in"], note)
    with pytest.raises(ConfigurationError, match=message) as refused:
        check_note("sums", now.routes["in"], note)
    assert "begin with another --instance and --checkpoint" in str(refused.value)


def test_change_that_loses_no_state_is_accepted() -> None:
    for before, now in (
        (app_of(copy), app_of(copy, name="renamed")),
        (app_of(add, ttl=MINUTE), app_of(add, ttl=2 * MINUTE)),
        (app_of(add, once=str, within=MINUTE), app_of(add, once=str, within=2 * MINUTE)),
    ):
        check_note("sums", now.routes["in"], make_note("sums", before.routes["in"]))
