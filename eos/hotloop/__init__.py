"""What runs once for each record, between the consumer's message and the producer's queue.

Owns the choice between two forms of the same four functions: compiled (_native.c), where a compiler was at hand when
the package was installed, and Python (python.py), which is what they mean. The compiled ones save a sixth to a quarter
of the worker's time (docs/engineering/measurements.md). They know no policy and no transaction, and hand back what is
not usual.

`EOS_PURE_PYTHON=1` chooses Python, to tell whether an error is the compiled code's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from eos import log
from eos.hotloop import python
from eos.hotloop.source import checksum

COMPILED = False
"""Whether the compiled functions are in use."""
STALE = ""
"""Why not, where there are some that may do something else than the source beside them."""

feed_outs = python.feed_outs
feed_values = python.feed_values
records_of = python.records_of
runs_of = python.runs_of

if not TYPE_CHECKING and os.environ.get("EOS_PURE_PYTHON", "") in ("", "0"):
    try:
        from eos.hotloop import _native
    except ImportError:
        pass  # it was installed without a compiler: the same, slower
    else:
        _source = checksum(Path(__file__).parent)
        if _source in (None, getattr(_native, "SOURCE", 0)):
            from eos.hotloop._native import feed_outs, feed_values, records_of, runs_of  # noqa: F401

            COMPILED = True
        else:
            # An editable installation keeps what it compiled when the source changes.
            STALE = "the compiled hot loop is of another source and is not used: build it again with `pip install -e .`"
            log.warning(STALE)
