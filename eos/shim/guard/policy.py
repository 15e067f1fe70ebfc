"""Define policies and their TOML form.

The module owns the rules' meaning, and does no I/O except reading the file. A request that no rule names is allowed.
Names are patterns (`o-*`).

    [[topic]]
    name = "orders-*"
    transactional_only = true          # records only in transactions
    read_committed_only = true         # no read_uncommitted Fetch

    [[group]]
    name = "billing"
    transactional_offsets_only = true  # no OffsetCommit outside a transaction

    [transactions]
    max_timeout_ms = 60000             # the longest transaction.timeout.ms that a producer may request

    [[principal]]
    name = "billing"                   # the SASL user; ANONYMOUS where there is no login
    transactional_id_prefixes = ["billing-"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from eos.errors import ConfigurationError

ANONYMOUS = "ANONYMOUS"  # Kafka's principal for a connection without a login


@dataclass(frozen=True)
class Policy:
    """Hold the rules: patterns of names, the longest transaction timeout in ms, and the prefixes of each principal."""

    transactional_topics: tuple[str, ...] = ()
    committed_topics: tuple[str, ...] = ()
    transactional_groups: tuple[str, ...] = ()
    max_timeout_ms: int | None = None
    prefixes: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def transactional_only(self, topic: str) -> bool:
        return _any_like(self.transactional_topics, topic)

    def committed_only(self, topic: str) -> bool:
        return _any_like(self.committed_topics, topic)

    def transactional_offsets_only(self, group: str) -> bool:
        return _any_like(self.transactional_groups, group)

    def may_use(self, principal: str, transactional_id: str) -> bool:
        """Return whether the first rule that matches the principal allows the id. Without a rule it is allowed."""
        for name, prefixes in self.prefixes:
            if fnmatchcase(principal, name):
                return transactional_id.startswith(prefixes)
        return True


def _any_like(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_TOPIC = {"name": str, "transactional_only": bool, "read_committed_only": bool}
_GROUP = {"name": str, "transactional_offsets_only": bool}
_PRINCIPAL = {"name": str, "transactional_id_prefixes": list}
_TRANSACTIONS = {"max_timeout_ms": int}
_TABLES: Mapping[str, Mapping[str, type]] = {"topic": _TOPIC, "group": _GROUP, "principal": _PRINCIPAL}


def read_policy(path: Path) -> Policy:
    """Read a policy from a TOML file. Raises ConfigurationError, with the table and the key, for an invalid policy."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"the policy {path} cannot be read: {error}") from error
    for name in table:
        if name not in (*_TABLES, "transactions"):
            raise ConfigurationError(
                f"the policy {path}: {name} is unknown: expected {', '.join(_TABLES)} or transactions"
            )
    try:
        rows = {name: _rows(table.get(name, []), name) for name in _TABLES}
        transactions = table.get("transactions", {})
        _check(transactions, _TRANSACTIONS, "transactions")
    except ConfigurationError as error:
        raise ConfigurationError(f"the policy {path}: {error}") from error
    cap = transactions.get("max_timeout_ms")
    if cap is not None and cap < 1:
        raise ConfigurationError(f"the policy {path}: max_timeout_ms = {cap}: must be at least 1")
    return Policy(
        transactional_topics=_named(rows["topic"], "transactional_only"),
        committed_topics=_named(rows["topic"], "read_committed_only"),
        transactional_groups=_named(rows["group"], "transactional_offsets_only"),
        max_timeout_ms=cap,
        prefixes=tuple((row["name"], tuple(row.get("transactional_id_prefixes", ()))) for row in rows["principal"]),
    )


def _rows(rows: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(rows, list):
        raise ConfigurationError(f"{name}: expected [[{name}]]")
    for number, row in enumerate(rows, 1):
        where = f"{name} no. {number}"
        _check(row, _TABLES[name], where)
        if "name" not in row:
            raise ConfigurationError(f"{where}: name is missing")
        if len(row) < 2:
            raise ConfigurationError(f"{where}: it has no rule for {row['name']}")
    return rows


def _check(row: Any, known: Mapping[str, type], where: str) -> None:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where}: expected a table")
    for key, value in row.items():
        if key not in known:
            raise ConfigurationError(f"{where}: {key} is unknown: expected one of {', '.join(known)}")
        wrong = type(value) is not known[key] or (isinstance(value, list) and not all(type(v) is str for v in value))
        if wrong or value in ("", []):
            raise ConfigurationError(f"{where}: {key} = {value!r}: expected {known[key].__name__}")


def _named(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[str, ...]:
    return tuple(row["name"] for row in rows if row.get(key))
