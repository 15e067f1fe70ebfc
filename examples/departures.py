"""Departures of the flights that left New York, ready to be added up: eos run examples/departures.py"""

import msgspec

from eos import App

app = App("departures")


class Flight(msgspec.Struct):
    origin: str
    time_hour: str  # when it should have left, to the hour, UTC
    dep_delay: int | None  # minutes; None: cancelled


class Departure(msgspec.Struct):
    airport: str
    hour: str
    minutes: int
    late: bool


@app.process("flights", to="departures")
def departure(flight: Flight) -> Departure | None:
    if flight.dep_delay is None:
        return None
    return Departure(flight.origin, flight.time_hour, flight.dep_delay, flight.dep_delay > 15)
