"""Delays of the flights that left New York: eos run examples/flights.py"""

from collections.abc import Iterator

import msgspec

from eos import App, Out

app = App("late-flights")


class Flight(msgspec.Struct):
    carrier: str
    dest: str
    dep_delay: int | None  # minutes; None: cancelled


class Delay(msgspec.Struct):
    carrier: str
    dest: str
    minutes: int


@app.process("flights", to=["flight-delays", "late-flights"])
def delays(flight: Flight) -> Iterator[Delay | Out]:
    delay = Delay(flight.carrier, flight.dest, flight.dep_delay or 0)
    yield delay
    if delay.minutes > 15:
        yield Out(delay, topic="late-flights")
