"""The examples in docs/deploy: strict YAML, a valid command line and a valid systemd unit."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from eos import cli
from eos.cli.init import FILES
from eos.health.server import parse_address
from eos.kafka.client.settings import OPTIONS

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
UNIT = DEPLOY / "eos-worker@.service"


class StrictLoader(yaml.SafeLoader):
    """A loader that refuses duplicate keys, of which YAML's own loader silently uses the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} occurs twice", node.start_mark)
        return super().construct_mapping(node, deep)


def documents() -> dict[str, Any]:
    text = (DEPLOY / "kubernetes.yaml").read_text()
    return {document["kind"]: document for document in yaml.load_all(text, StrictLoader)}


def test_statefulset_sets_names_probes_and_grace_period() -> None:
    found = documents()
    assert set(found) == {"Service", "StatefulSet"}
    spec = found["StatefulSet"]["spec"]
    assert spec["serviceName"] == found["Service"]["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels
    assert found["Service"]["spec"]["selector"].items() <= labels
    pod = spec["template"]["spec"]
    (worker,) = pod["containers"]
    environment = {item["name"]: item for item in worker["env"]}
    assert environment["EOS_INSTANCE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    shutdown_s = int(environment["EOS_SHUTDOWN_TIMEOUT_MS"]["value"]) / 1000
    assert pod["terminationGracePeriodSeconds"] >= shutdown_s + 10
    assert worker["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert worker["readinessProbe"]["httpGet"]["path"] == "/readyz"
    (port,) = worker["ports"]
    assert {worker[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {port["name"]}
    program, *command = [*entrypoint(), *worker["args"]]
    assert program == "eos"
    assert command[command.index("--http-port") + 1] == str(port["containerPort"])
    known = {name.upper().replace(".", "_") for name in OPTIONS} | {"KAFKA_BOOTSTRAP_SERVERS"}
    assert environment.keys() <= known


def entrypoint() -> list[str]:
    """Return the ENTRYPOINT of the Dockerfile that `eos init` makes; Kubernetes appends `args` to it."""
    (found,) = re.findall(r"^ENTRYPOINT (.*)$", FILES["Dockerfile"], re.MULTILINE)
    return [str(word) for word in json.loads(found)]


def test_pod_command_line_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command runs in the folder of `eos init`, with the yaml's environment, until it finds no broker."""
    (worker,) = documents()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(["init", "flights"]) == 0
    given = {item["name"]: item.get("value", "flights-0") for item in worker["env"]}
    given |= {"KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:1", "EOS_STARTUP_TIMEOUT_MS": "1000"}
    given["EOS_STATE_DIR"] = str(tmp_path)
    _, *command = [word.replace("8080", "127.0.0.1:0") for word in [*entrypoint(), *worker["args"]]]
    ran = subprocess.run(
        [sys.executable, "-m", "eos", *command],
        cwd=tmp_path / "flights",
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 69, ran.stderr
    last = json.loads(ran.stderr.splitlines()[-1])
    assert "127.0.0.1:1 cannot be reached" in last["error"]


def test_pod_keeps_state_on_a_volume_writable_by_its_user() -> None:
    found = documents()["StatefulSet"]["spec"]
    pod = found["template"]["spec"]
    (worker,) = pod["containers"]
    (claim,) = found["volumeClaimTemplates"]
    (mount,) = worker["volumeMounts"]
    assert mount["name"] == claim["metadata"]["name"]
    assert {"name": "EOS_STATE_DIR", "value": mount["mountPath"]} in worker["env"]
    dockerfile = FILES["Dockerfile"]
    (uid,) = re.findall(r"useradd --uid (\d+)", dockerfile)
    assert pod["securityContext"].items() >= {"runAsUser": int(uid), "fsGroup": int(uid)}.items()
    assert f"EOS_STATE_DIR={mount['mountPath']}" in dockerfile


def test_duplicate_key_is_refused() -> None:
    with pytest.raises(yaml.constructor.ConstructorError, match="twice"):
        yaml.load("{a: 1, a: 2}", StrictLoader)


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_systemd_unit_sets_stop_time_and_restart_codes() -> None:
    found = unit()
    environment = dict(value.split("=", 1) for value in found["Environment"])
    assert int(found["TimeoutStopSec"][0]) >= int(environment["EOS_SHUTDOWN_TIMEOUT_MS"]) / 1000 + 10
    assert "%i" in environment["EOS_INSTANCE"]
    assert found["StateDirectory"] == [environment["EOS_STATE_DIR"].removeprefix("/var/lib/")]
    assert found["Restart"] == ["on-failure"]
    never = set(map(int, found["RestartPreventExitStatus"][0].split()))
    assert never == {64, 65, 66, 70, 77, 78, 79}


def test_instances_of_the_unit_have_distinct_addresses() -> None:
    (given,) = re.findall(r"--http-port (\S+)", UNIT.read_text())
    addresses = [parse_address(given.replace("%i", str(number))) for number in range(1, 255)]
    assert len(set(addresses)) == 254
    for host, port in addresses:
        assert ipaddress.ip_address(host).is_loopback
        assert 1024 < port < 65536


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze on this machine")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text())
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr
    # systemd-analyze also reports problems of the machine. No problem may be about this unit.
    ours = [line for line in checked.stderr.splitlines() if re.search(re.escape(UNIT.stem), line)]
    assert not ours, checked.stderr
