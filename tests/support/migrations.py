"""The programs in docs/howto/migrate, as files of their names."""

from __future__ import annotations

from tests.support.pages import DOCS, blocks_of, file_of

PAGES = DOCS / "howto" / "migrate"
OURS = "orders_eos.py"
SETTINGS = "eos.toml"
"""Where a page has it, ours runs with it."""
THEIRS = {
    "from-a-loop": "orders_loop.py",
    "from-faststream": "orders_faststream.py",
    "from-faust": "orders_faust.py",
    "from-kafka-streams": "OrdersStreams.java",
    "from-quix": "orders_quix.py",
}


def programs_of(page: str) -> dict[str, str]:
    """The page's code blocks that begin with a comment with a file name, by that name, in their order."""
    blocks = blocks_of((PAGES / f"{page}.md").read_text())
    return {name: block for _, block in blocks if (name := file_of(block))}
