"""Put a test's producer into a session."""

from __future__ import annotations

from typing import Any

from eos.session.producer.producer import TransactionalProducer
from eos.session.producer.states import State
from eos.session.session import TransactSession


def give_producer(session: TransactSession, producer: Any) -> None:
    """Replace the session's producer by a stand-in."""
    session._parts.producer = session._loop._producer = session._loop._recovery._producer = producer


_decide_replacement = TransactionalProducer.decide_replacement


def decide_replacement_if_broken(producer: TransactionalProducer) -> str | None:
    """Keep a producer after aborts and possible retries, instead of `TransactionalProducer.decide_replacement`.

    A test then sees the damage that the replacement prevents.
    """
    return None if producer.state is State.READY else _decide_replacement(producer)


def keep_producers() -> None:
    """Keep the producers of this process, as `decide_replacement_if_broken` decides."""
    TransactionalProducer.decide_replacement = decide_replacement_if_broken  # type: ignore[method-assign]
