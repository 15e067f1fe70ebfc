"""librdkafka: a TxnOffsetCommit that arrives late, in the next transaction, moves the group's offset back."""

import sys

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.shim.faults import Event, Phase, Plan, Rule
from eos.testing.shim import ShimThread

# The first request is cut off from its client, which sends it again (1); it arrives after the next transaction's (2).
LATE = Rule("TxnOffsetCommit", "reset", Phase.LATE, until=Event("TxnOffsetCommit", nth=2))

with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    group = Consumer({"bootstrap.servers": servers, "group.id": "group"})
    with ShimThread(servers, Plan([LATE])) as shim:
        producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": "tx", "log_level": 0})
        producer.init_transactions()
        for offset in (5, 10):
            producer.begin_transaction()
            producer.send_offsets_to_transaction([TopicPartition("in", 0, offset)], group.consumer_group_metadata())
            producer.commit_transaction()  # no error
    committed = group.committed([TopicPartition("in", 0)], 30)[0].offset
    group.close()
print(f"offset 5 committed, then offset 10, every call ok: the group is at {committed}")
print("SEEN: the committed offset went back" if committed == 5 else "not seen: all right")
sys.exit(0 if committed == 5 else 1)
