"""Runs `eos run` for restart.py, and writes when each part of its start began.

`python -m benchmarks.restart_worker FILE run MODULE:APP ...`. FILE gets a JSON object: the Unix time in seconds of each
step, by name, until the first commit.
"""

import time

began = time.time()

import json  # noqa: E402 - the time of the imports is measured
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from eos import cli  # noqa: E402
from eos.kafka.client import world  # noqa: E402

LAST = "committed"


def main() -> None:
    marks = {"imports": began}

    def note(step: str) -> None:
        if LAST not in marks:
            marks.setdefault(step, time.time())
            if step == LAST:
                part = Path(f"{file}.part")
                part.write_text(json.dumps(marks))
                part.rename(file)

    file, *arguments = sys.argv[1:]
    object.__setattr__(world.REAL, "step", note)
    sys.argv[1:] = arguments
    cli.main()


if __name__ == "__main__":
    main()
