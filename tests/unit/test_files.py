"""The limit of open files, which a worker raises for its state."""

from __future__ import annotations

import resource

import pytest

from eos.state.files import allow_open_files

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "wanted", "allowed", "set_to"),
    [
        ((1_024, 4_096), 1_000, 1_000, None),
        ((1_024, 4_096), 2_000, 2_000, (2_000, 4_096)),
        ((1_024, 4_096), 9_000, 4_096, (4_096, 4_096)),
        ((1_024, INFINITE), 9_000, 9_000, (9_000, INFINITE)),
        ((INFINITE, INFINITE), 9_000, 9_000, None),
    ],
)
def test_open_file_limit_is_raised_up_to_the_hard_limit(
    limits: tuple[int, int], wanted: int, allowed: int, set_to: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, values: limits_set.append(values))
    assert allow_open_files(wanted) == allowed
    assert limits_set == ([] if set_to is None else [set_to])
