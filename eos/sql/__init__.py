"""Writes rows of an App into databases, exactly once (docs/howto/databases.md).

`@app.sink(topic, Postgres(...), table="orders", key="id")` decorates a function that returns rows. The databases are
imported at their first use, because each App imports this package.
"""

from typing import TYPE_CHECKING, Any

from eos.sql.database import Cursor

if TYPE_CHECKING:
    from eos.sql.postgres import Postgres
    from eos.sql.sqlite import SQLite

__all__ = ["Cursor", "Postgres", "SQLite"]


def __getattr__(name: str) -> Any:
    if name == "Postgres":
        from eos.sql.postgres import Postgres

        return Postgres
    if name == "SQLite":
        from eos.sql.sqlite import SQLite

        return SQLite
    raise AttributeError(f"module 'eos.sql' has no attribute {name!r}")
