"""Files: checksummed folders, text files, progress bars, the record of a training run."""
