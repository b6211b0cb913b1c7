"""The SDM estimator: tensors in, decisions out. Nothing here imports transformers."""
