"""The layers of the package: imports point downward only, and Spark executors load no Kafka client."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eos

PACKAGE = Path(eos.__file__).parent
MODULES = [*PACKAGE.rglob("*.py"), *PACKAGE.parent.joinpath("spark_connector").rglob("*.py")]

# Each package, and the packages earlier in this table from which it may import; all may import codes, errors, log and
# signals.
BELOW = {
    "log": "",
    "errors": "",
    "codes": "",
    "signals": "",
    "hotloop": "",
    "records": "hotloop",
    "probes": "",
    "broker": "",
    "shim": "probes",
    "sql": "",
    "encoding": "records hotloop",
    "app": "sql encoding records hotloop",
    "kafka.client": "records hotloop",
    "kafka.admin": "kafka.client records hotloop",
    "observe": "",
    "session.consumer": "observe kafka records hotloop",
    "session.producer": "observe encoding kafka records",
    "session": "session.consumer session.producer observe encoding kafka records hotloop",
    "plain": "session encoding kafka records",
    "health": "probes session observe kafka",
    "state": "app encoding kafka records hotloop",
    "engine": "app sql encoding kafka records hotloop",
    "worker": "engine state health plain session app sql encoding kafka records",
    "testing": "worker engine state plain session app sql encoding kafka records broker shim",
    "demo": "testing worker engine app kafka broker",
    "cli": "demo testing worker engine state health plain session app encoding kafka records hotloop broker shim",
    "__main__": "cli",
}


def is_in(module: str, rooms: set[str]) -> bool:
    return any(f"{module}.".startswith(f"eos.{room}.") for room in rooms)


def modules_of(path: Path) -> Iterator[str]:
    """Return the names of modules that the file imports at run time, without imports for type checkers."""
    tree = ast.parse(path.read_text())
    guarded = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    for_types = {id(n) for one in guarded for n in ast.walk(one)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            module = PACKAGE.parent / (node.module or "").replace(".", "/")
            for name in node.names:
                inside = (module / f"{name.name}.py").exists() or (module / name.name / "__init__.py").exists()
                yield f"{node.module}.{name.name}" if inside else node.module or ""
        elif isinstance(node, ast.Import) and id(node) not in for_types:
            yield from (name.name for name in node.names)


def imports_of(path: Path) -> Iterator[str]:
    """Return the modules of eos that the file imports at run time."""
    return (name for name in modules_of(path) if name.startswith("eos."))


def test_modules_have_no_import_cycle() -> None:
    """Imports inside functions count too."""
    dotted = {path: path.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".") for path in MODULES}
    paths = {name.removesuffix(".__init__"): path for path, name in dotted.items()}
    needs = {name: set(modules_of(path)) & paths.keys() for name, path in paths.items()}
    tuple(graphlib.TopologicalSorter(needs).static_order())  # raises CycleError with the cycle


@pytest.mark.parametrize("room", BELOW)
def test_package_imports_only_from_packages_below_it(room: str) -> None:
    paths = sorted((PACKAGE / room.replace(".", "/")).rglob("*.py")) or [PACKAGE / f"{room}.py"]
    allowed = {room, "codes", "errors", "log", "signals", *BELOW[room].split()}
    above = {f"{path.name} -> {module}" for path in paths for module in imports_of(path) if not is_in(module, allowed)}
    assert above == set()


def test_table_has_every_package_and_no_cycle() -> None:
    """Each package may import only from packages listed before it."""
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} == {room.partition(".")[0] for room in BELOW}
    assert {path.stem for path in (PACKAGE / "kafka").iterdir()} <= {"__init__", "__pycache__", "client", "admin"}
    before: set[str] = set()
    for room, below in BELOW.items():
        assert set(below.split()) <= before
        before |= {room, room.partition(".")[0]}


def test_app_and_encoding_import_only_msgspec_and_sortedcontainers() -> None:
    """Imports inside functions count too: no Kafka client may be needed. typing_extensions is for type checkers."""
    others = set()
    for path in [PACKAGE / "records.py", *(PACKAGE / "app").glob("*.py"), *(PACKAGE / "encoding").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "typing_extensions":
                continue
            if isinstance(node, ast.ImportFrom):
                others.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Import):
                others.update(name.name.partition(".")[0] for name in node.names)
    assert others - sys.stdlib_module_names == {"eos", "msgspec", "sortedcontainers"}


@pytest.mark.parametrize(
    "module", ["eos.app.definition", "eos.engine.handling", "spark_connector.apply", "eos.testing"]
)
def test_module_for_offline_runs_loads_no_kafka_client(module: str) -> None:
    code = f"import sys, {module}; print([m for m in sys.modules if m.split('.')[0] in ('confluent_kafka', 'kafka')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_spark_source_loads_nothing_of_the_sink() -> None:
    code = (
        "import sys, spark_connector.source; print({'pyarrow', 'numpy', 'kafka', 'confluent_kafka'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
