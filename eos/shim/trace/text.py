"""Format a step as one line, for people or as JSON. Pure."""

from __future__ import annotations

import json
import time

from eos.shim.trace.model import Step

_PARTITIONS_SHOWN = 4


def line(step: Step) -> str:
    """Format a step as `12:00:01.123  orders-a #3  4.2 Produce  out-0 out-1, 12 records, 1.2 kB ...  ok  2.1 ms`."""
    clock = time.strftime("%H:%M:%S", time.localtime(step.time)) + f".{int(step.time * 1000) % 1000:03d}"
    who = f"{step.transactional_id} #{step.transaction}"
    what = f"{step.number:3} {step.name}"
    tail = [detail(step), identity(step), verdict(step)]
    return "  ".join([clock, f"{who:24}", f"{what:22}", *filter(None, tail)])


def json_line(step: Step) -> str:
    return json.dumps(step.as_dict())


def detail(step: Step) -> str:
    """Format the request's own fields."""
    if step.name == "FindCoordinator":
        return f"-> {step.coordinator}" if step.coordinator else ""
    if step.name == "InitProducerId":
        return "" if step.new_producer_id is None else f"-> producer {step.new_producer_id} epoch {step.new_epoch}"
    if step.name == "Produce":
        return f"{_join_names(step.partitions)}, {_plural(step.records, 'record')}, {size(step.bytes or 0)}"
    if step.name == "AddOffsetsToTxn":
        return f"group {step.group}"
    if step.name == "TxnOffsetCommit":
        return f"group {step.group}: {_join_names([f'{name} at {offset}' for name, offset in step.offsets.items()])}"
    if step.name == "EndTxn":
        bumped = "" if step.new_epoch is None else f" -> producer {step.new_producer_id} epoch {step.new_epoch}"
        return f"{step.outcome}{bumped}"
    if step.name == "Marker":
        return f"{step.outcome} in {_join_names([f'{name} at {offset}' for name, offset in step.offsets.items()])}"
    return _join_names(step.partitions)


def identity(step: Step) -> str:
    return "" if step.producer_id is None else f"[{step.producer_id}/{step.epoch}]"


def verdict(step: Step) -> str:
    if step.name == "Marker":
        return "seen by a fetch"
    return f"{', '.join(step.errors) or 'ok'}  {step.ms:.1f} ms  {step.broker}"


def size(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    return f"{count / 1000:.1f} kB" if count < 1_000_000 else f"{count / 1_000_000:.1f} MB"


def _plural(count: int | None, what: str) -> str:
    return f"{count or 0:,} {what}{'' if count == 1 else 's'}"


def _join_names(names: list[str]) -> str:
    more = len(names) - _PARTITIONS_SHOWN
    return " ".join(names[:_PARTITIONS_SHOWN]) + (f" and {more} more" if more > 0 else "")
