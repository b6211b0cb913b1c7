"""The commands of `sdmlm`, one module each: `add` declares the options, `run` does the work.

What is slow to import (torch, matplotlib) is imported inside `run`, so that `sdmlm --help` answers at once.
"""
