"""The paper's experiments: runs on disk, their tables, the published figures."""
