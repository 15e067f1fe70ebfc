"""Defines ConsumerGroupDescribe (KIP-848), which kafka-python lacks; the schemas are in the JSON files beside it."""

from __future__ import annotations

from kafka.protocol.api_message import ApiMessage


class ConsumerGroupDescribeRequest(ApiMessage, load_json="eos.kafka.client"):  # type: ignore[call-arg, misc]
    pass


class ConsumerGroupDescribeResponse(ApiMessage, load_json="eos.kafka.client"):  # type: ignore[call-arg, misc]
    pass
