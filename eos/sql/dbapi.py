"""Describes databases that are reached through any DB-API driver (PEP 249).

The driver's module is found from the class of the connection. MySQL and MariaDB are recognised by asking the server,
because several drivers speak to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from eos.errors import ConfigurationError, raise_if_interrupted
from eos.sql.database import DatabaseError, Fault
from eos.sql.faults import fault_of_connecting, first_line
from eos.sql.mysql import MySQLConnection
from eos.sql.standard import MARKS, Connection

_OF_EOS: Final[Mapping[str, str]] = {"sqlite3": "SQLite", "duckdb": "DuckDB", "_duckdb": "DuckDB"}


@dataclass(frozen=True)
class DBAPI:
    """Describes a database by a function that opens a connection of its DB-API driver (PEP 249).

    `DBAPI(lambda: pymysql.connect(host="localhost", user="shop", password=os.environ["SHOP_PASSWORD"]))`. eos calls the
    function at the start and after each loss of the connection, and turns autocommit off. `name` names the database in
    messages, which contain nothing else of the function.
    """

    open_connection: Callable[[], Any]
    name: str = ""

    def __repr__(self) -> str:
        function = self.open_connection
        return f"DBAPI({self.name or getattr(function, '__qualname__', type(function).__name__)})"

    def connect(self) -> Connection:
        try:
            opened = self.open_connection()
        except Exception as error:
            raise_if_interrupted(error)
            raise self._connecting_error(error) from error
        driver = _driver_of(opened)
        if (name := _OF_EOS.get(driver.__name__)) is not None:
            raise ConfigurationError(f"{self} opens {driver.__name__}: use eos.sql.{name}")
        connection = Connection(self, opened, driver)
        try:
            if _is_mysql(connection):
                connection = MySQLConnection(self, opened, driver)
            connection.set_up()
        except DatabaseError:
            connection.close()
            raise
        return connection

    def _connecting_error(self, error: Exception) -> Exception:
        """Return the error of an attempt to connect. It quotes servers and sockets only, and so no password."""
        fault = fault_of_connecting(error)
        if fault in (Fault.AWAY, Fault.DENIED) or type(next(iter(error.args), None)) is int:
            return DatabaseError(fault, f"{self}: {first_line(error)}")
        return ConfigurationError(
            f"the function that opens a connection of {self} raised {type(error).__name__}",
            remedy="call it in a Python shell to see the whole error",
        )


def _is_mysql(connection: Connection) -> bool:
    """Return whether the server has a variable of MySQL's and MariaDB's. Raises DatabaseError."""
    try:
        connection.cursor().execute("select @@version_comment")
        connection.cursor().fetchall()
    except Exception as error:
        raise_if_interrupted(error)
        if (known := connection.explain(error)).fault in (Fault.AWAY, Fault.AGAIN):
            raise known from error
        return False
    finally:
        connection.roll_back()
    return True


def _driver_of(connection: Any) -> Any:
    """Return the module of PEP 249 that a connection is from. Raises ConfigurationError if there is none."""
    for one in type(connection).__mro__:
        name = one.__module__
        while name:
            module = sys.modules.get(name)
            if getattr(module, "paramstyle", None) in MARKS and hasattr(module, "Error"):
                return module
            name = name.rpartition(".")[0]
    raise ConfigurationError(
        f"{type(connection).__module__}.{type(connection).__qualname__} is no connection of a DB-API driver (PEP 249)",
        remedy="return what the driver's connect() returns, for example pymysql.connect(...)",
    )
