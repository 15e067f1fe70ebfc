"""Define `eos topology MODULE:APP`, which prints the topics and state of each function as text or as Mermaid."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from eos.app.definition import App
from eos.app.routes import Route, changelog_of
from eos.cli.options import Target
from eos.encoding.dead_letters import dead_letter_topic
from eos.encoding.serde import annotation_name
from eos.records import is_pattern
from eos.worker.loading import load_app


def topology(
    target: Target,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print a Mermaid flowchart.")] = False,
) -> None:
    """Print the functions, topics, state and changelogs of an App. Needs no cluster."""
    app = load_app(target)
    app.check()
    print("\n".join(_flowchart(app) if mermaid else _text(app)))


def _sources(app: App, route: Route) -> list[str]:
    patterns = [pattern.pattern for pattern, of in app.patterns.items() if of is route]
    return [topic for topic, of in app.routes.items() if of is route] + patterns


def _dead_letter_topics(app: App, route: Route) -> list[str]:
    if route.on_error.verdict != "dlq":
        return []
    return [dead_letter_topic(source) for source in _sources(app, route) if not is_pattern(source)]


def _stores(route: Route) -> list[str]:
    return [
        f"{store.name}: {store.kind.__name__}[{', '.join(map(annotation_name, store.annotations))}]"
        for store in route.values
    ]


def _describe_timing(route: Route) -> list[tuple[str, str]]:
    """Return what a function does by time, as pairs of a word and its description."""
    timing, found = route.timing, list[tuple[str, str]]()
    if timing.windows is not None:
        closed = f", closed by {route.handlers[''].name}" if "" in route.timer_names else ""
        found.append(("windows", f"{timing.windows}, grace {timedelta(milliseconds=timing.grace_ms)}{closed}"))
    if timers := [f"{name} -> {route.handlers[name].name}" for name in sorted(route.timer_names) if name]:
        found.append(("timers", ", ".join(timers)))
    if timing.once is not None:
        found.append(("once", f"per id within {timedelta(milliseconds=timing.within_ms)}"))
    return found


def _text(app: App) -> list[str]:
    lines = [f"App {app.id}"]
    for route in app.functions:
        lines.append(f"  {route.name}")
        if route.source is None:
            lines.append(f"    reads   {', '.join(_sources(app, route))}")
        else:
            lines.append(f"    reads   table {route.source.table} in {route.source.database}")
            lines.append(f"    keeps   its position in {route.sources[0]}")
        lines.append(f"    writes  {_target(route) or ', '.join(route.all_destinations) or '-'}")
        if letters := _dead_letter_topics(app, route):
            lines.append(f"    failed  {', '.join(letters)}")
        if route.has_state:
            stores = ", ".join(_stores(route)) or "timers and ids"
            lines.append(f"    state   {stores}, by key, in {changelog_of(app.id, route)}")
        lines += [f"    {what:<7} {of}" for what, of in _describe_timing(route)]
    return lines


def _target(route: Route) -> str:
    """Return where a function's rows go; "" for a function that writes to Kafka."""
    if route.sink is None:
        return ""
    what = "its own SQL" if route.sink.table is None else f"table {route.sink.table.name}"
    return f"{what} in {route.sink.database}"


def _flowchart(app: App) -> list[str]:
    names: dict[str, str] = {}

    def node(kind: str, label: str) -> str:
        """Return the node's short name. The first call declares the node with its label."""
        key = f"{kind}{label}"
        if key not in names:
            names[key] = f"n{len(names)}"
            opening, closing = {"topic": ("[", "]"), "function": ("(", ")"), "state": ("[(", ")]")}[kind]
            quoted = label.replace('"', "#quot;")
            lines.append(f'  {names[key]}{opening}"{quoted}"{closing}')
        return names[key]

    lines = ["flowchart LR"]
    for route in app.functions:
        function = node("function", route.name)
        lines += [f"  {node('topic', topic)} --> {function}" for topic in _sources(app, route)]
        lines += [f"  {function} --> {node('topic', topic)}" for topic in route.all_destinations]
        lines += [
            f"  {function} -. failed records .-> {node('topic', topic)}" for topic in _dead_letter_topics(app, route)
        ]
        if route.has_state:
            lines.append(f"  {function} <--> {node('state', changelog_of(app.id, route))}")
    return lines
