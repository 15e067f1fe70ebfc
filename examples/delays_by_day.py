"""Delays per airline and day, counted in state: eos run --create-topics examples/delays_by_day.py"""

import msgspec

from eos import App, Out, State

app = App("delays-by-day")


class Flight(msgspec.Struct):
    carrier: str
    time_hour: str  # 2013-01-31T23:00:00Z
    dep_delay: int | None  # minutes; None: cancelled


class Total(msgspec.Struct):
    flights: int = 0
    minutes: int = 0
    longest: int = 0


@app.process("flights", to="delays-by-airline")
def by_airline_and_day(flight: Flight) -> Out | None:
    if flight.dep_delay is None:
        return None
    return Out(flight.dep_delay, key=f"{flight.carrier} {flight.time_hour[:10]}")


@app.process("delays-by-airline", to="delays-by-day")
def add(minutes: int, total: State[Total]) -> Total:
    so_far = total.get(Total())
    so_far.flights += 1
    so_far.minutes += minutes
    so_far.longest = max(so_far.longest, minutes)
    return so_far
