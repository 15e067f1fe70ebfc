"""The rules of administrative commands, without Kafka: hanging transactions, reset targets, a group's partition."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from eos.cli.reset import parse_where, update_metadata
from eos.errors import ConfigurationError, Unavailable, UsageError
from eos.kafka.admin.facts import connect
from eos.kafka.admin.ownership import ABORTING
from eos.kafka.admin.reset import Move, parse_skip, parse_target
from eos.kafka.admin.transactions import ENDED, ENDING, Verdict, judge, log_partition_of
from eos.kafka.client.cluster import ClusterAdmin, ListedTransaction, OpenProducer
from eos.kafka.client.security import admin_configuration, login_refused
from eos.kafka.client.settings import Settings
from tests.support.secure import make_pki, openssl

SEEN = OpenProducer(("t", 0), 7, 3, 100, 1_372_939_200_000, 0)
KNOWN = ListedTransaction("id", 7, 3, "Ongoing", 0, 0, 10_000, frozenset({("t", 0)}))


@pytest.mark.parametrize("state", sorted(ENDED))
def test_partition_is_hanging_if_coordinator_ended_the_transaction(state: str) -> None:
    verdict, reason = judge(SEEN, dataclasses.replace(KNOWN, state=state), True)
    assert verdict is Verdict.HANGING
    assert state in reason


@pytest.mark.parametrize("state", sorted(ENDING))
def test_partition_is_not_hanging_while_markers_are_written(state: str) -> None:
    assert judge(SEEN, dataclasses.replace(KNOWN, state=state), True)[0] is Verdict.ENDING


def test_transaction_is_open_if_coordinator_knows_it() -> None:
    assert judge(SEEN, KNOWN, True)[0] is Verdict.OPEN


@pytest.mark.parametrize("state", ["Ongoing", *sorted(ENDING)])
def test_partition_is_hanging_if_coordinator_omits_it(state: str) -> None:
    elsewhere = dataclasses.replace(KNOWN, state=state, partitions=frozenset({("t", 1)}))
    assert judge(SEEN, elsewhere, True)[0] is Verdict.HANGING


def test_missing_coordinator_makes_an_unknown_producer_undecidable() -> None:
    assert judge(SEEN, None, True)[0] is Verdict.HANGING
    assert judge(SEEN, None, False)[0] is Verdict.UNKNOWN


def test_transaction_states_are_ended_ending_or_ongoing() -> None:
    assert ENDED.isdisjoint(ENDING)
    assert set(ABORTING) < ENDING
    assert len(ENDED | ENDING | {"Ongoing"}) == 8  # TransactionState.java


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


def certificate(pki: Path, name: str, holds: str, days: int = 2, ca: str = "ca") -> Path:
    (pki / f"{name}.names").write_text(f"subjectAltName={holds}\n")
    signer = ("-CA", str(pki / f"{ca}.pem"), "-CAkey", str(pki / f"{ca}.key"), "-CAcreateserial")
    signed = ("-days", str(days), "-extfile", str(pki / f"{name}.names"), "-out", str(pki / f"{name}.pem"))
    openssl("x509", "-req", "-in", str(pki / "server.csr"), *signer, *signed)
    return pki / f"{name}.pem"


@contextmanager
def tls_server(pki: Path, pem: Path) -> Iterator[int]:
    """Run a server that answers TLS handshakes one after the other, and yield its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, pki / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                with contextlib.suppress(ssl.SSLError, ConnectionError):
                    plain, _ = server.accept()
                    context.wrap_socket(plain, server_side=True).close()

        def serve() -> None:
            with contextlib.suppress(OSError):  # the server's socket is closed
                accept()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("name", "holds", "days", "ca", "said"),
    [
        ("expired", "IP:127.0.0.1", -1, "ca", "has expired (certificate has expired): renew it on the broker"),
        ("other-host", "DNS:kafka.example", 2, "ca", "is for another host (IP address mismatch, "),
        ("other-ca", "IP:127.0.0.1", 2, "other", "was signed by a CA that is not trusted here (unable to get local"),
    ],
)
def test_error_for_a_refused_certificate_names_the_reason(
    pki: Path, name: str, holds: str, days: int, ca: str, said: str
) -> None:
    authority = ("-keyout", str(pki / "other.key"), "-out", str(pki / "other.pem"))
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=other", *authority)
    with tls_server(pki, certificate(pki, name, holds, days, ca)) as port:
        settings = Settings(
            {
                "bootstrap.servers": f"127.0.0.1:{port}",
                "security.protocol": "SSL",
                "ssl.ca.location": str(pki / "ca.pem"),
            }
        )
        with pytest.raises(Unavailable) as refused:
            connect(settings, 20)
    assert str(refused.value).startswith(f"the certificate of 127.0.0.1:{port} {said}")


