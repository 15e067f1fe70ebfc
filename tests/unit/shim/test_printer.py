"""The printer of trace lines never delays the traffic."""

from __future__ import annotations

import io
import threading

from eos.shim.trace.printer import Printer


class Gate(io.StringIO):
    """A reader that does not read until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.waiting = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.waiting.set()
        assert self.opened.wait(10)
        return super().write(text)


def test_printer_keeps_the_order_of_lines() -> None:
    stream = io.StringIO()
    printer = Printer(stream)
    for number in range(1000):
        printer.print(f"{number}")
    printer.close()
    assert stream.getvalue().split() == [f"{number}" for number in range(1000)]


def test_printer_reports_the_number_of_dropped_lines() -> None:
    stream = Gate()
    printer = Printer(stream, most_waiting=10)
    printer.print("first")
    assert stream.waiting.wait(10)
    for number in range(100):
        printer.print(f"{number}")
    stream.opened.set()
    # The queue drains in its own time: offer lines until one is accepted and reports the dropped ones.
    while "lines dropped" not in stream.getvalue():
        printer.print("last")
    printer.close()
    lines = stream.getvalue().splitlines()
    assert lines[:11] == ["first", *map(str, range(10))]
    said = next(line for line in lines if "dropped" in line)
    assert int(said.split()[1]) >= 90


def test_printer_closes_even_if_its_reader_is_closed_or_hangs() -> None:
    closed = io.StringIO()
    closed.close()
    gone = Printer(closed, most_waiting=10)
    for _ in range(100):
        gone.print("line")
    gone.close()
    hanging = Gate()
    stuck = Printer(hanging, most_waiting=2)
    for _ in range(5):
        stuck.print("line")
    stuck.close(timeout_s=0.1)
    hanging.opened.set()
