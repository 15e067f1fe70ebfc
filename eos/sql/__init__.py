"""Writes rows of an App into databases, exactly once (docs/howto/databases.md).

`@app.sink(topic, Postgres(...), table="orders", key="id")` decorates a function that returns rows.
"""

from eos.sql.database import Cursor
from eos.sql.postgres import Postgres
from eos.sql.sqlite import SQLite

__all__ = ["Cursor", "Postgres", "SQLite"]
