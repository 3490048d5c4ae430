"""Which line of the caller's code each entry of a trace comes from.

Repetitions run without source lines, which would slow them down; the lines come from the discovery of the case.
"""

from __future__ import annotations

import linecache

from harness.campaign.case import Discovery
from harness.observe.trace import Entry, Free, HostAccess, Launch, SourceLine, Trace


class SourceLines:
    """The lines of one repetition's entries."""

    def __init__(self, trace: Trace, discovery: Discovery) -> None:
        """``trace`` must live as long as this does: entries are known by identity."""
        self._lines: dict[int, SourceLine | None] = {}
        frees = host_accesses = 0
        for entry in trace:
            if type(entry) is Launch:
                self._lines[id(entry)] = discovery.launches.get(entry.id, entry).line
            # Frees and what the host does have no names; their order, which is the host's, tells them apart.
            elif type(entry) is Free:
                free = discovery.frees[frees] if frees < len(discovery.frees) else None
                self._lines[id(entry)] = free.line if free is not None and free.stream == entry.stream else None
                frees += 1
            elif type(entry) is HostAccess:
                known = discovery.host_accesses
                access = known[host_accesses] if host_accesses < len(known) else None
                same = access is not None and access.operation == entry.operation
                self._lines[id(entry)] = access.line if access is not None and same else None
                host_accesses += 1

    def of(self, entry: Entry) -> SourceLine | None:
        """The line of an entry; None where it is not known."""
        return self._lines.get(id(entry))


def code_of(line: SourceLine | None) -> str:
    """The code on a line, without its indentation; empty where there is none."""
    return linecache.getline(line.file, line.line).strip() if line else ""
