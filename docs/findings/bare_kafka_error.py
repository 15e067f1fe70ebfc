"""confluent-kafka: a KafkaError can be raised but is not a BaseException, so no `except` with a type catches it."""

import sys

from confluent_kafka import Consumer, KafkaError

from eos.broker import DEFAULT_VERSION, LocalKafka


def handle(consumer: Consumer) -> str:
    """Reads a topic that does not exist."""
    try:
        while not (message := consumer.poll(1)):
            pass
        raise message.error()  # as many programs do; Python does not refuse it
    except BaseException as error:  # noqa: BLE001
        return f"caught: {type(error).__name__}"


with LocalKafka(version=sys.argv[1] if len(sys.argv) > 1 else DEFAULT_VERSION) as kafka:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "group"})
    consumer.subscribe(["not-there"])
    try:
        what = handle(consumer)
    except:  # noqa: E722
        error = sys.exc_info()[1]
        what = f"not caught by `except BaseException`: {type(error).__name__}: {error}"
    consumer.close()
print(what)
print(f"issubclass(KafkaError, BaseException): {issubclass(KafkaError, BaseException)}")
seen = what.startswith("not caught")
print("SEEN: the raised object is not an exception" if seen else "not seen: all right")
sys.exit(0 if seen else 1)
