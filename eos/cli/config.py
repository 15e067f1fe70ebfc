"""Define `eos config [MODULE:APP]`, which shows every setting with its value, origin and meaning."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from eos.cli.options import BootstrapServers, Json, Set, collect_flags, print_json, print_table
from eos.kafka.client import configuration, settings
from eos.kafka.client.settings import Settings
from eos.worker.loading import load_app


def config(
    target: Annotated[
        str | None, typer.Argument(metavar="[MODULE:APP]", help="An App: also show its group and its ids.")
    ] = None,
    instance: Annotated[str | None, typer.Option(help="As for `eos run`.")] = None,
    json: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/reference/settings.md: defaults only.")
    ] = False,
    bootstrap_servers: BootstrapServers = None,
    set_: Set = None,
) -> None:
    """Show every setting with its value, origin and meaning. Secrets are hidden."""
    if markdown:
        print(configuration.render_markdown(), end="")
        return
    flags = collect_flags(bootstrap_servers, set_, instance)
    given = settings.read_sources(flags)
    values: dict[str, object] = {}
    for _, more in given:
        values |= more
    loaded = Settings(values)
    if target is not None:
        app = load_app(target)
        named = {"group.id": app.id, "transactional.id": f"{app.id}-{loaded.instance}"}
        if app.reads_several_topics:
            named |= dict(loaded.with_multi_topic_assignment().values.items() - loaded.values.items())
        loaded = loaded.with_values(**named)
        given = [*given, (f"the App {target}", named)]
    found = configuration.list_settings(loaded, given)
    if json:
        print_json([dataclasses.asdict(row) for row in found])
        return
    table = Table("setting", "value", "from", "meaning")
    for row in found:
        strong = row.origin not in (configuration.DEFAULT, configuration.FORCED)
        value = f"[bold]{escape(row.value)}[/]" if strong else escape(row.value)
        table.add_row(row.name, value, escape(row.origin), escape(row.meaning))
    print_table(table)
