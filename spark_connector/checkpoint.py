"""Notes in a checkpoint how each function keeps its state there, and refuses functions that no longer fit.

Spark does not compare functions with the state in its checkpoint. A function with another window or time unit would
misread its state, or begin empty. So the checkpoint has a file with a note for each source topic, written before the
first micro-batch that reads the topic. This module must never change anything else in the checkpoint.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from eos.app.definition import App
from eos.app.routes import Route
from eos.errors import ConfigurationError, Unavailable
from eos.state import notes
from spark_connector.query import java_class
from spark_connector.session import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FOLDER: Final = "eos"
_REMEDY: Final = "change it back, or begin with another --instance and --checkpoint, and without state"


def require_same_state(spark: SparkSession, app: App, location: str) -> None:
    """Check the notes in the checkpoint against the App's functions, and write the notes that are missing.

    Raises ConfigurationError for a function that does not fit, Unavailable if the checkpoint cannot be used.
    """
    from py4j.protocol import Py4JJavaError

    try:
        files = _Files(spark, location)
        has_begun = files.exists("offsets")
        for topic, route in app.routes.items():
            name = f"{_FOLDER}/{topic}.json"
            if has_begun and files.exists(name):
                check_note(app.id, route, files.read(name))
            else:
                files.write(name, make_note(app.id, route))
    except Py4JJavaError as error:
        reason = first_line(str(error.java_exception))
        raise Unavailable(f"the checkpoint {location} cannot be read or written: {reason}") from error


def make_note(app: str, route: Route) -> str:
    """Return the note of a function as JSON: its header, and the names of the stores whose values begin with a time."""
    header = notes.current_header(app, route).encoded().decode()
    return json.dumps({"header": header, "timed": sorted(store.decode() for store in route.timed_stores)})


def check_note(app: str, route: Route, note: str) -> None:
    """Raise ConfigurationError if the function does not keep its state as the note says."""
    kept, now = json.loads(note), json.loads(make_note(app, route))
    had_state = bool(json.loads(kept["header"])["stores"] or kept["timed"])
    if not had_state and not route.has_state:
        return  # nothing is lost, whatever the function's name
    try:
        notes.next_header(app, route, "the state in the checkpoint", kept["header"].encode())
    except ConfigurationError as error:
        raise ConfigurationError(str(error.args[0]), remedy=_REMEDY) from error
    if kept["timed"] != now["timed"]:
        raise ConfigurationError(
            f"{route.name} uses ttl=, once=, timers or windows in another way than when its state was stored: Spark "
            "keeps state that uses time by partition and all other state by key, so the state would begin empty",
            remedy=_REMEDY,
        )


class _Files:
    """Reads and writes files of a checkpoint, on any file system that Spark supports."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        context: Any = spark.sparkContext
        self._jvm, self._path = context._jvm, java_class(context._jvm, "org.apache.hadoop.fs.Path")
        self._root = self._path(location)
        self._system = self._root.getFileSystem(context._jsc.hadoopConfiguration())

    def exists(self, name: str) -> bool:
        return bool(self._system.exists(self._path(self._root, name)))

    def read(self, name: str) -> str:
        stream = self._system.open(self._path(self._root, name))
        try:
            return str(java_class(self._jvm, "org.apache.commons.io.IOUtils").toString(stream, "UTF-8"))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Replace the file as a whole, so that a killed driver leaves no incomplete file."""
        path, new = self._path(self._root, name), self._path(self._root, f"{name}.new")
        stream = self._system.create(new, True)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()
        self._system.delete(path, False)
        if not self._system.rename(new, path):
            raise Unavailable(f"the note {path.toString()} cannot be written")
