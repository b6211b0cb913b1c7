"""The estimator demo: scikit-learn's handwritten digits, as they are, rotated, shifted, and with their pixels shuffled.

The pixels of an 8 x 8 image are its "embedding". Part of the digits is used to fit and calibrate; the rest is the test set, in
four versions that differ more and more from the known digits.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from sdmlm.demo.one_thread import one_thread
from sdmlm.estimator.embedding_files import Embeddings
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.explain import Explanation
from sdmlm.estimator.persistence import KIND
from sdmlm.evaluation.comparison import EstimatorComparison, compare, write_comparison
from sdmlm.report import Example, write_report
from sdmlm.storage.output_paths import check_artifact_folder, check_output_file

ALPHA, SEED = 0.95, 0
# Chosen by the calibration loss only: the best of the learning rates 3e-4 to 1e-2, and enough epochs for it.
FULL: dict[str, Any] = {"exemplar_dim": 128, "learning_rate": 1e-2, "epochs": 60, "rounds": 3}
FAST: dict[str, Any] = {**FULL, "epochs": 30, "rounds": 1}
_SHADES = " ░▒▓█"
_K = 3  # exemplars beside an image on the terminal

INTRO = (
    "An estimator is fitted on {n} handwritten digits. At alpha {alpha:g}, at least {alpha:.0%} of the answers that it "
    "accepts should be right, for every digit. It then gets {m} new digits in four versions: as they are, rotated by 15 "
    "degrees, shifted by one pixel, and with their pixels shuffled, so that they cannot be read."
)
READING = (
    'How to read this: "no-reject" is the plain accuracy. Every other line accepts some answers: the first number is '
    "their accuracy (for the digit where it is worst, and for all), the second their share. On changed digits an estimator "
    "may accept less but should not be wrong more often. Of the shuffled digits it should accept none: for their accuracy, "
    "the right answer is the digit they were made from."
)


def run_demo(folder: str, fast: bool, out: Console) -> EstimatorComparison:
    """Fit, compare, explain; write tables, report, estimator and the test sets into `folder`."""
    report = Path(folder) / "report.html"
    check_output_file(str(report))
    saved = str(Path(folder) / "estimator")
    check_artifact_folder(saved, KIND, force=True)
    began = time.perf_counter()
    fit, tests = digits()
    m = len(next(iter(tests.values())))
    out.print(INTRO.format(n=len(fit), m=m, alpha=ALPHA), style="italic")
    with one_thread():
        compared = compare(fit, tests, ALPHA, "digits", 1000, SEED, True, **(FAST if fast else FULL))
    out.print(compared.table.rich())
    out.print(compared.scores.rich())
    out.print(READING, style="italic")
    out.print()
    for line in verdict(compared, tests):
        out.print(line)
    examples = _examples(compared.estimator, tests)
    for example in examples:
        _show(out, example)
    write_comparison(folder, compared)
    first = next(iter(tests))
    tables = [(f"The same {m} digits in four versions", compared.table)]
    write_report(
        report,
        compared.estimator,
        tests[first],
        tables=tables,
        compared=compared.scores,
        examples=examples,
        title="SDM estimator demo: handwritten digits",
        class_names=fit.class_names,
    )
    compared.estimator.save_pretrained(saved)
    for name, data in tests.items():
        _save(Path(folder) / f"{name}.npz", data)
    out.print(f"\n{time.perf_counter() - began:.0f} s. Open {report} for plots. Try next:", markup=False)
    out.print(f"  sdmlm score {saved} {Path(folder) / 'shifted.npz'}", markup=False, soft_wrap=True)
    out.print(f"  sdmlm explain {saved} {Path(folder) / 'rotated.npz'} --rows 0-2", markup=False, soft_wrap=True)
    return compared


def digits() -> tuple[Embeddings, dict[str, Embeddings]]:
    """(the part to fit on, the four versions of the test part), always the same."""
    X, y = load_digits(return_X_y=True)
    rows = train_test_split(np.arange(len(y)), test_size=0.3, random_state=SEED, stratify=y)
    images = (X / 16.0).astype(np.float32).reshape(-1, 8, 8)
    fit, test = (np.sort(some) for some in rows)
    shown, rng = images[test], np.random.default_rng(SEED)
    versions = {
        "unseen": shown,
        "rotated": np.clip(rotate(shown, 15.0, axes=(1, 2), reshape=False, order=1), 0.0, 1.0),
        "shifted": np.pad(shown, ((0, 0), (0, 0), (1, 0)))[:, :, :-1],
        "shuffled": rng.permuted(shown.reshape(-1, 64), axis=1).reshape(-1, 8, 8),
    }
    tests = {name: _embeddings(version, y[test], test, f"{name}-") for name, version in versions.items()}
    return _embeddings(images[fit], y[fit], fit, "digit-"), tests


def _embeddings(images: NDArray[Any], y: NDArray[Any], rows: NDArray[Any], prefix: str) -> Embeddings:
    ids: list[int | str] = [f"{prefix}{i:04d}" for i in rows]
    names = [str(c) for c in range(10)]
    return Embeddings(images.reshape(len(images), 64), y.astype(np.int64), names, ids, [*map(art, images)], None)


def art(image: NDArray[Any]) -> str:
    """An 8 x 8 image as text."""
    levels = np.minimum((image * len(_SHADES)).astype(int), len(_SHADES) - 1)
    return "\n".join("".join(_SHADES[v] * 2 for v in line).rstrip() for line in levels)


def verdict(compared: EstimatorComparison, tests: dict[str, Embeddings]) -> list[str]:
    """The results of "SDM HR" in sentences."""
    lines = []
    for row in compared.table.rows:
        if row.estimator != "SDM HR":
            continue
        cell, n = row.metrics.marginal, len(tests[row.dataset])
        if cell.accuracy is None:
            lines.append(f"{row.dataset}: none of {n} accepted.")
        elif row.dataset == "shuffled":
            lines.append(f"{row.dataset}: {cell.n} of {n} accepted, where none should be.")
        else:
            kept = "above" if cell.accuracy >= ALPHA else "BELOW"
            says = f"{cell.accuracy:.1%} of them right: {kept} alpha"
            lines.append(f"{row.dataset}: {cell.n} of {n} accepted ({cell.share:.0%}), {says}.")
    return lines


def _examples(estimator: SDMEstimator, tests: dict[str, Embeddings]) -> list[Example]:
    """Examples, not picked by hand: of each version the first rejected digit and the first that was accepted although wrong;
    of the unseen digits also the first accepted one."""
    examples = []
    for name, data in tests.items():
        scores = estimator.score(data.X)
        wrong = scores.accepted & (scores.prediction != data.labels(name))
        kinds = {"rejected": ~scores.accepted, "wrongly accepted": wrong}
        if name == "unseen":
            kinds = {"accepted": scores.accepted & ~wrong, **kinds}
        for what, mask in kinds.items():
            if mask.any():
                i = int(np.argmax(mask))
                (explanation,) = estimator.explain(data.X[i : i + 1], _K)
                title = f"The first {what} of the {name} digits ({data.ids[i]}, a {data.labels(name)[i]})"
                examples.append(Example(title, (data.texts or [])[i], explanation))
    return examples


def _show(out: Console, example: Example) -> None:
    """Print the image and its nearest training images side by side, and the reason."""
    e: Explanation = example.explanation
    out.print(Text(f"\n{example.title}", style="bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text("this one"), *(Text(f"{x.id}: a {x.label}") for x in e.exemplars))
    grid.add_row(Text(example.text or ""), *(Text(x.text or "") for x in e.exemplars))
    out.print(grid)
    out.print(Text(e.reason))


def _save(path: Path, data: Embeddings) -> None:
    partial = path.with_name(f".{path.name}")  # savez adds .npz to any other ending
    np.savez_compressed(partial, X=data.X, y=data.labels(path), ids=np.array(data.ids), texts=np.array(data.texts))
    os.replace(partial, path)
