"""Imports kafka-python without its consumer and producer, which eos does not use.

The package imports both, and takes a third longer for that at every start of a worker. So this module puts a package
into `sys.modules` whose own code runs when a program first needs a name that the code defines, such as
`kafka.KafkaConsumer`. A program that imported kafka-python before keeps its package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import types
from typing import Any

_running = threading.RLock()


class _Package(types.ModuleType):
    """Stands for the package. `_waits`: its own code has not run."""

    _waits = True

    def __getattr__(self, name: str) -> Any:
        if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        with _running:
            if self._waits:
                self._waits = False
                _run_own_code(self)
        return super().__getattribute__(name)


def _run_own_code(module: types.ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module)


def defer(package: str) -> None:
    """Let later imports of the package's modules leave its own code to the first use of a name defined there."""
    if package not in sys.modules and (spec := importlib.util.find_spec(package)) is not None:
        module = importlib.util.module_from_spec(spec)
        module.__class__ = _Package
        sys.modules[package] = module
