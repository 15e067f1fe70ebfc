"""Check how workers of an App with several topics share partitions on a real broker."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from eos.broker import LocalKafka
from eos.errors import Unavailable
from eos.kafka.client.settings import Settings
from eos.kafka.client.world import REAL
from tests.support import forked
from tests.support.reading import create_topic, wait_until

APP = """
from eos import App, State

app = App({group!r})

@app.process({source!r}, to={between!r})
def pass_on(value: str) -> str:
    return value

@app.process({between!r})
def count(value: str, seen: State[int]) -> None:
    seen.set(seen.get(0) + 1)
"""


def test_two_workers_each_get_half_of_every_topic(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path
) -> None:
    group, source, between = names("app"), names("in"), names("between")
    for topic in (source, between):
        create_topic(kafka.bootstrap_servers, topic, 6)
    (tmp_path / "app.py").write_text(APP.format(group=group, source=source, between=between))

    def started(instance: str, *more: str) -> subprocess.Popen[bytes]:
        options = ["--bootstrap-servers", kafka.bootstrap_servers, "--instance", instance, *more]
        options += ["-X", f"eos.state.dir={tmp_path / instance}"]
        with (tmp_path / f"{instance}.log").open("wb") as log_file:
            return forked.Popen(["eos", "run", str(tmp_path / "app.py"), *options], stderr=log_file)

    def shares() -> dict[str, Counter[str]]:
        try:
            with REAL.admin(Settings({"bootstrap.servers": kafka.bootstrap_servers})) as admin:
                members = admin.members(group)
        except Unavailable:  # the group's coordinator is not available yet
            return {}
        return {
            member["group_instance_id"]: Counter(
                {one["topic"]: len(one["partitions"]) for one in member["member_assignment"]["assigned_partitions"]}
            )
            for member in members
            if isinstance(member["member_assignment"], dict)
        }

    workers = [started("one")]
    try:
        wait_until(
            "all partitions at the first worker",
            lambda: [6, 6] in map(list, map(Counter.values, shares().values())),
            60,
        )
        workers.append(started("two"))
        half = Counter({source: 3, between: 3})
        wait_until("half of each topic at both workers", lambda: list(shares().values()) == [half, half], 60)
        workers.append(started("other", "-X", "partition.assignment.strategy=cooperative-sticky"))
        assert workers[-1].wait(60) == 78
        assert "or set partition.assignment.strategy to theirs" in (tmp_path / "other.log").read_text()
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)
