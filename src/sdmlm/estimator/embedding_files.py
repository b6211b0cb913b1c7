"""Embedding files: .npz, .parquet or .jsonl with vectors, labels, ids, texts and logits (docs/data-formats.md).

| meaning                     | .npz array             | .parquet / .jsonl column |
|-----------------------------|------------------------|--------------------------|
| vectors (N, D), required    | X or embeddings        | embedding                |
| labels, numbers or strings  | y or labels            | label                    |
| document ids                | ids                    | id                       |
| texts, for explanations     | texts                  | text                     |
| the LM's own logits (N, C)  | logits                 | logits                   |
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdmlm.storage.text_files import decode, json_lines, parquet_table

_NAMES = {
    "embedding": ("X", "embeddings"),
    "label": ("y", "labels"),
    "id": ("ids",),
    "text": ("texts",),
    "logits": ("logits",),
}


@dataclass(frozen=True)
class Embeddings:
    """The contents of an embedding file. `y` are indices into `class_names`, -1 for a label that is not among them."""

    X: NDArray[np.float32]
    y: NDArray[np.int64] | None
    class_names: list[str]
    ids: list[int | str]
    texts: list[str] | None
    logits: NDArray[np.float64] | None

    def __len__(self) -> int:
        return len(self.X)

    def documents(self) -> dict[int | str, str]:
        """The texts by id; empty if the file has no texts."""
        return dict(zip(self.ids, self.texts or [], strict=False))

    def labels(self, path: str | Path) -> NDArray[np.int64]:
        """The labels, or a ValueError that names the file if it has none."""
        if self.y is None:
            raise ValueError(f"{path} has no labels: add an array y (.npz) or a column label.")
        return self.y


def read_embeddings(path: str | Path, class_names: Sequence[str] | None = None) -> Embeddings:
    """Read an embedding file. `class_names`: the classes of a fitted estimator; default: the sorted labels of the file.

    Whole-number labels 0..C-1 are used as class indices. All others (-1 and 1, 1 to 5, texts) are names of classes.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: name an .npz, .parquet or .jsonl file of embeddings."
        )
    readers = {".npz": _read_npz, ".parquet": _read_parquet, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"{path} is of an unknown kind: embeddings are read from .npz, .parquet or .jsonl files.")
    columns = readers[path.suffix](path)
    X = _matrix(columns.get("embedding"), path, "embeddings", np.float32)
    if X is None:
        raise ValueError(f"{path} has no embeddings: an .npz needs an array X, other files a column embedding.")
    if X.size == 0:
        raise ValueError(f"{path} is empty: it holds no embeddings.")
    n = len(X)
    for name, column in columns.items():
        shape = np.shape(column) if isinstance(column, np.ndarray) else (len(column),)
        if name in ("label", "id", "text") and len(shape) != 1:
            raise ValueError(f"{path} has {name}s of shape {shape}: give one {name} per row.")
        if column is not None and len(column) != n:
            raise ValueError(f"{path} has {n} embeddings but {len(column)} entries of {name}: they must match.")
    ids = columns.get("id")
    texts = columns.get("text")
    y, names = _labels(columns.get("label"), class_names, path)
    return Embeddings(
        X,
        y,
        names,
        list(range(n))
        if ids is None
        else [i if isinstance(i, (int, str)) else str(i) for i in np.asarray(ids).tolist()],
        None if texts is None else [str(t) for t in texts],
        _matrix(columns.get("logits"), path, "logits", np.float64),
    )


def _labels(values: Any, class_names: Sequence[str] | None, path: Path) -> tuple[NDArray[np.int64] | None, list[str]]:
    if values is None:
        return None, list(class_names or [])
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{path} has labels of shape {array.shape}: give one label per row.")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise ValueError(f"{path} has labels that are missing (NaN): give every row a label.")
    if array.dtype.kind == "f" and (array == np.floor(array)).all():
        array = array.astype(np.int64)
    if array.dtype.kind in "iub":
        numbers = np.unique(array)
        if class_names is None:
            class_names = [str(c) for c in numbers.astype(int).tolist()]
        if not all(_is_whole(name) for name in class_names):
            return array.astype(np.int64), list(class_names)  # indices of the classes of an estimator
        array = array.astype(int)
    if any(v is None for v in array.tolist()):
        raise ValueError(f"{path} has rows without a label: give every row a label.")
    words = [str(v) for v in array.tolist()]
    names = list(class_names or sorted(set(words)))
    where = {name: i for i, name in enumerate(names)}
    return np.array([where.get(word, -1) for word in words]), names


def _is_whole(name: str) -> bool:
    return name.removeprefix("-").isdecimal()


def _matrix(values: Any, path: Path, name: str, dtype: Any) -> NDArray[Any] | None:
    if values is None:
        return None
    try:
        with np.errstate(over="ignore"):  # overflow gives inf, which is reported on use
            matrix = np.asarray(values, dtype=dtype)
    except OverflowError as error:
        raise ValueError(
            f"{path} has {name} with a number too large for a float: remove or repair that row."
        ) from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has {name} of different lengths, or that are not numbers.") from error
    if matrix.ndim != 2 and matrix.size:
        raise ValueError(f"{path} has {name} of shape {matrix.shape}: they must be a matrix, one row per document.")
    return matrix


def _read_npz(path: Path) -> dict[str, Any]:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            raise ValueError(f"{path} holds a single array, not named ones: write it with np.savez(..., X=X, y=y).")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not a readable .npz file: write one with np.savez({path.name!r}, X=X, y=y).")
    try:
        with np.load(path, allow_pickle=False) as archive:
            array_names = {meaning: next((n for n in names if n in archive), None) for meaning, names in _NAMES.items()}
            return {meaning: _array(archive, name, path) for meaning, name in array_names.items() if name is not None}
    except (OSError, EOFError, KeyError, NotImplementedError, zlib.error, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a readable .npz file: {error}.") from error


def _array(archive: Any, name: str, path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = archive[name]
    except ValueError as error:
        if not _holds_objects(archive, name):
            raise ValueError(f"{path}: the array {name} cannot be read ({error}).") from error
        kind = "float" if name in (*_NAMES["embedding"], *_NAMES["logits"]) else "str"
        raise ValueError(
            f"{path}: the array {name} holds Python objects (object arrays are refused): save it as "
            f"np.asarray({name}, dtype={kind})."
        ) from error
    return array


def _holds_objects(archive: Any, name: str) -> bool:
    """Whether an array of an .npz file holds Python objects, from its header alone; NumPy has no type for this error."""
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.zip.open(name if name in archive.zip.namelist() else f"{name}.npy") as file:
        try:
            version = np.lib.format.read_magic(file)
            return bool(version in read_header and read_header[version](file)[2].hasobject)
        except ValueError:
            return False


def _read_parquet(path: Path) -> dict[str, Any]:
    table = parquet_table(path, path)
    return {name: table.column(name).to_pylist() for name in _NAMES if name in table.column_names}


def _read_jsonl(path: Path) -> dict[str, Any]:
    rows = [row for _, row in json_lines(decode(path.read_bytes(), path), path, " with the key embedding")]
    if not rows:
        raise ValueError(f"{path} is empty: it holds no embeddings.")
    columns = {}
    for name in _NAMES:
        missing = [i for i, row in enumerate(rows, start=1) if row.get(name) is None]
        if missing and len(missing) < len(rows):
            raise ValueError(f"{path}, row {missing[0]}: {name} is missing although other rows have it.")
        if not missing:
            columns[name] = [row[name] for row in rows]
    return columns
