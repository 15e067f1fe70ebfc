"""Send rows while workers are suspended, databases die or are restored, and positions disappear."""

from __future__ import annotations

import re
import shutil
import signal
import sys

import psutil
import pytest

from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import Settings
from tests.support.outbox import TABLE, Outbox
from tests.support.reading import wait_until

pytestmark = pytest.mark.takes(30)


FAILING = """
import sys
from eos import cli
from eos.errors import Action, CallFailed
from eos.session.producer.producer import TransactionalProducer
commit, calls = TransactionalProducer.commit, []
def failing(self, *arguments):
    calls.append(1)
    if len(calls) not in (2, 6):
        commit(self, *arguments)
    if len(calls) in (2, 4, 6):
        raise CallFailed("commit", Action.ABORT if len(calls) == 2 else Action.REBUILD, TimeoutError())
TransactionalProducer.commit = failing
sys.exit(cli.invoke(sys.argv[1:]))
"""


@pytest.mark.deep_for("two-0")
@pytest.mark.parametrize(("successor", "code"), [("one", 79), ("two", 0)])
def test_suspended_worker_sends_nothing_after_a_takeover(outbox: Outbox, successor: str, code: int) -> None:
    """A worker of the same name has fenced it. Otherwise the group refuses its transaction, and it stands by."""
    outbox.insert(200)
    program = outbox.folder / "suspended.py"
    program.write_text(
        "import os, signal, sys\nfrom eos import cli\nfrom eos.session.producer.producer import TransactionalProducer\n"
        "send_offsets, calls = TransactionalProducer.send_offsets, []\n"
        "def suspended(self, *arguments):\n"
        "    calls.extend([1] if self._produced_count else [])  # a transaction without rows needs no fencing\n"
        "    if len(calls) == 3:\n        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    return send_offsets(self, *arguments)\n"
        "TransactionalProducer.send_offsets = suspended\nsys.exit(cli.invoke(sys.argv[1:]))\n"
    )
    short = ("-X", "session.timeout.ms=6000", "-X", "transaction.timeout.ms=6000")
    command = [sys.executable, str(program), *outbox.command("--until-end", *short)[1:]]
    with outbox.log_path.open("wb") as log:
        zombie = psutil.Popen(command, cwd=outbox.folder, env=outbox.environment, stderr=log)
    try:
        wait_until("the suspension", lambda: zombie.status() == psutil.STATUS_STOPPED, 60)
        outbox.run("--instance", successor, *short)
        outbox.require_exact()
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(60) == code, outbox.log
    finally:
        if zombie.is_running():
            zombie.kill()
    outbox.require_exact()


def test_failed_commits_of_a_worker_are_settled(outbox: Outbox) -> None:
    """A refused commit, one without an answer that took effect, and one that did not."""
    outbox.insert(300)
    printed = outbox.run(program=("-c", FAILING))
    assert printed.count("transaction aborted") == 1
    assert re.findall(r"outcome=(\w+)", printed)[0] == "committed"
    assert len(re.findall(r"outcome=(\w+)", printed)) == 2
    outbox.require_exact()


def test_worker_waits_for_a_killed_database(outbox: Outbox) -> None:
    server = outbox.server
    outbox.insert(300)
    with outbox.start() as worker:
        outbox.wait_for_records(50)
        server.kill()
        outbox.wait_for_log("database away, waiting")
        server.start()
        outbox.insert(100)
        outbox.wait_for_records(400)
        outbox.stop(worker)
    assert "database back" in outbox.log
    outbox.require_exact()
    with outbox.start("-X", "eos.database.timeout.ms=1000") as worker:
        outbox.wait_for_log("table assigned", 2)
        server.kill()
        assert worker.wait(60) == 75, outbox.log
    assert "the database has been away for" in outbox.log
    outbox.run(ends=69)
    server.start()


def test_restored_backup_and_other_database_are_refused(outbox: Outbox) -> None:
    server = outbox.server
    outbox.insert(10)
    outbox.run()
    server.stop()
    backup = server.directory / "backup"
    shutil.copytree(server.directory / "data", backup)
    for folder in (backup, *backup.rglob("*")):
        shutil.chown(folder, (server.directory / "data").owner(), (server.directory / "data").group())
    server.start()
    outbox.insert(10)
    outbox.run()
    outbox.require_exact()
    server.stop()
    shutil.rmtree(server.directory / "data")
    backup.rename(server.directory / "data")
    server.start()
    outbox.define(options=", delete=True")
    printed = outbox.run(ends=66)
    assert "was restored from a backup" in printed
    assert outbox.execute("select count(*) from outbox") == [(10,)], "rows of a wrong database were deleted"
    outbox.execute("delete from outbox")
    (remedy,) = re.findall(r"`eos (reset) MODULE:APP (--topic \S+ --from earliest)`", printed)
    with ClusterAdmin(Settings({"bootstrap.servers": outbox.servers})) as admin:
        admin.remove_member(outbox.id, f"{outbox.id}-one")  # as its session.timeout.ms does
    assert "1 set before the first row" in outbox.eos(
        remedy[0],
        "outbox:app",
        *remedy[1].split(),
        "--yes",
    )
    outbox.insert(5)
    outbox.run()
    with server.connect() as admin:
        admin.execute('create database "other"')
    with server.connect("other") as other:
        other.execute(TABLE)
    outbox.define(database="other")
    assert "belongs to the database" in outbox.run(ends=66)
