"""Upstream beside us: the kill rate of any test file, so that two suites can be compared on one machine.

The user points ``python -m harness upstream`` at a file, of a PyTorch checkout say; nothing of it is kept here. Each
test is run complete, under the tap, and then once for each of its synchronizations with that one left out: the test
notices what is missing if it fails.
"""
