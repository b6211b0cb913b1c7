"""The figures that the paper published, to compare with ours: Phi-3.5-mini-instruct on word ordering, alpha = 0.95.

They are kept as text, as printed: "1." and "<0.01" are not rounded further, "-" is a dash, "R" means all rejected. Test sets
and settings have the names of ours: `test` is the paper's Wikipedia set, `shifted` its sentences of 60 words.
"""

from __future__ import annotations

MODEL = "Phi-3.5-mini-instruct"


def _read(text: str, names: int) -> dict[tuple[str, ...], tuple[str, ...]]:
    """A mapping from the first `names` words of each line to the others."""
    lines = [line.split() for line in text.strip().split("\n")]
    return {tuple(line[:names]): tuple(line[names:]) for line in lines}


# (test set, setting): accuracy and n/|D| in the high-reliability region
SELECTIVE = _read(
    """
harvard none - 0.
harvard ce 0.99 0.47
harvard ce_hn 0.98 0.36
harvard sdm 0.98 0.74
harvard sdm_hn 0.97 0.90
harvard sdm_hn_rerun 0.99 0.90
test none - 0.
test ce 0.98 0.56
test ce_hn 0.98 0.55
test sdm 0.97 0.64
test sdm_hn 0.98 0.72
test sdm_hn_rerun 0.97 0.73
shifted none - 0.
shifted ce 1. <0.01
shifted ce_hn 0.88 0.01
shifted sdm 1. <0.01
shifted sdm_hn 0.97 0.01
shifted sdm_hn_rerun 0.94 0.02
""",
    names=2,
)

# (test set, setting): sentence accuracy, exact match
GENERATION = _read(
    """
harvard none 0.41 0.33
harvard ce 0.95 0.94
harvard ce_hn 0.95 0.94
harvard sdm 0.93 0.93
harvard sdm_hn 0.94 0.93
harvard sdm_hn_rerun 0.96 0.96
test none 0.26 0.25
test ce 0.93 0.93
test ce_hn 0.93 0.92
test sdm 0.92 0.92
test sdm_hn 0.93 0.92
test sdm_hn_rerun 0.93 0.93
shifted none 0.14 0.13
shifted ce 0.91 0.91
shifted ce_hn 0.90 0.89
shifted sdm 0.89 0.89
shifted sdm_hn 0.89 0.88
shifted sdm_hn_rerun 0.92 0.91
""",
    names=2,
)

# (test set, setting, estimator): accuracy and n/|D| for y = 0, y = 1, y_hat = 0, y_hat = 1, and over all
FULL = _read(
    """
harvard ce no-reject 0.59 0.05 0.96 0.95 0.49 0.07 0.98 0.93 0.94 1.
harvard ce_hn no-reject 0.61 0.05 0.95 0.95 0.40 0.08 0.98 0.92 0.93 1.
harvard sdm no-reject 0.50 0.07 0.96 0.93 0.46 0.07 0.96 0.93 0.93 1.
harvard sdm_hn no-reject 0.40 0.06 0.98 0.94 0.57 0.04 0.96 0.96 0.95 1.
harvard sdm_hn_rerun no-reject 0.53 0.04 0.99 0.96 0.77 0.03 0.98 0.97 0.97 1.
test ce no-reject 0.58 0.07 0.98 0.93 0.65 0.06 0.97 0.94 0.95 1.
test ce_hn no-reject 0.55 0.07 0.98 0.93 0.72 0.05 0.97 0.95 0.95 1.
test sdm no-reject 0.55 0.08 0.98 0.92 0.71 0.06 0.96 0.94 0.95 1.
test sdm_hn no-reject 0.54 0.07 0.99 0.93 0.75 0.05 0.97 0.95 0.95 1.
test sdm_hn_rerun no-reject 0.53 0.07 0.99 0.93 0.79 0.04 0.97 0.95 0.96 1.
shifted ce no-reject 0.38 0.09 0.98 0.91 0.66 0.05 0.94 0.95 0.93 1.
shifted ce_hn no-reject 0.24 0.10 1.00 0.90 0.89 0.03 0.92 0.97 0.92 1.
shifted sdm no-reject 0.27 0.11 0.99 0.89 0.73 0.04 0.92 0.96 0.91 1.
shifted sdm_hn no-reject 0.30 0.11 0.98 0.89 0.66 0.05 0.92 0.95 0.91 1.
shifted sdm_hn_rerun no-reject 0.32 0.08 0.99 0.92 0.82 0.03 0.94 0.97 0.94 1.
harvard ce HR 0. 0.01 1. 0.46 R 0. 0.99 0.47 0.99 0.47
harvard ce_hn HR 0.69 0.02 1. 0.34 1. 0.01 0.98 0.35 0.98 0.36
harvard sdm HR 0.36 0.02 1. 0.72 1. 0.01 0.98 0.73 0.98 0.74
harvard sdm_hn HR 0.12 0.03 1. 0.87 1. <0.01 0.97 0.90 0.97 0.90
harvard sdm_hn_rerun HR 0.27 0.02 1. 0.88 1. <0.01 0.99 0.89 0.99 0.90
test ce HR 0.26 0.01 1. 0.55 1. <0.01 0.98 0.56 0.98 0.56
test ce_hn HR 0.22 0.02 1. 0.54 1. <0.01 0.98 0.55 0.98 0.55
test sdm HR 0.15 0.02 1. 0.62 1. <0.01 0.97 0.64 0.97 0.64
test sdm_hn HR 0.14 0.02 1. 0.70 1. <0.01 0.98 0.72 0.98 0.72
test sdm_hn_rerun HR 0.17 0.02 1. 0.71 1. <0.01 0.97 0.73 0.97 0.73
shifted ce HR 1. <0.01 R 0. 1. <0.01 R 0. 1. <0.01
shifted ce_hn HR 0. <0.01 1. 0.01 R 0. 0.88 0.01 0.88 0.01
shifted sdm HR 1. <0.01 1. <0.01 1. <0.01 1. <0.01 1. <0.01
shifted sdm_hn HR 0.50 <0.01 1. 0.01 1. <0.01 0.96 0.01 0.97 0.01
shifted sdm_hn_rerun HR 0.50 <0.01 1. 0.02 1. <0.01 0.94 0.02 0.94 0.02
""",
    names=3,
)

# (setting,): SDM loss, accuracy, mean q and psi, for y = 0 and y = 1 each, and q'_min
CALIBRATION = _read(
    """
none 0.26 0.27 0.81 0.85 218.58 36.92 - - ∞
ce 0.06 0.08 0.96 0.97 856.04 362.22 0.95 0.98 187.82
ce_hn 0.07 0.07 0.95 0.97 862.90 240.49 0.95 0.96 139.0
sdm 0.08 0.07 0.95 0.96 682.80 386.74 0.95 0.97 162.36
sdm_hn 0.06 0.06 0.96 0.97 817.87 505.90 0.96 0.95 139.0
sdm_hn_rerun 0.06 0.05 0.96 0.98 908.75 275.94 0.96 0.95 82.0
""",
    names=1,
)
