"""Print docs/reference/commands.md, made from the definitions of the commands: `make reference` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eos.cli import COMMANDS, build_program


def page() -> str:
    """Return every command with its arguments and options, as `eos COMMAND --help` shows them."""
    lines = ["# Commands", "", "`eos COMMAND --help` shows the same. `make reference` writes this page.", ""]
    for name in COMMANDS:
        lines += _lines(build_program([name]).commands[name], f"eos {name}", "##")
    return "\n".join(lines).rstrip() + "\n"


def _lines(command: Any, path: str, level: str) -> Iterator[str]:
    context = command.make_context(path, [], resilient_parsing=True)
    yield from (f"{level} {path}", "")
    yield from (" ".join((command.help or "").split()), "")
    below = getattr(command, "commands", {})
    if not below:
        yield from (f"`{path} {' '.join(command.collect_usage_pieces(context))}`", "")
        records = [parameter.get_help_record(context) for parameter in command.params]
        if rows := [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in filter(None, records)]:
            yield from ("| | |", "|---|---|", *rows, "")
    for name, one in below.items():
        yield from _lines(one, f"{path} {name}", f"{level}#")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    print(page(), end="")
