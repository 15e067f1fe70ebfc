"""What `eos.testing.run` answers a test that asks for something else than what the App does."""

from __future__ import annotations

import pytest

import eos
import eos.testing
from eos.errors import ConfigurationError


def test_a_topic_that_the_app_never_writes_to_is_an_error_and_not_an_empty_answer() -> None:
    app = eos.App("prices")

    @app.process("orders", to=["priced", "audit"])
    def price(order: bytes) -> bytes:
        return order

    ran = eos.testing.run(app, [("orders", b"o")])
    assert (ran.values("priced"), ran.values("audit"), ran.values("orders.dlq")) == ([b"o"], [], [])
    for asked in (ran.values, ran.to):
        with pytest.raises(
            ConfigurationError, match=r"no output goes to 'pricedd', they go to audit, orders\.dlq, priced$"
        ):
            asked("pricedd")
