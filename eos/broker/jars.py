"""Resolve the jars of one Kafka version (or of any Maven coordinates) and record where they are.

The module owns the Maven coordinates per version of Kafka, the file lock between resolving processes, and the record of
a finished resolve, so that later starts read one small file. It must never start Java or touch a broker's data. It uses
jgo's resolver instead of jgo's environments: those classify jars with a JDK that jgo downloads for this, and accept a
half-linked environment as valid.
"""

from __future__ import annotations

import fcntl
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from eos.errors import ConfigurationError, Unavailable

if TYPE_CHECKING:
    from jgo.maven import Artifact

DEFAULT_VERSION = "4.4.0"
KNOWN_VERSIONS = ("3.9.2", "4.0.2", "4.1.2", "4.2.1", "4.3.1", "4.4.0")
OLDEST_VERSION = (3, 9, 0)

# Kafka's published modules contain slf4j-api without a binding, and without one no broker error is logged.
# 4.x logs through log4j 2. 3.9 uses log4j 1, whose maintained fork is reload4j.
_BINDING_4 = "org.apache.logging.log4j:log4j-slf4j-impl:2.25.3"
_BINDING_3 = "org.slf4j:slf4j-reload4j:1.7.36"


class _Jar(msgspec.Struct, frozen=True):
    path: str
    size_bytes: int


class _ResolvedJars(msgspec.Struct, frozen=True):
    coordinates: list[str]
    jars: list[_Jar]


def parse_version(version: str) -> tuple[int, ...]:
    """Parse `"4.3.1"` to `(4, 3, 1)`. Raises ConfigurationError for an invalid version or one before 3.9."""
    parts = version.split(".")
    if len(parts) != 3 or not all(part.isdecimal() and part.isascii() for part in parts):
        raise ConfigurationError(f"{version!r} is not a Kafka version like {DEFAULT_VERSION}")
    numbers = tuple(int(part) for part in parts)
    if numbers < OLDEST_VERSION:
        raise ConfigurationError(f"Kafka {version} is not supported here: use 3.9 or later")
    return numbers


def coordinates(version: str) -> list[str]:
    """Return the Maven coordinates of a runnable broker of this version, including its logging binding."""
    # kafka-clients is listed although kafka_2.13 depends on it: otherwise log4j's dependency management would choose
    # an older one, and no broker starts with that.
    broker = [f"org.apache.kafka:kafka_2.13:{version}", f"org.apache.kafka:kafka-clients:{version}"]
    if parse_version(version)[0] < 4:
        return [*broker, _BINDING_3]
    return [*broker, f"org.apache.kafka:kafka-tools:{version}", _BINDING_4]


def kafka_jars(version: str = DEFAULT_VERSION, console: Console | None = None) -> list[Path]:
    """Return the jars of this Kafka version. The first use downloads 70 MB, with a progress bar on `console` (stderr).

    Raises Unavailable if they are not on this machine and cannot be downloaded, ConfigurationError for an unknown
    version.
    """
    wanted = coordinates(version)
    return maven_jars(version, wanted, f"Kafka {version}", f"Kafka {', '.join(KNOWN_VERSIONS)}", console=console)


