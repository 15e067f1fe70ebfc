"""Run workers on a broker with TLS, SASL and ACLs, and check the message for each missing part."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.support import forked
from tests.support.life import until_killed, write_app
from tests.support.reading import create_topic, settled_ends, took_under, visible_values, wait_until
from tests.support.secure import ALICE, SecureKafka, make_pki, secure_kafka

pytestmark = pytest.mark.takes(205)

Names = Callable[[str], str]
CLIENT_SECRET = "client-secret-71ab"
PLAIN = {
    "security.protocol": "sasl_plaintext",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "alice",
    "sasl.password": ALICE,
}
# Logging as beginners set it up: all libraries log to stderr.
LOGS_ALL = """import logging
logging.basicConfig(level=logging.DEBUG)
logging.getLogger("kafka.protocol.parser").setLevel(logging.DEBUG)
"""
UNSIGNED = "eyJhbGciOi"  # the beginning of each token of these tests
TOKEN = {"security.protocol": "sasl_plaintext", "sasl.mechanism": "OAUTHBEARER"}


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def kafka(pki: Path, request: pytest.FixtureRequest) -> Iterator[SecureKafka]:
    with secure_kafka(pki) as secure:
        yield secure
        secure.kafka.keep = request.session.testsfailed > 0


@pytest.fixture(scope="module")
def token_endpoint() -> Iterator[str]:
    """Run an identity provider that returns alice's token for the client secret."""

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            wanted = base64.b64encode(f"the-client:{CLIENT_SECRET}".encode()).decode()
            if self.headers["Authorization"] != f"Basic {wanted}":
                self.send_response(401)
                self.end_headers()
                return
            now = int(time.time())
            parts = ({"alg": "none"}, {"sub": "alice", "iat": now, "exp": now + 600})
            encoded = [base64.urlsafe_b64encode(json.dumps(p).encode()).decode().rstrip("=") for p in parts]
            body = json.dumps({"access_token": ".".join([*encoded, ""]), "expires_in": 600}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write nothing to stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/token"
    server.shutdown()
    server.server_close()


class Case:
    """Run the App `app` from `app-in` to `app-out` in its own directory, with the rights of its user."""

    def __init__(self, kafka: SecureKafka, directory: Path, app: str, records: int = 5) -> None:
        self.kafka, self.directory, self.app = kafka, directory, app
        self.input, self.output = f"{app}-in", f"{app}-out"
        servers = kafka.servers["PLAINTEXT"]
        for topic in (self.input, self.output):
            create_topic(servers, topic)
        producer = Producer({"bootstrap.servers": servers})
        self.values = [f"v{i}".encode() for i in range(records)]
        for value in self.values:
            producer.produce(self.input, value)
        assert producer.flush(30) == 0
        write_app(directory, app, self.input, self.output)
        module = directory / "theapp.py"
        module.write_text(f"{LOGS_ALL}\n{module.read_text()}")

    def allow_all(self) -> None:
        """Grant the minimal rights of a worker, which docs/howto/secure.md lists too."""
        self.kafka.allow("TOPIC", self.input, "READ")
        self.kafka.allow("TOPIC", self.output, "WRITE")
        self.kafka.allow("GROUP", self.app, "READ")
        self.kafka.allow("TRANSACTIONAL_ID", f"{self.app}-", "WRITE", prefixed=True)
        self.kafka.allow("TOPIC", "__eos_places", "CREATE", "READ", "WRITE")

    def eos(self, listener: str, settings: Mapping[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command with its settings in a file, as secrets are stored. No output may contain a secret."""
        lines = [f"{json.dumps(name)} = {json.dumps(value)}" for name, value in settings.items()]
        (self.directory / "eos.toml").write_text("\n".join(lines))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("EOS_", "KAFKA_"))}
        command = ["eos", *arguments, "--bootstrap-servers", self.kafka.servers[listener]]
        ended = forked.run(command, cwd=self.directory, env=inherited)
        for secret in (ALICE, CLIENT_SECRET, UNSIGNED):
            assert secret not in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
        return ended

    def run(self, listener: str, settings: Mapping[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
        arguments = ("run", "theapp.py:app", "--instance", "one", "--until-end", "--log-level", "debug", *more)
        return self.eos(listener, settings, *arguments)

    def outputs(self) -> list[bytes | None]:
        return visible_values(self.kafka.servers["PLAINTEXT"], self.output)[0]


@pytest.fixture
def case(kafka: SecureKafka, names: Names, tmp_path: Path) -> Case:
    return Case(kafka, tmp_path, names("app"))


# ---- authentication ------------------------------------------------------------------------------------------------


def ways(pki: Path, endpoint: str) -> dict[str, tuple[str, dict[str, Any]]]:
    ca = {"ssl.ca.location": str(pki / "ca.pem")}
    scram = PLAIN | {"sasl.mechanism": "SCRAM-SHA-256", "security.protocol": "sasl_ssl"} | ca
    certificate = {
        "security.protocol": "ssl",
        "ssl.certificate.location": str(pki / "client.pem"),
        "ssl.key.location": str(pki / "client.key"),
    }
    pem = {
        "security.protocol": "ssl",
        "ssl.ca.pem": (pki / "ca.pem").read_text(),
        "ssl.certificate.pem": (pki / "client.pem").read_text(),
        "ssl.key.pem": (pki / "client.key").read_text(),
    }
    unsecured = TOKEN | {
        "enable.sasl.oauthbearer.unsecure.jwt": "true",
        "sasl.oauthbearer.config": "principal=alice",
    }
    oidc = TOKEN | {
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.client.id": "the-client",
        "sasl.oauthbearer.client.secret": CLIENT_SECRET,
        "sasl.oauthbearer.token.endpoint.url": endpoint,
    }
    return {
        "plain": ("SASL", PLAIN),
        "scram over TLS": ("BOTH", scram),
        "certificate": ("TLS", certificate | ca),
        "certificate in the settings": ("TLS", pem),
        "token": ("SASL", unsecured),
        "token of an identity provider": ("SASL", oidc),
    }


@pytest.mark.deep_for("plain", "certificate", "token*")
@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "scram over TLS",
        "certificate",
        "certificate in the settings",
        "token",
        "token of an identity provider",
    ],
)
def test_worker_with_minimal_rights_works(way: str, case: Case, pki: Path, token_endpoint: str) -> None:
    case.allow_all()
    listener, settings = ways(pki, token_endpoint)[way]
    ended = case.run(listener, settings)
    assert ended.returncode == 0, ended.stderr
    assert "not noted" not in ended.stderr
    settled_ends(case.kafka.servers["PLAINTEXT"], [case.output])
    assert case.outputs() == case.values


def test_worker_without_history_rights_works_with_a_warning(case: Case) -> None:
    case.allow_all()
    case.kafka.withdraw("TOPIC", "__eos_places")
    ended = case.run("SASL", PLAIN)
    assert ended.returncode == 0, ended.stderr
    (warning,) = (line for line in ended.stderr.splitlines() if "group history not written" in line)
    for part in (
        "offsets.retention.minutes",
        "topic __eos_places cannot be created: not authorised",
        "set eos.places.topic to nothing",
    ):
        assert part in warning
    settled_ends(case.kafka.servers["PLAINTEXT"], [case.output])
    assert case.outputs() == case.values


# ---- authorization -------------------------------------------------------------------------------------------------


def last_line_of_eos(text: str) -> str:
    """Return the last line that no library logged: a thread of kafka-python may still log after the final error."""
    return [line for line in text.splitlines() if not re.match(r"(DEBUG|INFO|WARNING|ERROR):", line)][-1]


def resource(case: Case, which: str) -> tuple[str, str, str]:
    """Return the kind of resource, the name in its ACL, and its name in messages."""
    return {
        "input": ("TOPIC", case.input, f"topic {case.input}: not authorised to READ it"),
        "output": ("TOPIC", case.output, f"topic {case.output}: not authorised to WRITE it"),
        "group": ("GROUP", case.app, f"group {case.app}: not authorised to READ it"),
        "id": ("TRANSACTIONAL_ID", f"{case.app}-", f"transactional.id {case.app}-one: not authorised to WRITE it"),
    }[which]


@pytest.mark.deep_for("nothing-input", "nothing-output", "nothing-group")
@pytest.mark.parametrize("which", ["input", "output", "group", "id"])
@pytest.mark.parametrize("left", ["nothing", "describe"])
def test_missing_right_exits_with_77_and_names_its_resource(which: str, left: str, case: Case) -> None:
    case.allow_all()
    kind, name, sentence = resource(case, which)
    assert case.kafka.withdraw(kind, name) == 1
    if left == "describe":  # a right that can be queried is reported as missing, a needed one as refused
        case.kafka.allow(kind, name, "DESCRIBE", prefixed=which == "id")
    began = time.monotonic()
    ended = case.run("SASL", PLAIN)
    assert ended.returncode == 77, ended.stderr
    assert sentence in last_line_of_eos(ended.stderr)
    took_under(30, began, "a run without a right")
    assert case.outputs() == []


def test_doctor_names_all_missing_rights(case: Case) -> None:
    ended = case.eos("SASL", PLAIN, "doctor", "theapp.py:app", "--instance", "one", "--json")
    assert ended.returncode == 77, ended.stderr
    failed = [row["found"] for row in json.loads(ended.stdout) if row["level"] == "failed"]
    wanted = [resource(case, which)[2] for which in ("input", "output", "group", "id")]
    assert [f for f in failed if "alternate" not in f] == wanted


@pytest.mark.deep_for("input", "output", "group")
@pytest.mark.parametrize("which", ["input", "output", "group", "id"])
def test_right_withdrawn_during_a_run_stops_the_worker_with_77(which: str, case: Case) -> None:
    case.allow_all()
    log = case.directory / "worker.log"
    (case.directory / "eos.toml").write_text("\n".join(f"{json.dumps(n)} = {json.dumps(v)}" for n, v in PLAIN.items()))
    where = ["--bootstrap-servers", case.kafka.servers["SASL"]]
    command = ["eos", "run", "theapp.py:app", "--instance", "one", *where]
    producer = Producer({"bootstrap.servers": case.kafka.servers["PLAINTEXT"]})

    def ended() -> bool:
        producer.produce(case.input, b"more")
        assert producer.flush(30) == 0
        return worker.poll() is not None

    with log.open("wb") as stderr, until_killed(forked.Popen(command, cwd=case.directory, stderr=stderr)) as worker:
        wait_until("outputs", lambda: len(case.outputs()) >= 5, 60)
        kind, name, sentence = resource(case, which)
        assert case.kafka.withdraw(kind, name) == 1
        wait_until("the worker's end", ended, 60)
    last_line = last_line_of_eos(log.read_text())
    assert worker.returncode == 77, last_line
    assert sentence.split(":")[0] in last_line


def test_command_without_its_right_exits_with_77(case: Case) -> None:
    """Allow describing the topic, which is not enough to see whose transaction is open on it."""
    case.kafka.allow("TOPIC", case.input, "DESCRIBE")
    for arguments, resource, operation in (
        (("txn", "describe", f"{case.app}-one"), f"transactional.id {case.app}-one", "DESCRIBE"),
        (("txn", "find-hanging", "--topic", case.input), f"topic {case.input}", "READ"),
        (("reset", "theapp.py:app", "--from", "earliest", "--yes"), f"group {case.app}", "READ"),
    ):
        ended = case.eos("SASL", PLAIN, *arguments)
        assert ended.returncode == 77, ended.stderr
        right = f"add an ACL that allows {operation} on {resource}"
        assert last_line_of_eos(ended.stderr) == f"eos: {resource}: not authorised to {operation} it: {right}"


# ---- messages about wrong logins and certificates
# ----------------------------------------------------------------------


def test_refused_login_exits_with_77_within_seconds(case: Case, token_endpoint: str, pki: Path) -> None:
    case.allow_all()
    wrong = ways(pki, token_endpoint)["token of an identity provider"][1] | {"sasl.oauthbearer.client.secret": "no"}
    for settings in (PLAIN | {"sasl.password": "not-hers"}, wrong):
        began = time.monotonic()
        ended = case.run("SASL", settings)
        assert ended.returncode == 77, ended.stderr
        assert "not-hers" not in ended.stderr
        assert ": check sasl.mechanism and sasl." in last_line_of_eos(ended.stderr)
        took_under(15, began, "a refused login")


def test_unknown_broker_certificate_exits_with_69_within_seconds(case: Case, pki: Path) -> None:
    settings = PLAIN | {"security.protocol": "sasl_ssl"}
    began = time.monotonic()
    ended = case.run("BOTH", settings)
    assert ended.returncode == 69, ended.stderr
    assert "signed by a CA that is not trusted here" in last_line_of_eos(ended.stderr)
    assert ": set ssl.ca.location" in last_line_of_eos(ended.stderr)
    took_under(15, began, "a certificate that nobody knows")


@pytest.mark.parametrize("name", ["ssl.ca.location", "ssl.certificate.location", "ssl.key.location"])
def test_missing_file_exits_with_78_and_is_named_in_the_error(name: str, case: Case, pki: Path) -> None:
    settings = {
        "security.protocol": "ssl",
        "ssl.ca.location": str(pki / "ca.pem"),
        "ssl.certificate.location": str(pki / "client.pem"),
        "ssl.key.location": str(pki / "client.key"),
    }
    ended = case.run("TLS", settings | {name: "/nowhere/at.pem"})
    assert ended.returncode == 78, ended.stderr
    assert "/nowhere/at.pem" in ended.stderr or name in ended.stderr


def test_commands_show_no_secrets(case: Case, pki: Path, token_endpoint: str) -> None:
    """Run commands; `Case.eos` searches each output for the secrets."""
    case.allow_all()
    settings = ways(pki, token_endpoint)["token of an identity provider"][1] | PLAIN
    shown = case.eos("SASL", settings, "config", "theapp.py:app")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("(hidden)") == 2
    typed = case.eos("SASL", {}, "config", "-X", f"sasl.password {ALICE}")
    assert typed.returncode == 78
    broken = case.eos("SASL", PLAIN | {"ssl.key.pem": ALICE, "security.protocol": "sasl_ssl"}, "run", "theapp.py:app")
    assert broken.returncode in (69, 78), broken.stderr
