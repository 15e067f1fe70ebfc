"""Final delays per airline and hour: eos run --create-topics examples/delays_per_hour.py"""

from datetime import datetime, timedelta

import msgspec

from eos import App, Out, State, Window, tumbling

app = App("delays-per-hour")


class Flight(msgspec.Struct):
    carrier: str
    dep_delay: int | None  # minutes; None: cancelled


class Total(msgspec.Struct):
    flights: int = 0
    minutes: int = 0
    longest: int = -1440


class Hour(msgspec.Struct):
    begins: datetime
    total: Total


@app.process("flights", to="delays-by-airline")
def by_airline(flight: Flight) -> Out | None:
    return None if flight.dep_delay is None else Out(flight.dep_delay, key=flight.carrier)


# A flight of the morning can be a day late, so each hour stays open for a day.
@app.process(
    "delays-by-airline", to="delays-per-hour", window=tumbling(hours=1), grace=timedelta(days=1), late="late-delays"
)
def add(minutes: int, total: State[Total]) -> None:
    so_far = total.get(Total())
    so_far.flights += 1
    so_far.minutes += minutes
    so_far.longest = max(so_far.longest, minutes)


@app.on_close(add)
def send(window: Window, total: State[Total]) -> Hour:
    return Hour(window.start, total.get(Total()))
