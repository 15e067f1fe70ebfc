"""Run pytest in a user's folder with the plugin of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from eos.broker import LocalKafka
from eos.testing.clusters import choose
from tests.support.users_pytest import run_pytest


def test_plugin_uses_the_given_cluster_without_faults(tmp_path: Path, kafka: LocalKafka) -> None:
    test = """
def test_cluster_has_one_node(eos_kafka):
    assert eos_kafka.controller() == 0
    assert eos_kafka.size == 1

def test_node_is_killed(eos_kafka):
    eos_kafka.kill(0)

def test_node_is_cut_off(eos_kafka):
    eos_kafka.partition(0)
"""
    code, output = run_pytest(tmp_path, test, f"--eos-kafka={kafka.bootstrap_servers}")
    assert code == 0, output
    assert "1 passed, 2 skipped" in output
    assert f"not run: a fault needs a cluster of our own, not {kafka.bootstrap_servers}" in output
    assert f"eos: brokers are those at {kafka.bootstrap_servers}" in output
    assert kafka.running(0)


def test_tests_without_an_engine_use_local_jvms_with_a_notice(tmp_path: Path) -> None:
    test = """
def test_killed_node_is_left_down(eos_kafka):
    assert eos_kafka.backend == "jvm"
    eos_kafka.kill(0)

def test_killed_node_is_up_again(eos_kafka):
    assert eos_kafka.reachable() == [0]
    assert eos_kafka.controller() == 0

def test_node_is_cut_off(eos_kafka):
    eos_kafka.partition(0)
"""
    nowhere = f"unix://{tmp_path}/no.sock"
    code, output = run_pytest(tmp_path, test, "--eos-kafka-nodes=1", DOCKER_HOST=nowhere)
    assert code == 0, output
    assert "2 passed, 1 skipped" in output
    assert output.count("eos: brokers are local JVMs: no container engine answers") == 1
    assert "not run: local JVMs share one network address" in output


@pytest.mark.deep_for("jvm")
@pytest.mark.parametrize("backend", ["jvm", "container"])
def test_requested_backend_runs_a_users_test(tmp_path: Path, backend: str) -> None:
    if backend == "container" and (choice := choose()).backend != backend:
        pytest.skip(f"not run: {choice.reason}")
    test = f"""
from confluent_kafka.admin import AdminClient, NewTopic

def test_restarted_node_knows_the_topic(eos_kafka):
    assert (eos_kafka.backend, eos_kafka.size, eos_kafka.version) == ({backend!r}, 1, "4.4.0")
    admin = AdminClient({{"bootstrap.servers": eos_kafka.bootstrap_servers}})
    admin.create_topics([NewTopic("t", 1)])["t"].result(60)
    eos_kafka.restart(0)
    assert eos_kafka.wait_in_sync("t") == 1
    assert eos_kafka.leader_of("t") == 0

def test_node_is_cut_off(eos_kafka):
    eos_kafka.partition(0)
    assert eos_kafka.reachable() == []
"""
    code, output = run_pytest(tmp_path, test, f"--eos-kafka={backend}", "--eos-kafka-nodes=1")
    assert code == 0, output
    assert ("2 passed" if backend == "container" else "1 passed, 1 skipped") in output
    assert ("eos: brokers are containers of" if backend == "container" else "local JVMs, as requested") in output


def test_unavailable_requested_backend_is_not_replaced(tmp_path: Path) -> None:
    test = "def test_cluster_starts(eos_cluster):\n    eos_cluster(nodes=1)\n"
    code, output = run_pytest(tmp_path, test, "--eos-kafka=container", DOCKER_HOST=f"unix://{tmp_path}/no.sock")
    assert code == 1, output
    assert "Unavailable: no container engine answers" in output


def test_invalid_cluster_option_is_a_usage_error(tmp_path: Path) -> None:
    code, output = run_pytest(tmp_path, "", "--eos-kafka=podman")
    assert code == 4
    assert "--eos-kafka=podman: must be container, jvm or HOST:PORT" in output


def test_plugin_imports_only_the_package_and_pytest() -> None:
    code = """
import sys, pytest, eos
before = set(sys.modules)
import eos.testing.pytest_plugin
print(*sorted(set(sys.modules) - before))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["eos.testing", "eos.testing.pytest_plugin"]
