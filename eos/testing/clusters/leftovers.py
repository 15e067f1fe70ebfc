"""Removes the leftovers of dead test runs: every created object carries its owner's name.

Owns the label that names the owning process, and the proof that this process has ended. It must never remove objects of
a live run or of another machine's process, or objects without this label.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OWNER_LABEL = "eos.owner"
CLUSTER_LABEL = "eos.cluster"


def owner() -> str:
    """Return a name for this process that no later process has: machine/pid/start."""
    pid = os.getpid()
    return f"{_machine()}/{pid}/{_start_of(pid)}"


def is_dead(name: str) -> bool:
    """Return whether a process was on this machine and has ended.

    `name`: as `owner` returns it. False for a text of another form."""
    machine, _, process = name.rpartition("/")[0].rpartition("/")
    start = name.rpartition("/")[2]
    return machine == _machine() and process.isdecimal() and _start_of(int(process)) != start


def remove_leftovers(client: Any) -> list[str]:
    """Remove objects of dead runs with their volumes, and return the names. `client`: a docker client.

    Several runs may do this at once, so an object that no longer exists is not an error.
    """
    import docker

    removed = []
    for item in _owned_objects(client):
        if not is_dead(_labels(item).get(OWNER_LABEL, "")):
            continue
        try:
            if hasattr(item, "kill"):
                item.remove(force=True, v=True)
            else:
                item.remove()
            removed.append(item.name)
        except docker.errors.APIError as error:
            # Ignore 404 (the resource is gone), 409 (it is being removed) and 403 (a network whose container is being
            # removed).
            if error.status_code not in (403, 404, 409):
                raise
    return removed


def _owned_objects(client: Any) -> Iterator[Any]:
    """Yield containers first, because networks and volumes cannot be removed before them."""
    filters = {"label": OWNER_LABEL}
    yield from client.containers.list(all=True, filters=filters, ignore_removed=True)
    yield from client.networks.list(filters=filters)
    yield from client.volumes.list(filters=filters)


def _labels(item: Any) -> dict[str, str]:
    return getattr(item, "labels", None) or item.attrs.get("Labels") or {}


def _machine() -> str:
    """Return the scope of a pid: one machine, and one pid namespace on it."""
    try:
        return f"{Path('/etc/machine-id').read_text().strip()}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return platform.node()


def _start_of(pid: int) -> str | None:
    """Return the process's start time in the system's ticks; None if it does not exist, or has ended and is not reaped
    yet.

    Without /proc only its existence is known: "-".
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return "-"
    return None if fields[0] in "ZX" else fields[19]


class Watcher:
    """Runs a shell that removes one cluster after this process has ended, because its pipe then reports end of file.

    Otherwise three brokers would stay until the next run removes them. Without docker's command line there is no
    watcher.
    """

    _SCRIPT = """
        read -r _
        docker ps -aq --filter "label=$0" | xargs -r docker rm -f -v
        docker network ls -q --filter "label=$0" | xargs -r docker network rm
    """

    def __init__(self, cluster: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if shutil.which("docker"):
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", self._SCRIPT, f"{CLUSTER_LABEL}={cluster}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process = None
