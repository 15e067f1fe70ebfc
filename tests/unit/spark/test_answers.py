"""The table of broker answers: each code once, success only where it is success, and nothing unknown is success."""

from __future__ import annotations

import pytest

from eos.codes import CODES, RETRIABLE, error_name
from spark_connector import answers
from spark_connector.answers import Answer, judge


def test_each_code_has_one_row_and_only_two_are_success() -> None:
    codes = [code for row in answers._ROWS.values() for code in row]
    assert len(codes) == len(set(codes)) > 30
    assert [code for code in range(-1, 200) if judge(code) is Answer.DONE] == [0, 46]


def test_what_kafkas_own_clients_retry_is_retried() -> None:
    """Every error that kafka-python calls retriable and that these requests can be answered with."""
    # Of followers, groups, fetch and share sessions, controllers, elections, topic ids.
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
def test_an_answer_is_what_kafka_means_by_it(code: int, answer: Answer) -> None:
    assert judge(code) is answer
