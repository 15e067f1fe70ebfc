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


def programs_of(page: str) -> dict[str, str]:
    """Return the page's code blocks that begin with a comment with a file name, by that name, in order."""
    blocks = blocks_of((PAGES / f"{page}.md").read_text())
    return {name: block for _, block in blocks if (name := file_of(block))}
