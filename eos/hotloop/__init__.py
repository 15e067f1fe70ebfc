"""Runs the code that is called once per record, between the consumer's message and the producer's queue.

Owns the choice between two forms of the same functions: compiled (_native.c), if a compiler was available when the
package was installed, and Python (python.py), which defines them. The compiled ones save a sixth to a quarter of the
worker's time (docs/engineering/measurements.md). They know no policy and no transaction, and leave unusual results to
their caller.

`EOS_PURE_PYTHON=1` chooses Python, to find out whether an error is the compiled code's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eos import log
from eos.hotloop import python
from eos.hotloop.source import checksum

COMPILED = False
"""Whether the compiled functions are in use."""
STALE = ""
"""Why compiled functions are not used although they exist: they were built from another source."""

encode_key = python.encode_key
fast_out = python.fast_out
fast_state = python.fast_state
feed_outs = python.feed_outs
feed_values = python.feed_values
fetched_of = python.fetched_of
records_of = python.records_of
runs_of = python.runs_of

if not TYPE_CHECKING and os.environ.get("EOS_PURE_PYTHON", "") in ("", "0"):
    try:
        from eos.hotloop import _native
    except ImportError:
        pass  # installed without a compiler: same results, slower
    else:
        _source = checksum(Path(__file__).parent)
        if _source in (None, getattr(_native, "SOURCE", 0)):
            from eos.hotloop._native import (  # noqa: F401
                encode_key,
                fast_out,
                fast_state,
                feed_outs,
                feed_values,
                fetched_of,
                records_of,
                runs_of,
            )

            COMPILED = True
        else:
            # An editable installation keeps its compiled loop when the source changes.
            STALE = (
                "the compiled hot loop was built from other source and is not used: rebuild it with `pip install -e .`"
            )
            log.warning(STALE)


def spans_of(records: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the start and stop of each run of one partition with rising offsets. The client delivers such runs, so
    work per run costs less than work per record."""
    begins = runs_of(records)
    # Records without a run: the second list is one longer.
    return list(zip(begins, [*begins[1:], len(records)], strict=False))