def maven_jars(
    name: str,
    wanted: list[str],
    what: str,
    known_to_work: str,
    *,
    only: frozenset[str] | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Return the jars of these Maven coordinates and their dependencies, and record them under `name`.

    `only` limits them to these artifact ids. `what` and `known_to_work` are for the message of Unavailable.
    """
    record = _record_path(name)
    known = _read_record(record, wanted)
    if known is not None:
        return known
    record.parent.mkdir(parents=True, exist_ok=True)
    # All versions share one lock, because they share most files of the local repository, and the resolver overwrites
    # these files.
    with locked(record.parent / "lock"):
        known = _read_record(record, wanted)
        if known is not None:
            return known
        jars = _resolve(wanted, what, known_to_work, only, console or Console(stderr=True))
        _write_record(record, wanted, jars)
    return jars


def cache_directory() -> Path:
    return user_folder("XDG_CACHE_HOME", ".cache") / "eos" / "kafka-jars"


def user_folder(variable: str, below_home: str) -> Path:
    """Return the folder that the variable names, or the one in the user's home. Raises ConfigurationError."""
    if named := os.environ.get(variable):
        return Path(named)
    try:
        return Path.home() / below_home
    except RuntimeError as error:  # HOME is not set and /etc/passwd has no entry for the user
        raise ConfigurationError(f"this user has no home folder: set HOME or {variable}") from error


def _record_path(name: str) -> Path:
    return cache_directory() / f"{name}.json"


def _read_record(record: Path, wanted: list[str]) -> list[Path] | None:
    """Return the jars of the record, or None unless each of them still exists with its full size."""
    try:
        known = msgspec.json.decode(record.read_bytes(), type=_ResolvedJars)
        if known.coordinates != wanted or not known.jars:
            return None
        for jar in known.jars:
            if os.stat(jar.path).st_size != jar.size_bytes:
                return None
    except (OSError, msgspec.DecodeError):
        return None
    return [Path(jar.path) for jar in known.jars]


def _write_record(record: Path, wanted: list[str], jars: list[Path]) -> None:
    content = _ResolvedJars(wanted, [_Jar(str(jar), jar.stat().st_size) for jar in jars])
    part = record.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(content))
    part.replace(record)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let only one process at a time run the block."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _resolve(
    wanted: list[str], what: str, known_to_work: str, only: frozenset[str] | None, console: Console
) -> list[Path]:
    try:
        import requests
        from jgo.maven import MavenContext, PythonResolver
        from jgo.parse import Coordinate
    except ImportError:
        raise Unavailable(f"downloading the jars of {what} needs jgo: pip install 'eos-kafka[embedded]'") from None
    with _progress(what, console) as (progress, overall):
        context = MavenContext(resolver=PythonResolver(progress_callback=_file_bar(progress)), timeout=60)
        try:
            roots = [context.create_dependency(Coordinate.parse(text)) for text in wanted]
            inputs, transitive = context.resolver.resolve(roots)
            artifacts = [dependency.artifact for dependency in [*inputs, *transitive]]
            artifacts = [one for one in artifacts if only is None or one.artifactId in only]
            progress.update(overall, total=len(artifacts))
            jars = []
            for artifact in artifacts:
                jars.append(_download_jar(artifact))
                progress.advance(overall)
        except requests.exceptions.SSLError as error:
            raise Unavailable(
                f"the jars of {what} cannot be downloaded: the repository's certificate was rejected ({error})",
                remedy="behind a proxy that signs certificates, set REQUESTS_CA_BUNDLE to its CA",
            ) from error
        except (requests.RequestException, OSError) as error:
            raise Unavailable(
                f"the jars of {what} are not on this machine and cannot be downloaded without a network "
                f"({type(error).__name__})"
            ) from error
        except (RuntimeError, ValueError) as error:
            raise Unavailable(
                f"the jars of {what} cannot be resolved; known to work: {known_to_work} "
                f"({str(error).splitlines()[0][:160]})"
            ) from error
    return jars


def _download_jar(artifact: Artifact) -> Path:
    """Return this artifact's file, and download it again if an earlier download was incomplete."""
    jar = artifact.resolve()
    if not zipfile.is_zipfile(jar):
        # The resolver checks only that the file exists. A zip's directory is at its end, so an incomplete file is not a
        # valid zip.
        jar.unlink()
        jar = artifact.resolve()
        if not zipfile.is_zipfile(jar):
            raise ValueError(f"{jar.name} is not a jar")
    return jar


@contextmanager
def _progress(what: str, console: Console) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(f"downloading the jars of {what}", total=None)


def _file_bar(progress: Progress) -> Callable[[str, int], AbstractContextManager[Callable[[int], Any]]]:
    @contextmanager
    def bar(filename: str, total_bytes: int) -> Iterator[Callable[[int], Any]]:
        task = progress.add_task(f"  {filename}", total=total_bytes)
        try:
            yield lambda count_bytes: progress.advance(task, count_bytes)
        finally:
            progress.remove_task(task)

    return bar
