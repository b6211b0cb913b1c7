"""The demos, and the small base LM that they come with."""

from sdmlm.language_model.loading import DEMO_MODEL as BASE_MODEL

__all__ = ["BASE_MODEL", "SENTENCES", "SENTENCES_SEED"]

# Of the grammar, the sentences that the demo's rows are drawn from; `--sentences demo` of `sdmlm data` gives the same.
SENTENCES, SENTENCES_SEED = 30_000, 0  # the base LM was trained on other seeds
