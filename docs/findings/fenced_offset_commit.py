"""Kafka before 4.0: a TxnOffsetCommit that is refused for its epoch deletes the offset of the newer epoch."""

import sys

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import LocalKafka
from eos.shim.faults import Event, Phase, Plan, Rule
from eos.testing.shim import ShimThread

# The first request is cut off from its client, which sends it again (1); it arrives after the next producer's (2).
LATE = Rule("TxnOffsetCommit", "reset", Phase.LATE, until=Event("TxnOffsetCommit", nth=2))

with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else "3.9.2") as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("in", 1)])["in"].result()
    group = Consumer({"bootstrap.servers": servers, "group.id": "group"})
    with ShimThread(servers, Plan([LATE])) as shim:
        for offset in (5, 10):  # each with its own producer: the late request has the epoch of the first one
            producer = Producer({"bootstrap.servers": shim.bootstrap_servers, "transactional.id": "tx", "log_level": 0})
            producer.init_transactions()
            producer.begin_transaction()
            producer.send_offsets_to_transaction([TopicPartition("in", 0, offset)], group.consumer_group_metadata())
            producer.commit_transaction()  # no error
    committed = group.committed([TopicPartition("in", 0)], 30)[0].offset
    group.close()
print(f"offset 5 committed by epoch 0, then offset 10 by epoch 1, every call ok: the group is at {committed}")
print("SEEN: the commit of epoch 1 was ok and its offset is lost" if committed == 5 else "not seen: all right")
sys.exit(0 if committed == 5 else 1)
