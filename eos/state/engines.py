"""Provides the engines that keep values in a folder: LMDB, and RocksDB for state that does not fit in memory.

An engine has two tables of bytes: values and notes. One write changes both tables atomically and survives a killed
process; neither engine syncs on a write. LMDB reads a cached value in a microsecond, but a transaction writes one page
for each value that it changed, at random places of the file. RocksDB writes all values sequentially and sorts them
later.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, cast

import lmdb

from eos import log
from eos.errors import ConfigurationError
from eos.state.values import Value

_MAX_BYTES = 1 << 36  # the largest size of one folder: 64 GiB; disk space is taken only as values are written


class EngineFailed(Exception):
    """Reports an engine that cannot be opened, read or written, with the reason."""


class Engine(Protocol):
    """Stores the values and notes of one task in a folder."""

    folder: str
    """The name of the engine's folder inside a task's folder."""
    files: int
    """The number of files that the engine usually has open."""

    def __init__(self, path: Path, memory_bytes: int) -> None:
        """Open the engine's folder. Raise EngineFailed if it cannot be read."""

    @property
    def size_bytes(self) -> int:
        """Return the size on disk in bytes; 0 if the folder was deleted."""

    def __len__(self) -> int:
        """Return the number of values; RocksDB returns an estimate."""

    def get(self, name: bytes) -> bytes | None: ...

    def get_all(self, names: list[bytes]) -> Mapping[bytes, bytes]:
        """Return the values that exist, by name."""

    def get_note(self, name: bytes) -> bytes | None: ...

    def scan(self, low: bytes, high: bytes, back: bool) -> Iterator[tuple[bytes, bytes]]:
        """Yield the values from `low` (included) to `high` (excluded) in the order of their names.

        The iterator is valid until the next `write`.
        """

    def scan_notes(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the notes from `low` (included) to `high` (excluded) in the order of their names, as `scan` does."""

    def write(self, values: Mapping[bytes, Value], notes: Mapping[bytes, Value]) -> None:
        """Write all changes atomically. Raise EngineFailed."""

    def clear(self) -> None:
        """Delete all values and notes. Raise EngineFailed."""

    def sync(self) -> None:
        """Write everything to the disk. Raise EngineFailed."""

    def close(self) -> None: ...


class Lmdb:
    folder, files = "values", 2
    get: Callable[[bytes], bytes | None]

    def __init__(self, path: Path, memory_bytes: int) -> None:
        options: dict[str, Any] = {"map_size": _MAX_BYTES, "max_dbs": 2, "sync": False, "metasync": False}
        options |= {"readahead": False, "max_spare_txns": 1}
        try:
            self._environment = lmdb.open(str(path), **options)
            self._values = self._environment.open_db(b"values")
            self._notes = self._environment.open_db(b"notes")
        except lmdb.Error as error:
            raise EngineFailed(str(error)) from error
        self._file = path / "data.mdb"
        self._begin_reading()

    def _begin_reading(self) -> None:
        self._reader = self._environment.begin(self._values)
        self.get = self._reader.get  # calls LMDB directly, without a method of this class in between

    @property
    def size_bytes(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            return self._file.stat().st_blocks * 512
        return 0

    def __len__(self) -> int:
        return int(self._reader.stat(self._values)["entries"])

    def get_all(self, names: list[bytes]) -> Mapping[bytes, bytes]:
        return dict(self._reader.cursor().getmulti(names))

    def get_note(self, name: bytes) -> bytes | None:
        return self._reader.get(name, db=self._notes)

    def scan(self, low: bytes, high: bytes, back: bool) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._reader.cursor()
        if back:
            found = cursor.prev() if cursor.set_range(high) else cursor.last()
            while found and (name := cursor.key()) >= low:
                yield name, cursor.value()
                found = cursor.prev()
        else:
            found = cursor.set_range(low)
            while found and (name := cursor.key()) < high:
                yield name, cursor.value()
                found = cursor.next()

    def scan_notes(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        cursor = self._reader.cursor(self._notes)
        found = cursor.set_range(low)
        while found and (name := cursor.key()) < high:
            yield name, cursor.value()
            found = cursor.next()

    def write(self, values: Mapping[bytes, Value], notes: Mapping[bytes, Value]) -> None:
        with self._writing() as writing:
            for table, changes in ((self._values, values), (self._notes, notes)):
                deleted = [name for name, value in changes.items() if value is None]
                for name in deleted:
                    writing.delete(name, db=table)
                kept = changes.items() if not deleted else ((n, v) for n, v in changes.items() if v is not None)
                writing.cursor(table).putmulti(kept)

    def clear(self) -> None:
        with self._writing() as writing:
            writing.drop(self._values, delete=False)
            writing.drop(self._notes, delete=False)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        try:
            with self._environment.begin(write=True) as writing:
                yield writing
        except (lmdb.Error, OSError) as error:
            raise EngineFailed(str(error)) from error
        self._reader.abort()
        self._begin_reading()

    def sync(self) -> None:
        try:
            self._environment.sync(True)
        except lmdb.Error as error:
            raise EngineFailed(str(error)) from error

    def close(self) -> None:
        self._reader.abort()
        self._environment.close()


# RocksDB has one table for both. No value's name begins with this byte (eos/app/cells.py, folders.py).
_NOTE = b"\xfe"
# RocksDB soon compacts a file in which _NEIGHBOURS adjacent entries include _DELETED deleted ones. Until then a scan
# walks over the deleted entries.
_NEIGHBOURS, _DELETED = 1_000, 500


class RocksDb:
    folder, files = "rocksdb", 6

    def __init__(self, path: Path, memory_bytes: int) -> None:
        from rocksdict import Rdict, ReadOptions, WriteBatch

        self._path, self._batch = path, functools.partial(WriteBatch, raw_mode=True)
        self._read_options = ReadOptions
        try:
            self._db = Rdict(str(path), _options(memory_bytes))
        except Exception as error:  # RocksDB's errors have no class of their own
            raise EngineFailed(str(error)) from error

    @property
    def size_bytes(self) -> int:
        found = 0
        with contextlib.suppress(FileNotFoundError):
            for file in self._path.iterdir():
                with contextlib.suppress(FileNotFoundError):  # compaction deletes files at the same time
                    found += file.stat().st_blocks * 512
        return found

    def __len__(self) -> int:
        return int(self._db.property_int_value("rocksdb.estimate-num-keys") or 0)

    def get(self, name: bytes) -> bytes | None:
        found: bytes | None = self._db.get(name)
        return found

    def get_all(self, names: list[bytes]) -> Mapping[bytes, bytes]:
        found: Any = self._db.get(cast("list[Any]", names))
        return {name: value for name, value in zip(names, found, strict=True) if value is not None}

    def get_note(self, name: bytes) -> bytes | None:
        return self.get(_NOTE + name)

    def scan(self, low: bytes, high: bytes, back: bool) -> Iterator[tuple[bytes, bytes]]:
        # Without a bound, RocksDB walks over all deleted values up to the next live one, even in other rows. rocksdict
        # 0.3.29 points to the bytes of the bound, so `high` must outlive the iterator. Its set_iterate_lower_bound sets
        # the upper bound, so a backward scan finds the first value beforehand and stops there.
        options = self._read_options()
        options.set_iterate_upper_bound(high)
        iterator = self._db.iter(options)
        iterator.seek(low)
        first = iterator.key()
        if back and iterator.valid():
            iterator.seek_for_prev(high)
        while iterator.valid():
            name = iterator.key()
            yield name, iterator.value()
            if not back:
                iterator.next()
            elif name == first:
                break
            else:
                iterator.prev()
        iterator.status()  # raises the error that ended the scan, if there is one

    def scan_notes(self, low: bytes, high: bytes) -> Iterator[tuple[bytes, bytes]]:
        return ((name[1:], value) for name, value in self.scan(_NOTE + low, _NOTE + high, back=False))

    def write(self, values: Mapping[bytes, Value], notes: Mapping[bytes, Value]) -> None:
        with self._writing() as batch:
            for begin, changes in ((b"", values), (_NOTE, notes)):
                for name, value in changes.items():
                    if value is None:
                        batch.delete(begin + name)
                    else:
                        batch.put(begin + name, value)

    def clear(self) -> None:
        with self._writing() as batch:
            batch.delete_range(b"", b"\xff" * 40)

    @contextmanager
    def _writing(self) -> Iterator[Any]:
        batch = self._batch()
        yield batch
        try:
            self._db.write(batch)
        except Exception as error:
            raise EngineFailed(str(error)) from error

    def sync(self) -> None:
        try:
            self._db.flush(wait=True)
        except Exception as error:
            raise EngineFailed(str(error)) from error

    def close(self) -> None:
        try:
            self._db.close()
        except Exception as error:  # noqa: BLE001 - RocksDB's errors have no class of their own
            # RocksDB recovers these values from its log.
            log.debug("state folder not flushed", folder=self._path, error=str(error))


@functools.cache
def _options(memory_bytes: int) -> Any:
    """Return options with one cache and one buffer budget for all folders of the process.

    With separate caches and buffers, the memory of the process would grow with the number of its partitions.
    """
    from rocksdict import BlockBasedOptions, Cache, Options, WriteBufferManager

    options, table, cache = Options(raw_mode=True), BlockBasedOptions(), Cache(memory_bytes)
    table.set_block_cache(cache)
    table.set_cache_index_and_filter_blocks(True)
    table.set_bloom_filter(10, False)
    options.set_block_based_table_factory(table)
    # The memory of the buffers counts towards the cache.
    options.set_write_buffer_manager(
        WriteBufferManager.new_write_buffer_manager_with_cache(memory_bytes // 2, False, cache)
    )
    options.add_compact_on_deletion_collector_factory(_NEIGHBOURS, _DELETED, 0.5)
    options.increase_parallelism(2)
    options.set_keep_log_file_num(2)
    return options


ENGINES: Final[Mapping[str, type[Lmdb] | type[RocksDb]]] = {"lmdb": Lmdb, "rocksdb": RocksDb}


def check_engine(name: str) -> None:
    """Raise ConfigurationError if the engine is not installed."""
    if name == "rocksdb":
        try:
            import rocksdict  # noqa: F401
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                "eos.state.engine=rocksdb needs rocksdict", remedy="pip install 'eos-kafka[rocksdb]'"
            ) from error
