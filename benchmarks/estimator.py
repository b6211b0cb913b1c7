"""Speed and memory of the estimator, as ratios against what one would otherwise use, in one run.

    python benchmarks/estimator.py            # all, each in a process of its own; writes benchmarks/results/estimator.json
    python benchmarks/estimator.py NAME       # one of them, as JSON

A ratio is time / reference time, so below 1 is faster than the reference. Memory is the peak of the process beyond what it
held before the timed call. Times are the best of several runs.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sdmlm.estimator.activation import sdm_losses
from sdmlm.estimator.adaptor import train_adaptor
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.region import DistanceCDF, find_region
from sdmlm.estimator.support import SupportSet

Result = dict[str, Any]


def seconds(call: Callable[[], Any], repeat: int = 5) -> float:
    best = math.inf
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


class Memory:
    """Peak memory of what runs inside, beyond what was held before; Linux only (0 elsewhere)."""

    mb = 0.0

    def __enter__(self) -> Memory:
        if self._linux:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is held now
            self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_: Any) -> None:
        if self._linux:
            self.mb = max(0.0, self._read("VmHWM") - self._before)

    _linux = sys.platform == "linux"

    @staticmethod
    def _read(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def support_problem(n: int, queries: int, width: int = 1000) -> tuple[SupportSet, torch.Tensor, torch.Tensor]:
    """Two classes that overlap, 2% wrong predictions: runs of all lengths."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 2
    vectors = torch.randn(n, width, generator=generator)
    vectors[:, :50] += 1.5 * labels[:, None]
    wrong = torch.rand(n, generator=generator) < 0.02
    predictions = torch.where(wrong, 1 - labels, labels)
    guesses = torch.arange(queries) % 2
    x = torch.randn(queries, width, generator=generator)
    x[:, :50] += 1.5 * guesses[:, None]
    return SupportSet(vectors, labels, predictions), x, guesses


def similarity_small() -> Result:
    import faiss

    support, x, guesses = support_problem(2500, 2500)
    vectors, labels, predictions = (t.numpy() for t in (support.vectors, support.labels, support.predictions))

    def with_faiss() -> np.ndarray:
        index = faiss.IndexFlatL2(vectors.shape[1])
        index.add(vectors)
        _, found = index.search(x.numpy(), 2048)
        ends = (labels[found] != predictions[found]) | (predictions[found] != guesses.numpy()[:, None])
        return np.where(ends.any(axis=1), ends.argmax(axis=1), 2048)

    with Memory() as memory:
        ours = seconds(lambda: SupportSet(vectors, labels, predictions).query(x, guesses))
    reference = seconds(with_faiss, 2)
    same = float((with_faiss() == support.query(x, guesses).q.clamp(max=2048).numpy()).mean())
    return {
        "what": "q and d_nearest, 2,500 against 2,500 x 1000",
        "reference": "FAISS IndexFlatL2, k = 2048, then the run count",
        "seconds": ours,
        "reference_seconds": reference,
        "memory_mb": memory.mb,
        "note": f"q equal for {same:.2%} of the queries (FAISS rounds in float32)",
    }


def similarity_large() -> Result:
    support, x, guesses = support_problem(200_000, 2000)
    with Memory() as memory:
        ours = seconds(lambda: support.query(x, guesses), 2)
    rows = support._vectors

    def product() -> None:
        for part in x.split(512):
            for start in range(0, len(rows), 4096):
                torch.mm(part, rows[start : start + 4096].T)

    return {
        "what": "q and d_nearest, 2,000 against 200,000 x 1000",
        "reference": "the matrix product alone, in the same blocks",
        "seconds": ours,
        "reference_seconds": seconds(product, 2),
        "memory_mb": memory.mb,
    }


