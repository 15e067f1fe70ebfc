"""Quotes names in SQL."""

from __future__ import annotations


def quoted(name: str, quote: str = '"') -> str:
    return quote + name.replace(quote, 2 * quote) + quote


def quoted_table(name: str, quote: str = '"') -> str:
    """Return a table's name quoted, with its schema if it has one: `sales.orders`."""
    return ".".join(quoted(part, quote) for part in name.split("."))
