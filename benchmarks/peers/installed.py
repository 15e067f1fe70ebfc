"""Where the other frameworks are: one environment below build/peers for each of Python, and compiled classes of Java.

Their dependencies collide with ours and with each other's. `python -m benchmarks.peers.installed quix` makes one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from eos.broker.jars import DEFAULT_VERSION, maven_jars
from eos.broker.java import find_java
from eos.errors import Unavailable

BUILD = Path(__file__).parents[2] / "build" / "peers"
REQUIREMENTS = {
    "faststream": "faststream[confluent,cli]==0.7.8",
    "faust": "faust-streaming==0.15.3",
    "quix": "quixstreams==3.28.1",
}
# With a binding for its log, or its warnings are invisible; kafka-clients is named for the reason in eos.broker.jars.
STREAMS_JARS = [
    f"org.apache.kafka:kafka-streams:{DEFAULT_VERSION}",
    f"org.apache.kafka:kafka-clients:{DEFAULT_VERSION}",
    "org.slf4j:slf4j-simple:1.7.36",
]


def python_of(name: str) -> Path:
    """The Python of this framework's environment, made if it is not there. Raises Unavailable where it cannot be."""
    directory, wanted = BUILD / name, REQUIREMENTS[name]
    python, stamp = directory / "bin" / "python", directory / ".installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        venv.create(directory, clear=True, with_pip=True)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wanted]
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            told = done.stderr.strip().splitlines() or ["pip says nothing"]
            raise Unavailable(f"{wanted} cannot be installed: {told[-1]}")
        stamp.write_text(wanted)
    return python


def streams_command(source: Path, build: Path) -> list[str]:
    """Runs a program of Kafka Streams, which is compiled if it is newer than its class.

    Raises Unavailable without a JDK or the jars.
    """
    jars = maven_jars("streams", STREAMS_JARS, "Kafka Streams", f"Kafka {DEFAULT_VERSION}")
    java = find_java().resolve()
    compiler = java.with_name("javac")
    if not compiler.exists():
        raise Unavailable(f"Kafka Streams needs a JDK, and there is no {compiler}")
    path = os.pathsep.join([str(build), *map(str, jars)])
    made = build / f"{source.stem}.class"
    if not made.exists() or made.stat().st_mtime < source.stat().st_mtime:
        build.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, "-cp", path, "-d", build, source], check=True)
    return [str(java), "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", path, source.stem]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(python_of(name))
