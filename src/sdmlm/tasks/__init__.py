"""Tasks whose answers can be checked, one file each.

A task is a module with a generator of rows (`prompt`, `chosen`, `rejected`, and the right answer in a column named by
REFERENCE), `reward(prompts, completions, **columns)` in TRL's signature, and `answer(text)`, which reads the answer out of a
completion (None where there is none).
"""
