"""Run one test N times on a busy core without second tries: `python -m tests.suites.flaky TEST [N]`.

Prints which runs failed, and keeps their output in build/flaky.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "flaky"


def main(test: str, times: int) -> int:
    KEPT.mkdir(parents=True, exist_ok=True)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    failed = []
    try:
        for run in range(1, times + 1):
            start = time.monotonic()
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
            ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            print(f"{run:3} {'ok' if ran.returncode == 0 else 'FAILED'} {time.monotonic() - start:.1f} s", flush=True)
            if ran.returncode:
                failed.append(run)
                (KEPT / f"{run}.log").write_bytes(ran.stdout)
    finally:
        busy.kill()
        busy.wait()
    print(f"{len(failed)} of {times} failed" + (f", see {KEPT}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20))
