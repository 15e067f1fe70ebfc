"""Raises the limit of files that this process may have open."""

from __future__ import annotations

import resource


def allow_open_files(wanted: int) -> int:
    """Raise this process's soft limit of open files to `wanted`, or as near as allowed, and return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
