"""Define `eos topology MODULE:APP`, which prints the topics and state of each function as text or as Mermaid."""

from __future__ import annotations

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


def _text(app: App) -> list[str]:
    lines = [f"App {app.id}"]
    for route in app.functions:
        lines.append(f"  {route.name}")
        lines.append(f"    reads   {', '.join(_sources(app, route))}")
        lines.append(f"    writes  {', '.join(route.destinations) or '-'}")
        if letters := _dead_letter_topics(app, route):
            lines.append(f"    failed  {', '.join(letters)}")
        if route.has_state:
            lines.append(f"    state   {', '.join(_stores(route))}, by key, in {changelog_of(app.id, route)}")
    return lines


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
        lines += [f"  {function} --> {node('topic', topic)}" for topic in route.destinations]
        lines += [
            f"  {function} -. failed records .-> {node('topic', topic)}" for topic in _dead_letter_topics(app, route)
        ]
        if route.has_state:
            lines.append(f"  {function} <--> {node('state', changelog_of(app.id, route))}")
    return lines
