"""Avro with a schema registry's framing, through `decode=` and `encode=`.

    pip install eos-kafka fastavro
    SCHEMA_REGISTRY_URL=http://127.0.0.1:8081 eos run examples/avro_orders.py:app

A framed value is a zero byte, the schema's id (4 bytes, big endian) and the Avro body. Readers request the schema of an
id once and cache it; the writer's schema is registered before the first record. A value that is not framed, or whose
schema is unknown, is retried three times (the registry may have been unavailable) and is a dead letter then.
"""

from __future__ import annotations

import io
import json
import os
import struct
import urllib.error
import urllib.request
from typing import Any

from fastavro import parse_schema, schemaless_reader, schemaless_writer

import eos

FRAME = struct.Struct(">bI")
JSON = "application/vnd.schemaregistry.v1+json"


class Registry:
    """Calls the two necessary functions of a schema registry's REST interface and caches their results."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._schemas: dict[int, Any] = {}

    def schema(self, number: int) -> Any:
        """Return the schema of an id. Raise LookupError for an unknown id."""
        if number not in self._schemas:
            try:
                answer = self._ask(f"/schemas/ids/{number}")
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
                raise LookupError(f"the registry knows no schema {number}: {error}") from error
            self._schemas[number] = parse_schema(json.loads(answer["schema"]))
        return self._schemas[number]

    def register(self, subject: str, schema: Any) -> int:
        """Return the id of a subject's schema, and register the schema if it is new."""
        body = json.dumps({"schema": json.dumps(schema)}).encode()
        return int(self._ask(f"/subjects/{subject}/versions", body)["id"])

    def _ask(self, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, body, {"Content-Type": JSON, "Accept": JSON})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


REGISTRY = Registry(os.environ.get("SCHEMA_REGISTRY_URL", "http://127.0.0.1:8081"))
TOTAL = {
    "type": "record",
    "name": "Total",
    "fields": [{"name": "customer", "type": "string"}, {"name": "cents", "type": "long"}],
}
total_schema, total_id = parse_schema(TOTAL), 0


def from_avro(value: bytes) -> Any:
    """Decode a framed value with the schema that it names."""
    if len(value) <= FRAME.size or value[0] != 0:
        raise ValueError("no schema registry's frame: it begins with a zero byte and 4 bytes of schema id")
    _, number = FRAME.unpack_from(value)
    return schemaless_reader(io.BytesIO(value[FRAME.size :]), REGISTRY.schema(number), None)


def to_avro(value: Any) -> bytes:
    """Encode a total with its frame."""
    out = io.BytesIO()
    out.write(FRAME.pack(0, total_id))
    schemaless_writer(out, total_schema, value)
    return out.getvalue()


app = eos.App("avro-orders")


@app.on_start
def register() -> None:
    global total_id
    total_id = REGISTRY.register("totals-value", TOTAL)


@app.process("orders", to="totals", decode=from_avro, encode=to_avro, on_error=eos.retry(3, then=eos.dlq))
def total(order: dict[str, Any]) -> dict[str, Any]:
    return {"customer": order["customer"], "cents": order["quantity"] * order["unit_cents"]}
