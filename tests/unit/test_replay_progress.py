"""The dead letters selected by a command, and the file in which a user repairs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eos.cli.dead_letter_selection import Selection, export_row, read_changes
from eos.encoding.dead_letters import make_dead_letter
from eos.errors import UsageError
from eos.records import Record
from eos.worker.dead_letters import DeadLetter, letter_of

RECORD = Record("orders", 3, 17, 1_700_000_000_000, b"k\xff", b"v", [("trace", b"t"), ("trace", None)])


def letter(error: Exception = ValueError("why"), record: Record = RECORD, offset: int = 5) -> DeadLetter:  # noqa: B008
    topic, value, key, _, _, headers = make_dead_letter(record, error, app="shop", function="total")
    return letter_of(Record(topic, 1, offset, 9, key, value, headers or []))


def changes(folder: Path, *lines: object) -> dict[str, Any]:
    file = folder / "letters.jsonl"
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return read_changes("--file letters.jsonl", file)


def test_selection_filters_by_record_and_exception() -> None:
    first, second = letter(), letter(KeyError("x"), msgspec.structs.replace(RECORD, offset=18), 6)
    for choice, chosen in (
        (Selection(), [first, second]),
        (Selection(["orders[3]@18"]), [second]),
        (Selection(["orders.dlq[1]@5", "orders[0]@1"]), [first]),
        (Selection((), ["KeyError"]), [second]),
        (Selection(["orders[3]@18"], ["ValueError"]), []),
    ):
        assert [each for each in (first, second) if choice(each)] == chosen
        assert choice.selected == len(chosen)
    assert choice.missing == set(), "it exists, although with another reason"
    assert Selection(["orders[3]@19"]).missing == {"orders[3]@19"}


def test_exported_dead_letter_is_read_back_with_edits(tmp_path: Path) -> None:
    row = export_row(letter())
    assert row == {
        "letter": "orders.dlq[1]@5",
        "source": "orders[3]@17",
        "replays": 0,
        "app": "shop",
        "function": "total",
        "exception": "ValueError",
        "message": "why",
        "timestamp": 1_700_000_000_000,
        "key": {"base64": "a/8="},
        "value": "v",
        "headers": [["trace", "t"], ["trace", None]],
    }
    assert Selection(changes=changes(tmp_path, row, ""))(letter()) == letter()
    breaking = letter(record=msgspec.structs.replace(RECORD, value="a\u2028b\u0085c\nd".encode()))
    as_printed = msgspec.json.encode(export_row(breaking)).decode()
    assert Selection(changes=changes(tmp_path, as_printed))(breaking) == breaking
    mended = Selection(
        changes=changes(tmp_path, {"letter": row["letter"], "value": "w"}, {"letter": "orders.dlq[1]@9"})
    )
    found = mended(letter())
    assert found is not None
    assert found.record == msgspec.structs.replace(RECORD, value=b"w")
    assert mended(letter(offset=6)) is None
    assert mended.missing == {"orders.dlq[1]@9"}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["{"], "line 1: Expecting property name"),
        ([{"letter": "a"}, {"value": "b"}], 'line 2: expected an object with "letter"'),
        ([[]], 'line 1: expected an object with "letter"'),
        ([{"letter": "a"}, {"letter": "a"}], "line 2: an earlier line has a too"),
        ([{"letter": "a", "valeu": "b"}], "line 1: unknown field 'valeu': expected app, exception, "),
        ([{"letter": "a", "value": 5}], "line 1: value: expected a string, null or"),
        ([{"letter": "a", "key": {"base64": "?"}}], "line 1: key: invalid base64"),
        ([{"letter": "a", "timestamp": "x"}], "line 1: timestamp: expected milliseconds"),
        ([{"letter": "a", "headers": [["n"]]}], "line 1: headers: expected a list"),
        ([{"letter": "a", "headers": [["n", 5]]}], "line 1: header n: expected a string"),
        ([{"letter": "a", "headers": [["\ud800", "x"]]}], "line 1: headers: expected a list"),
        (['"' + "[" * 100_000, "["], "line 1: "),
        (["[" * 100_000], "line 1: "),
    ],
)
def test_invalid_line_is_reported_with_its_number(tmp_path: Path, lines: list[Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        changes(tmp_path, *lines)
    assert str(refused.value).startswith(f"--file letters.jsonl, {sentence}")
    with pytest.raises(UsageError, match="--file none cannot be read: No such file"):
        read_changes("--file none", tmp_path / "none")
