"""Sends executors the modules they must import: the App's and, on a cluster, this package.

Owns the choice of the files that are sent with the query, and the error for a failed import on an executor. It must
never send installed packages (site-packages, the standard library): compiled packages cannot be sent this way, and the
executors' Python must have msgspec, sortedcontainers, pyarrow and kafka-python.
"""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from eos.app.definition import App
from eos.encoding.serde import underlying
from eos.errors import ConfigurationError
from spark_connector.session import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OURS = ("eos", "spark_connector")
_sent: set[tuple[str, str]] = set()
"""Spark's applicationId, and the name of a module that it has; the driver sends a file once."""
# The last line of a Python worker's traceback.
_LACKS = (
    re.compile(r"^\s*ModuleNotFoundError: (No module named '[^']+')", re.MULTILINE),
    re.compile(r"PySparkImportError: \[PACKAGE_NOT_INSTALLED\] (.+)"),
    re.compile(r"PySparkRuntimeError: \[PYTHON_VERSION_MISMATCH\] (.+?)[.,]? PySpark"),
)


def ship(spark: SparkSession, app: App) -> None:
    """Send the modules of the App's functions, and this package.

    Modules that these import and that executors do not have need `--py-files`.
    """
    ship_ourselves(spark)
    _send(spark, _modules_of(app))


def ship_ourselves(spark: SparkSession) -> None:
    """Send this package unless everything runs in this machine's Python.

    The driver's version always wins over an installed one: both ends of a claim and of a failure must agree.
    """
    if not is_local(spark.sparkContext.master):
        _send(spark, _OURS)


def find_missing_package(text: str) -> ConfigurationError | None:
    """Return the error for a Python worker that lacks a package or has another Python version, or None without one."""
    for pattern in _LACKS:
        if found := pattern.search(text):
            return ConfigurationError(
                f"the executors' Python lacks a package, or its version is not the driver's: {found[1].rstrip('.')}",
                remedy="pip install 'eos-kafka[spark]' and the packages that your functions import on the executors, "
                "in the driver's minor version of Python, or send an environment (docs/howto/spark.md)",
            )
    return None


def _send(spark: SparkSession, names: Iterable[str]) -> None:
    context = spark.sparkContext
    for name in sorted(set(names)):
        if (context.applicationId, name) not in _sent:
            context.addPyFile(str(_importable(name)))
            _sent.add((context.applicationId, name))


def _modules_of(app: App) -> Iterator[str]:
    """Yield the top-level names of the modules that hold the App's functions and are not installed."""
    for route in app.routes.values():
        name = str(getattr(underlying(route.function), "__module__", "__main__")).partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        # Objects of __main__ travel by value inside the query.
        if name != "__main__" and file is not None and name not in _OURS and not _is_installed(Path(file)):
            yield name


def _is_installed(file: Path) -> bool:
    places = (sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    return any(file.resolve().is_relative_to(Path(place).resolve()) for place in places)


def _importable(name: str) -> Path:
    """Return a file that makes this top-level module importable: the module itself, or an archive of the package."""
    file = Path(str(sys.modules[name].__file__ if name in sys.modules else _locate(name)))
    return file if file.name != "__init__.py" else _archive(file.parent)


def _locate(name: str) -> str:
    import importlib.util

    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is this package"
    assert spec.origin is not None, f"{name} is this package"
    return spec.origin


def _archive(package: Path) -> Path:
    archive = _directory() / f"{package.name}.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for source in sorted(package.rglob("*.py")):
            file.write(source, source.relative_to(package.parent))
    return archive


@functools.cache
def _directory() -> Path:
    """Return the folder for archives, from which Spark serves them as long as the driver lives."""
    directory = Path(tempfile.mkdtemp(prefix="eos-spark-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory
