"""`eos run --reload`: workers start again when the source changes; for development. Needs watchfiles (extra `reload`).

It only says that something changed; a change stops workers as SIGTERM does, so nothing is lost or doubled by it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from eos import log
from eos.errors import UsageError


def folders_of(target: str) -> list[Path]:
    """Where the source of `module:app` or `path.py:app` is looked for: the working directory and the file's own."""
    file = Path(target.partition(":")[0])
    folders = {Path.cwd()}
    if file.suffix == ".py":
        folders.add(file.parent.resolve())
    return sorted(folders)


@contextlib.contextmanager
def reloading(folders: Sequence[Path], changed: Callable[[], None]) -> Iterator[None]:
    """Calls `changed` when a .py file below `folders` changed, on a daemon thread. UsageError without watchfiles."""
    try:
        import watchfiles
    except ImportError as error:
        raise UsageError("--reload needs watchfiles: pip install 'eos-kafka[reload]'") from error
    stopping = threading.Event()

    def watch() -> None:
        for changes in watchfiles.watch(
            *folders, watch_filter=watchfiles.PythonFilter(), stop_event=stopping, raise_interrupt=False
        ):
            names = ", ".join(sorted({os.path.relpath(path) for _, path in changes})[:3])
            log.info("source changed: workers start again", files=names)
            changed()

    log.info("watching for changes", folders=",".join(map(str, folders)))
    thread = threading.Thread(target=watch, name="eos-reload", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(2)
