"""The command ``mmrl demos``."""

from __future__ import annotations

import argparse

SUMMARY = "write demonstrations of the scripted experts as a LeRobotDataset"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    raise NotImplementedError
