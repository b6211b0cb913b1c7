"""The `sdmlm` command."""

from sdmlm.cli.main import build_parser, main

__all__ = ["build_parser", "main"]
