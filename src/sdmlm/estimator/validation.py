"""What the estimator asks of labels and ids, and the random halves of a round. Every error names the thing and the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdmlm.errors import BadSetting
from sdmlm.estimator.region import check_alpha


def random_halves(labels: NDArray[np.int64], rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Two random halves of the points, class by class, so that no class is lost; sorted indices.

    The odd point of a class goes to the half that is smaller so far, or to either.
    """
    halves: list[list[int]] = [[], []]
    for c in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == c))
        small = int(rng.integers(2)) if len(halves[0]) == len(halves[1]) else int(len(halves[1]) < len(halves[0]))
        cut = (len(members) + 1) // 2
        halves[small].extend(members[:cut].tolist())
        halves[1 - small].extend(members[cut:].tolist())
    return np.sort(np.array(halves[0])), np.sort(np.array(halves[1]))


def label_tensor(values: Any, name: str) -> Tensor:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape} but must be one whole number per point.")
    if array.dtype.kind == "f" and bool((array == np.floor(array)).all()) and bool(np.isfinite(array).all()):
        array = array.astype(np.int64)
    if array.size and array.dtype.kind not in "iub":
        named = ": SDMClassifier takes named classes" if array.dtype.kind in "OUS" else ""
        raise ValueError(f"{name} must hold whole numbers (class indices 0..C-1), got {array.dtype}{named}.")
    return torch.from_numpy(array.astype(np.int64))


def count_classes(labels: Tensor) -> int:
    if int(labels.min()) < 0:
        raise ValueError(f"y holds the label {int(labels.min())}, which is out of range: labels are 0..C-1.")
    found = torch.unique(labels)
    if len(found) < 2:
        raise ValueError(f"y holds only one class ({int(found[0])}): at least two classes are needed.")
    n_classes = int(found[-1]) + 1
    if len(found) < n_classes:
        gap = next(c for c in range(len(found) + 1) if c >= len(found) or int(found[c]) != c)
        raise ValueError(
            f"y has no point of class {gap} although it holds the label {n_classes - 1}: labels are 0..C-1, at least 2 "
            "points of each class."
        )
    return n_classes


def check_classes(labels: Tensor, n_classes: int, name: str, least: int) -> None:
    if int(labels.min()) < 0 or int(labels.max()) >= n_classes:
        wrong = int(labels.min()) if int(labels.min()) < 0 else int(labels.max())
        raise ValueError(f"{name} holds the label {wrong}, which is out of range: the classes are 0..{n_classes - 1}.")
    for c, count in enumerate(torch.bincount(labels, minlength=n_classes).tolist()):
        if count < least:
            raise ValueError(f"{name} has {count} point(s) of class {c}: at least {least} of each class are needed.")


def check_lengths(name: str, length: int, other: str, other_length: int) -> None:
    if length != other_length:
        raise ValueError(f"{name} has {length} rows but {other} has {other_length}: they must match.")


def plain_id(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def checked_ids(ids: Sequence[Any] | None, n: int, name: str) -> list[Any]:
    if ids is None:
        return list(range(n))
    plain = [plain_id(i) for i in ids]
    check_lengths("X", n, name, len(plain))
    wrong = [i for i in plain if isinstance(i, bool) or not isinstance(i, (int, str))]
    if wrong:
        raise ValueError(f"{name} holds {wrong[0]!r}: an id is a whole number or a string.")
    if len(set(plain)) != n:
        raise ValueError(f"{name} holds an id twice: every document needs an id of its own.")
    return plain


def check_parameters(estimator: Any) -> None:
    """Refuse constructor parameters that nothing can be fitted with; as scikit-learn does, when `fit` is called."""
    check_alpha(estimator.alpha)
    for name in ("exemplar_dim", "epochs", "batch_size", "rounds"):
        value = getattr(estimator, name)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise BadSetting(name, f"is {value!r} but must be a whole number of at least 1.")
    rate, seed, max_q = estimator.learning_rate, estimator.seed, estimator.max_q
    if not isinstance(rate, (int, float, np.number)) or not 0 < rate < math.inf:
        raise BadSetting("learning_rate", f"is {rate!r} but must be a positive number.")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise BadSetting("seed", f"is {seed!r} but must be a whole number of at least 0.")
    if estimator.center not in ("global", "feature"):
        raise BadSetting("center", f'is {estimator.center!r} but must be "global" or "feature".')
    if estimator.index not in ("exact", "faiss"):
        raise BadSetting("index", f'is {estimator.index!r} but must be "exact" or "faiss".')
    if max_q is not None and (not isinstance(max_q, (int, np.integer)) or max_q < 1):
        raise BadSetting("max_q", f"is {max_q!r} but must be a whole number of at least 1, or None for no cap.")


def float_matrix(
    values: Any, name: str, device: torch.device, width: int | None = None, allow_empty: bool = False
) -> Tensor:
    """A finite float32 matrix on the device, one row per point."""
    try:
        with np.errstate(over="ignore"):  # what overflows is named below
            x = values.detach() if isinstance(values, Tensor) else torch.from_numpy(np.array(values, dtype=np.float32))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is not a matrix of numbers: {error}.") from error
    if x.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)} but must be a matrix: one row per point.")
    if width is not None and x.shape[1] != width:
        raise ValueError(f"{name} is {x.shape[1]} wide but the estimator was fitted on vectors {width} wide.")
    if x.shape[1] == 0 or (len(x) == 0 and not allow_empty):
        raise ValueError(f"{name} is empty: give at least one row and one column.")
    x = x.to(device, torch.float32)
    # A row with NaN or inf has no finite sum: one pass over good data, a closer look only at the others.
    odd = (~torch.isfinite(x.sum(dim=1))).nonzero().squeeze(1)
    bad = odd[~torch.isfinite(x[odd]).all(dim=1)]
    if len(bad):
        raise ValueError(
            f"{name} has NaN or infinite values (beyond float32 counts as infinite) in {len(bad)} rows, "
            f"the first is row {int(bad[0])}: remove or repair them."
        )
    return x
