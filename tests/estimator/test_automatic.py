"""SDMEstimator() as people first try it: no setting, any labels, a certified rule."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from toy_points import blobs

from sdmlm import SDMClassifier, SDMEstimator
from sdmlm.estimator.acceptance import least_points
from sdmlm.estimator.splits import held_out_split
from sdmlm.storage.progress import progress_bar as _bar

X, Y = blobs(600, 3, gap=4.0)
FRESH, FRESH_Y = blobs(400, 3, seed=1, gap=4.0)


def fit(**changes):
    return SDMEstimator(**{"progress": False, **changes})


@pytest.fixture(scope="module")
def fitted():
    return fit().fit(X, Y)


def same(one, two):
    return all(
        np.array_equal(getattr(one, f.name), getattr(two, f.name), equal_nan=getattr(one, f.name).dtype.kind == "f")
        for f in dataclasses.fields(one)
    )


def test_the_defaults_accept_nearly_all_that_is_known_and_nothing_else(fitted):
    scores = fitted.score(FRESH)
    right = scores.prediction == FRESH_Y
    assert right.mean() > 0.97
    assert scores.accepted.mean() > 0.85
    assert right[scores.accepted].mean() > 0.95
    far = FRESH.copy()
    far[:, -1] += 12  # a direction that tells no classes apart
    assert fitted.score(far).accepted.mean() == 0
    assert fitted.certificate_.certified
    settings = fitted.settings()
    assert (settings["rule"], settings["layers"], settings["held_out"]) == (
        "certified",
        20,
        180,
    )  # 420 points: five folds, four times
    assert settings["inverse_penalty"] in (0.001, 0.01, 0.1, 1.0, 10.0)


def test_what_is_accepted_is_the_rule_applied(fitted):
    scores, rule = fitted.score(FRESH), fitted.certificate_
    expected = [
        c >= rule.thresholds[y] and d >= rule.least_distance and d > 0
        for c, d, y in zip(scores.confidence, scores.d, scores.prediction, strict=True)
    ]
    assert scores.accepted.tolist() == expected
    lower = fitted.score(FRESH, alpha=0.8)
    assert lower.accepted.tolist() == fitted.certified_rule(0.8).accepts(scores).tolist()
    at = fitted.accepted_at(scores, (0.8, 0.95))
    np.testing.assert_array_equal(at, np.stack([lower.accepted, scores.accepted], axis=1))


@pytest.mark.parametrize("epsilon", [0.05, 0.2])
def test_epsilon_of_the_known_points_are_given_up(epsilon):
    estimator = fit(epsilon=epsilon).fit(X, Y)
    new = blobs(3000, 3, seed=2, gap=4.0)[0]
    lost = 1 - estimator.certificate_.near_enough(estimator.score(new).d).mean()
    known = len(estimator.calibration_.labels)
    spread = np.sqrt(epsilon * (1 - epsilon) * (1 / known + 1 / len(new)))
    assert abs(lost - epsilon) < 4.5 * spread


def test_saved_and_loaded_it_decides_the_same(fitted, tmp_path):
    fitted.save_pretrained(tmp_path / "e")
    loaded = SDMEstimator.from_pretrained(tmp_path / "e")
    assert same(loaded.score(FRESH), fitted.score(FRESH))
    assert loaded.certificate_ == fitted.certificate_
    assert loaded.settings() == fitted.settings()
    assert loaded.digest() == fitted.digest()
    assert loaded.label_errors() == fitted.label_errors()
    new = loaded.with_support(FRESH[:50], FRESH_Y[:50])
    assert same(new.score(FRESH), fitted.with_support(FRESH[:50], FRESH_Y[:50]).score(FRESH))


def test_points_that_join_make_the_rule_anew(fitted):
    new = fitted.with_support(FRESH[:200], FRESH_Y[:200])
    assert new.certificate_ != fitted.certificate_
    assert same(new.score(FRESH[200:]), fitted.with_support(FRESH[:200], FRESH_Y[:200]).score(FRESH[200:]))
    old = fitted.score(FRESH[200:])
    assert same(old, fitted.score(FRESH[200:]))


@pytest.mark.parametrize("combine", ["average", "all"])
def test_near_known_out_of_distribution_points_nothing_is_accepted(combine):
    rule = "certified" if combine == "average" else "region"
    centre = X[Y == 0].mean(axis=0)
    rng = np.random.default_rng(3)
    strange = (centre + np.array([0, 0, 0, 0, 2.5, 0]) + 0.2 * rng.normal(size=(80, 6))).astype(np.float32)
    options = {"combine": combine, "rule": rule, "alpha": 0.9, "epsilon": 0.0, "rounds": 2}
    plain, warned = fit(**options).fit(X, Y), fit(**options).fit(X, Y, ood=strange[:40])
    before, after = plain.score(strange[40:]), warned.score(strange[40:])
    assert before.accepted.mean() > 0.5
    assert after.accepted.mean() < 0.05
    assert (after.q == 0).mean() > 0.9
    np.testing.assert_array_equal(before.z, after.z)
    for layer in warned.layers_:
        assert int((layer.support.labels == -1).sum()) == 40
    assert warned.score(FRESH).accepted.mean() > 0.7 * plain.score(FRESH).accepted.mean()
    with pytest.raises(ValueError, match="ood is 5 wide"):
        fit().fit(X, Y, ood=strange[:, :5])


@pytest.mark.parametrize(
    "names",
    [
        np.array([-1, 1]),
        np.array(["no", "yes"]),
        np.array(["no", "yes"], dtype=object),
        np.array([False, True]),
        np.array([3, 70]),
        np.array([-1.0, 1.0]),
        np.array([np.int8(-5), np.int8(7)]),
    ],
    ids=str,
)
def test_any_labels(names, tmp_path):
    points, y = blobs(240, 2, gap=4.0)
    fresh = blobs(60, 2, seed=1, gap=4.0)[0]
    plain = fit(rounds=1).fit(points, y)
    estimator = fit(rounds=1).fit(points, names[y])
    assert same(estimator.score(fresh), plain.score(fresh))
    assert estimator.classes_.tolist() == names.tolist()
    assert estimator.predict(fresh).tolist() == names[plain.predict(fresh)].tolist()
    estimator.save_pretrained(tmp_path / "e")
    loaded = SDMEstimator.from_pretrained(tmp_path / "e")
    assert loaded.predict(fresh).tolist() == names[plain.predict(fresh)].tolist()
    labels = names[blobs(60, 2, seed=1, gap=4.0)[1]]
    assert estimator.certify(fresh, labels, delta=0.2).held_out == 60
    new = loaded.with_support(fresh[:5], labels[:5])
    assert new.layers_[0].support.labels[-5:].tolist() == [names.tolist().index(v) for v in labels[:5].tolist()]


def test_held_out_points_of_the_caller():
    estimator = fit(rounds=1).fit(X, Y, held_out=(FRESH, FRESH_Y))
    assert estimator.certificate_.held_out == len(FRESH)
    assert len(estimator.calibration_.labels) == len(X)  # nothing was set aside
    rows = estimator.certify(FRESH, FRESH_Y)
    assert dataclasses.replace(rows, estimator=None) == estimator.certificate_
    with pytest.raises(ValueError, match="held_out X has 400 rows but held_out y has 3"):
        fit(rounds=1).fit(X, Y, held_out=(FRESH, FRESH_Y[:3]))
    with pytest.raises(ValueError, match="held_out X is 2 wide"):
        fit(rounds=1).fit(X, Y, held_out=(FRESH[:, :2], FRESH_Y))


def test_held_out_points_play_no_part_in_fitting(fitted):
    """Other labels of the held-out points change the certificate and nothing else."""
    kept, rest = held_out_split(Y, least_points(0.95, 0.05), np.random.default_rng([0, 2**20]))
    assert sorted([*kept, *rest]) == list(range(600))
    assert sorted(fitted.calibration_ids_) == kept.tolist()
    assert {name for layer in fitted.layers_ for name in layer.support_ids} == set(kept.tolist())
    other = fit().fit(X[kept], Y[kept], held_out=(X[rest], (Y[rest] + 1) % 3))
    one, two = fitted.score(FRESH), other.score(FRESH)
    np.testing.assert_array_equal(one.confidence, two.confidence)
    np.testing.assert_array_equal(one.d, two.d)
    assert not other.certificate_.certified
    assert not two.accepted.any()


def test_too_few_points_say_how_many_are_needed(tmp_path):
    points, y = blobs(60, 2, gap=4.0)
    estimator = fit(rounds=1).fit(points, y)
    assert not estimator.score(points).accepted.any()
    assert "even without an error 59 are needed, so fit on at least 118 points" in str(estimator.certificate_)
    assert "59 are needed" in estimator.explain(FRESH[:1])[0].reason or estimator.score(FRESH[:1]).q[0] == 0
    estimator.save_pretrained(tmp_path / "e")
    assert same(SDMEstimator.from_pretrained(tmp_path / "e").score(points), estimator.score(points))
    assert fit(rounds=1, alpha=0.8).fit(points, y).certificate_.held_out == 30


def test_a_seed_decides_everything(fitted):
    again, other = fit().fit(X, Y), fit(seed=1).fit(X, Y)
    assert same(again.score(FRESH), fitted.score(FRESH))
    assert again.certificate_ == fitted.certificate_
    assert again.digest() == fitted.digest()
    assert not same(other.score(FRESH), fitted.score(FRESH))
    assert set(other.calibration_ids_) != set(fitted.calibration_ids_)


def test_alone_or_in_a_batch_the_decision_is_the_same(fitted):
    rng = np.random.default_rng(4)
    rows = np.concatenate([FRESH[:60], X[:60], (5 * rng.normal(size=(40, 6))).astype(np.float32)])
    together = fitted.score(rows)
    for i in range(len(rows)):
        alone = fitted.score(rows[i : i + 1])
        assert alone.accepted[0] == together.accepted[i]
        assert alone.prediction[0] == together.prediction[i]
        assert alone.q[0] == pytest.approx(together.q[i])
        assert alone.d[0] == pytest.approx(together.d[i])
        assert alone.nearest[0] == together.nearest[i]
    assert together.accepted.any()
    assert not together.accepted.all()


def test_an_artifact_of_format_1_gives_the_same_verdicts(tmp_path):
    """Before averaged layers every estimator was as published, and the settings had other names."""
    points, y = blobs(200, 2)
    fresh = blobs(80, 2, seed=1)[0]
    for ensemble in (False, True):
        small = {"exemplar_dim": 12, "epochs": 8, "learning_rate": 1e-2, "rounds": 2, "alpha": 0.8, "progress": False}
        estimator = SDMEstimator.published(**small, combine="all" if ensemble else "best").fit(points, y)
        folder = tmp_path / f"old {ensemble}"
        estimator.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        kept = (
            "exemplar_dim", "epochs", "batch_size", "learning_rate", "rounds", "alpha", "center", "seed", "max_q", "index",
        )  # fmt: skip
        parameters = {name: config["parameters"][name] for name in kept}
        config.update(format_version=1, parameters={**parameters, "ensemble": ensemble})
        del config["classes"]
        (folder / "config.json").write_text(json.dumps(config))
        loaded = SDMEstimator.from_pretrained(folder)
        assert same(loaded.score(fresh), estimator.score(fresh))
        assert loaded.region_ == estimator.region_
        assert (loaded.rule, loaded.distance) == ("region", "exemplar")
        assert loaded.classes_.tolist() == [0, 1]
        assert estimator.score(fresh).accepted.any()
        loaded.save_pretrained(folder)  # in today's format
        assert same(SDMEstimator.from_pretrained(folder).score(fresh), estimator.score(fresh))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_is_put_back(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fit(rounds=1).fit(X[:100], Y[:100])
        assert torch.get_num_threads() == threads
        with pytest.raises(RuntimeError, match="stop"):
            fit(rounds=1).fit(X[:100], Y[:100], on_epoch=_stop)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def _stop(row):
    assert torch.get_num_threads() == 1  # small work runs on one thread
    raise RuntimeError("stop")


def test_the_classifier_has_the_same_defaults():
    classifier = SDMClassifier().fit(X, np.array(["a", "b", "c"])[Y])
    labels, accepted = classifier.predict_selective(FRESH)
    scores = fit().fit(X, Y).score(FRESH)
    assert labels.tolist() == np.array(["a", "b", "c"])[scores.prediction].tolist()
    np.testing.assert_array_equal(accepted, scores.accepted)


def test_rules_of_many_alphas_are_found_from_one_scoring(fitted, monkeypatch):
    fresh = fitted.with_support(FRESH[:1], FRESH_Y[:1])
    calls = []
    plain = type(fresh._model).score
    monkeypatch.setattr(
        type(fresh._model), "score", lambda self, x, *rest: calls.append(len(x)) or plain(self, x, *rest)
    )
    scores = fresh.score(FRESH[:10])
    fresh.accepted_at(scores, np.linspace(0.6, 0.99, 300))
    assert sorted(calls) == [10, 180]
    assert len(fresh._rules) <= 256


def test_progress_is_shown_on_a_terminal_by_default(monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("sdmlm.estimator.fitting.progress_bar", lambda enabled: shown.append(enabled) or _bar(False))
    for estimator in (SDMEstimator(rounds=1), SDMClassifier(rounds=1), SDMClassifier(rounds=1, progress=False)):
        estimator.fit(X[:100], Y[:100])
    assert shown == [True, True, False]
    monkeypatch.undo()
    SDMClassifier(rounds=1).fit(X[:100], Y[:100])  # no terminal here
    assert capsys.readouterr() == ("", "")
