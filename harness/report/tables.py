"""How the tables of the reports look, and their way to a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

LEAST_WIDTH = 165
"""Tables are never cut narrower, however narrow the terminal: their rows name node ids."""


def new_table(names: Sequence[str], figures: Sequence[str]) -> Table:
    """An empty table: columns of names, which stand left, then columns of figures, which stand right."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table


def add_by_file(table: Table, nodeid: str, file: str | None, cells: Sequence[str], style: str) -> str:
    """Add the row of a test, under a heading with its file unless that is ``file``, the last one's.

    Returns:
        The file.
    """
    path, _, test = nodeid.partition("::")
    if path != file:
        table.add_row(f"[bold]{escape(path)}[/bold]")
    table.add_row("  " + escape(test), *cells, style=style)
    return path


def rate(value: float | None) -> str:
    """A rate in 0 to 1 as a percentage; ``none`` where there is nothing that it could be of."""
    return "none" if value is None else f"{value:.1%}"


def rendered(parts: Iterable[Table | str], width: int, *, colour: bool) -> list[str]:
    """Tables and sentences as the lines of a terminal; sentences are not wrapped.

    Args:
        parts: what to show.
        width: of the terminal, in characters.
        colour: whether it shows colours.
    """
    buffer = io.StringIO()
    console = Console(file=buffer, width=max(LEAST_WIDTH, width), force_terminal=colour, highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(part, soft_wrap=True, markup=False)
        else:
            console.print(part)
    return [line.rstrip() for line in buffer.getvalue().splitlines()]
