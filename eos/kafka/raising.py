"""Calls of confluent-kafka whose errors are exceptions, whatever it raises.

confluent-kafka 2.16 raises a fatal error that shows during poll() or flush() as a bare KafkaError (or, where Python
notices, a SystemError). KafkaError is no BaseException: no `except` clause with a type catches it, it passes through
every handler of a program and ends it. Every call that serves callbacks goes through here.

And a signal's exception that comes while a client is taken down (its last lines go to a logger, in Python) can be left
lying there: whatever runs next ends with a SystemError in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from confluent_kafka import KafkaException

P = ParamSpec("P")
T = TypeVar("T")


def raising(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The call's result; KafkaException instead of what is no exception, a signal's exception as what it is."""
    try:
        return call(*args, **kwargs)
    except SystemError as error:
        if error.__cause__ is None or isinstance(error.__cause__, Exception):
            raise
        raise error.__cause__ from None
    except BaseException:
        raise
    except:  # noqa: E722 - see above
        bare = sys.exc_info()[1]
    # Behind the handler: Python could not keep it as a context.
    raise KafkaException(bare)
