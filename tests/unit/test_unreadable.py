"""How long a place that cannot be read is asked for again, without a broker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from eos.errors import InputGone
from eos.records import Record
from eos.session.asking import NotNow
from eos.session.positions import Positions
from eos.session.unreadable import Unreadable

AT = ("in", 0)
ERROR = KafkaError(KafkaError._AUTO_OFFSET_RESET, "Offset out of range")


class Life:
    """A partition that is read on at 100, a clock, and a cluster that tells what it holds."""

    def __init__(self) -> None:
        self.now, self.holds = 1000.0, (0, 50)
        self.positions: Positions[Record] = Positions()
        self.positions.assigned({AT: 100})
        asking: Any = SimpleNamespace(watermarks=self._watermarks)
        world: Any = SimpleNamespace(now=lambda: self.now)
        self.unreadable = Unreadable(self.positions, asking, world)

    def _watermarks(self, partition: tuple[str, int]) -> tuple[int, int]:
        if not self.holds:
            raise NotNow("nobody answers")
        return self.holds

    def told_for(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now <= until:
            self.unreadable.absent(AT, ERROR)
            self.now += 1


@pytest.fixture
def life() -> Life:
    return Life()


def test_what_does_not_come_back_is_gone(life: Life) -> None:
    life.told_for(29)
    with pytest.raises(InputGone, match=r"in\[0\] is committed at offset 100, but the topic now holds 0 to 50; reset"):
        life.told_for(5)


def test_what_was_removed_is_gone_at_once(life: Life) -> None:
    life.holds = (101, 150)
    with pytest.raises(InputGone, match="holds 101 to 150"):
        life.unreadable.absent(AT, ERROR)


def test_what_nobody_answers_for_is_not_called_removed(life: Life) -> None:
    life.holds = ()
    life.told_for(29)
    with pytest.raises(InputGone, match="holds other ones"):
        life.told_for(5)


@pytest.mark.parametrize("meanwhile", ["it came, and an hour later it is absent again", "others came before it"])
def test_each_time_is_waited_for_anew(meanwhile: str, life: Life) -> None:
    life.told_for(29)
    if meanwhile.startswith("others"):
        life.positions.assigned({AT: 102})
    else:
        life.now += 3600
    life.told_for(29)
