"""Folders on disk: safetensors and JSON, checksummed, replaced atomically.

`config.json` names the other files with their SHA-256, and their names contain part of that hash. A save writes the new
files beside the old ones, then replaces `config.json` in one step, then removes the files that the old `config.json` named.
If the process is stopped at any moment, the folder holds the old artifact or the new one, never a mixture.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdmlm.errors import SDMError

CONFIG = "config.json"
SDM_FOLDER = "sdm"  # of an SDM layer, inside the folder of its LM


class DamagedError(SDMError):
    """A saved file or folder is damaged, or is not of the expected kind."""


def write_artifact(
    folder: str | Path,
    kind: str,
    version: int,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    texts: dict[str, Any],
) -> None:
    """Write `config`, `tensors` and JSON-able `texts` as an artifact of this kind and version."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to save into.")
    present = _present_config(folder)
    if present and "kind" not in present:  # a language model's, most likely
        raise ValueError(f"{folder} holds something else, whose {CONFIG} would be lost: name another folder.")
    old, existed = _named_files(folder), folder.exists()
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _temporary(folder / "tensors.tmp") as path:
            # Tensors of several layers may share memory, which the format does not allow.
            save_file({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, path)
            tensor_file = _into_place(path, "tensors", ".safetensors", written)
        with _temporary(folder / "texts.tmp") as path:
            path.write_text(json.dumps(texts, ensure_ascii=False), encoding="utf-8")
            text_file = _into_place(path, "texts", ".json", written)
        head = {"kind": kind, "format_version": version, "files": {"tensors": tensor_file, "texts": text_file}}
        with _temporary(folder / "config.tmp") as path:
            path.write_text(json.dumps({**head, **config}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            _flush(path)
            os.replace(path, folder / CONFIG)
    except BaseException as error:  # Ctrl-C too: keep the old files, remove the new ones
        named = old | _named_files(folder)  # includes the new files if config.json was already replaced
        for path in written:
            if path.name not in named:
                path.unlink(missing_ok=True)
        if not existed:
            with contextlib.suppress(OSError):  # not empty, because another process wrote into it, or never created
                folder.rmdir()
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"Could not save to {folder}: {reason}. What was there before is intact.") from error
    _flush(folder)
    for name in old - {tensor_file["name"], text_file["name"]}:
        (folder / name).unlink(missing_ok=True)


def read_artifact(
    folder: str | Path, kind: str, version: int
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """(config, tensors, texts) of an artifact, or a DamagedError that says what is wrong with it."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise DamagedError(f"{folder} holds no {CONFIG}: it is not a saved {kind}.")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind_present, version_present, files = config["kind"], int(config["format_version"]), config["files"]
        entries = {part: (str(files[part]["name"]), str(files[part]["sha256"])) for part in ("tensors", "texts")}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{folder / CONFIG} is damaged: save the artifact again or restore it from a copy."
        ) from error
    if kind_present != kind:
        raise DamagedError(f"{folder} holds a saved {kind_present}, not a {kind}.")
    if version_present > version:
        raise DamagedError(
            f"{folder} was written by a newer sdmlm (format {version_present}, this one reads up to {version}): upgrade sdmlm."
        )
    for name, sha256 in entries.values():
        if Path(name).name != name or not (folder / name).is_file():
            raise DamagedError(f"{folder / name} is missing: the artifact is damaged, restore it from a copy.")
        if _sha256(folder / name) != sha256:
            raise DamagedError(f"{folder / name} is damaged (its checksum differs): restore it from a copy.")
    tensors = load_file(folder / entries["tensors"][0])
    texts = json.loads((folder / entries["texts"][0]).read_text(encoding="utf-8"))
    return config, tensors, texts


@contextlib.contextmanager
def locked(folder: Path, wait: float = math.inf) -> Iterator[bool]:
    """Lock a folder among processes that call this; yields whether this process has the lock.

    If another process has the lock, wait for it, for at most `wait` seconds, and then yield False. A lock ends with its
    process.
    """
    try:
        import fcntl
    except ImportError:  # on Windows: no locks there
        yield True
        return
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield _flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, time.monotonic() + wait)
    finally:
        os.close(handle)


def _flock(handle: int, operation: int, until: float) -> bool:
    import fcntl

    while True:
        try:
            fcntl.flock(handle, operation)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        time.sleep(0.01)


def finite_or_none(value: float) -> float | None:
    """The number itself, or None if it is infinite, which JSON cannot hold."""
    return value if math.isfinite(value) else None


def none_as_infinity(value: float | None) -> float:
    """The inverse of `finite_or_none`. Only positive infinity is saved: thresholds that nothing reaches."""
    return math.inf if value is None else float(value)


def write_text_atomically(path: str | Path, text: str) -> None:
    """Replace a text file in one step. On an OSError (a full disk, for example) the old file stays, and the error names it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _temporary(path) as partial:
            partial.write_text(text, encoding="utf-8")
            _flush(partial)
            os.replace(partial, path)
    except OSError as error:  # it names the temporary file, or no file at all
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_metadata(path: Path, metadata: Mapping[str, Any], indent: int | None = None) -> None:
    """A JSON object with a checksum of its own, replaced in one step."""
    plain = json.loads(json.dumps(metadata))
    write_text_atomically(path, json.dumps({**plain, "sha256": _digest(plain)}, indent=indent) + "\n")


def read_metadata(path: Path) -> dict[str, Any]:
    """What `write_metadata` wrote; ValueError or OSError if it cannot be read or was changed since."""
    metadata = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(metadata, dict):
        raise DamagedError("it is no object")
    if metadata.pop("sha256", None) not in (None, _digest(metadata)):  # the first versions wrote no checksum
        raise DamagedError("its checksum differs")
    return metadata


def _digest(metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A path in the same folder that no other process or thread writes to; removed at the end."""
    path = path.with_name(f"{path.stem}-{secrets.token_hex(4)}.tmp")
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _into_place(path: Path, stem: str, suffix: str, written: list[Path]) -> dict[str, str]:
    _flush(path)
    sha256 = _sha256(path)
    target = path.with_name(f"{stem}-{sha256[:12]}{suffix}")
    os.replace(path, target)
    written.append(target)
    return {"name": target.name, "sha256": sha256}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named_files(folder: Path) -> set[str]:
    """The files that the present config.json names; empty if it is missing or cannot be read."""
    try:
        return {Path(str(entry["name"])).name for entry in _present_config(folder)["files"].values()}
    except (KeyError, TypeError, AttributeError):
        return set()


def _present_config(folder: Path) -> dict[str, Any]:
    """The content of the present config.json; empty if it is missing or cannot be read."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
