"""Compiles the functions of timers, and those that close windows, into Routes of their own.

Such a function shares the states, the error policy and the encoder of the function whose timers it handles.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, Final

from eos.app.annotations import parameter_annotation
from eos.app.routes.route import Gives, Route, is_async
from eos.app.stores import find_stores
from eos.app.timers import Timer
from eos.app.windows import Window
from eos.encoding.serde import annotation_name, function_name
from eos.errors import ConfigurationError

_GIVES: Final[dict[object, Gives]] = {Timer: "timer", Window: "window", bytes: "bytes", str: "str"}


def make_handler(
    route: Route, timer: str, function: Callable[..., Any], destinations: tuple[str, ...], frame: types.FrameType
) -> Route:
    """Return the Route of a timer function, or of a function that closes windows (`timer` is ""). Raise
    ConfigurationError.
    """
    name = function_name(function)
    if is_async(function):
        raise ConfigurationError(f"{name} is async: a timer function must be an ordinary def")
    stores = find_stores(function, frame)
    owned = {store.name: store for store in route.stores}
    for store in stores:
        if (its := owned.get(store.name)) is None or (its.kind, its.annotations) != (store.kind, store.annotations):
            has = ", ".join(f"{its.name}: {its.kind.__name__}" for its in route.stores)
            raise ConfigurationError(
                f"the state {store.name} of {name} is not one of {route.name}, whose timers it handles: that has {has}",
                remedy=f"use the same name and annotation as in {route.name}",
            )
    default = bytes if timer else Window
    annotation = parameter_annotation(function, default, frame, len(stores))
    gives = _GIVES.get(annotation)
    if gives is None or (gives == "window") is bool(timer):
        wanted = "bytes, str or Timer" if timer else "Window"
        raise ConfigurationError(
            f"the first parameter of {name} is annotated {annotation_name(annotation)}, but it must be {wanted}"
        )
    return Route(
        function,
        annotation,
        route.sources,
        destinations,
        False,
        route.on_error,
        encode=route.encode,
        stores=tuple(owned[store.name] for store in stores),
        window_stores=route.values,
        name=name,
        gives=gives,
        timer_names=route.timer_names,
    )


def check_merge(route: Route, merge: Callable[..., object]) -> None:
    """Raise ConfigurationError for a function that cannot merge the states of two session windows."""
    names = [store.name for store in route.values]
    try:
        inspect.signature(merge).bind(*names, *names)
    except (TypeError, ValueError) as error:
        wanted = ", ".join([*names, *(f"other_{name}" for name in names)])
        raise ConfigurationError(
            f"{function_name(merge)} cannot merge two windows of {route.name}: {error}",
            remedy=f"def {function_name(merge)}({wanted})",
        ) from error
    if is_async(merge):
        raise ConfigurationError(f"{function_name(merge)} is async: it must be an ordinary def")


def make_window_cleaner(route: Route) -> Route:
    """Return the Route that closes the windows of a function without `on_close`: it only deletes their state."""

    def closed(window: Window) -> None:
        """Do nothing: the state of the window is deleted afterwards."""

    return Route(
        closed,
        Window,
        route.sources,
        (),
        False,
        route.on_error,
        name=route.name,
        gives="window",
        window_stores=route.values,
    )
