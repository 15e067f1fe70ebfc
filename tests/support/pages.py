"""Follow a page of docs/ as a reader does: write its files, run its commands in one shell, compare the output.

A block of Python that begins with `# name.py` is a file, `sh` blocks are commands, and the `text` blocks after them are
the output. In texts with times, numbers and order may differ. A line that ends with `(open)` may be missing, because a
kill between two transactions leaves none open.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TUTORIALS = DOCS / "tutorial"
SERVERS = "127.0.0.1:9092"  # the address on the pages
_NOT_HERE = re.compile(r"^(?:pip install|eos broker) .*$", re.MULTILINE)  # an address that a reader has, and a test too
_TIMES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d")
_MARK = "---- what is printed from here on belongs to commands"


@dataclass
class Step:
    """Hold the files to write first, the commands, and the output that the page shows."""

    files: dict[str, str] = field(default_factory=dict)
    commands: str = ""
    printed: str | None = None


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Return the language and lines of each block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def file_of(block: str) -> str:
    """Return the file name in the first line of a block, or "" without one."""
    named = re.match(r"(?:#|//) (\S+\.\w+)\n", block)
    return named[1] if named else ""


def files_of(page: Path) -> dict[str, str]:
    """Return the files in a page's blocks of Python; a block without a name continues the file before it."""
    files: dict[str, str] = {}
    name = ""
    for language, block in blocks_of(page.read_text()):
        if language == "python":
            name = file_of(block) or name
            files[name] = f"{files[name]}\n\n{block}" if name in files else block
    return files


def steps_of(page: Path) -> Iterator[Step]:
    step = Step()
    for language, block in blocks_of(page.read_text()):
        if language not in ("python", "sh", "text"):
            continue
        if step.commands and language != "text":
            yield step
            step = Step()
        if language == "python":
            step.files[file_of(block)] = block
        elif language == "sh":
            step.commands = _NOT_HERE.sub("", block).strip()
        else:
            step.printed = block
            yield step
            step = Step()
    if step.commands:
        yield step


def follow(page: Path, servers: str, folder: Path, timeout: float = 120.0) -> list[tuple[Step, str]]:
    """Yield each step with the output of its commands, which run in `folder` with the brokers `servers`."""
    steps = [step for step in steps_of(page) if step.commands]
    for step in steps:
        for name, text in step.files.items():
            (folder / name).write_text(text.replace(SERVERS, servers))
    script = "\n".join(f"echo {_MARK!r}\n{step.commands.replace(SERVERS, servers)}" for step in steps)
    done = subprocess.run(
        ["bash", "-s"],
        input=script,
        cwd=folder,
        env=os.environ
        | {
            "KAFKA_BOOTSTRAP_SERVERS": servers,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    print(done.stdout, done.stderr, sep="\n")  # Pytest shows it when the page is wrong.
    printed = done.stdout.split(f"{_MARK}\n")[1:]
    assert len(printed) == len(steps), "the shell ended early"
    return list(zip(steps, printed, strict=True))


def differences(steps: list[tuple[Step, str]]) -> list[str]:
    """Return the output lines that differ from the page."""
    return [
        f"{step.commands}\n printed\n{seen}\n in place of\n{step.printed}"
        for step, seen in steps
        if step.printed is not None and _comparable(seen) != _comparable(step.printed)
    ]


def _comparable(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.strip().splitlines() if not line.endswith("(open)")]
    return sorted(re.sub(r"\d+", "N", line) for line in lines) if _TIMES.search(text) else lines
