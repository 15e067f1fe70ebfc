"""Shows the demo on the terminal: numbered steps, events below them, progress bars, and the table at the end.

Owns the form only, not the texts. If the output is not a terminal it writes plain lines: no colour, no bar, no line
that is cut.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TextColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from eos.demo.proof import Row

_PLAIN_WIDTH = 120
_PLAIN_EVERY_S = 5.0


class Show:
    """Shows one demo on one console; `total_s` is the time in seconds since its creation."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if not self.console.is_terminal:
            self.console.width = _PLAIN_WIDTH
        self._began = time.monotonic()
        self._steps = 0

    @property
    def total_s(self) -> float:
        return time.monotonic() - self._began

    def title(self, text: str) -> None:
        self.console.print(f"[bold]{text}[/]")

    def code(self, path: Path) -> None:
        """Show the App that is about to run, without its imports; only on a terminal."""
        if self.console.is_terminal:
            source = path.read_text().rstrip()
            source = source[source.index("app = ") :]
            self.console.print(Syntax(source, "python", theme="ansi_dark", background_color="default", padding=(0, 4)))

    def step(self, text: str) -> None:
        self._steps += 1
        self.console.print(f"[dim]{self.total_s:5.1f} s[/]  [bold cyan]{self._steps}[/]  {text}", soft_wrap=True)

    def event(self, text: str, style: str = "") -> None:
        """Show an event of the current step."""
        self.console.print(Text.assemble((f"{self.total_s:5.1f} s", "dim"), "     ", (text, style)), soft_wrap=True)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Show activity in this block, for work that takes seconds and reports no progress."""
        if self.console.is_terminal:
            with self.console.status(f"           {what}"):
                yield
        else:
            self.event(what)
            yield

    @contextlib.contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar in this block; it yields a function that takes the number done."""
        if not self.console.is_terminal:
            yield self._plain_bar(what, total)
            return
        columns = (
            TextColumn("             {task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,} of {task.total:,}"),
            _Rate(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda done: progress.update(task, completed=done)

    def _plain_bar(self, what: str, total: int) -> Callable[[int], None]:
        began = last = time.monotonic()

        def at(done: int) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= _PLAIN_EVERY_S:
                last = now
                self.event(f"{what}: {done:,} of {total:,}, {done / (now - began):,.0f} records/s")

        return at

    def table(self, rows: Sequence[Row]) -> None:
        table = Table("check", "expected", "seen", "verdict", title_justify="left")
        table.columns[1].justify = table.columns[2].justify = "right"
        for row in rows:
            verdict = "[bold green]ok[/]" if row.passed else "[bold red]WRONG[/]"
            table.add_row(escape(row.check), row.expected, row.seen, verdict)
        self.console.print(table)
        for row in rows:
            if not row.passed:
                self.console.print(f"[bold red]WRONG[/] {escape(row.check)}: {escape(row.why)}", soft_wrap=True)


class _Rate(TextColumn):
    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:>7,.0f} records/s", "yellow")
