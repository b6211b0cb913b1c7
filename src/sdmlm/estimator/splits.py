"""Random partitions of the points, class by class: halves, folds, and the points that are held out for the certificate.

Points of one group (documents of one prompt, pictures of one patient) are alike, so a point is not out of sample where another
one of its group was fitted on. With `groups`, whole groups are put on one side or the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_FEW = 500  # points: with fewer, layers fitted on half of them would be poor
_TRIES = 20  # random partitions of groups, until every part holds every class


def fold_count(labels: Ints, groups: Ints | None = None) -> int:
    """Folds of a partition: two, or up to five where there are few points and enough of each class."""
    if groups is None:
        return 2 if len(labels) > _FEW else int(np.clip(np.bincount(labels).min() // 2, 2, 5))
    return 2 if len(np.unique(groups)) > _FEW else int(np.clip(groups_by_class(labels, groups).min() // 2, 2, 5))


def random_halves(labels: Ints, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Two random halves of the points, class by class, so that each has every class; sorted indices.

    If a class has an odd number of points, the last goes to the half that is smaller so far.
    """
    halves: list[list[int]] = [[], []]
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        small = int(rng.integers(2)) if len(halves[0]) == len(halves[1]) else int(len(halves[1]) < len(halves[0]))
        cut = (len(members) + 1) // 2
        halves[small].extend(members[:cut].tolist())
        halves[1 - small].extend(members[cut:].tolist())
    return np.sort(np.array(halves[0])), np.sort(np.array(halves[1]))


def random_folds(labels: Ints, folds: int, rng: np.random.Generator, groups: Ints | None = None) -> list[Ints]:
    """A random partition of the points into folds, class by class; sorted indices."""
    if groups is not None:
        return _grouped_folds(labels, groups, folds, rng)
    if folds == 2:
        return list(random_halves(labels, rng))
    fold = np.empty(len(labels), dtype=np.int64)
    start = 0
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        fold[members] = (start + np.arange(len(members))) % folds
        start += len(members)  # so that the folds stay of one size
    return [np.flatnonzero(fold == k) for k in range(folds)]


def held_out_split(
    labels: Ints, needed: int, rng: np.random.Generator, groups: Ints | None = None
) -> tuple[Ints, Ints]:
    """(points to fit on, points to hold out for the certificate), class by class, sorted.

    Three in ten are held out; of few points up to half, because a certificate needs about 150. If half of the points are fewer
    than the `needed` ones, no certificate is possible, and all points are fitted on. Every class keeps at least four points to
    fit on.

    The test of the certificate assumes independent points, which those of one group are not. So with `groups`, whole groups are
    held out, and of each only one random point is returned; the numbers above then count groups.
    """
    if groups is not None:
        return _grouped_held_out(labels, groups, needed, rng)
    if len(labels) // 2 < needed:
        return np.arange(len(labels)), np.empty(0, dtype=np.int64)
    share = max(0.3, min(0.5, 150 / len(labels)))
    kept = np.zeros(len(labels), dtype=bool)
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        kept[members[: max(min(4, len(members)), len(members) - round(share * len(members)))]] = True
    return np.flatnonzero(kept), np.flatnonzero(~kept)


def groups_by_class(labels: Ints, groups: Ints) -> Ints:
    """In how many groups there are points of each class, (C,)."""
    return np.asarray((_counts(labels, groups) > 0).sum(axis=0))


def grouped_parts(labels: Ints, groups: Ints, shares: Sequence[float], rng: np.random.Generator) -> list[Ints]:
    """A random partition of whole groups in which each part has about its share of the points of every class; sorted indices.

    Large groups are placed first, and each goes to the part that still needs most points of its classes.
    """
    counts = _counts(labels, groups)
    totals = counts.sum(axis=0)
    order = rng.permutation(len(counts))
    order = order[np.argsort(-counts.sum(axis=1)[order], kind="stable")]
    lacking = np.outer(shares, totals).astype(np.float64)  # points of each class that a part still needs
    part = np.empty(len(counts), dtype=np.int64)
    for group in order.tolist():
        gain = (lacking / np.maximum(totals, 1)) @ counts[group]
        part[group] = rng.choice(np.flatnonzero(gain >= gain.max() - 1e-9))
        lacking[part[group]] -= counts[group]
    where = part[np.unique(groups, return_inverse=True)[1]]
    return [np.flatnonzero(where == k) for k in range(len(shares))]


def _counts(labels: Ints, groups: Ints) -> Ints:
    """Points by group and class, (G, C)."""
    names, where = np.unique(groups, return_inverse=True)
    counts = np.zeros((len(names), int(labels.max()) + 1), dtype=np.int64)
    np.add.at(counts, (where, labels), 1)
    return counts


def _grouped_folds(labels: Ints, groups: Ints, folds: int, rng: np.random.Generator) -> list[Ints]:
    n_classes = len(np.unique(labels))
    for _ in range(_TRIES):
        parts = grouped_parts(labels, groups, [1 / folds] * folds, rng)
        if all(len(np.unique(labels[part])) == n_classes for part in parts):
            return parts
    raise ValueError(
        "groups leaves a class without points on one side of every partition that was tried: the points of each class must be "
        "spread over more groups."
    )


def _grouped_held_out(labels: Ints, groups: Ints, needed: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    names = np.unique(groups)
    if len(names) // 2 < needed:
        return np.arange(len(labels)), np.empty(0, dtype=np.int64)
    share = max(0.3, min(0.5, 150 / len(names)))
    # A plain random choice: held-out points must be drawn like new ones, and large groups are not to be fitted on more often.
    aside = np.isin(groups, rng.permutation(names)[: round(share * len(names))])
    kept, held = np.flatnonzero(~aside), np.flatnonzero(aside)
    for c in np.unique(labels):  # groups go back until every class has four to fit on, or all that there are
        lost = np.unique(groups[held[labels[held] == c]])
        missing = max(0, 4 - len(np.unique(groups[kept[labels[kept] == c]])))
        back = np.isin(groups[held], rng.permutation(lost)[:missing])
        kept, held = np.sort(np.concatenate([kept, held[back]])), held[~back]
    one_each = rng.permutation(held)
    one_each = one_each[np.unique(groups[one_each], return_index=True)[1]]
    return kept, np.sort(one_each)
