"""The demos, and the small base LM that they come with."""

from pathlib import Path

BASE_MODEL = Path(__file__).parent / "base"  # what the name "demo" stands for where a model is asked for
# Of the grammar, the sentences that the demo's rows are drawn from; `--sentences demo` of `sdmlm data` gives the same.
SENTENCES, SENTENCES_SEED = 30_000, 0  # the base LM was trained on other seeds
