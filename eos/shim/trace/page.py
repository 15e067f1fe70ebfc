"""Render one self-contained HTML page with a sequence diagram of each kept transaction.

The module owns the drawing: a lane per party, an arrow per request, and its response below. The page has no scripts and
no external resources, and follows the system's light or dark mode. It must never show a record's content.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from eos.shim.trace import text
from eos.shim.trace.model import History, Step, Transaction

_OPEN_AT_FIRST, _UNFOLDED = 3, ' open=""'
_ROW, _TOP, _CLOCK, _LANE, _MARGIN = 50, 64, 86, 290, 106
_ROWS_DRAWN = 60
_BADGES = {"committed": "good", "aborted": "warn", "abandoned": "bad", "open": "calm"}


def write(path: Path, page: str) -> None:
    """Replace the page atomically: a reader sees the old page or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(page, encoding="utf-8")
    os.replace(part, path)


def render(history: History, title: str) -> str:
    transactions = sorted(history.transactions, key=lambda each: each.started_at, reverse=True)
    cards = "".join(_card(each, number < _OPEN_AT_FIRST) for number, each in enumerate(transactions))
    nothing = '<p class="none">No transaction has passed yet.</p>'
    return _PAGE.format(
        title=escape(title),
        style=_STYLE,
        when=time.strftime("%Y-%m-%d %H:%M:%S"),
        tiles="".join(_tiles(history)),
        kept=f"the last {len(transactions)}" if transactions else "none",
        cards=cards or nothing,
    )


def _tiles(history: History) -> Iterator[str]:
    for name, kind in (("committed", "good"), ("aborted", "warn"), ("abandoned", "bad"), ("errors", "bad")):
        count = history.counts[name]
        yield f'<div class="tile {kind if count else "calm"}"><b>{count:,}</b><span>{name}</span></div>'
    yield f'<div class="tile calm"><b>{history.counts["steps"]:,}</b><span>steps seen</span></div>'


def _card(transaction: Transaction, unfolded: bool) -> str:
    steps = transaction.steps
    clock = time.strftime("%H:%M:%S", time.localtime(transaction.started_at))
    records = sum(step.records or 0 for step in steps)
    took = max(step.time * 1000 + (step.ms or 0) for step in steps) - transaction.started_at * 1000
    identity = "" if transaction.producer_id is None else f"{transaction.producer_id} / {transaction.epoch}"
    badges = "".join(_error_badges(steps))
    return (
        f"<details{_UNFOLDED if unfolded else ''}><summary>"
        f'<span class="badge {_BADGES[transaction.state]}">{_state(transaction)}</span>'
        f"<b>{escape(transaction.transactional_id)}</b><span>#{transaction.number}</span>{badges}"
        f'<span class="facts">{clock} · producer id / epoch {identity or "?"} · {records:,} records · {took:,.1f} ms'
        f"</span></summary>{_diagram(transaction)}</details>"
    )


def _state(transaction: Transaction) -> str:
    return transaction.state if transaction.is_opened or transaction.state != "open" else "not opened"


def _error_badges(steps: Sequence[Step]) -> Iterator[str]:
    retried = sum(step.is_retriable for step in steps)
    errors = sum(step.failed for step in steps) - retried
    if errors:
        yield f'<span class="badge bad">{errors} error{"s" * (errors != 1)}</span>'
    if retried:
        yield f'<span class="badge calm">{retried} with a retriable error</span>'


def _lanes(steps: Sequence[Step]) -> dict[str, int]:
    """Return role -> lane in the order of KIP-98's figure. A role without steps has no lane."""
    roles = ["producer", "transaction coordinator"]
    roles += sorted({f"leader · {step.broker}" for step in steps if step.name in ("Produce", "Marker")})
    roles += ["group coordinator"] if any(step.name == "TxnOffsetCommit" for step in steps) else []
    return {role: lane for lane, role in enumerate(roles)}


def _role(step: Step) -> str:
    if step.name in ("Produce", "Marker"):
        return f"leader · {step.broker}"
    return "group coordinator" if step.name == "TxnOffsetCommit" else "transaction coordinator"


