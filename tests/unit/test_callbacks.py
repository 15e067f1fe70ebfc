"""Errors of user callbacks are kept and raised later; an invalid token is not a token."""

from __future__ import annotations

from typing import Any

import pytest

from eos.kafka.client.client_calls import guard_callbacks


@pytest.mark.parametrize("name", ["stats_cb", "error_cb", "throttle_cb"])
def test_callback_error_is_kept_and_not_raised_in_the_call(name: str) -> None:
    kept: list[Exception] = []
    heard: list[object] = []

    def fail(event: object) -> None:
        heard.append(event)
        raise LookupError(str(event))

    guard_callbacks({name: fail, "client.id": "c"}, kept.append)[name]("told")
    assert heard == ["told"]
    assert [type(error) for error in kept] == [LookupError]


def test_callback_signal_exception_passes_at_once() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard_callbacks({"error_cb": interrupt}, pytest.fail)["error_cb"]("told")


def test_configuration_without_callbacks_is_unchanged() -> None:
    assert guard_callbacks({"client.id": "c", "stats_cb": None}, pytest.fail) == {"client.id": "c", "stats_cb": None}


@pytest.mark.parametrize("token", [None, "token", ("token",), (b"token", 1.0), ("token", "soon"), ("t", 1, "p", {}, 5)])
def test_malformed_token_is_a_callback_failure(token: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An exception counts as "no token" and is retried; a malformed token would fail the call in progress."""
    with caplog.at_level("WARNING", "eos"), pytest.raises((TypeError, ValueError)):
        guard_callbacks({"oauth_cb": lambda text: token}, pytest.fail)["oauth_cb"]("")
    assert "oauth_cb failed" in caplog.text


def test_valid_token_passes() -> None:
    ask = guard_callbacks({"oauth_cb": lambda text: (text, 7, "me", {"a": "b"})}, pytest.fail)["oauth_cb"]
    assert ask("token") == ("token", 7.0, "me", {"a": "b"})
