"""Run real Apache Kafka in local JVMs, for `eos broker`, the demo and tests."""

from eos.broker.jars import DEFAULT_VERSION
from eos.broker.local import LocalKafka

__all__ = ["DEFAULT_VERSION", "LocalKafka"]
