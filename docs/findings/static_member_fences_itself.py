"""librdkafka: a static member whose session timed out while no broker was available fences itself: a fatal error."""

import sys
import time

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka

SESSION_MS = 6_000

with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    member = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "group",
            "group.instance.id": "one",  # no other member has it
            "session.timeout.ms": SESSION_MS,
            "heartbeat.interval.ms": 500,
            "log_level": 0,
        }
    )
    member.subscribe(["in"])
    while not member.assignment():
        member.poll(0.2)
    print("the only member of its group has its partition")
    kafka.stop(0)
    time.sleep(SESSION_MS / 1000 + 2)  # the member is busy and does not poll
    kafka.start(0)
    time.sleep(3)  # some heartbeats
    said = "nothing"
    deadline = time.monotonic() + 20
    while said == "nothing" and time.monotonic() < deadline:
        try:
            message = member.poll(0.2)
            if message is not None and message.error() is not None and message.error().code() == KafkaError._FATAL:
                said = message.error().str()
        except KafkaException as error:
            said = str(error.args[0])
    print(f"the broker was away for longer than the session; then poll() returned: {said}")
seen = "fenced" in said.lower()
print("SEEN: fenced by another member, which does not exist" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
