"""Sidestream's harness: how a case is run, perturbed, observed, judged and counted."""

__version__ = "0.1.0"
