"""Delay the answer of a group coordinator until after the client's timeout.

librdkafka's own query about a group ends the process with a failed assertion then, so the preflight does not use it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from eos.broker import LocalKafka
from tests.support.proxy import ApiKey, Fault, HoldingProxy

ASKING = """
import sys
from eos.kafka.admin import facts
from eos.kafka.client.settings import Settings

servers, group = sys.argv[1:]
connect, clients = facts.connect, []  # kept: what was asked through them may still be answered
facts.connect = lambda *asked: clients.append(connect(*asked)) or clients[-1]
print(facts.query_facts(Settings({"bootstrap.servers": servers}), [], group, [], 20.0).group_operations, flush=True)
sys.stdin.readline()
for client in clients:
    client.list_topics(timeout=20)
"""


@pytest.mark.parametrize("late", [ApiKey.FindCoordinator, ApiKey.DescribeGroups])
def test_preflight_survives_a_late_answer_about_the_group(
    kafka: LocalKafka, names: Callable[[str], str], late: ApiKey
) -> None:
    with HoldingProxy.before(kafka) as proxy:
        rule = proxy.on(late, Fault.HOLD_RESPONSE)
        client = subprocess.Popen(
            [sys.executable, "-c", ASKING, kafka.proxied_servers, names("group")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        rule.wait(60)
        assert client.stdout is not None
        answer = client.stdout.readline()
        rule.release()
        _, errors = client.communicate("\n", timeout=60)
    assert client.returncode == 0, errors
    assert answer.strip() == "None", "a late answer must be treated as unknown"
