"""Compile a function of an App, with its topics, into the form that a worker, Spark and tests call.

Each shape of function has a class with `outputs`, `each` and `feed`: single.py, async_.py, keyed.py, batch.py.
"""

from eos.app.routes.feeds import feed_from, send_to
from eos.app.routes.route import Route, changelog_of, is_async

__all__ = ["Route", "changelog_of", "feed_from", "is_async", "send_to"]
