"""Run our own worker through every fault at every step of a transaction on real Kafka (`make sweep`), with one
table.

There are two ways through the shim. In the first, the shim does not protect, so that the worker's own rules must
suffice. In the second, it protects, and the faults are between worker and shim, where the shim cannot recognise a late
request by its epoch. (`--ways broker` runs the faults between a protecting shim and the brokers.)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.testing.sweeping import ACTIONS, Outcome, Sweeper, every_case, every_txn_step, table

_APPS = Path(__file__).parents[1] / "support"
APP, KEEPING_APP = f"{_APPS / 'sweep_app.py'}:app", f"{_APPS / 'sweep_app_keeping.py'}:app"
RECORDS = {"sweep-in": [b"record %d" % number for number in range(60)]}

# The arguments of the sweep for each way.
WAYS: dict[str, dict[str, Any]] = {
    "unprotected": {"protect": False},
    "client": {"protect": True, "side": "client"},
    "broker": {"protect": True, "side": "broker"},
}


def ways_on(version: str) -> list[str]:
    """Return the ways for a version: before 4.0, no broker has what protection needs, and groups have one protocol."""
    return ["unprotected", "client"] if _since_4(version) else ["unprotected"]


def protocols_on(version: str) -> list[str]:
    return ["classic", "consumer"] if _since_4(version) else ["classic"]


def _since_4(version: str) -> bool:
    return int(version.split(".")[0]) >= 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--over", nargs="*", default=list(every_txn_step))
    parser.add_argument("--actions", nargs="*", default=list(ACTIONS))
    parser.add_argument("--protocols", nargs="*", help="classic, consumer; default: those that the brokers have")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), help="default: unprotected and client")
    parser.add_argument("--kafka", default=DEFAULT_VERSION, help="the version of Kafka")
    options = parser.parse_args()
    if options.ways and not _since_4(options.kafka) and options.ways != ["unprotected"]:
        parser.error(f"Kafka {options.kafka} has no EndTxn v5: there is no protection to go through")
    console, outcomes, began = Console(width=150), list[Outcome](), time.monotonic()
    cases = every_case(options.over, options.actions, options.protocols or protocols_on(options.kafka))
    try:
        with LocalKafka(version=options.kafka) as kafka:
            for way in options.ways or ways_on(options.kafka):
                sweeper = Sweeper(APP, kafka.bootstrap_servers, RECORDS, **WAYS[way])
                for case in cases:
                    outcome = sweeper.run(case)
                    outcomes.append(outcome)
                    console.print(f"{outcome.seconds:5.1f} s  {outcome}", highlight=False)
    finally:
        # Print the table after an interrupt too, because a run takes half an hour.
        console.print(table(outcomes))
        console.print(f"{len(outcomes)} runs on Kafka {options.kafka} in {(time.monotonic() - began) / 60:.0f} minutes")
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
