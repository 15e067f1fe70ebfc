"""Reads the annotations of a user's function: of its record, of a second parameter for the record, and of its result.

Owns the resolution of annotations. It must never choose the decoder for an annotation (eos/encoding/serde.py does).
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Final, TypeVar

from eos.encoding.serde import function_name, underlying
from eos.errors import ConfigurationError
from eos.records import Record


def parameter_annotation(
    function: Callable[..., object], default: object, frame: types.FrameType | None, more: int = 0
) -> object:
    """Return the resolved annotation of the function's first parameter; `default` without an annotation.

    `frame` is where the decorator was applied: under `from __future__ import annotations` only its locals contain a
    type that is local to a function. Raises ConfigurationError for a function that cannot be called with its record and
    `more` further positional arguments (states, or a cursor), and for an annotation that cannot be resolved.
    """
    name = function_name(function)
    try:
        signature = inspect.signature(function)
        signature.bind(*[None] * (1 + more))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{name} must take exactly one positional argument; it may also take a second one annotated Record, and "
            f"any number annotated State[...]: {error}"
        ) from error
    except NameError as error:  # Python >= 3.14 evaluates annotations here
        raise ConfigurationError(f"an annotation of {name} cannot be resolved: {error}") from error

    annotation = next(iter(signature.parameters.values())).annotation
    return default if annotation is inspect.Parameter.empty else resolve_annotation(function, annotation, frame)


def takes_record(function: Callable[..., object], frame: types.FrameType | None) -> bool:
    """Return whether the second parameter is annotated Record, so that it gets the record."""
    try:
        _, *rest = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError):
        return False  # the check of the first parameter reports the error
    if not rest or rest[0].annotation is inspect.Parameter.empty:
        return False
    annotation = resolve_annotation(function, rest[0].annotation, frame)
    return annotation is Record or typing.get_origin(annotation) is Record


def resolve_annotation(function: Callable[..., object], annotation: Any, frame: types.FrameType | None) -> Any:
    """Return the type that an annotation of this function names. Raise ConfigurationError."""
    name, code_owner = function_name(function), underlying(function)

    def holder() -> None: ...

    # Evaluate only the parameter's annotation, because the return annotation may name something imported under
    # TYPE_CHECKING.
    holder.__annotations__ = {"value": annotation}
    try:
        hints = typing.get_type_hints(
            holder,
            globalns=getattr(code_owner, "__globals__", {}),
            localns=_defining_locals(code_owner, frame),
            include_extras=True,
        )
    except (NameError, SyntaxError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"the annotation {annotation!r} of {name} cannot be resolved ({error}): "
            "define or import that type at module level, and not only under TYPE_CHECKING"
        ) from error
    return hints["value"]


def result_annotation(function: Callable[..., object], frame: types.FrameType | None) -> object:
    """Return the resolved annotation of the function's result; None without one, or if it cannot be resolved."""
    try:
        annotation = inspect.signature(function).return_annotation
        return None if annotation is inspect.Signature.empty else resolve_annotation(function, annotation, frame)
    except (ConfigurationError, TypeError, ValueError, NameError):
        return None


# None, and types that include None.
_INCLUDES_NONE: Final = (None, types.NoneType, Any, object, collections.abc.Hashable, typing.NoReturn, typing.Never)
_NAMES_NONE: Final = re.compile(r"\b(?:None|Optional|Any|object|Hashable|NoReturn|Never)\b")


def may_return_none(function: Callable[..., object]) -> bool:
    """Return whether a function's annotation allows the result None; without an annotation every result is allowed."""
    try:
        annotation = inspect.signature(function).return_annotation
        return annotation is inspect.Signature.empty or _allows_none(resolve_annotation(function, annotation, None))
    except ConfigurationError:
        # The annotation names something imported for type checkers only, or local to another function.
        return not isinstance(annotation, str) or _NAMES_NONE.search(annotation) is not None
    except (TypeError, ValueError, NameError):
        return True  # the check of the function's parameters reports the error


def _allows_none(annotation: Any) -> bool:
    if isinstance(annotation, TypeVar) or any(annotation is one for one in _INCLUDES_NONE):
        return True
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _allows_none(inner[0])
    if origin in (typing.Union, types.UnionType, typing.Literal):
        return any(map(_allows_none, inner))
    return hasattr(annotation, "__value__") and _allows_none(annotation.__value__)  # type Total = int | None


def _defining_locals(code_owner: Callable[..., object], frame: types.FrameType | None) -> dict[str, Any]:
    # Use the frame's names only if the frame defined the function. A decorator may be applied elsewhere to an imported
    # function, whose annotations must not be resolved with unrelated names.
    code = getattr(code_owner, "__code__", None)
    if frame is None or code is None or code not in frame.f_code.co_consts:
        return {}
    return dict(frame.f_locals)
