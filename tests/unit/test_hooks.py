"""`on_start` and `on_stop` hooks: their order and their failures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import eos.testing
from eos import App
from eos.engine.hooks import HookFailed, Hooks
from eos.errors import ConfigurationError, PoisonRecord


def add_hooks(app: App, calls: list[str], *fails: str) -> App:
    def note(name: str) -> Callable[[], None]:
        def hook() -> None:
            calls.append(name)
            if name in fails:
                raise OSError(f"{name} failed")

        return hook

    for name in ("one", "two"):
        app.on_start(note(f"start {name}"))
        app.on_stop(note(f"stop {name}"))

    @app.process("in")
    def handle(value: bytes) -> None:
        calls.append("handle")
        if value == b"bad":
            raise ValueError

    return app


def test_start_hooks_run_in_order_and_stop_hooks_in_reverse() -> None:
    calls: list[str] = []
    eos.testing.run(add_hooks(App("app"), calls), [("in", "a")])
    assert calls == ["start one", "start two", "handle", "stop two", "stop one"]


def test_stop_hooks_run_after_a_poison_record_and_keep_its_error() -> None:
    calls: list[str] = []
    with pytest.raises(PoisonRecord):
        eos.testing.run(add_hooks(App("app"), calls, "stop two"), [("in", "bad")])
    assert calls[-2:] == ["stop two", "stop one"]


def test_failed_start_hook_ends_the_run_before_any_record() -> None:
    calls: list[str] = []
    with pytest.raises(HookFailed, match="on_start: hook raised OSError: start one failed") as e:
        eos.testing.run(add_hooks(App("app"), calls, "start one"), [("in", "a")])
    assert calls == ["start one"]
    assert isinstance(e.value.__cause__, OSError)
    assert e.value.exit_code == 75


def test_failed_stop_hook_is_raised_after_the_other_hooks() -> None:
    calls: list[str] = []
    with pytest.raises(HookFailed, match="on_stop: hook raised OSError: stop two failed"):
        eos.testing.run(add_hooks(App("app"), calls, "stop two"), [("in", "a")])
    assert calls[-2:] == ["stop two", "stop one"]


def test_no_hook_runs_after_a_stop_timeout() -> None:
    calls: list[str] = []
    hooks = Hooks(add_hooks(App("app"), calls))
    hooks.start()
    hooks.abandon()
    hooks.stop(failed=True)
    assert calls == ["start one", "start two"]


def test_hook_is_returned_unchanged_and_takes_no_arguments() -> None:
    app = App("app")

    def hook() -> None: ...

    assert app.on_start(hook) is hook
    for wrong in (lambda one: None, 5):
        with pytest.raises(ConfigurationError, match="must be callable without arguments"):
            app.on_stop(wrong)  # type: ignore[type-var]
    assert app.stop_hooks == []