# ---- eos reset --from -----------------------------------------------------------------------------------------


def test_reset_and_skip_targets_are_parsed() -> None:
    assert parse_target(["earliest"]).name == "earliest"
    assert parse_target(["latest"]).name == "latest"
    assert parse_target(["2013-07-04T12:00:00+00:00"]).timestamp_ms == 1372939200000
    assert parse_target(["2013-07-04T12:00:00"]).offsets is None, "a time, not a topic with colons"
    assert parse_target(["a.b-c[3]@17", "d:0:0"]).offsets == {("a.b-c", 3): 17, ("d", 0): 0}
    assert parse_skip(["a.b-c[3]@17"]).offsets == {("a.b-c", 3): 18}


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of this process cannot be changed")
def test_reset_time_without_zone_shows_the_local_zone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        timestamps = [parse_where([text]).timestamp_ms for text in ("2013-07-04T12:00", "2013-07-04T12:00+00:00")]
    time.tzset()
    assert timestamps == [1372906800000, 1372939200000]
    assert capsys.readouterr().out == "from 2013-07-04T12:00:00+09:00\nfrom 2013-07-04T21:00:00+09:00\n"
    parse_where(["earliest"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["yesterday"],
        ["0001-01-01"],
        ["earliest", "latest"],
        ["t:0:1", "earliest"],
        ["t:0"],
        ["t:0:-1"],
        ["t:0:1", "t[0]@2"],
    ],
)
def test_invalid_reset_target_is_a_usage_error(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="--from"):
        parse_target(texts)


@pytest.mark.parametrize("text", ["earliest", "2013-07-04T12", "t:0", "t[0]", "t[0]@"])
def test_skip_target_accepts_only_offsets(text: str) -> None:
    with pytest.raises(UsageError, match=f"^--skip {re.escape(text)}: expected TOPIC"):
        parse_skip([text])


NOTES = {"v": 1, "instance": "a-one", "lineage": [2, 10, 7], "state": ["count", 40, {"seen": "State"}]}


@pytest.mark.parametrize(
    ("after", "skipping", "accepting", "changed"),
    [
        (12, False, False, {}),
        (12, False, True, {"state": "accepted"}),
        (13, True, False, {"lineage": [2, 11, 7]}),
        (13, True, True, {"lineage": [2, 11, 7], "state": "accepted"}),
        (0, False, False, {"lineage": None}),
    ],
)
def test_reset_keeps_valid_metadata(after: int, skipping: bool, accepting: bool, changed: dict[str, object]) -> None:
    moved = update_metadata(Move(("in", 0), 12, after, 0, 20, json.dumps(NOTES)), skipping, accepting)
    expected = {name: value for name, value in (NOTES | changed).items() if value is not None}
    assert json.loads(moved.metadata) == expected


@pytest.mark.parametrize("metadata", ["AQAAAZ", '["a list"]'])
def test_reset_keeps_metadata_of_other_programs(metadata: str) -> None:
    move = Move(("in", 0), 12, 13, 0, 20, metadata)
    assert update_metadata(move, True, True) == move


# ---- the rest -------------------------------------------------------------------------------------------------


