"""Checks of the points, labels and ids given to an estimator. Every error names the problem and the fix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdmlm.errors import BadSetting
from sdmlm.estimator.acceptance import check_promise
from sdmlm.estimator.splits import groups_by_class


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


def find_classes(y: Any) -> NDArray[Any]:
    """The distinct labels, sorted; whole numbers given as floats are whole numbers."""
    array = _label_array(y, "y")
    classes = np.unique(array)
    if len(classes) < 2:
        named = f" ({classes[0]})" if len(classes) else ""
        raise ValueError(f"y holds only one class{named}: at least two classes are needed.")
    if len(classes) > 1000 and len(classes) > len(array) // 2:
        raise ValueError(f"y holds {len(classes)} different labels for {len(array)} points: labels must be classes.")
    return classes


def encode_labels(y: Any, classes: NDArray[Any], name: str | None = None) -> Tensor:
    """Labels as indices into `classes`; others become -1, or are refused where the labels have a `name`."""
    array = _label_array(y, name or "y")
    try:
        at = np.clip(np.searchsorted(classes, array), 0, len(classes) - 1)
        known = classes[at] == array
    except TypeError:  # numbers and texts cannot be compared
        at, known = np.zeros(len(array), dtype=np.int64), np.zeros(len(array), dtype=bool)
    if name is not None and not np.all(known):
        wrong = plain_id(array[~np.asarray(known)][0])
        raise ValueError(f"{name} holds the label {wrong!r}, which is not one of the classes {_listed(classes)}.")
    return torch.from_numpy(np.where(known, at, -1).astype(np.int64))


def _label_array(values: Any, name: str) -> NDArray[Any]:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape} but must be one label per point.")
    if array.dtype.kind == "f":
        if not np.isfinite(array).all() or not (array == np.floor(array)).all():
            raise ValueError(f"{name} holds numbers that are not whole: labels must be classes, not measurements.")
        return array.astype(np.int64)
    if array.dtype.kind == "O":
        kinds = {type(value) for value in array.tolist()}
        if kinds <= {str}:
            return array.astype(str)
        if not kinds <= {int, bool}:
            odd = next((value for value in array.tolist() if not isinstance(value, (str, int))), None)
            raise ValueError(
                f"{name} mixes kinds of labels or holds {odd!r}: give all as texts or all as whole numbers."
            )
        return array.astype(np.int64)
    if array.dtype.kind == "b":
        return array.astype(np.int64)
    if array.size and array.dtype.kind not in "iuUS":
        raise ValueError(f"{name} holds {array.dtype} values: labels must be whole numbers or texts.")
    return array


def _listed(classes: NDArray[Any]) -> str:
    shown = ", ".join(map(str, classes[:8].tolist()))
    return shown + (", ..." if len(classes) > 8 else "")


def check_classes(labels: Tensor, classes: NDArray[Any], name: str, least: int) -> None:
    """Refuse labels with too few points of some class."""
    for c, count in enumerate(torch.bincount(labels, minlength=len(classes)).tolist()):
        if count < least:
            raise ValueError(
                f"{name} has {count} point(s) of class {classes[c]}: at least {least} of each class are needed."
            )


def check_groups(groups: Any, labels: Tensor, classes: NDArray[Any]) -> NDArray[np.int64]:
    """The group of each point as a number; every class must be in at least two groups."""
    array = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if array.ndim != 1 or array.dtype.kind not in "iubUSO":
        raise ValueError("groups must hold one whole number or text per point: the group that the point belongs to.")
    check_lengths("X", len(labels), "groups", len(array))
    numbers: dict[Any, int] = {}
    numbered = np.array([numbers.setdefault(plain_id(value), len(numbers)) for value in array.tolist()], dtype=np.int64)
    for c, count in enumerate(groups_by_class(labels.cpu().numpy(), numbered).tolist()):
        if count < 2:
            raise ValueError(f"All points of class {classes[c]} are in one group: at least two groups are needed.")
    return numbered


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
    check_promise(estimator.alpha, estimator.delta, estimator.promise, estimator.epsilon)
    for name, optional in (("exemplar_dim", True), ("epochs", True), ("rounds", True), ("batch_size", False)):
        value = getattr(estimator, name)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise BadSetting(name, f"is {value!r} but must be a whole number of at least 1.")
    rate, seed, max_q = estimator.learning_rate, estimator.seed, estimator.max_q
    if rate is not None and (not isinstance(rate, (int, float, np.number)) or not 0 < rate < math.inf):
        raise BadSetting("learning_rate", f"is {rate!r} but must be a positive number.")
    for name in ("exemplar_dim", "epochs"):
        if rate is None and getattr(estimator, name) is not None:
            raise BadSetting(name, "is set without a learning_rate: give both, or neither for automatic settings.")
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise BadSetting("seed", f"is {seed!r} but must be a whole number of at least 0.")
    for name, choices in CHOICES.items():
        value = getattr(estimator, name)
        if value not in choices:
            raise BadSetting(name, f"is {value!r} but must be one of {', '.join(map(repr, choices))}.")
    if estimator.rule == "certified" and estimator.combine == "all":
        raise BadSetting("rule", 'is "certified", which does not go with combine "all": use "region".')
    if max_q is not None and (not isinstance(max_q, (int, np.integer)) or max_q < 1):
        raise BadSetting("max_q", f"is {max_q!r} but must be a whole number of at least 1, or None for no cap.")


CHOICES = {
    "rule": ("certified", "region", "region lower"),
    "combine": ("average", "best", "all"),
    "distance": ("whitened", "exemplar"),
    "center": ("global", "feature"),
    "index": ("exact", "faiss"),
}


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
