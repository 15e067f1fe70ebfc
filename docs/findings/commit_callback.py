"""confluent-kafka: a callback that raises inside commit_transaction() blocks the abort of the transaction."""

import sys

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from eos.broker import DEFAULT_VERSION, LocalKafka


def report(error: object, message: object) -> None:
    raise LookupError("of the user's callback")


def tried(call: object) -> str:
    try:
        call(30)
    except KafkaException as error:
        return f"{error.args[0].name()}, retriable={error.args[0].retriable()}: {error.args[0].str()}"
    except LookupError as error:
        return f"LookupError {error}"
    return "ok"


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    servers = kafka.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic("out", 1)])["out"].result()
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "tx", "log_level": 0})
    producer.init_transactions()
    producer.begin_transaction()
    for _ in range(3):
        producer.produce("out", "value", on_delivery=report)
    first, abort = tried(producer.commit_transaction), tried(producer.abort_transaction)
    again = [tried(producer.commit_transaction) for _ in range(3)]
    print(f"commit: {first}\nthen abort: {abort}\nthen commit, three times: {'; '.join(again)}")
seen = first.startswith("LookupError") and abort.startswith("_CONFLICT")
print("SEEN: commit raised, and then the transaction cannot be aborted" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
