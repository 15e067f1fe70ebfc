"""Compiles _native.c while the package is built (pyproject.toml names this file to hatchling).

A machine without a compiler, or without Python's headers, still gets the package: python.py does the same work, only
more slowly. `eos --version` shows which one is in use.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = "eos/hotloop"


class CompiledLoop(BuildHookInterface):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("EOS_PURE_PYTHON", "") not in ("", "0"):
            return
        made = _compiled(Path(self.root))
        if made is None:
            print("eos-kafka: no C compiler: its hot loop stays in Python", file=sys.stderr)
            return
        build_data["force_include"][str(made)] = f"{_PACKAGE}/{made.name}"
        build_data["pure_python"], build_data["infer_tag"] = False, True


def _compiled(root: Path) -> Path | None:
    """Build the shared object next to its source, where an editable installation finds it.

    Return None if it cannot be built here.
    """
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    source = runpy.run_path(str(root / _PACKAGE / "source.py"))["checksum"](root / _PACKAGE)
    # optional=True turns a failed build into a warning.
    extension = Extension(
        "eos.hotloop._native", [f"{_PACKAGE}/_native.c"], define_macros=[("EOS_SOURCE", f"{source}LL")], optional=True
    )
    command = build_ext(Distribution({"name": "eos-kafka", "ext_modules": [extension]}))
    command.build_temp, command.build_lib = str(root / "build" / "native"), str(root)
    before = Path.cwd()
    os.chdir(root)  # source paths are relative to this folder
    try:
        command.ensure_finalized()
        made = root / command.get_ext_filename(extension.name)
        made.unlink(missing_ok=True)  # an outdated one must not be loaded
        command.run()
    finally:
        os.chdir(before)
    return made if made.exists() else None
