"""The `sdmlm` command."""

from sdmlm.cli.main import main

__all__ = ["main"]
