import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from sdmlm import SDMClassifier

SMALL = {"exemplar_dim": 32, "epochs": 30, "learning_rate": 1e-2, "rounds": 1}


@parametrize_with_checks([SDMClassifier(**SMALL)])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    return X, np.array(["setosa", "versicolor", "virginica"])[y]


def test_named_classes_and_selective_prediction(iris):
    X, y = iris
    classifier = SDMClassifier(alpha=0.9, **{**SMALL, "epochs": 60}).fit(X, y)
    labels, accepted = classifier.predict_selective(X)
    assert set(labels) == set(y)
    assert np.array_equal(labels, classifier.predict(X))
    assert np.array_equal(accepted, classifier.scores(X).accepted)
    assert 0 < accepted.sum() < len(X)
    assert (labels == y)[accepted].mean() >= 0.9
    assert classifier.score(X, y) == (labels == y).mean()


def test_probabilities_point_at_the_prediction_even_where_uniform(iris):
    X, y = iris
    classifier = SDMClassifier(**SMALL).fit(X, y)
    far = X + 1e3 * np.random.default_rng(0).normal(size=X.shape)  # beyond every distance seen: d = 0
    scores = classifier.scores(far)
    assert (scores.d == 0).any()
    for method in (classifier.predict_proba, classifier.decision_function):
        assert np.array_equal(classifier.classes_[method(far).argmax(axis=1)], classifier.predict(far))
    np.testing.assert_allclose(classifier.predict_proba(far).sum(axis=1), 1.0)


def test_probabilities_never_exceed_one_so_proper_scores_work():
    X, y = load_digits(return_X_y=True)
    classifier = SDMClassifier(**SMALL).fit(X[:900], y[:900])
    p = classifier.predict_proba(X)
    assert p.max() == 1.0  # saturated, or nothing is shown
    assert p.min() >= 0.0
    assert np.isfinite(log_loss(y, p))
    assert np.isfinite(cross_val_score(classifier, X[:600], y[:600], cv=2, scoring="neg_log_loss")).all()


def test_which_answers_are_accepted_through_a_pipeline(iris):
    X, y = iris
    pipeline = make_pipeline(StandardScaler(), SDMClassifier(alpha=0.8, rounds=1)).fit(X, y)
    labels, accepted = pipeline.predict(X, return_accepted=True)
    inside = pipeline[:-1].transform(X)
    expected = pipeline[-1].predict_selective(inside)
    np.testing.assert_array_equal(labels, expected[0])
    np.testing.assert_array_equal(accepted, expected[1])
    np.testing.assert_array_equal(labels, pipeline.predict(X))
    assert accepted.dtype == bool
    assert accepted.any()
    assert not accepted.all()
    search = GridSearchCV(pipeline, {"sdmclassifier__rounds": [1]}, cv=2).fit(X, y)
    again = search.best_estimator_.predict(X, return_accepted=True)
    np.testing.assert_array_equal(again[1], accepted)


def test_pipeline_clone_and_grid_search(iris):
    X, y = iris
    pipeline = make_pipeline(StandardScaler(), SDMClassifier(**SMALL))
    assert cross_val_score(clone(pipeline), X, y, cv=2).mean() > 0.8
    search = GridSearchCV(pipeline, {"sdmclassifier__learning_rate": [1e-6, 1e-2]}, cv=2).fit(X, y)
    assert search.best_params_ == {"sdmclassifier__learning_rate": 1e-2}