def _diagram(transaction: Transaction) -> str:
    steps = transaction.steps
    lanes = _lanes(steps)
    drawn, left_out = _fold(steps)
    rows = len(drawn) + (transaction.state in ("committed", "aborted"))
    width = _CLOCK + _MARGIN * 2 + _LANE * (len(lanes) - 1)
    height = _TOP + _ROW * rows + 24
    parts = [f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="sequence diagram">']
    parts += _heads(lanes, steps, height)
    for row, step in enumerate(drawn):
        y = _TOP + _ROW * row + 26
        parts.append(_fold_row(left_out, y) if step is None else _step_row(step, transaction, lanes, y))
    if transaction.state in ("committed", "aborted"):
        parts.append(_end_row(transaction, lanes, _TOP + _ROW * len(drawn) + 26))
    parts.append("</svg>")
    return f'<div class="scroll">{"".join(parts)}</div>'


def _fold(steps: Sequence[Step]) -> tuple[list[Step | None], Sequence[Step]]:
    """Return the rows to draw (the first and last ones, with None for the gap between them) and the rows left out."""
    if len(steps) <= _ROWS_DRAWN:
        return list(steps), []
    half = _ROWS_DRAWN // 2
    return [*steps[:half], None, *steps[-half:]], steps[half:-half]


def _x(lane: int) -> int:
    return _CLOCK + _MARGIN + _LANE * lane


def _heads(lanes: dict[str, int], steps: Sequence[Step], height: int) -> Iterator[str]:
    brokers = {_role(step): step.broker for step in steps if step.name not in ("FindCoordinator", "InitProducerId")}
    found = next((step.coordinator for step in steps if step.coordinator), None)
    for role, lane in lanes.items():
        x = _x(lane)
        title, _, where = role.partition(" · ")
        where = where or brokers.get(role) or (found if role.startswith("transaction") else "") or ""
        if role == "producer":
            where = next((step.client for step in steps if step.client), "")
        yield f'<line class="lane" x1="{x}" y1="48" x2="{x}" y2="{height - 8}"/>'
        yield f'<rect class="head" x="{x - 96}" y="6" width="192" height="42" rx="8"/>'
        yield f'<text class="role" x="{x}" y="{24 if where else 32}">{escape(title)}</text>'
        yield f'<text class="where" x="{x}" y="40">{escape(where)}</text>' if where else ""


def _step_row(step: Step, transaction: Transaction, lanes: dict[str, int], y: int) -> str:
    start, end = _x(0), _x(lanes[_role(step)])
    offset_ms = (step.time - transaction.started_at) * 1000
    clock = f'<text class="clock" x="{_CLOCK - 12}" y="{y + 4}">+{offset_ms:,.1f} ms</text>'
    if step.name == "Marker":
        return clock + _marker(step, _x(lanes["transaction coordinator"]), end, y)
    # Labels are cut at the edge of the drawing. They may extend beyond the lane that their arrow points to.
    room = _x(len(lanes) - 1) + _MARGIN - start - 30
    label = _short(f"{step.name}  {text.detail(step)}".replace("->", "→"), room // 7)
    kind = "warn" if step.is_retriable else "bad" if step.failed else "good"
    verdict = _short(f"{', '.join(step.errors) or 'ok'} · {step.ms:,.1f} ms", 60)
    tip = escape(text.line(step))
    # A label starts at the arrow's beginning, on a patch of background, so that no lane crosses its letters.
    return (
        f"<g><title>{tip}</title>{clock}"
        f'<line class="ask" x1="{start}" y1="{y}" x2="{end - 9}" y2="{y}"/>{_head(end, y, 1, "ask")}'
        f'<rect class="number" x="{start - 17}" y="{y - 9}" width="34" height="18" rx="9"/>'
        f'<text class="digits" x="{start}" y="{y + 4}">{step.number}</text>'
        f"{_label(start + 28, y - 6, label, 'what')}"
        f'<line class="reply {kind}" x1="{end}" y1="{y + 17}" x2="{start + 9}" y2="{y + 17}"/>'
        f"{_head(start, y + 17, -1, kind)}{_label(start + 28, y + 13, verdict, kind)}</g>"
    )


def _marker(step: Step, start: int, end: int, y: int) -> str:
    label = _short(f"marker {text.detail(step)}", 60)
    left = min(start, end)
    return (
        f"<g><title>{escape(text.line(step))}</title>"
        f'<line class="reply calm" x1="{start}" y1="{y}" x2="{end - 9}" y2="{y}"/>{_head(end, y, 1, "calm")}'
        f'<rect class="number" x="{start - 17}" y="{y - 9}" width="34" height="18" rx="9"/>'
        f'<text class="digits" x="{start}" y="{y + 4}">{step.number}</text>'
        f"{_label(left + 28, y - 6, label, 'what')}{_label(left + 28, y + 13, 'seen by a fetch', 'calm')}</g>"
    )


def _end_row(transaction: Transaction, lanes: dict[str, int], y: int) -> str:
    """Draw a note about steps 5.2 and 5.3, which happen between brokers."""
    x = _x(lanes["transaction coordinator"])
    outcome = "commit" if transaction.state == "committed" else "abort"
    seen = any(step.name == "Marker" for step in transaction.steps)
    words = (
        f"5.3 the coordinator records COMPLETE_{outcome.upper()} (between brokers)"
        if seen
        else f"5.2 {outcome} markers, 5.3 COMPLETE_{outcome.upper()}: between brokers, not on this wire"
    )
    return f'<circle class="end {_BADGES[transaction.state]}" cx="{x}" cy="{y}" r="6"/>' + _label(
        x + 14, y + 4, words, "calm"
    )


def _fold_row(steps: Sequence[Step], y: int) -> str:
    records = sum(step.records or 0 for step in steps)
    return _label(_x(0) + 28, y + 4, f"… {len(steps):,} more steps, {records:,} records …", "calm")


def _head(x: int, y: int, direction: int, kind: str) -> str:
    back = x - 9 * direction
    return f'<path class="tip {kind}" d="M{x} {y} L{back} {y - 5} L{back} {y + 5} Z"/>'


def _label(x: int, y: int, words: str, kind: str) -> str:
    # paint-order draws the outline in the card's colour first, so letters stay readable on top of lines.
    return f'<text class="label {kind}" x="{x}" y="{y}">{escape(words)}</text>'


def _short(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{style}</style></head><body>
<header><h1>{title}</h1><p>as of {when} · transactions shown: {kept}, newest first</p></header>
<div class="tiles">{tiles}</div>{cards}
<footer>Written by <code>eos shim --trace-html</code>. Numbers are the steps of KIP-98's data flow; solid arrows are
requests, dashed ones their responses. Point at a step for all of its fields.</footer></body></html>
"""

_STYLE = """
:root { --page:#f4f5f7; --card:#fff; --ink:#1c2430; --soft:#66707f; --line:#d5dae1; --ask:#3b5bdb;
  --good:#1a7f4b; --goodbg:#dff3e7; --warn:#9a6700; --warnbg:#fbefcf; --bad:#c0293b; --badbg:#fde3e6;
  --calmbg:#e9ecf1; }
@media (prefers-color-scheme: dark) { :root { --page:#12161c; --card:#1b212a; --ink:#e4e8ee; --soft:#939dab;
  --line:#37404c; --ask:#8ba4ff; --good:#5fce92; --goodbg:#173325; --warn:#e0b252; --warnbg:#362b12; --bad:#ff8792;
  --badbg:#3d1a20; --calmbg:#28303b; } }
* { box-sizing: border-box }
body { margin:0 auto; max-width:1500px; padding:28px 24px; background:var(--page); color:var(--ink);
  font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif }
h1 { font-size:22px; margin:0 } header p, footer { color:var(--soft); margin:2px 0 0 } footer { margin-top:24px }
.tiles { display:flex; gap:12px; flex-wrap:wrap; margin:18px 0 }
.tile { background:var(--card); border-radius:10px; padding:10px 18px; min-width:116px; border:1px solid var(--line) }
.tile b { display:block; font-size:22px; font-variant-numeric:tabular-nums } .tile span { color:var(--soft) }
.tile.good b { color:var(--good) } .tile.warn b { color:var(--warn) } .tile.bad b { color:var(--bad) }
details { background:var(--card); border:1px solid var(--line); border-radius:10px; margin:10px 0 }
summary { cursor:pointer; padding:10px 14px; display:flex; gap:10px; align-items:center; flex-wrap:wrap }
.facts { color:var(--soft); margin-left:auto; font-variant-numeric:tabular-nums }
.badge { padding:1px 10px; border-radius:99px; font-size:12px; font-weight:600 }
.badge.good { background:var(--goodbg); color:var(--good) } .badge.warn { background:var(--warnbg); color:var(--warn) }
.badge.bad { background:var(--badbg); color:var(--bad) } .badge.calm { background:var(--calmbg); color:var(--soft) }
.scroll { overflow-x:auto; padding:6px 10px 10px; border-top:1px solid var(--line) }
svg { display:block; max-width:none }
.none { color:var(--soft); padding:30px; text-align:center }
.lane { stroke:var(--line); stroke-width:1.5 } .head { fill:var(--calmbg) }
.role { font-weight:600; font-size:13px; text-anchor:middle; fill:var(--ink) }
.where { font-size:11.5px; text-anchor:middle; fill:var(--soft) }
.clock { font-size:11.5px; text-anchor:end; fill:var(--soft); font-variant-numeric:tabular-nums }
.ask { stroke:var(--ask); stroke-width:1.6 } .tip.ask { fill:var(--ask); stroke:none }
.reply { stroke-width:1.3; stroke-dasharray:5 4 } .reply.good { stroke:var(--good) } .reply.bad { stroke:var(--bad) }
.reply.calm { stroke:var(--soft) } .tip.good { fill:var(--good) } .tip.bad { fill:var(--bad) }
.tip.calm { fill:var(--soft) } .reply.warn { stroke:var(--warn) } .tip.warn { fill:var(--warn) }
.label.warn { fill:var(--warn); font-size:11.5px; font-weight:600 }
.number { fill:var(--card); stroke:var(--ask); stroke-width:1.2 }
.digits { font-size:11px; font-weight:600; text-anchor:middle; fill:var(--ask) }
.label { font-size:12.5px; paint-order:stroke; stroke:var(--card); stroke-width:5px; stroke-linejoin:round }
.label.what { fill:var(--ink) } .label.good { fill:var(--good); font-size:11.5px }
.label.bad { fill:var(--bad); font-size:11.5px; font-weight:600 } .label.calm { fill:var(--soft); font-size:11.5px }
.end.good { fill:var(--good) } .end.warn { fill:var(--warn) } g:hover .label.what { fill:var(--ask) }
"""
