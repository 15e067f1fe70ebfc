"""The table of broker answers: each code has one row, and only two codes mean success."""

from __future__ import annotations

import pytest

from eos.codes import CODES, RETRIABLE, error_name
from spark_connector import answers
from spark_connector.answers import Answer, judge


def test_each_code_has_one_row_and_only_two_codes_mean_success() -> None:
    codes = [code for row in answers._ROWS.values() for code in row]
    assert len(codes) == len(set(codes)) > 30
    assert [code for code in range(-1, 200) if judge(code) is Answer.DONE] == [0, 46]


def test_errors_retried_by_kafka_clients_are_retried() -> None:
    """Compare with every retriable error of kafka-python that can answer these requests."""
    # Codes of followers, groups, fetch and share sessions, controllers, elections and topic ids.
    elsewhere = {9, 41, 70, 71, 72, 80, 83, 84, 88, 100, 103, 106, 122, 123}
    retriable = [code for code in CODES if error_name(code) in RETRIABLE]
    assert len(retriable) > 15
    missed = [code for code in retriable if judge(code) not in (Answer.RETRY, Answer.RESTART) and code not in elsewhere]
    assert [error_name(code) for code in missed] == []


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (45, Answer.RESTART),
        (47, Answer.FENCED),
        (90, Answer.FENCED),
        (10, Answer.REFUSED),
        (29, Answer.UNAUTHORISED),
        (199, Answer.REFUSED),
    ],
)
def test_code_is_judged_by_its_meaning_in_kafka(code: int, answer: Answer) -> None:
    assert judge(code) is answer
