"""Registers the plugin; everything else is in ``harness/plugin.py``."""

pytest_plugins = ["harness.plugin"]
