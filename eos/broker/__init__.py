"""Real Apache Kafka in a local JVM: for `eos broker`, the demo and tests. Nothing else of eos needs it."""

from eos.broker.jars import DEFAULT_VERSION
from eos.broker.local import LocalKafka

__all__ = ["DEFAULT_VERSION", "LocalKafka"]
