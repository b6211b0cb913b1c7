"""One model on one test set: what is counted, and that it comes back from disk as it was."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sdmlm.estimator.calibration_summary import summarize_calibration
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.evaluation.lm_evaluation import Evaluation, evaluation_file, read_evaluation, write_evaluation
from sdmlm.experiments.evaluate import evaluate, load_task
from sdmlm.experiments.runs import dataset_order, read_runs, setting_order
from sdmlm.generation.judging import widened
from sdmlm.language_model.encoding import VerificationTags
from sdmlm.tasks import word_ordering


def small_estimator() -> SDMEstimator:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    X = rng.normal(size=(120, 6)) + 2.0 * y[:, None]
    return SDMEstimator.published(
        alpha=0.8, exemplar_dim=8, epochs=3, learning_rate=1e-2, rounds=1, progress=False
    ).fit(X, y)


class ScriptedLM:
    """Answers as it is told: (what the LM wrote, verdict of the SDM layer, in the region, in the lower region)."""

    def __init__(self, script: list[tuple[str, str, bool, bool]], tags: VerificationTags | None = None) -> None:
        self.script, self.estimator, self.alpha = script, small_estimator(), 0.8
        self.encoder = SimpleNamespace(tags=tags or VerificationTags(), suffix_length=5, continuation=str.split)
        self.room = 0

    def sampling(self) -> Any:
        return SimpleNamespace(max_new_tokens=20)

    def region(self, alpha: float) -> Any:
        return widened(self.estimator.layers_[0].region(alpha))

    def generate(self, prompts: list[Any], max_new_tokens: int, **options: Any) -> list[Any]:
        assert len(prompts) == len(self.script)
        self.room = max_new_tokens
        out = []
        for n, (text, verdict, accepted, lower) in enumerate(self.script):
            body = self.encoder.tags.split(text)[0]
            out.append(
                SimpleNamespace(
                    text=body, generated=text, verdict=verdict, accepted=accepted, accepted_lower=lower,
                    probability=0.5 + n / 100, q=n, d=n / 10, q_prime=float(n),
                )
            )  # fmt: skip
        return out


RIGHT = "<sentence>a b c d.</sentence>"
ROW = {"prompt": "?", "chosen": RIGHT, "rejected": "<sentence>a d. b c</sentence>", "sentence": "a b c d."}


def test_there_is_room_for_the_longest_reference() -> None:
    """Shifted test sets hold the longest sentences: longer than any that the model was fitted over."""
    long = {**ROW, "chosen": " ".join(["a"] * 30)}
    for rows, room in (([ROW, long], 30 + 5 + 8), ([ROW, ROW], 20)):
        lm = ScriptedLM([(RIGHT, "Yes", True, True)] * 2)
        evaluate(lm, word_ordering, rows)  # type: ignore[arg-type]
        assert lm.room == room


def test_reward_answer_and_exact_match_look_at_different_things() -> None:
    script = [
        (f"{RIGHT}\n<verified>Yes</verified>", "Yes", True, True),
        (f"{RIGHT}\n<verified>No</verified>", "Yes", True, False),  # the LM doubts itself: not the exact match
        (f"{RIGHT} <verified>Yes</verified>", "No", False, False),  # formatting differs: neither
        ("<sentence>a b c d.</sentence> Bye.\n<verified>Yes</verified>", "Yes", True, True),  # the body differs
        ("a b c d.\n<verified>Yes</verified>", "No", True, True),  # no tags: no sentence to read
        (f"{RIGHT}", "No", False, False),  # never verified: the body is right all the same
        ("<sentence>a d. b c</sentence>\n<verified>Yes</verified>", "No", True, False),
    ]
    found = evaluate(ScriptedLM(script), word_ordering, [ROW] * 7)  # type: ignore[arg-type]
    assert found.y.tolist() == [1, 1, 1, 0, 0, 1, 0]  # r: outer white space apart
    assert found.prediction.tolist() == [1, 1, 0, 1, 0, 0, 0]  # the SDM layer's, not the LM's
    assert found.answer_right.tolist() == [True, True, True, True, False, True, False]
    assert found.exact_match.tolist() == [True, False, False, False, False, False, False]
    assert found.accepted.tolist() == [True, True, False, True, True, False, True]
    assert found.accepted_lower.tolist() == [True, False, False, True, True, False, False]
    assert found.q.tolist() == list(range(7))
    assert found.generated == [text for text, *_ in script]
    assert found.calibration == summarize_calibration(small_estimator()).metrics()
    assert found.alpha == 0.8


def test_other_tags_and_another_reward() -> None:
    tags = VerificationTags(open="<ok>", close="</ok>", yes="ja", no="nein", separator=" ")
    script = [(f"{RIGHT} <ok>ja</ok>", "ja", True, True), (f"{RIGHT}\n<ok>ja</ok>", "nein", True, True)]
    lm, rows = ScriptedLM(script, tags), [{**ROW, "chosen": f"{RIGHT} <ok>ja</ok>"}, ROW]
    found = evaluate(lm, word_ordering, rows, reward=lambda completions, **_: [0 for _ in completions])  # type: ignore[arg-type]
    assert found.y.tolist() == [0, 0]
    assert found.prediction.tolist() == [1, 0]
    assert found.exact_match.tolist() == [True, False]


def test_regions_give_the_decisions_at_every_alpha() -> None:
    estimator = small_estimator()
    lm = ScriptedLM([("x", "Yes", True, True)])
    found = evaluate(lm, word_ordering, [ROW])  # type: ignore[arg-type]
    rng = np.random.default_rng(1)
    scores = estimator.score(rng.normal(size=(60, 6)) + 1.0)
    for alpha, q_min, psi_0, psi_1 in found.regions:
        expected = estimator.accepted_at(scores, [alpha])[:, 0]
        inside = []
        for q_prime, c, p in zip(scores.q_prime, scores.prediction, scores.probability, strict=True):
            own, other = (psi_1, psi_0) if c else (psi_0, psi_1)
            inside.append(bool(q_prime >= q_min and p >= own and not 1 - p >= other))
        assert inside == expected.tolist()


def some_evaluation(n: int = 5, seed: int = 0) -> Evaluation:
    rng = np.random.default_rng(seed)
    coins = [rng.random(n) < 0.5 for _ in range(4)]
    y, y_hat = rng.integers(0, 2, n), rng.integers(0, 2, n)
    calibration = {"q_min": math.inf, "psi_0": math.inf, "psi_1": math.inf, "sdm_loss": 0.1 + 0.2}
    texts = [f'line\n"{i}" \u2028 ü' for i in range(n)]
    return Evaluation(
        y, y_hat, coins[0], coins[1], rng.random(n), rng.integers(0, 9, n), rng.random(n), rng.random(n) * 9,
        coins[2], coins[3], texts, 0.95, calibration, [(0.51, 3.0, 0.9, 0.8), (0.99, math.inf, math.inf, math.inf)],
    )  # fmt: skip


def same(one: Evaluation, other: Evaluation) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Evaluation))


def test_an_evaluation_comes_back_bit_by_bit(tmp_path: Path) -> None:
    before, path = some_evaluation(), evaluation_file(tmp_path, "test")
    write_evaluation(path, before, {"family": "f", "seed": 3})
    after, facts = read_evaluation(path)
    assert same(before, after)
    assert not same(before, some_evaluation(seed=1))
    assert facts["family"] == "f"
    assert facts["seed"] == 3
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert len(content["rows"]) == 5
    assert after.regions[1][1] == math.inf


@pytest.mark.parametrize("content", ["", "{", "{}", '{"rows": [{}], "calibration": {}, "regions": []}', "[]"])
def test_a_damaged_evaluation_is_named(tmp_path: Path, content: str) -> None:
    path = evaluation_file(tmp_path, "test")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ValueError, match="damaged: remove it"):
        read_evaluation(path)


def test_runs_are_read_with_their_names_and_history(tmp_path: Path) -> None:
    for seed in (0, 1):
        home = tmp_path / "fam-sdm_hn" / f"seed-{seed}"
        facts = {"family": "fam", "setting": "sdm_hn", "label": "SDM + HN", "seed": seed}
        for test in ("test", "shifted"):
            write_evaluation(evaluation_file(home, test), some_evaluation(seed=seed), facts)
        record = {"status": "finished", "settings": {}, "data": {}, "config": {}, "log_history": [{"step": seed}]}
        (home / "training.json").write_text(json.dumps(record))
    # Begun, not evaluated: another process has just begun to save its SDM layer
    (tmp_path / "fam-ce" / "seed-0" / "sdm").mkdir(parents=True)
    runs = read_runs(tmp_path)
    assert [(run.family, run.setting, run.label, run.seed) for run in runs] == [
        ("fam", "sdm_hn", "SDM + HN", 0),
        ("fam", "sdm_hn", "SDM + HN", 1),
    ]
    assert [run.history for run in runs] == [[{"step": 0}], [{"step": 1}]]
    assert set(runs[0].evaluations) == {"test", "shifted"}
    assert runs[0].alpha == 0.95
    (tmp_path / "fam-sdm_hn" / "seed-1" / "training.json").unlink()
    with pytest.raises(ValueError, match=r"seed-1 is damaged"):
        read_runs(tmp_path)
    assert read_runs(tmp_path / "nothing") == []


def test_tasks_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_task("word_ordering") is word_ordering
    with pytest.raises(ValueError, match=r"Task 'crosswords' \(known here: .*word_ordering\): there is no module"):
        load_task("crosswords")
    # One of the user's own, beside their recipe
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_own_task.py").write_text(
        "REFERENCE = 'x'\ndef answer(text): return text\ndef reward(**_): return []"
    )
    assert load_task("my_own_task").answer("a") == "a"
    (tmp_path / "my_half_task.py").write_text("REFERENCE = 'x'\ndef reward(**_): return []")
    with pytest.raises(ValueError, match=r"Task 'my_half_task' .*: the module has no answer"):
        load_task("my_half_task")


def test_rows_without_the_reference_are_refused() -> None:
    rows = [ROW, {**ROW, "sentence": None}]
    with pytest.raises(ValueError, match="row 1 has no text in its column 'sentence'"):
        evaluate(ScriptedLM([]), word_ordering, rows)  # type: ignore[arg-type]


def test_the_order_is_that_of_the_paper() -> None:
    settings = ["zeta", "sdm_hn_rerun", "ce_hn", "none", "alpha", "sdm"]
    assert sorted(settings, key=setting_order) == ["none", "ce_hn", "sdm", "sdm_hn_rerun", "alpha", "zeta"]
    assert sorted(["x", "shifted", "test", "harvard"], key=dataset_order) == ["harvard", "test", "shifted", "x"]
