"""`eos init`: the created project works unchanged."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from eos import cli
from eos.cli.init import FILES
from eos.kafka.client.settings import load


def test_init_folder_passes_its_own_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.invoke(["init", "my-shop.v1"]) == 0
    output = capsys.readouterr().out
    assert all(file in output for file in FILES)
    made = tmp_path / "my-shop.v1"
    assert {file.name for file in made.iterdir()} == set(FILES)
    assert not any("$" in file.read_text().replace("${PYTHON}", "") for file in made.iterdir())
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=made, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout
    assert load({}, {}, made / "eos.toml")["bootstrap.servers"] == "127.0.0.1:9092"
    monkeypatch.chdir(made)
    assert cli.invoke(["topology", "app:app"]) == 0
    assert "writes  my-shop.v1-out" in capsys.readouterr().out
    commands = re.findall(r"^  ([^#\n]*)", output, re.MULTILINE)
    installed = {package for line in commands if line.startswith("pip install") for package in line.split()[2:]}
    assert {word.split()[2] for word in commands if word.startswith("python -m")} == installed
    for command in re.findall(r"^  eos (\w+)", output, re.MULTILINE):
        assert command in cli.COMMANDS


def test_init_overwrites_nothing_and_checks_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("full", "full already exists"),
        ("file", "file already exists"),
        ("a b", "is not a name for an App"),
        ("../x", "is not a name for an App"),
    ):
        assert cli.invoke(["init", name]) == 64
        assert said in capsys.readouterr().err
    assert {file.name for file in (tmp_path / "full").iterdir()} == {"mine"}
    assert cli.invoke(["init", "empty"]) == 0
