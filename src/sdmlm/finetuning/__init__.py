"""Fine-tuning a causal LM into an SDM language model."""
