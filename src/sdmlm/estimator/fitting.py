"""How layers are fitted: cross-fitted layers that are averaged (the default), or the rounds of the paper."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from sdmlm.estimator.activation import sdm_losses
from sdmlm.estimator.adaptor import balanced_loss, train_adaptor
from sdmlm.estimator.convex import choose_penalty, convex_adaptor
from sdmlm.estimator.layer import SDMLayer
from sdmlm.estimator.splits import fold_count, random_folds
from sdmlm.storage.progress import progress_bar

if TYPE_CHECKING:
    from sdmlm.estimator.estimator import SDMEstimator

Part = tuple[Tensor, Tensor, list[Any]]  # (x, labels, ids)
OnEpoch = Callable[[dict[str, float]], None]

REPEATS = 4  # random partitions whose layers are averaged
# Squared points times columns below which one thread is used. Several gain at most their number, and on a busy machine they wait for
# each other: 10,000 x 256 took 4 s of computing with one thread and 69 s with two. Training repeats the work in every epoch.
_SMALL_WORK, _SMALL_TRAINING = 1e11, 2e9


def fit_layers(
    estimator: SDMEstimator,
    points: Part,
    given: Part | None,
    n_classes: int,
    on_epoch: OnEpoch | None,
    groups: NDArray[np.int64] | None = None,
) -> list[SDMLayer]:
    """The layers that the estimator's settings ask for, the best first if they are not averaged."""
    with threads_for(points[0], _SMALL_WORK if estimator.learning_rate is None else _SMALL_TRAINING):
        if estimator.combine == "average":
            return _fit_repeats(estimator, points, n_classes, on_epoch, groups)
        return _fit_rounds(estimator, points, given, n_classes, on_epoch, groups)


@contextlib.contextmanager
def threads_for(x: Tensor, small: float) -> Iterator[None]:
    """One thread for small problems, in which several would wait for each other; afterwards the old setting is restored."""
    if x.device.type != "cpu" or len(x) ** 2 * x.shape[1] > small or torch.get_num_threads() == 1:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def split_points(points: Part, indices: NDArray[np.int64]) -> Part:
    """The points at these indices."""
    x, labels, ids = points
    at = torch.from_numpy(indices)
    return x[at], labels[at].to(x.device), [ids[i] for i in indices.tolist()]


def _fit_repeats(
    estimator: SDMEstimator, points: Part, n_classes: int, on_epoch: OnEpoch | None, groups: NDArray[np.int64] | None
) -> list[SDMLayer]:
    layers: list[SDMLayer] = []
    repeats, labels = estimator.rounds or REPEATS, points[1].numpy()
    folds = fold_count(labels, groups)
    with progress_bar(estimator.progress) as bar:
        task = bar.add_task("Fitting the SDM layers", total=folds * repeats)
        penalty: float | None = None
        for repeat in range(repeats):
            rng = np.random.default_rng([estimator.seed, repeat])
            splits = []
            for held_at in random_folds(labels, folds, rng, groups):
                train_at = np.setdiff1d(np.arange(len(labels)), held_at)
                splits.append((split_points(points, train_at), split_points(points, held_at)))
            if penalty is None and estimator.learning_rate is None:
                penalty = choose_penalty([(train[:2], held[:2]) for train, held in splits], n_classes)
            for train, held in splits:
                if penalty is not None:
                    layer = _convex_layer(estimator, train, held, n_classes, penalty)
                else:
                    layer = _trained_layer(estimator, train, held, n_classes, rng, lambda row: None)
                layers.append(layer)
                bar.advance(task)
                if on_epoch is not None:
                    on_epoch({"round": float(repeat + 1), **layer.history[-1]})
    return layers


def _convex_layer(estimator: SDMEstimator, train: Part, held: Part, n_classes: int, penalty: float) -> SDMLayer:
    adaptor = convex_adaptor(train[:2], n_classes, penalty)
    whiten = estimator.distance == "whitened"
    layer = SDMLayer.build(adaptor, train, held, n_classes, estimator.make_support(), 0.0, [], whiten)
    ca = layer.calibration
    layer.loss = balanced_loss(sdm_losses(ca.z, ca.q, ca.d, ca.labels), ca.labels, n_classes)
    right = (ca.predictions == ca.labels).double().mean()
    layer.history.append(
        {
            "inverse_penalty": penalty,
            "exemplar_dim": float(len(adaptor.bias)),
            "calibration_loss": layer.loss,
            "calibration_accuracy": float(right),
        }
    )
    return layer


def _fit_rounds(
    estimator: SDMEstimator,
    points: Part,
    given: Part | None,
    n_classes: int,
    on_epoch: OnEpoch | None,
    groups: NDArray[np.int64] | None,
) -> list[SDMLayer]:
    """J rounds, each with new random halves and new weights: the best one, or all of them for an ensemble."""
    layers: list[SDMLayer] = []
    convex = estimator.learning_rate is None
    rounds = estimator.rounds or 1
    with progress_bar(estimator.progress) as bar:
        task = bar.add_task("Fitting the SDM layer", total=rounds * (1 if convex else estimator.epochs or 1))
        for j in range(rounds):
            rng = np.random.default_rng([estimator.seed, j])

            def tell(row: dict[str, float], j: int = j) -> None:
                bar.advance(task)
                if on_epoch is not None:
                    on_epoch({"round": j + 1, **row})

            if given is not None:
                train, held = (points[0], points[1].to(points[0].device), points[2]), given
            else:
                first, second = random_folds(points[1].numpy(), 2, rng, groups)
                train, held = split_points(points, first), split_points(points, second)
            if convex:
                penalty = choose_penalty([(train[:2], held[:2])], n_classes)
                layer = _convex_layer(estimator, train, held, n_classes, penalty)
                tell(layer.history[-1])
            else:
                layer = _trained_layer(estimator, train, held, n_classes, rng, tell)
            if estimator.combine == "all":
                layers.append(layer)
            elif not layers or layer.loss < layers[0].loss:
                layers = [layer]  # keep only one: ten layers of a large model would not fit into memory
    layers.sort(key=lambda layer: layer.loss)
    return layers


def _trained_layer(
    estimator: SDMEstimator, train: Part, held: Part, n_classes: int, rng: np.random.Generator, tell: OnEpoch
) -> SDMLayer:
    """A layer trained by Adam with the SDM loss, as published."""
    trained = train_adaptor(
        train[:2],
        held[:2],
        n_classes,
        exemplar_dim=estimator.exemplar_dim or PUBLISHED_WIDTH,
        epochs=estimator.epochs or PUBLISHED_EPOCHS,
        batch_size=estimator.batch_size,
        learning_rate=float(estimator.learning_rate or 0.0),
        center=estimator.center,
        generator=torch.Generator().manual_seed(int(rng.integers(2**62))),
        make_support=estimator.make_support(),
        on_epoch=tell,
    )
    whiten = estimator.distance == "whitened"
    return SDMLayer.build(
        trained.adaptor, train, held, n_classes, estimator.make_support(), trained.loss, trained.history, whiten
    )


PUBLISHED_WIDTH, PUBLISHED_EPOCHS = 1000, 200
