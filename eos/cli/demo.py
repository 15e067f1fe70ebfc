"""Define `eos demo`, which runs eos.demo, and make SIGTERM clean up as Ctrl-C does."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Annotated

import typer

from eos.errors import Unavailable


def demo(
    bootstrap_servers: Annotated[
        str | None,
        typer.Option(
            help="Use this Kafka (HOST:PORT) instead of starting one. The demo deletes its topics at the end."
        ),
    ] = None,
    spark: Annotated[
        bool,
        typer.Option(
            "--spark", help="Run another demo: a stateful Spark query reads from a worker; its driver is killed."
        ),
    ] = False,
    state: Annotated[
        bool,
        typer.Option(
            "--state", help="Run another demo: state with sums by key, workers killed, a state folder deleted."
        ),
    ] = False,
    flights: Annotated[int, typer.Option(hidden=True, min=10_000, max=336_776)] = 336_776,
) -> int:
    """Kill workers on real data and show that no record was lost or duplicated."""
    try:
        # Imported here: the other commands must start without numpy and the rest of the extra `demo`.
        from eos.demo.show import Show
        from eos.demo.story import run_demo

        if spark:
            from eos.demo.spark import run_demo
        if state:
            from eos.demo.state import run_demo
    except ModuleNotFoundError as error:
        raise Unavailable(f"the demo needs {error.name}: pip install 'eos-kafka[demo,embedded]'") from error
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    run_demo(Show(), bootstrap_servers, flights)
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
