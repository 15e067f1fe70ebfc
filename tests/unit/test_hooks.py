"""`on_start` and `on_stop`: their order, and what a failing one leads to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import eos.testing
from eos import App
from eos.engine.hooks import HookFailed, Hooks
from eos.errors import ConfigurationError, PoisonRecord


def noting(app: App, told: list[str], *fails: str) -> App:
    def note(name: str) -> Callable[[], None]:
        def hook() -> None:
            told.append(name)
            if name in fails:
                raise OSError(f"{name} is away")

        return hook

    for name in ("one", "two"):
        app.on_start(note(f"start {name}"))
        app.on_stop(note(f"stop {name}"))

    @app.process("in")
    def handle(value: bytes) -> None:
        told.append("handle")
        if value == b"bad":
            raise ValueError

    return app


def test_start_hooks_run_in_order_and_stop_hooks_in_reverse() -> None:
    told: list[str] = []
    eos.testing.run(noting(App("app"), told), [("in", "a")])
    assert told == ["start one", "start two", "handle", "stop two", "stop one"]


def test_stop_hooks_run_after_a_poison_record_and_keep_its_error() -> None:
    told: list[str] = []
    with pytest.raises(PoisonRecord):
        eos.testing.run(noting(App("app"), told, "stop two"), [("in", "bad")])
    assert told[-2:] == ["stop two", "stop one"]


def test_a_start_hook_that_fails_ends_the_run_before_any_record() -> None:
    told: list[str] = []
    with pytest.raises(HookFailed, match="on_start: hook raised OSError: start one is away") as e:
        eos.testing.run(noting(App("app"), told, "start one"), [("in", "a")])
    assert told == ["start one"]
    assert isinstance(e.value.__cause__, OSError)
    assert e.value.exit_code == 75


def test_a_stop_hook_that_fails_keeps_no_other_from_running_and_is_raised() -> None:
    told: list[str] = []
    with pytest.raises(HookFailed, match="on_stop: hook raised OSError: stop two is away"):
        eos.testing.run(noting(App("app"), told, "stop two"), [("in", "a")])
    assert told[-2:] == ["stop two", "stop one"]


def test_after_a_stop_that_took_too_long_no_hook_runs() -> None:
    told: list[str] = []
    hooks = Hooks(noting(App("app"), told))
    hooks.start()
    hooks.abandon()
    hooks.stop(failed=True)
    assert told == ["start one", "start two"]


def test_a_hook_stays_as_it_is_and_must_be_callable_without_arguments() -> None:
    app = App("app")

    def hook() -> None: ...

    assert app.on_start(hook) is hook
    for wrong in (lambda one: None, 5):
        with pytest.raises(ConfigurationError, match="must be callable without arguments"):
            app.on_stop(wrong)  # type: ignore[type-var]
    assert app.stop_hooks == []
