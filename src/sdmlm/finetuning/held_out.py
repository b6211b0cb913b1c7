"""Which calibration rows are held out for the certificate; no layer is fitted, and no checkpoint chosen, with their help."""

from __future__ import annotations

import numpy as np

from sdmlm.estimator.acceptance import points_for_certificate
from sdmlm.finetuning.config import SDMConfig


def part_rows(n: int, args: SDMConfig) -> tuple[list[int], list[int]]:
    """Rows to fit on, and rows held out for the certificate; the same seed gives the same split."""
    order = np.random.default_rng([args.seed, 5]).permutation(n).tolist()
    held_out = held_out_rows(n, args)
    return sorted(order[held_out:]), sorted(order[:held_out])


def held_out_rows(n: int, args: SDMConfig) -> int:
    """How many rows are held out: the share of them, but as many as can certify something if half of them are enough."""
    asked, least = round(n * args.certificate_share), rows_for_certificate(args)
    return least if asked < least <= n // 2 else asked


def rows_for_certificate(args: SDMConfig) -> int:
    """How many held-out rows can certify something if all answers are right; 0 if no number can."""
    return points_for_certificate(args.alpha, args.certificate_delta, args.certificate_epsilon)


def evaluated_rows(n: int, args: SDMConfig) -> list[int]:
    """The calibration rows over which checkpoints are compared: all, or those that are not held out for a certificate."""
    return part_rows(n, args)[0] if args.documents == "own" else list(range(n))
