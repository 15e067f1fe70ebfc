"""Write rows into a real PostgreSQL that accepts only TLS, and look for its password in everything that eos prints."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from eos.broker import LocalKafka
from eos.errors import EosError
from eos.sql import Postgres
from eos.sql.database import DatabaseError
from tests.support import forked
from tests.support.postgres import TLSServer, needs_tls
from tests.support.secure import make_pki
from tests.support.sinks import Names, Sinks

pytestmark = needs_tls


SECRET = "secret-9f2c"
# Texts after a right connection string, and the code with which a worker ends.
STRINGS = {
    "wrong password": ("-not", 77),
    "password with a space, not quoted": (f" password=one {SECRET}", 78),
    "unknown parameter": (f" pass_word={SECRET}", 78),
    "wrong CA file": (" sslmode=verify-full sslrootcert=/nothing.pem", 78),
    "other port": (" port=1", 69),
}
URLS = (f"postgresql://me:{SECRET}/x@127.0.0.1/shop", f"postgresql://me:x@{SECRET}@127.0.0.1/shop")


@pytest.fixture(scope="module")
def tls() -> Iterator[TLSServer]:
    with TLSServer.running() as running:
        yield running


@pytest.fixture
def sinks(kafka: LocalKafka, names: Names, tmp_path: Path, tls: TLSServer) -> Sinks:
    return Sinks(kafka, names, tmp_path, tls)


def change(sinks: Sinks, old: str, new: str) -> None:
    """Replace a part of the connection string in the App."""
    sinks.define()
    program = sinks.folder / "sinking.py"
    text = program.read_text()
    assert old in text
    program.write_text(text.replace(old, new))


def run_without_password(sinks: Sinks, code: int) -> None:
    """Run a worker and `eos doctor`, and look for the password in their output."""
    printed = sinks.run("--log-level", "debug", ends=code)
    doctor = forked.run(["eos", "doctor", "sinking:app"], cwd=sinks.folder, env=sinks.environment)
    assert (doctor.returncode == 0) == (code == 0), doctor.stdout
    assert "database" in doctor.stdout.lower()
    assert SECRET not in printed + doctor.stdout + doctor.stderr


def last_line(printed: str) -> str:
    return printed.strip().splitlines()[-1]


def test_rows_are_exact_with_verify_full(sinks: Sinks, tls: TLSServer) -> None:
    sinks.load(200)
    change(sinks, "password=", f"sslmode=verify-full sslrootcert={tls.ca} password=")
    run_without_password(sinks, 0)
    sinks.require_exact()


def test_wrong_ca_exits_with_69_and_missing_ca_with_78(sinks: Sinks, tls: TLSServer, tmp_path: Path) -> None:
    """The codes are those of the same errors with Kafka's certificates (broker/test_security.py)."""
    sinks.load(2)
    other = make_pki(tmp_path) / "ca.pem"
    for wrong, code, sentence in (
        (f"sslmode=verify-full sslrootcert={other}", 69, "certificate verify failed"),
        (f"sslmode=verify-full sslrootcert={tls.ca} hostaddr=127.0.0.1 host=localhost", 69, "does not match host name"),
        ("sslmode=verify-full sslrootcert=/nothing.pem", 78, 'root certificate file "/nothing.pem" does not exist'),
        ("sslmode=sometimes", 78, 'invalid sslmode value: "sometimes"'),
        ("sslmode=disable", 77, "no encryption"),
    ):
        change(sinks, "password=", f"{wrong} password=")
        printed = sinks.run(ends=code)
        assert sentence in last_line(printed)
        assert "Traceback" not in printed
    assert sinks.execute("select count(*) from orders") == [(0,)]


def test_password_appears_in_no_output(sinks: Sinks) -> None:
    for more, code in STRINGS.values():
        change(sinks, f"password={SECRET}", f"password={SECRET}{more}")
        run_without_password(sinks, code)


def test_password_appears_in_no_exception(tls: TLSServer) -> None:
    dsn = tls.dsn()
    examined = 0
    for string in (*URLS, *(f"{dsn}{more}" for more, _ in STRINGS.values())):
        try:
            Postgres(string).connect()
        except (DatabaseError, EosError) as error:
            text = "".join(traceback.format_exception(error)) + repr(error) + repr(Postgres(string))
            assert SECRET not in text
            examined += 1
    assert examined == len(STRINGS) + len(URLS)