def test_log_partition_matches_kafka() -> None:
    """By Java's String.hashCode: "" is 0, "ä" 228, "Aa" and "BB" 2112."""
    assert log_partition_of("", 50) == 0
    assert log_partition_of("ä", 50) == 228 % 50
    assert log_partition_of("Aa", 50) == log_partition_of("BB", 50) == 2112 % 50
    assert log_partition_of("polygenelubricants", 50) == 0  # hashCode is Integer.MIN_VALUE
    # Negative hash codes, as a JVM says: -771814909 and -1008770331.
    assert log_partition_of("flights", 50) == 771814909 % 50
    assert log_partition_of("orders", 50) == 1008770331 % 50


def test_token_without_source_is_configuration_error() -> None:
    settings = Settings({"security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER"})
    with pytest.raises(ConfigurationError, match=r"sasl\.oauthbearer\.method=oidc"):
        admin_configuration(settings, 1000)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sasl.oauthbearer.grant.type", "urn:ietf:params:oauth:grant-type:jwt-bearer"),
        ("sasl.oauthbearer.metadata.authentication.type", "azure_imds"),
    ],
)
def test_unsupported_grant_type_is_refused_by_name(name: str, value: str) -> None:
    given = {"security.protocol": "sasl_ssl", "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.method": "oidc"}
    admin_configuration(Settings(given | {"sasl.oauthbearer.grant.type": "client_credentials"}), 1000)
    with pytest.raises(ConfigurationError, match=f"^{name}={value} cannot be used here: set .*client_credentials"):
        admin_configuration(Settings(given | {name: value}), 1000)


def test_ssl_ca_location_probe_uses_system_certificates() -> None:
    context = admin_configuration(Settings({"security.protocol": "ssl", "ssl.ca.location": "probe"}), 1000)[
        "ssl_context"
    ]
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
    with pytest.raises(ConfigurationError, match=r"ssl\.ca\.location cannot be used"):
        admin_configuration(Settings({"security.protocol": "ssl", "ssl.ca.location": "/nowhere/probe"}), 1000)


def test_oauth_callback_gives_admin_client_its_token() -> None:
    asked: list[str] = []

    def oauth_cb(text: str) -> tuple[str, float]:
        asked.append(text)
        return "token", 4_000_000_000.0

    settings = Settings(
        {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "OAUTHBEARER",
            "oauth_cb": oauth_cb,
            "sasl.oauthbearer.config": "a=b",
        }
    )
    provider = admin_configuration(settings, 1000)["sasl_oauth_token_provider"]
    assert (provider.token(), provider.token()) == ("token", "token")
    assert asked == ["a=b"], "a token is asked for again before its time"


@pytest.mark.parametrize(
    ("mechanism", "settings"), [("PLAIN", "sasl.username, sasl.password"), ("OAUTHBEARER", "sasl.oauthbearer.*")]
)
def test_error_for_a_refused_login_names_its_settings(mechanism: str, settings: str) -> None:
    refused = login_refused(Settings({"bootstrap.servers": "b:9092", "sasl.mechanism": mechanism}), "no")
    assert str(refused) == f"the login at b:9092 was refused: no: check sasl.mechanism and {settings}"


def test_admin_connection_failure_leaves_no_thread() -> None:
    with pytest.raises(Unavailable, match=r"cannot be reached: .*: check bootstrap\.servers"):
        ClusterAdmin(Settings({"bootstrap.servers": "127.0.0.1:9"}), timeout_ms=100)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("kafka-io")] == []


def test_admin_connection_interrupt_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """kafka-python's own close raises then, for a thread that cannot be joined."""

    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ClusterAdmin(Settings({"bootstrap.servers": "127.0.0.1:9"}), timeout_ms=100)


def test_apis_omit_requests_unknown_to_kafka_python() -> None:
    """Kafka 4.4 has one unknown API; dropping the others would make a preflight report brokers as too old."""
    admin = object.__new__(ClusterAdmin)
    offered = {0: (0, 13), 65: (0, 0), 93: (0, 0), 30_000: (0, 0)}
    admin._client = SimpleNamespace(_manager=SimpleNamespace(broker_version_data=SimpleNamespace(api_versions=offered)))
    assert admin.apis() == {"Produce", "DescribeTransactions"}
