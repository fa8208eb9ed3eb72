"""The command ``mmrl rollout``."""

from __future__ import annotations

import argparse

SUMMARY = "measure a robot policy in simulated rollouts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    raise NotImplementedError
