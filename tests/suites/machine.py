"""List what this machine lacks and which tests are skipped for it, one line each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from eos.broker.java import find_java
from eos.errors import Unavailable
from spark_connector.session import spark_java
from tests.support import chromium, mariadb, pgbouncer, postgres


def lacks() -> Iterator[str]:
    if not any(shutil.which(compiler) for compiler in ("cc", "gcc", "clang")):
        yield "a C compiler: the compiled loop is not built, its tests are left out"
    for java in (find_java, spark_java):
        try:
            java()
        except Unavailable as error:
            yield str(error)
    if not shutil.which("docker"):
        yield "a container engine: clusters are local JVMs; cuts and compose are left out (as root: make engine)"
    if chromium.PROGRAM is None:
        yield "Chromium: the page of --http-port is not looked at (apt-get install chromium)"
    if mariadb.PROGRAM is None:
        yield "MariaDB: no rows are written into it (apt-get install mariadb-server)"
    if pgbouncer.PROGRAM is None:
        yield "pgbouncer: no rows are written through it (apt-get install pgbouncer)"
    if postgres.DEBIAN_PROGRAMS is None:
        yield "PostgreSQL with TLS: no rows are written through TLS (apt-get install postgresql)"
    if not shutil.which("kcat"):
        yield "kcat: the shim is not shown to it (apt-get install kcat)"
