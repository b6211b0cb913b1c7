"""The demos, and the small base LM that they come with."""

from pathlib import Path

BASE_MODEL = Path(__file__).parent / "base"  # what the name "demo" stands for where a model is asked for
