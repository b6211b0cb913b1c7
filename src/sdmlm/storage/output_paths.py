"""Checks of output files and folders before the work starts, and folders that are created completely or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def check_output_file(path: str | Path | None, *suffixes: str) -> None:
    """Refuse a file that could not be written; None is accepted and means that no file is wanted."""
    if path is None:
        return
    if suffixes and Path(path).suffix not in suffixes:
        raise ValueError(f"{path} must end in {' or '.join(suffixes)}.")
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name a file.")
    _check_writable(Path(path).parent)


def check_artifact_folder(folder: str | Path, kind: str, force: bool = False) -> None:
    """Refuse a folder to save an artifact into that holds something else, or one of this kind (unless forced)."""
    from sdmlm.storage.artifacts import CONFIG  # here, because it imports torch

    path, noun = Path(folder), kind.removeprefix("sdmlm ")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to save into.")
    if path.is_dir() and any(path.iterdir()):
        try:
            present = json.loads((path / CONFIG).read_text(encoding="utf-8"))["kind"]
        except (OSError, ValueError, KeyError, TypeError):
            present = None
        if present != kind:
            raise ValueError(f"{folder} holds something else than a saved {noun}: name another folder.")
        if not force:
            raise ValueError(f"{folder} already holds a saved {noun}: give --force to replace it.")
    _check_writable(path)


def _check_writable(folder: Path) -> None:
    """Refuse a folder in which no file can be created, or that cannot be created itself."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    try:
        # Permission bits are not enough: root may do everything and still cannot write to a read-only disk.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{existing} cannot be written to ({error.strerror}): name another place.") from error


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` with all its contents, or leaves nothing behind after an error."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, target)  # over an empty folder too
    finally:
        shutil.rmtree(partial, ignore_errors=True)
