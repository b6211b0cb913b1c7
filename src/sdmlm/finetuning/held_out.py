"""Which calibration rows are held out for the certificate; no layer is fitted, and no checkpoint chosen, with their help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdmlm.estimator.acceptance import points_for_certificate
from sdmlm.finetuning.config import SDMConfig
from sdmlm.language_model.rows import first_rows, prompt_key


def part_rows(prompts: Sequence[Any], args: SDMConfig) -> tuple[list[int], list[int]]:
    """Rows to fit on, and rows held out for the certificate; the same seed gives the same split.

    Of rows with the same prompt only the first is used: the LM answers them alike, and the same answer counted twice would
    make a certificate look surer than it is.
    """
    distinct = first_rows(prompts)
    order = np.random.default_rng([args.seed, 5]).permutation(distinct).tolist()
    held_out = held_out_rows(len(distinct), args)
    return sorted(order[held_out:]), sorted(order[:held_out])


def held_out_rows(n: int, args: SDMConfig) -> int:
    """How many of n different prompts are held out: the share of them, but as many as can certify something if half are enough."""
    asked, least = round(n * args.certificate_share), rows_for_certificate(args)
    return least if asked < least <= n // 2 else asked


def rows_for_certificate(args: SDMConfig) -> int:
    """How many held-out prompts can certify something if all answers are right; 0 if no number can."""
    return points_for_certificate(args.alpha, args.certificate_delta, args.certificate_epsilon)


def evaluated_rows(prompts: Sequence[Any], args: SDMConfig) -> list[int]:
    """The calibration rows over which checkpoints are compared: all, or those whose prompts are not held out for a certificate."""
    if args.documents != "own":
        return list(range(len(prompts)))
    held_out = {prompt_key(prompts[i]) for i in part_rows(prompts, args)[1]}
    return [i for i, prompt in enumerate(prompts) if prompt_key(prompt) not in held_out]
