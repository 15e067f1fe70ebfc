"""Use the TLS and SASL settings of a worker for Spark's Java consumer and for the sink's connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.shim.test_tls_and_sasl import pki, secure  # noqa: F401 - fixtures
from tests.support.secure import ALICE, SecureKafka
from tests.support.spark import SparkRuns

pytestmark = [pytest.mark.deep, pytest.mark.timeout(560)]

APP = """
    from eos import App, Record

    app = App($app)


    @app.process($source, to=$to)
    def copy(record: Record) -> bytes:
        return record.value
"""


@pytest.fixture
def runs(secure: SecureKafka, names: Callable[[str], str], tmp_path: Path) -> Iterator[SparkRuns]:  # noqa: F811
    made = SparkRuns(secure.servers["PLAINTEXT"], "-".join(names("s").split("-")[-2:]), tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_app_runs_over_sasl_and_tls_with_a_workers_settings(
    runs: SparkRuns,
    secure: SecureKafka,  # noqa: F811
    pki: Path,  # noqa: F811
) -> None:
    source, target = runs.topic("in"), runs.topic("out")
    values = [b"%d" % n for n in range(300)]
    runs.load(source, values)
    app = runs.app(APP, app=runs.prefix, source=source, to=target)
    settings = {
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": str(pki / "ca.pem"),
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": ALICE,
    }
    flags = [part for name, value in settings.items() for part in ("-X", f"{name}={value}")]
    servers = ("--bootstrap-servers", secure.servers["BOTH"], "-X", "eos.startup.timeout.ms=15000")
    run = runs.spark(app, "--until-end", *flags, *servers)
    assert run.wait() == 0, run.log[-3_000:]
    found = runs.settled(target)
    assert sorted(m.value() for messages in found.values() for m in messages) == sorted(values)
    wrong = [flag.replace(ALICE, "wrong") for flag in flags]
    refused = runs.spark(app, "--until-end", *wrong, *servers)
    assert refused.wait() in (69, 77), refused.log[-3_000:]
    assert ALICE not in refused.log
    assert "wrong" not in refused.log
