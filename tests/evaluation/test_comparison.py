"""compare: the right points for the right purpose, every row rebuilt by hand, and the test labels never used to fit."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from scipy.special import softmax

import sdmlm.evaluation.comparison
from sdmlm.estimator.embedding_files import Embeddings
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.evaluation.baselines import APS, RAPS, SoftmaxThreshold, TemperatureScaling, cross_entropy_logits
from sdmlm.evaluation.comparison import EstimatorComparison, compare
from sdmlm.evaluation.metrics import selective_metrics

FAST = {"exemplar_dim": 16, "epochs": 15, "learning_rate": 1e-3, "rounds": 2, "progress": False}
OVER_LOGITS = ["no-reject", "softmax", "temperature", "APS", "RAPS"]
OVER_SDM = ["no-reject", "softmax(d z')", "SDM", "SDM HR", "SDM HR lower"]


def blobs(n: int, seed: int, n_classes: int = 2, shift: float = 0.0, logits: bool = True) -> Embeddings:
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % n_classes)
    X = rng.normal(size=(n, 8)).astype(np.float32) + shift
    X[np.arange(n), y] += 3.0
    lm = rng.normal(size=(n, n_classes)) + 2.0 * (y[:, None] == np.arange(n_classes))
    ids = [f"document {i}" for i in rng.permutation(n)]
    return Embeddings(X, y, [f"class {c}" for c in range(n_classes)], ids, None, lm if logits else None)


FIT = blobs(400, 0)
TESTS = {"same": blobs(150, 1), "shifted": blobs(150, 2, shift=1.0)}


@pytest.fixture(scope="module")
def comparison() -> EstimatorComparison:
    return compare(FIT, TESTS, alpha=0.9, model_name="tiny", bootstrap=50, seed=3, **FAST)


def test_rows_are_complete_and_in_order(comparison: EstimatorComparison) -> None:
    expected = [
        (dataset, model, estimator)
        for dataset in ("same", "shifted")
        for model, estimators in (("tiny", OVER_LOGITS), ("tiny+adaptor", OVER_LOGITS), ("tiny+SDM", OVER_SDM))
        for estimator in estimators
    ]
    assert [(row.dataset, row.model, row.estimator) for row in comparison.table.rows] == expected
    assert list(comparison.decisions) == expected
    assert comparison.table.alpha == comparison.estimator.alpha_ == 0.9
    assert comparison.table.class_names == ["class 0", "class 1"]
    json.dumps(comparison.table.json(), allow_nan=False)


def test_every_row_is_the_metrics_of_its_decisions(comparison: EstimatorComparison) -> None:
    for row in comparison.table.rows:
        predictions, accepted = comparison.decisions[row.dataset, row.model, row.estimator]
        y = TESTS[row.dataset].y
        assert row.metrics == selective_metrics(y, predictions, accepted, 2, bootstrap=50, seed=3)
        if row.estimator == "no-reject":
            assert row.metrics.marginal.share == 1.0
    accepted = {key: int(decided[1].sum()) for key, decided in comparison.decisions.items()}
    assert 0 < accepted["same", "tiny+SDM", "SDM HR"] < 150  # an example in which something happens
    assert accepted["same", "tiny+SDM", "SDM HR lower"] <= accepted["same", "tiny+SDM", "SDM HR"]


def test_decisions_can_be_rebuilt_from_the_split_of_the_estimator(comparison: EstimatorComparison) -> None:
    layer = SDMEstimator.published(alpha=0.9, seed=3, **FAST).fit(FIT.X, FIT.y, ids=FIT.ids).layers_[0]
    train = np.array([FIT.ids.index(i) for i in layer.support_ids])
    held = np.array([FIT.ids.index(i) for i in layer.calibration_ids])
    assert sorted([*train, *held]) == list(range(400))
    assert FIT.y is not None
    assert FIT.logits is not None
    adaptor = cross_entropy_logits(
        comparison.estimator, (FIT.X[train], FIT.y[train]), (FIT.X[held], FIT.y[held]), seed=3, progress=False
    )
    for dataset, data in TESTS.items():
        for model, logits_ca, logits in (
            ("tiny", FIT.logits[held], data.logits),
            ("tiny+adaptor", adaptor(FIT.X[held]), adaptor(data.X)),
        ):
            for name, baseline in {
                "softmax": SoftmaxThreshold(0.9),
                "temperature": TemperatureScaling(0.9),
                "APS": APS(0.9, seed=3),
                "RAPS": RAPS(0.9, seed=3),
            }.items():
                predictions, accepted = baseline.fit(logits_ca, FIT.y[held]).accept(logits)
                assert (comparison.decisions[dataset, model, name][0] == predictions).all()
                assert (comparison.decisions[dataset, model, name][1] == accepted).all()
        scores = comparison.estimator.score(data.X)
        for name, accepted in {
            "no-reject": np.ones(150, bool),
            "softmax(d z')": softmax(scores.d[:, None] * scores.z, axis=1).max(axis=1) >= 0.9,
            "SDM": scores.p.max(axis=1) >= 0.9,
            "SDM HR": scores.accepted,
            "SDM HR lower": scores.accepted_lower,
        }.items():
            assert (comparison.decisions[dataset, "tiny+SDM", name][0] == scores.prediction).all()
            assert (comparison.decisions[dataset, "tiny+SDM", name][1] == accepted).all()


def test_labels_of_the_tests_change_metrics_only(comparison: EstimatorComparison) -> None:
    flipped = {name: dataclasses.replace(data, y=1 - data.y) for name, data in TESTS.items()}
    other = compare(FIT, flipped, alpha=0.9, model_name="tiny", bootstrap=0, seed=3, **FAST)
    for key, (predictions, accepted) in comparison.decisions.items():
        assert (other.decisions[key][0] == predictions).all()
        assert (other.decisions[key][1] == accepted).all()
    assert other.table.rows[0].metrics.marginal.accuracy == pytest.approx(
        1 - comparison.table.rows[0].metrics.marginal.accuracy
    )


def test_without_logits_in_every_file_the_lm_has_no_rows() -> None:
    fast = {**FAST, "rounds": 1, "epochs": 2}
    for fit, test in ((False, True), (True, False)):
        result = compare(blobs(60, 0, 3, logits=fit), {"test": blobs(30, 1, 3, logits=test)}, bootstrap=0, **fast)
        assert {row.model for row in result.table.rows} == {"adaptor", "SDM"}
        assert all(len(row.metrics.class_conditional) == 3 for row in result.table.rows)
    result = compare(blobs(60, 0, 3), {"test": blobs(30, 1, 3)}, bootstrap=0, **fast)
    assert result.table.rows[0].model == "LM"


def test_class_names_are_completed() -> None:
    data = dataclasses.replace(blobs(60, 0, 3), class_names=["a"])
    result = compare(data, {"test": data}, bootstrap=0, **{**FAST, "rounds": 1, "epochs": 1})
    assert result.table.class_names == ["a", "1", "2"]


def test_bad_tests_are_named_before_anything_is_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdmlm.evaluation.comparison, "SDMEstimator", None)
    good = blobs(20, 1)
    assert good.y is not None
    bad = {
        r"outside the classes 0\.\.1 .*the first is 4": dataclasses.replace(good, y=np.where(good.y == 1, 4, 0)),
        "20 labels outside": dataclasses.replace(good, y=np.full(20, -1)),
        "no labels": dataclasses.replace(good, y=None),
        "7 wide": dataclasses.replace(good, X=good.X[:, :7]),
        "NaN": dataclasses.replace(good, X=np.full_like(good.X, np.nan)),
        "The LM logits matrix of bad has 3 columns": dataclasses.replace(good, logits=np.zeros((20, 3))),
    }
    for message, data in bad.items():
        with pytest.raises(ValueError, match=message) as caught:
            compare(FIT, {"good": good, "bad": data})
        assert "bad" in str(caught.value)
    with pytest.raises(ValueError, match="no test set"):
        compare(FIT, {})
    with pytest.raises(ValueError, match="The data to fit on has no labels"):
        compare(dataclasses.replace(FIT, y=None), TESTS)
    with pytest.raises(ValueError, match="alpha"):
        compare(FIT, TESTS, alpha=0.3)


def test_scores_have_a_line_for_every_estimator_and_rival(comparison: EstimatorComparison) -> None:
    rivals = ["logistic regression", "temperature", "Platt", "isotonic", "k-NN distance", "Mahalanobis"]
    keys = [(row.dataset, row.model, row.estimator) for row in comparison.scores.rows]
    certified = [key for key in keys if key[1] == "certified"]
    assert {key[2] for key in certified} == {"SDM", "VBLL", *rivals, "relative Mahalanobis"}
    assert len(certified) == len(TESTS) * len({key[2] for key in certified})
    assert [key for key in keys if "logistic" not in key[1] and key not in certified] == list(comparison.decisions)
    assert [key[2] for key in keys if key[:2] == ("same", "tiny+logistic regression")] == [
        *rivals,
        "relative Mahalanobis",
    ]
    for row in comparison.scores.rows:
        if (key := (row.dataset, row.model, row.estimator)) in comparison.decisions:
            predictions, accepted = comparison.decisions[key]
            assert (row.accepted == accepted).all()
            assert (row.correct == (predictions == TESTS[row.dataset].y)).all()
            assert row.measures["coverage"] == accepted.mean()
        if row.model != "certified" and row.estimator in (
            "softmax",
            "temperature",
            "SDM",
            "softmax(d z')",
        ):  # their rule is a threshold on the score
            assert (row.accepted == (row.scores >= 0.9)).all()
        if row.estimator == "APS":  # one class in the set: the second one has a score above the threshold
            assert (row.scores[row.accepted].min(initial=2)) > row.scores[~row.accepted].min(initial=-1)
    same = {row.estimator: row for row in comparison.scores.rows if row.dataset == "same"}
    assert same["SDM HR"].measures["auroc"] > 0.5
    plain = json.loads(json.dumps(comparison.scores.json(), allow_nan=False))
    assert {"accuracy", "coverage", "accuracy_accepted", "auroc", "aurc", "prr", "coverage_at_0.95"} <= set(plain[0])
    measured = [row for row in plain if row["ece"] is not None]
    assert {row["estimator"] for row in measured} == {"softmax", "temperature", "SDM", "logistic regression"}
    for row in measured:
        assert 0 <= row["ece"] <= 1
        assert 0 <= row["class_wise_ece"] <= 1
        assert 0 <= row["brier"] <= 2
        assert row["log_loss"] >= 0
    assert len(comparison.scores.csv().splitlines()) == len(keys) + 1
    assert comparison.scores.markdown().count("\n") == len(keys) + 2
    assert comparison.scores.latex().count(r"\midrule") == 2
