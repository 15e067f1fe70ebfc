"""Define the App of our own sweep: two outputs per input, on two partitions, so that torn and lost ones differ."""

from __future__ import annotations

from eos import App, Out, Record

app = App("sweep")


@app.process("sweep-in", to="sweep-out")
def both(record: Record) -> list[Out]:
    return [Out(record.value, partition=number) for number in range(2)]
