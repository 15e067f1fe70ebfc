"""examples/avro_orders.py with a registry over HTTP: framing, unknown schemas and invalid frames."""

from __future__ import annotations

import http.server
import importlib.util
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fastavro import parse_schema, schemaless_reader, schemaless_writer

import eos.testing

ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "customer", "type": "string"},
        {"name": "quantity", "type": "int"},
        {"name": "unit_cents", "type": "long"},
    ],
}
ORDER_ID, TOTAL_ID = 258, 7  # two bytes of the id are used, in their order


class Registry(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []
    schemas: ClassVar[dict[int, Any]] = {ORDER_ID: ORDER}

    def do_GET(self) -> None:
        self.asked.append(self.path)
        number = int(self.path.rpartition("/")[2])
        if number not in self.schemas:
            self.send_error(404)
            return
        self._answer({"schema": json.dumps(self.schemas[number])})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/subjects/totals-value/versions"
        self.schemas[TOTAL_ID] = json.loads(body["schema"])
        self._answer({"id": TOTAL_ID})

    def _answer(self, answer: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", f"http://127.0.0.1:{server.server_port}/")
    Registry.asked.clear()
    spec = importlib.util.spec_from_file_location("avro_orders", Path(__file__).parents[2] / "examples/avro_orders.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    server.shutdown()
    server.server_close()


def framed(number: int, schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    out.write(b"\0" + number.to_bytes(4, "big"))
    schemaless_writer(out, parse_schema(schema), value)
    return out.getvalue()


def test_avro_example_makes_totals_and_dead_letters(example: Any) -> None:
    order = framed(ORDER_ID, ORDER, {"customer": "ada", "quantity": 3, "unit_cents": 250})
    unknown = b"\0" + (99).to_bytes(4, "big") + b"body"
    ran = eos.testing.run(
        example.app, [("orders", order), ("orders", "no frame"), ("orders", unknown), ("orders", order)]
    )
    values = ran.values("totals")
    assert len(values) == 2
    assert values[0] is not None
    assert values[0][:5] == b"\0" + TOTAL_ID.to_bytes(4, "big")
    body = schemaless_reader(io.BytesIO(values[0][5:]), parse_schema(example.TOTAL), None)
    assert body == {"customer": "ada", "cents": 750}
    assert ran.values("orders.dlq") == [b"no frame", unknown]
    messages = [dict(sent.headers)["eos-dlq-message"] or b"" for sent in ran.to("orders.dlq")]
    assert b"no schema registry's frame" in messages[0]
    assert b"the registry knows no schema 99" in messages[1]
    assert Registry.asked.count(f"/schemas/ids/{ORDER_ID}") == 1, "a schema is fetched once"
