"""A process that compares operators for the module ``workers``: one task and one result a line."""

from __future__ import annotations

import json
import os
import sys

import torch

from harness.backends import simulator
from harness.backends.simulator.coverage import comparison, database


def main() -> None:
    """Serves tasks from the standard input until it ends; results go to the descriptor that was the standard output."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an operator prints is no result
    torch.set_num_threads(1)
    native = simulator.register()
    database.operators()
    for line in sys.stdin:
        name, dtype, most_samples = json.loads(line)
        try:
            result = comparison.compare(native, name, getattr(torch, dtype), most_samples)
        except Exception as error:
            result = comparison.failed(name, dtype, comparison.sentence(error))
        results.write(json.dumps(result.to_json()) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
