"""Keep old input on a real broker: topics between functions retain it, and a worker warns about a destination."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from eos.broker import LocalKafka
from tests.support.reading import create_topics, visible_values

APP = """
import eos
app = eos.App("{group}")
app.process("{source}", to="{between}")(lambda record: record.value)
app.process("{between}", to="{out}")(lambda record: record.value)
"""


def test_old_input_between_functions_is_kept_with_one_warning(
    kafka: LocalKafka, names: Callable[[str], str], tmp_path: Path
) -> None:
    servers = kafka.bootstrap_servers
    source, between, out = (names(name) for name in ("source", "between", "out"))
    create_topics(servers, [NewTopic(source, 1, 1, config={"retention.ms": "-1"})])
    producer = Producer({"bootstrap.servers": servers})
    for number in range(20):
        producer.produce(source, b"%d" % number, timestamp=1_000_000_000_000 + number)  # in the year 2001
    assert producer.flush(15) == 0
    (tmp_path / "old.py").write_text(APP.format(group=names("old"), source=source, between=between, out=out))
    ran = subprocess.run(
        [sys.executable, "-m", "eos", "run", "old:app", "--until-end", "--create-topics"],
        cwd=tmp_path,
        env=os.environ | {"KAFKA_BOOTSTRAP_SERVERS": servers},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("input is older than the retention of a destination") == 1
    assert f"destination={out} retention=7 days" in ran.stderr
    assert "timestamp=2001-09-09T01:46:40+00:00" in ran.stderr
    assert len(visible_values(servers, between)[0]) == 20
    asked = ConfigResource(ConfigResource.Type.TOPIC, between)
    admin = AdminClient({"bootstrap.servers": servers})  # must live until it has answered
    config = admin.describe_configs([asked])[asked].result(15)
    assert (config["retention.ms"].value, config["retention.bytes"].value) == ("-1", "-1")
