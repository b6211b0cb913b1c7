"""The commands of `sdmlm`, one module each: `add` declares the options, `run` does the work.

Slow imports (torch, matplotlib) are inside `run`, so that `sdmlm --help` is fast.
"""
