"""Writes rows of an App into databases, exactly once (docs/howto/databases.md).

`@app.sink(topic, Postgres(...), table="orders", key="id")` decorates a function that returns rows. The databases are
imported at their first use, because each App imports this package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eos.sql.database import Cursor

if TYPE_CHECKING:
    from eos.sql.dbapi import DBAPI
    from eos.sql.delta import Delta
    from eos.sql.duckdb import DuckDB
    from eos.sql.postgres import Postgres
    from eos.sql.sqlite import SQLite

__all__ = ["DBAPI", "Cursor", "Delta", "DuckDB", "Postgres", "SQLite"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"eos.sql.{name.lower()}"), name)
    raise AttributeError(f"module 'eos.sql' has no attribute {name!r}")
