"""Extract the programs in docs/howto/migrate as files."""

from __future__ import annotations

from tests.support.pages import DOCS, blocks_of, file_of

PAGES = DOCS / "howto" / "migrate"
OURS = "orders_eos.py"
SETTINGS = "eos.toml"
"""The settings file of our program, on pages that have one."""
THEIRS = {
    "from-a-loop": "orders_loop.py",
    "from-faststream": "orders_faststream.py",
    "from-faust": "orders_faust.py",
    "from-kafka-streams": "OrdersStreams.java",
    "from-quix": "orders_quix.py",
}

WITH_TIME = {
    "from-faust": ("hours_faust.py", "hours_eos.py"),
    "from-flink": ("carts_flink.py", "carts_eos.py"),
    "from-kafka-streams": ("HoursStreams.java", "hours_eos.py"),
    "from-quix": ("hours_quix.py", "hours_eos.py"),
}
"""The programs with windows or timers, theirs and ours, of the pages that have them."""


def programs_of(page: str) -> dict[str, str]:
    """Return the old program of a page, ours, and its settings file, by the file's name, in order."""
    return {name: block for name, block in _files_of(page).items() if name not in WITH_TIME.get(page, ())}


def timed_programs_of(page: str) -> dict[str, str]:
    """Return the two programs of a page that use time, by the file's name, in order."""
    return {name: block for name, block in _files_of(page).items() if name in WITH_TIME[page]}


def _files_of(page: str) -> dict[str, str]:
    """Return the page's code blocks that begin with a comment with a file name, by that name, in order."""
    blocks = blocks_of((PAGES / f"{page}.md").read_text())
    return {name: block for _, block in blocks if (name := file_of(block))}
