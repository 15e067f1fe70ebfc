"""Decides how long a worker waits for a database that is away, and which errors of a database end the run."""

from __future__ import annotations

from typing import Any

from eos import log
from eos.errors import ConfigurationError, NotAuthorised, Temporary, Unavailable
from eos.kafka.client.world import World
from eos.sql.database import DatabaseError, Fault

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0


class DatabaseWaits:
    """Measures for how long one database has been away. `timeout_s`: how many seconds it may be away."""

    def __init__(self, database: Any, timeout_s: float, world: World) -> None:
        self._database, self._timeout_s, self._world = database, timeout_s, world
        self._away_since: float | None = None
        self._wait_s = _FIRST_WAIT_S

    def note_away(self, error: DatabaseError) -> float:
        """Return the seconds until the next attempt.

        Raises Temporary once the database has been away for too long, NotAuthorised, ConfigurationError.
        """
        now = self._world.now()
        if error.fault not in (Fault.AWAY, Fault.AGAIN):
            raise start_error(error) from error
        if self._away_since is None:
            self._away_since = now
            log.warning("database away, waiting", error=str(error))
        if now - self._away_since > self._timeout_s:
            raise Temporary(
                f"the database has been away for {now - self._away_since:.0f} s: {error}",
                remedy="no record is lost: a restarted worker continues where this one stopped "
                "(eos.database.timeout.ms limits the wait)",
            ) from error
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, _LONGEST_WAIT_S)
        return wait_s

    def note_answer(self) -> None:
        """Record that the database answers."""
        if self._away_since is not None:
            log.info("database back", database=self._database)
        self._away_since, self._wait_s = None, _FIRST_WAIT_S


def start_error(error: DatabaseError) -> Exception:
    """Return the exception for an error of the database that ends the run, because a later attempt would fail too."""
    if error.fault is Fault.DENIED:
        return NotAuthorised(str(error))
    if error.fault is Fault.DEFINITION:
        return ConfigurationError(str(error), remedy="create what is missing, or correct the table, key or columns")
    return Unavailable(str(error))
