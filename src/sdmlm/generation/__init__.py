"""SDM language models in use: verified generation, search, feedback."""
