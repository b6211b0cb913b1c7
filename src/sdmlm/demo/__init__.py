"""The demos, and the small base LM that they come with."""

from sdmlm.language_model.loading import DEMO_MODEL as BASE_MODEL

__all__ = ["BASE_MODEL", "SENTENCES", "SENTENCES_SEED"]

# Number and seed of the sentences of the grammar that the demo's rows are drawn from; `sdmlm data word-ordering --sentences
# demo` uses the same. The base LM was trained on other seeds.
SENTENCES, SENTENCES_SEED = 30_000, 0
