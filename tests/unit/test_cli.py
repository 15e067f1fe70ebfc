"""The command line without Kafka: messages and exit codes for user errors."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import libversion

import eos
from eos import cli, log
from eos.cli import COMMANDS
from eos.cli.run import suggest_remedy
from eos.errors import PoisonRecord
from eos.worker.loading import load_app
from tests.support.forked import environment
from tests.support.forked import eos as program

pytestmark = pytest.mark.takes(122)

ROOT = Path(eos.__file__).resolve().parents[1]
APP = """
from eos import App

app = App("an-app")
number = 7

@app.process("a", to="b")
def copy(value: bytes) -> bytes:
    return value
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a user's directory with a valid App in good.py."""
    (tmp_path / "good.py").write_text(APP)
    return tmp_path


def started(here: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new process, in which nothing is imported yet."""
    command = [sys.executable, "-m", "eos", *arguments]
    variables = environment({"PYTHONPATH": str(ROOT)} | more)
    return subprocess.run(command, cwd=here, env=variables, capture_output=True, text=True, timeout=60, check=False)


def refused(code: int, here: Path, *arguments: str, **environment: str) -> str:
    """Return stderr, which must have no traceback, and check that stdout is empty."""
    ended = program(here, *arguments, **environment)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert "internal error" not in ended.stderr
    return ended.stderr


# ---- usage: 64 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pure_python", ["0", "1"])
def test_version_option_prints_all_versions(here: Path, pure_python: str) -> None:
    ended = started(here, "--version", EOS_PURE_PYTHON=pure_python)
    assert (ended.returncode, ended.stderr) == (0, "")
    for name in ("eos-kafka", "confluent-kafka", "kafka-python"):
        assert f"{name} {metadata.version(name)}" in ended.stdout
    compiled = pure_python == "0" and find_spec("eos.hotloop._native") is not None
    assert f"librdkafka {libversion()[0]}, hot loop {'compiled' if compiled else 'in Python'}" in ended.stdout


def test_missing_command_shows_help_and_exits_with_usage_error(here: Path) -> None:
    ended = program(here)
    assert ended.returncode == 64
    assert "Usage:" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


TOPOLOGY = """App shop
  by_town
    reads   sales
    writes  by-town
    failed  sales.dlq
  total
    reads   by-town
    writes  -
    state   sold: State[int], days: MapState[str, int], by key, in shop-total-changelog
"""
FLOWCHART = """flowchart LR
  n0("by_town")
  n1["sales"]
  n1 --> n0
  n2["by-town"]
  n0 --> n2
  n3["sales.dlq"]
  n0 -. failed records .-> n3
  n4("total")
  n2 --> n4
  n5[("shop-total-changelog")]
  n4 <--> n5
"""


def test_topology_needs_no_cluster(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "shop.py").write_text(
        "import eos\nfrom eos import MapState, State\napp = eos.App('shop')\n"
        "@app.process('sales', to='by-town', on_error=eos.dlq)\ndef by_town(value: str) -> str: ...\n"
        "@app.process('by-town')\ndef total(value: str, sold: State[int], days: MapState[str, int]) -> None: ...\n"
    )
    assert cli.invoke(["topology", str(here / "shop.py:app")]) == 0
    assert capsys.readouterr().out == TOPOLOGY
    assert cli.invoke(["topology", str(here / "shop.py:app"), "--mermaid"]) == 0
    assert capsys.readouterr().out == FLOWCHART


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nope",), "No such command 'nope'"),
        (("run",), "Missing argument 'MODULE:APP'"),
        (("run", "good:app", "--nope"), "No such option: --nope"),
        (("run", "good:app", "--instance"), "--instance"),
    ],
    ids=["unknown command", "missing argument", "unknown option", "option without its value"],
)
def test_error_names_the_invalid_part_of_a_command_line(here: Path, arguments: tuple[str, ...], named: str) -> None:
    assert named in refused(64, here, *arguments)


NOT_SET = "cannot be set for `eos run`: it is the App's id (and its instance)\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("broker", "start", "--nodes", "2"), "--nodes 2: must be 1 or 3"),
        (("broker", "start", "--config", "x"), "--config x: expected NAME=VALUE"),
        (("reset", "good:app"), "--from is missing: expected earliest, latest, a time such as"),
        (("reset", "good:app", "--from", "never"), "--from never: expected earliest, latest, a time such as"),
        (("reset", "--group", "g", "--from", "earliest"), "--group needs --topic"),
        (("txn", "abort", "--topic", "t"), "eos txn abort needs either --transactional-id, or --topic and --partition"),
        (("doctor", "good:number"), "number in good is a int, not an App"),
        (("config", "nosuch"), "there is no module nosuch"),
        (("run", "good:app", "--log-format", "xml"), "--log-format xml: must be one of human, json\n"),
        (("run", "good:app", "--log-level", "loud"), "--log-level loud: must be one of debug, info, warning, error\n"),
        (("run", "good:app", "--http-port", "soon"), "--http-port soon: expected PORT or HOST:PORT\n"),
        (("run", "good:app", "--workers", "0"), "--workers 0: must be at least 1\n"),
        (("run", "good:app", "-X", "group.id=mine"), f"group.id {NOT_SET}"),
        (("run", "good:app", "-X", "transactional.id=mine"), f"transactional.id {NOT_SET}"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else None,
)
def test_wrong_option_is_reported_in_one_sentence(here: Path, arguments: tuple[str, ...], sentence: str) -> None:
    said = refused(64, here, *arguments)
    assert said.startswith(f"eos: {sentence}")
    assert said.count("\n") == 1


def test_unusable_http_port_is_a_configuration_error(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        sentence = refused(78, here, "run", "good:app", "--workers", "2", "--instance", "i", "--http-port", address)
    assert sentence == f"eos: --http-port {address}: Address already in use\n"


def test_supervisor_ends_with_code_of_its_first_worker(here: Path) -> None:
    ended = program(here, "run", "good:nope", "--workers", "2", "--instance", "w")
    assert ended.returncode == 64
    assert re.search(r"^w-[01] \| eos: nope in good is missing; say good:app$", ended.stderr, re.MULTILINE), (
        ended.stderr
    )


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_stop_while_app_is_loading_exits_with_0(here: Path, number: str) -> None:
    (here / "slow.py").write_text(f"import os, signal, time\nos.kill(os.getpid(), signal.{number})\ntime.sleep(50)\n")
    assert f"worker stopped before start signal={number}\n" in refused(0, here, "run", "slow:app", "--instance", "i")


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (69, ("good:app", "--bootstrap-servers", "127.0.0.1:1", "-X", "eos.startup.timeout.ms=1000")),
        (64, ("good:nope", "--workers", "2")),
    ],
    ids=["one", "supervised"],
)
def test_container_without_instance_logs_one_warning(here: Path, code: int, arguments: tuple[str, ...]) -> None:
    said = refused(code, here, "run", *arguments, KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert said.count("host names of containers are random") == 1
    said = refused(code, here, "run", *arguments, "--instance", "i", KUBERNETES_SERVICE_HOST="10.0.0.1")
    assert "host names" not in said


# ---- settings: 78 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("linger.ms", "expected name=value"),
        ("linger.msec=3", "did you mean linger.ms?"),
        ("acks=1", "a record that only the leader has stored is lost with the leader"),
        ("isolation.level=read_uncommitted", "would copy aborted ones"),
        ("eos.transaction.interval.ms=soon", "is not a number"),
        ("message.timeout.ms=60000", "after the broker ended its transaction"),
    ],
)
def test_wrong_setting_is_a_configuration_error(here: Path, flag: str, reason: str) -> None:
    sentence = refused(78, here, "run", "good:app", "-X", flag)
    assert reason in sentence
    assert sentence.count("\n") == 1


def test_value_rejected_by_librdkafka_is_a_configuration_error(here: Path) -> None:
    stderr = refused(78, here, "run", "good:app", "--instance", "i", "-X", "fetch.min.bytes=many")
    assert "eos: the consumer's settings were refused: " in stderr
    assert "fetch.min.bytes" in stderr


def test_wrong_setting_in_eos_toml_is_a_configuration_error(here: Path) -> None:
    (here / "eos.toml").write_text("linger.ms 20")
    assert refused(78, here, "run", "good:app").startswith("eos: eos.toml cannot be read: ")


def test_wrong_setting_in_environment_is_a_configuration_error(here: Path) -> None:
    sentence = refused(78, here, "run", "good:app", EOS_STATE_ENGINE="paper")
    assert sentence == "eos: eos.state.engine=paper must be one of lmdb, rocksdb\n"


# ---- the App -----------------------------------------------------------------------------------------------


# Users' modules next to good.py, each with one error.
OTHERS = {
    "two.py": 'from eos import App\nbilling = App("b")\nshipping = App("s")\n',
    "none.py": "number = 7\n",
    "needs.py": "import not_installed_anywhere\n",
    "wrong.py": 'from eos import App\napp = App("no spaces!")\n',
    "empty.py": 'from eos import App\napp = App("empty")\n',
}


@pytest.mark.parametrize(
    ("code", "target", "sentence"),
    [
        (64, "nosuch:app", "there is no module nosuch (looked in {here} and the Python path)\n"),
        (64, "package.nosuch:app", "there is no module package.nosuch "),
        (64, "apps/none.py:app", "apps/none.py does not exist\n"),
        (64, "good:number", "number in good is a int, not an App; say good:app\n"),
        (64, "good:copy", "copy in good is a function, not an App; say good:app\n"),
        (64, "good:nope", "nope in good is missing; say good:app\n"),
        (64, "two", "app in two is missing; say two:billing or two:shipping\n"),
        (64, "./two.py", "app in two is missing; say ./two.py:billing or ./two.py:shipping\n"),
        (64, "none", "app in none is missing and it has no App\n"),
        (64, "needs", "needs needs the module not_installed_anywhere, which is not installed\n"),
        (78, "wrong", "the id of an App must be "),
        (78, "empty", "the App 'empty' has no function"),
    ],
)
def test_target_that_is_not_an_app_is_explained(here: Path, code: int, target: str, sentence: str) -> None:
    (here / "package").mkdir()  # without nosuch
    for name, text in OTHERS.items():
        (here / name).write_text(text)
    said = refused(code, here, "run", target, "--instance", "i")
    assert said.startswith(f"eos: {sentence.format(here=here)}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("target", [":app", ".good:app", ""])
def test_error_for_target_without_module_shows_an_example(here: Path, target: str) -> None:
    assert "names no module: expected e.g. flights:app" in refused(64, here, "run", target)


def users_failure(here: Path, *arguments: str) -> str:
    """An exception of user code gives 64 and shows only frames of user code."""
    ended = program(here, *arguments)
    assert ended.returncode == 64, ended.stderr
    assert "internal error" not in ended.stderr
    assert str(ROOT) not in ended.stderr
    assert "importlib" not in ended.stderr
    return ended.stderr


def test_import_error_shows_frames_of_user_code_only(here: Path) -> None:
    (here / "helper.py").write_text('def fail():\n    raise ValueError("boom")\n')
    (here / "bad.py").write_text("import helper\nhelper.fail()\n")
    assert users_failure(here, "run", "bad:app") == (
        "Traceback (most recent call last):\n"
        f'  File "{here}/bad.py", line 2, in <module>\n    helper.fail()\n'
        f'  File "{here}/helper.py", line 2, in fail\n    raise ValueError("boom")\n'
        "ValueError: boom\n"
        "eos: bad could not be imported: ValueError: boom\n"
    )


def test_syntax_error_shows_its_line(here: Path) -> None:
    (here / "syntax.py").write_text("\ndef f(:\n")
    stderr = users_failure(here, "run", "syntax.py:app")
    assert f'File "{here}/syntax.py", line 2' in stderr
    assert "eos: syntax could not be imported: SyntaxError: " in stderr


def test_failed_import_of_a_name_is_an_error_of_user_code(here: Path) -> None:
    (here / "importing.py").write_text("from good import nope\n")
    assert "eos: importing could not be imported: ImportError: " in users_failure(here, "run", "importing")


# ---- for machines --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["one", "supervised"])
def test_json_log_format_applies_to_every_line(here: Path, workers: tuple[str, ...]) -> None:
    (here / "bad.py").write_text('raise ValueError("boom")\n')
    ended = program(here, "run", "bad:app", "--instance", "w", "--log-format", "json", *workers)
    assert ended.returncode == 64, ended.stderr
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    last = next(line for line in lines if line["event"] == "command failed")
    assert (last["error"], last["exit_code"]) == ("bad could not be imported: ValueError: boom", 64)
    assert last["traceback"].endswith('    raise ValueError("boom")\nValueError: boom\n')
    assert last.get("worker") in ({"w-0", "w-1"} if workers else {None})


@pytest.mark.parametrize(
    "configures",
    [
        'logging.config.dictConfig({"version": 1, "root": {"level": "INFO"}})',  # disables all existing loggers
        "logging.disable(logging.CRITICAL)",
    ],
)
def test_failure_is_logged_even_if_the_app_configures_logging(here: Path, configures: str) -> None:
    (here / "own.py").write_text(f"import logging, logging.config\n{configures}\n{APP}")
    arguments = "--bootstrap-servers", "127.0.0.1:1", "-X", "eos.startup.timeout.ms=1000", "--log-format", "json"
    ended = program(here, "run", "own:app", "--instance", "w", *arguments)
    assert ended.returncode == 69, ended.stderr
    assert json.loads(ended.stderr.splitlines()[-1])["exit_code"] == 69


@pytest.mark.parametrize(("target", "taken"), [("kafka:app", "site-packages/kafka/"), ("queue.py:app", "/queue.py")])
def test_error_for_module_named_like_a_library_names_both_files(here: Path, target: str, taken: str) -> None:
    file = target.split(":")[0].removesuffix(".py") + ".py"
    (here / file).write_text(APP)
    said = refused(64, here, "run", target)
    assert said.startswith(f"eos: {file} is not loaded, because another module is named {file.removesuffix('.py')} (")
    assert taken in said
    assert said.endswith("): rename it\n")


def test_loggers_disabled_by_an_app_are_enabled_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "disables.py").write_text(f"import logging\nlogging.getLogger('eos').disabled = True\n{APP}")
    load_app("disables:app")
    assert not log.logger.disabled


def test_supervised_workers_ignore_files_named_like_stdlib(here: Path) -> None:
    for name in ("queue", "types", "logging", "kafka"):
        (here / f"{name}.py").write_text("raise RuntimeError('not the one that was meant')\n")
    arguments = "--bootstrap-servers", "127.0.0.1:1", "-X", "eos.startup.timeout.ms=1000"
    assert "cannot be reached" in refused(69, here, "run", "good:app", "--workers", "2", "--instance", "w", *arguments)


def test_output_is_escaped_for_the_terminal_encoding(here: Path) -> None:
    (here / "good.py").write_text(APP.replace("def copy", "def größe"))
    ended = started(here, "topology", "good:app", PYTHONIOENCODING="ascii")
    assert (ended.returncode, "gr\\xf6\\xdfe" in ended.stdout) == (0, True), ended.stderr


@pytest.mark.parametrize(("closed", "code"), [(">&-", 0), (">&- 2>&-", 0), ("nope >&- 2>&-", 64)])
def test_closed_output_is_not_an_error(here: Path, closed: str, code: int) -> None:
    command = ["sh", "-c", f'exec "$0" -m eos topology good:app {closed}', sys.executable]
    ended = subprocess.run(command, cwd=here, env=environment({"PYTHONPATH": str(ROOT)}), timeout=60, check=False)
    assert ended.returncode == code


# ---- the cluster: 69 ---------------------------------------------------------------------------------------


def test_valid_app_fails_only_at_an_unreachable_cluster(here: Path) -> None:
    arguments = ("--bootstrap-servers", "127.0.0.1:1", "--instance", "i", "-X", "eos.startup.timeout.ms=1000")
    stderr = refused(69, here, "run", "good:app", *arguments)
    assert stderr.startswith("eos: 127.0.0.1:1 cannot be reached: ")
    assert ": check bootstrap.servers, security.protocol, and that a broker listens there" in stderr
    assert stderr.endswith("; `eos broker start` starts one here\n")


def test_verify_names_an_unreachable_cluster_at_once(here: Path) -> None:
    examined = ("--input", "a", "--output", "b", "--group", "g")
    soon = ("--bootstrap-servers", "127.0.0.1:1", "-X", "eos.startup.timeout.ms=1000")
    for named in (examined, ("good:app",)):
        assert refused(69, here, "verify", *named, *soon).startswith("eos: 127.0.0.1:1 cannot be reached: ")


@pytest.mark.parametrize("named", [(), ("--input", "a", "--group", "g"), ("good:app", "--output", "b")])
def test_verify_takes_an_app_or_else_topics_and_a_group(here: Path, named: tuple[str, ...]) -> None:
    assert "needs either MODULE:APP, or --input, --output and --group" in refused(64, here, "verify", *named)


# ---- imports -------------------------------------------------------------------------------------------------


def loaded_by(here: Path, *arguments: str) -> set[str]:
    """Return the modules imported by a command until its end."""
    code = "import sys, eos.cli; eos.cli.invoke(sys.argv[1:]); print(*sorted(sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(ended.stdout.split())


WORKER = ("run", "good", "--bootstrap-servers", "127.0.0.1:1", "--instance", "i", "-X", "eos.startup.timeout.ms=1000")


def test_worker_imports_only_needed_modules(
    here: Path,
) -> None:
    """Outputs wait for a worker's imports at every restart."""
    loaded = loaded_by(here, *WORKER)
    assert {"eos.cli.run", "eos.worker.worker", "good", "kafka.admin", "confluent_kafka.admin"} <= loaded
    others = [name for name in loaded if name.startswith(("eos.shim", "eos.broker", "eos.demo", "eos.cli.spark"))]
    assert others == []
    heavy = {"rich", "http.server", "urllib.request", "eos.cli.live", "eos.health.server", "eos.testing", "numpy"}
    heavy |= {"kafka.consumer", "kafka.producer"}
    assert heavy & loaded == set()
    assert {"http.server", "eos.health.server", "eos.probes"} <= loaded_by(here, *WORKER, "--http-port", "0")


def test_garbage_collection_is_on_when_app_is_imported(
    here: Path,
) -> None:
    (here / "good.py").write_text(f"import gc\nprint(gc.isenabled(), gc.get_freeze_count() > 10_000)\n{APP}")
    assert started(here, *WORKER).stdout == "True True\n"


def test_version_option_imports_no_command(here: Path) -> None:
    loaded = loaded_by(here, "--version")
    assert "eos.cli" in loaded
    assert [name for name in loaded if name.startswith(("eos.cli.", "kafka.", "rich."))] == []


def leaves(command: Any, *names: str) -> list[tuple[str, ...]]:
    below = getattr(command, "commands", {})
    return [leaf for name, one in below.items() for leaf in leaves(one, *names, name)] if below else [names]


def test_help_shows_no_value_for_flags(capsys: pytest.CaptureFixture[str]) -> None:
    commands = leaves(cli.build_program([]))
    assert len(commands) > 15
    for command in [(), *commands]:
        assert cli.invoke([*command, "--help"]) == 0
        output = capsys.readouterr().out
        assert "--help" in output
        assert "bool" not in output.lower(), f"{command}: {output}"


def test_shell_completes_commands_and_options(here: Path) -> None:
    for words, completed in (("eos topo", ["topology"]), ("eos run --until", ["--until-end"])):
        asked = {"_EOS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        completion = subprocess.run(
            [Path(sys.executable).with_name("eos")],
            env=os.environ | asked,
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
        )
        assert completion.stdout.split() == completed, completion.stderr


def test_help_shows_every_command(here: Path) -> None:
    whole = program(here, "--help")
    assert (whole.returncode, whole.stderr) == (0, "")
    assert "Exactly-once" in whole.stdout
    for name in COMMANDS:
        assert re.search(rf"^\W*{name} ", whole.stdout, re.MULTILINE), name
    alone = program(here, "run", "--help")
    assert alone.returncode == 0, alone.stderr
    options = "--instance --bootstrap-servers --until-end --workers --reload --http-port -X --log-format --log-level"
    for shown in ("run [OPTIONS] ", "MODULE:APP", *options.split()):
        assert shown in alone.stdout, shown


def test_skip_remedy_is_suggested_only_for_input_records() -> None:
    remedy = suggest_remedy(PoisonRecord("failed", "in", 0, 3), "it.py:app", "h:9092")
    assert remedy.startswith("`eos reset it.py:app --skip 'in[0]@3' --wait 30 --bootstrap-servers h:9092` skips it, ")
    sent_by_the_function = PoisonRecord("was refused", "out", -1, -1)
    assert suggest_remedy(sent_by_the_function, "it.py:app") == ""
