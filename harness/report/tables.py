"""How the tables of the reports look, and their way to a terminal."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

LOG_WIDTH = 165
"""Of what goes to a file: there is room, and rows name node ids."""
_NAME = "\ue000"
"""Stands in a table for a line that has a name across all columns; a character of no alphabet."""


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


def width_for(width: int, *, is_terminal: bool) -> int:
    """How wide to write: as wide as the terminal, or as ``COLUMNS`` asks; else as is good for a file."""
    return width if is_terminal or "COLUMNS" in os.environ else max(LOG_WIDTH, width)


def rendered(parts: Iterable[Table | str], width: int, *, colour: bool) -> list[str]:
    """Tables and sentences as the lines of a terminal; sentences are not wrapped.

    Nothing of a table is cut: where it is too wide, each name has lines of its own, with the figures below.

    Args:
        parts: what to show.
        width: of the terminal, in characters.
        colour: whether it shows colours.
    """
    lines: list[str] = []
    for part in parts:
        if isinstance(part, str):
            lines += _lines(part, width, colour)
        elif _natural_width(part) > width:
            lines += _stacked(part, width, colour)
        else:
            lines += _lines(part, width, colour)
    return lines


def _natural_width(table: Table) -> int:
    wide = _console(100 * LOG_WIDTH, colour=False)
    return Measurement.get(wide, wide.options, table).maximum


def _console(width: int, colour: bool) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=colour, highlight=False)


def _lines(part: Table | Text | str, width: int, colour: bool) -> list[str]:
    console = _console(width, colour)
    if isinstance(part, str):
        console.print(part, soft_wrap=True, markup=False)
    else:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def _stacked(table: Table, width: int, colour: bool) -> list[str]:
    """A table with the names above the figures of their row."""
    columns = [list(column.cells) for column in table.columns]
    count = next(n for n, column in enumerate(table.columns) if column.justify == "right")
    stacked = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    stacked.add_column()
    for column, cells in zip(table.columns[count:], columns[count:], strict=True):
        single = not any(" " in str(cell) for cell in (column.header, *cells))
        stacked.add_column(column.header, justify=column.justify, no_wrap=single, overflow="fold")
    names: list[Text] = []
    for number, row in enumerate(table.rows):
        parts = [str(cells[number]) for cells in columns[:count] if cells[number]]
        names.append(Text.from_markup("  ".join(parts), style=row.style or "", overflow="fold"))
        stacked.add_row(_NAME)
        figures = [cells[number] for cells in columns[count:]]
        if any(figures):
            stacked.add_row("", *figures, style=row.style)
    waiting = iter(names)
    lines: list[str] = []
    for line in _lines(stacked, width, colour):
        lines += _lines(next(waiting), width, colour) if _NAME in line else [line]
    return lines
