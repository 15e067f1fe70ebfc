"""Holds what the errors of databases mean for a sink: codes of SQLSTATE, numbers of MySQL, exceptions of PEP 249.

Must never do I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from eos.sql.database import Fault

# Classes and codes of SQLSTATE (PostgreSQL's appendix A).
SQLSTATES: Final[Mapping[str, Fault]] = {
    **dict.fromkeys(("08", "53", "57", "58", "XX", "25P03", "55P03", "F0"), Fault.AWAY),
    **dict.fromkeys(("28", "3D", "42501"), Fault.DENIED),
    **dict.fromkeys(("40",), Fault.AGAIN),
    **dict.fromkeys(("21", "22", "23", "44", "P0"), Fault.RECORD),
    **dict.fromkeys(("42", "0A", "25P01", "3B"), Fault.DEFINITION),
}
# Errors of MySQL and MariaDB. Numbers from 2000 to 2999 are errors of the client's library.
_MYSQL_AWAY: Final = (
    *(1021, 1030, 1037, 1038, 1040, 1041, 1053, 1114, 1129, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1226, 1290),
    *(1317, 1792, 1836, 1927, 4031),
)
_MYSQL_DEFINITION: Final = (
    *(1046, 1049, 1051, 1054, 1064, 1072, 1103, 1109, 1115, 1136, 1146, 1149, 1153, 1176, 1193, 1235, 1286, 1305),
    *(1419, 1665, 2020),
)
MYSQL_ERRORS: Final[Mapping[int, Fault]] = {
    **dict.fromkeys(range(2000, 3000), Fault.AWAY),
    **dict.fromkeys(_MYSQL_AWAY, Fault.AWAY),
    **dict.fromkeys((1020, 1205, 1213, 1969, 3024, 3572), Fault.AGAIN),
    **dict.fromkeys((1044, 1045, 1142, 1143, 1227, 1370, 1410, 1698), Fault.DENIED),
    **dict.fromkeys(_MYSQL_DEFINITION, Fault.DEFINITION),
}
_EXCEPTIONS: Final[Mapping[str, Fault]] = {
    "OperationalError": Fault.AWAY,
    "InterfaceError": Fault.AWAY,
    "IntegrityError": Fault.RECORD,
    "DataError": Fault.RECORD,
    "ProgrammingError": Fault.DEFINITION,
    "NotSupportedError": Fault.DEFINITION,
}
_DENIALS: Final = ("password", "authentication", "does not exist", "pg_hba")


def fault_of_state(state: str) -> Fault | None:
    return SQLSTATES.get(state) or SQLSTATES.get(state[:2])


def fault_of(error: BaseException, is_mysql: bool = False) -> Fault:
    """Return what an exception of a driver means, by its code, or by its class if the driver gives no codes.

    An error without a code, from a driver whose server's errors have codes, arose in the driver: a value that it
    cannot send, or a lost connection.
    """
    number, state = _number(error), _sqlstate(error)
    if is_mysql and number is not None:
        return MYSQL_ERRORS.get(number, Fault.RECORD)
    if state and (fault := fault_of_state(state)) is not None:
        return fault
    by_class = next((_EXCEPTIONS[one.__name__] for one in type(error).__mro__ if one.__name__ in _EXCEPTIONS), None)
    if by_class is Fault.DEFINITION and (is_mysql or state == ""):
        return Fault.RECORD
    return by_class or Fault.RECORD


def fault_of_connecting(error: BaseException) -> Fault:
    """Return what the exception of an attempt to connect means: a right, a missing database, or a server away."""
    number = _number(error)
    if number is not None and number in MYSQL_ERRORS:
        return MYSQL_ERRORS[number]
    fault = Fault.AWAY if isinstance(error, OSError) else fault_of(error)
    return Fault.DENIED if fault is Fault.AWAY and says_denied(error) else fault


def says_denied(error: BaseException) -> bool:
    """Return whether PostgreSQL refused a login. Its clients get no code for errors of a connection's start."""
    return any(text in str(error) for text in _DENIALS)


def first_line(error: BaseException) -> str:
    if isinstance(fields := next(iter(error.args), None), Mapping):  # pg8000
        return str(fields.get("M", fields))
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _number(error: BaseException) -> int | None:
    """Return the number that drivers of MySQL give an error: the attribute `errno`, or the first argument."""
    number = getattr(error, "errno", None) or next(iter(error.args), None)
    return number if type(number) is int and number > 0 else None


def _sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, "" if this error of a driver with SQLSTATEs has none, or None without them."""
    for name in ("sqlstate", "pgcode"):  # psycopg and mysql.connector; psycopg2
        if hasattr(error, name):
            return str(getattr(error, name) or "")
    first = next(iter(error.args), None)
    if isinstance(first, Mapping):  # pg8000
        return str(first.get("C", ""))
    return first if isinstance(first, str) and len(first) == 5 and first.isalnum() and first.isupper() else None  # ODBC