def region() -> Result:
    def problem(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(0)
        labels, own = rng.integers(0, 2, n), 1 - rng.random(n) * 0.2
        p = np.where(np.arange(2) == labels[:, None], own[:, None], 1 - own[:, None])
        return rng.random(n) * 1000, p, labels

    def literal(q_prime: np.ndarray, p: np.ndarray, labels: np.ndarray, alpha: float) -> float:
        own = p[np.arange(len(labels)), labels]
        for v in np.unique(q_prime[q_prime > 0]):
            psi = []
            for c in range(p.shape[1]):
                left = np.sort(own[(labels == c) & (q_prime >= v)])
                psi.append(left[min(math.floor((1 - alpha) * len(left)), len(left) - 1)] if len(left) else 0.0)
            if min(psi) >= alpha:
                return float(v)
        return math.inf

    small, large = problem(20_000), problem(1_000_000)
    assert find_region(*small, 0.95).q_min == literal(*small, 0.95)
    with Memory() as memory:
        ours_large = seconds(lambda: find_region(*large, 0.95), 3)
    return {
        "what": "Algorithm 1, n = 20,000",
        "reference": "the literal algorithm, vectorised with NumPy, n = 20,000",
        "seconds": seconds(lambda: find_region(*small, 0.95)),
        "reference_seconds": seconds(lambda: literal(*small, 0.95), 1),
        "memory_mb": memory.mb,
        "note": f"n = 1,000,000: {ours_large:.2f} s, of which the memory is",
    }


def training_data(n: int = 2500, dim: int = 6144) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.arange(n) % 2
    x = torch.randn(n, dim, generator=torch.Generator().manual_seed(n))
    x[:, :100] += 0.7 * y[:, None]
    return x, y


def epoch() -> Result:
    (x, y), (x_ca, y_ca) = training_data(), training_data(2501)
    x_ca, y_ca = x_ca[:2500], y_ca[:2500]
    width, batch = 1000, 50

    def bare() -> None:
        """A step's two products (forward, gradient), both splits embedded, both compared with the support."""
        weight = torch.randn(width, x.shape[1])
        for part in x.split(batch):
            h = part @ weight.T
            h.T @ part
        h, h_ca = x @ weight.T, x_ca @ weight.T
        h @ h.T
        h_ca @ h.T

    def published_style() -> None:
        """What one writes at first: Conv1d, autograd through it, plain Adam, normalising in every step; then q and d."""
        conv, linear = torch.nn.Conv1d(1, width, x.shape[1]), torch.nn.Linear(width, 2)
        optimizer = torch.optim.Adam([*conv.parameters(), *linear.parameters()], lr=1e-5, foreach=False, fused=False)
        mean, std = x.mean(), x.std()

        def embed(rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = conv(((rows - mean) / std)[:, None, :])
            return out.squeeze(2)

        for start in range(0, len(x), batch):
            optimizer.zero_grad()
            F.cross_entropy(linear(embed(x[start : start + batch])), y[start : start + batch]).backward()
            optimizer.step()
        with torch.no_grad():
            h = torch.cat([embed(part) for part in x.split(batch)])
            h_ca = torch.cat([embed(part) for part in x_ca.split(batch)])
            support = SupportSet(h, y, linear(h).argmax(1))
            for rows, labels in ((h, y), (h_ca, y_ca)):
                z = linear(rows)
                found = support.query(rows, z.argmax(1))
                d = DistanceCDF.fit(found.d_nearest, labels, found.q, 2).quantile(found.d_nearest)
                sdm_losses(z, found.q, d, labels).mean()

    times: list[float] = []
    with Memory() as memory:
        train_adaptor(
            (x, y),
            (x_ca, y_ca),
            2,
            exemplar_dim=width,
            epochs=6,
            batch_size=batch,
            learning_rate=1e-5,
            center="global",
            generator=torch.Generator().manual_seed(0),
            on_epoch=lambda row: times.append(time.perf_counter()),
        )
    ours = min(b - a for a, b in itertools.pairwise(times))
    naive = seconds(published_style, 1)
    return {
        "what": "one training epoch, 2,500 + 2,500 documents, D = 6144, M = 1000, batch 50",
        "reference": "the bare matrix products (steps forward and backward, both splits embedded and compared)",
        "seconds": ours,
        "reference_seconds": seconds(bare, 3),
        "memory_mb": memory.mb,
        "note": f"convolution, autograd, plain Adam: {naive:.2f} s, {naive / ours:.1f}x ours",
    }


def fitted(dim: int = 6144) -> SDMEstimator:
    estimator = SDMEstimator.published(epochs=2, rounds=1, progress=False)
    x, y = training_data(5000, dim)
    return estimator.fit(x, y)


def score_batch() -> Result:
    estimator = fitted()
    x, _ = training_data(2000)
    weight, support = estimator.layers_[0].adaptor.weight, estimator.layers_[0].support._vectors
    with Memory() as memory:
        ours = seconds(lambda: estimator.score(x))
    return {
        "what": "scoring 2,000 documents in one batch, D = 6144, N = 2,500",
        "reference": "its matrix products (h' and the distances)",
        "seconds": ours,
        "reference_seconds": seconds(lambda: (x @ weight.T) @ support.T),
        "memory_mb": memory.mb,
    }


def score_one() -> Result:
    estimator = fitted()
    x, _ = training_data(2000)
    weight, support = estimator.layers_[0].adaptor.weight, estimator.layers_[0].support._vectors
    rows = iter(range(10**9))
    with Memory() as memory:
        times = [seconds(lambda: estimator.score(x[next(rows) % 2000][None]), 1) for _ in range(300)]
    products = [seconds(lambda: (x[:1] @ weight.T) @ support.T, 1) for _ in range(300)]
    return {
        "what": "scoring a single document, D = 6144, N = 2,500 (median of 300)",
        "reference": "its matrix products",
        "seconds": float(np.median(times[20:])),
        "reference_seconds": float(np.median(products[20:])),
        "memory_mb": memory.mb,
        "note": f"99th percentile {1000 * np.quantile(times[20:], 0.99):.2f} ms",
    }


BENCHMARKS = {f.__name__: f for f in (similarity_small, similarity_large, region, epoch, score_batch, score_one)}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(BENCHMARKS[sys.argv[1]]()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "reference", "time", "ratio", "memory", "note", title="Estimator benchmarks")
    results = {}
    for name in BENCHMARKS:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        result = json.loads(done.stdout.splitlines()[-1])
        result["ratio"] = result["seconds"] / result["reference_seconds"]
        results[name] = result
        table.add_row(
            result["what"],
            f"{result['reference']}: {result['reference_seconds']:.4g} s",
            f"{result['seconds']:.4g} s",
            f"{result['ratio']:.3g}",
            f"{result['memory_mb']:.0f} MB",
            result.get("note", ""),
        )
    Console().print(table)
    machine = {"processor": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    out = Path(__file__).parent / "results" / "estimator.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
