"""`make sweep`: our own worker through every fault at every step of a transaction, on real Kafka, with a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from eos.broker import DEFAULT_VERSION, LocalKafka
from eos.testing import sweep
from eos.testing.sweeping import ACTIONS, every_txn_step

APP = str(Path(__file__).parents[1] / "support" / "sweep_app.py") + ":app"
RECORDS = {"sweep-in": [b"record %d" % number for number in range(60)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--over", nargs="*", default=list(every_txn_step))
    parser.add_argument("--actions", nargs="*", default=list(ACTIONS))
    parser.add_argument("--protocols", nargs="*", default=["classic", "consumer"])
    parser.add_argument("--replace", default="auto", help="eos.replace.producer of the worker")
    parser.add_argument("--protect", action="store_true", help="with the shim's protection between faults and worker")
    parser.add_argument("--side", default="broker", help="with --protect: broker or client")
    parser.add_argument("--kafka", default=DEFAULT_VERSION, help="its version")
    options = parser.parse_args()
    with LocalKafka(version=options.kafka) as kafka:
        outcomes = sweep(
            APP,
            kafka.bootstrap_servers,
            RECORDS,
            over=options.over,
            actions=options.actions,
            protocols=options.protocols,
            settings={"eos.replace.producer": options.replace},
            protect=options.protect,
            side=options.side,
            console=Console(width=150),
        )
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
