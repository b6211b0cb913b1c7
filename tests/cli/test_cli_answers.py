"""`sdmlm compare-answers` and `sdmlm certify` of a language model."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_sdm_lm import OWN, calibration_rows, marked_rows, train

from sdmlm import SDMLanguageModel
from sdmlm.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("answers"), **OWN)


@pytest.fixture
def model(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copytree(trained, tmp_path / "model")
    for name, n, seed in (("fresh", 300, 7), ("few", 20, 8), ("shifted", 30, 9)):
        rows = marked_rows(n, seed)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return "model"


def read(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_compare_answers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare-answers", model, "--data", "fresh.jsonl", "--shifted", "shifted.jsonl", "--samples", "2"]
    assert main([*command, "--plot", "risk.png", "--json"]) == 0
    found = read(capsys)
    assert Path("risk.png").read_bytes().startswith(b"\x89PNG")
    assert found["rows"] == {"test": 100, "shifted": 30, "answers to other prompts": 100}
    assert found["samples"] == 2
    scores = {(row["dataset"], row["estimator"]): row for row in found["scores"]}
    names = {name for _, name in scores}
    assert {"mean log-probability", "least log-probability", "P(Yes) of the LM", "self-consistency"} <= names
    assert {"summed log-probability", "mean log-probability, if usual"} <= names
    assert {"SDM layer of the model", "SDM: the model's own rule", "SDM: region of the papers"} <= names
    rule = scores["test", "SDM: the model's own rule"]
    assert rule["coverage"] > 0.5
    assert scores["answers to other prompts", "SDM: the model's own rule"]["coverage"] < 0.05
    assert ("answers to other prompts", "self-consistency") not in scores  # there is nothing to sample
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "Self-consistency generates 2 more answers" in shown
    assert "held-out prompts correctly" in shown


def test_generate_and_verify_name_the_certificate(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in Path("few.jsonl").read_text().splitlines()]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    answers = SDMLanguageModel.from_pretrained(model, device="cpu").generate([row["prompt"] for row in rows])
    verified = sum(answer.verified for answer in answers)
    assert verified > 0
    assert main(["generate", model, "--prompts", "prompts.jsonl"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{verified} of 20 answers ({verified / 20:.1%}) are verified" in shown
    assert "under the model's certificate" in shown
    assert "of the answers that pass this rule are right" in shown
    judged = "".join(json.dumps({"prompt": r["prompt"], "completion": r["chosen"]}) + "\n" for r in rows)
    Path("answers.jsonl").write_text(judged)
    assert main(["verify", model, "--data", "answers.jsonl"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "promises nothing about answers that the model did not write itself" in shown


def test_the_report_begins_with_the_promise(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = SDMLanguageModel.from_pretrained(model, device="cpu").certificate()
    assert certificate is not None
    assert main(["report", model]) == 0
    page = Path(model, "report.html").read_text(encoding="utf-8")
    body = page[page.index("<main>") :]
    verified = (
        f"{certificate.accepted} of {certificate.prompts} answers are verified, {certificate.accepted_right} of these"
    )
    assert (
        body.index("<figure") < body.index(verified) < body.index("held-out prompts correctly") < body.index("<table")
    )
    assert main(["report", model, "--alpha", "0.99"]) == 0  # more than the certificate promises
    assert "held-out prompts correctly" not in Path(model, "report.html").read_text(encoding="utf-8")


def test_certify_renews_the_certificate_of_a_language_model(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = SDMLanguageModel.from_pretrained(model, device="cpu").certificate()
    assert main(["certify", model, "--data", "fresh.jsonl", "--epsilon", "0.02", "--json"]) == 0
    found = read(capsys)
    after = SDMLanguageModel.from_pretrained(model, device="cpu").certificate()
    assert after is not None
    assert before is not None
    assert (found["epsilon"], after.rule.epsilon) == (0.02, 0.02)
    assert after.source == f"fresh.jsonl (SHA-256 {hashlib.sha256(Path('fresh.jsonl').read_bytes()).hexdigest()[:16]})"
    prompts = {json.loads(line)["prompt"] for line in Path("fresh.jsonl").read_text().splitlines()}
    new = prompts - {row["prompt"] for row in calibration_rows()}
    assert 0.7 * len(new) < after.prompts == found["prompts"] < 0.95 * len(new)
    assert after.usual == before.usual
    assert main(["certify", model, "--data", "fresh.jsonl"]) == 0
    assert "will be verified" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare-answers", "model", "--data", "few.jsonl"], "20 rows are too few to compare"),
        (["compare-answers", "model", "--data", "few.jsonl", "--samples", "-1"], "--samples is -1"),
        (["certify", "model"], "give EMBEDDINGS to certify an estimator, or --data"),
        (["certify", "model", "x.npz", "--data", "few.jsonl"], "give EMBEDDINGS to certify an estimator, or --data"),
        (["certify", "model", "--data", "few.jsonl", "--output", "c.json"], "--output does not go with --data"),
        (["certify", "model", "--data", "few.jsonl", "--delta", "2"], "delta is 2.0"),
    ],
)
def test_bad_input(model: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_too_few_rows_are_named_with_what_is_needed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", model, "--data", "few.jsonl", "--alpha", "0.95", "--json"]) == 0
    found = read(capsys)
    assert not found["certified"]
    assert "held-out prompts are needed" in found["says"] or "would be needed" in found["says"]


def test_a_replicated_run_has_its_scores_compared_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `sdmlm replicate` does with a run after its evaluations: the answers are not written again."""
    from sdmlm.evaluation.lm_evaluation import evaluation_file, write_evaluation
    from sdmlm.experiments import runner
    from sdmlm.experiments.answer_runs import read_comparison
    from sdmlm.experiments.evaluate import evaluate
    from sdmlm.language_model.rows import read_preferences
    from sdmlm.language_model.sdm_folder import layer_sha256

    lm = SDMLanguageModel.from_pretrained(model, device="cpu")
    files = {"test": "fresh.jsonl", "shifted": "shifted.jsonl"}
    rows = {test: read_preferences(path, lm.tags) for test, path in files.items()}
    task = SimpleNamespace(reward="sdmlm.rewards:exact_match", answer=str, REFERENCE="chosen")
    for test, some in rows.items():
        write_evaluation(evaluation_file(model, test), evaluate(lm, task, some.rows, progress=False), {})
    one: Any = SimpleNamespace(
        folder=Path(model),
        settings={"tests": files},
        layer_sha256=lambda: layer_sha256(Path(model) / "sdm"),
        test_rows=rows.__getitem__,
    )
    monkeypatch.setattr(runner, "SAMPLES", 0)
    monkeypatch.setattr(lm, "write", None)  # it fails if an answer is generated
    assert runner._comparable(one)
    runner._compare(one, lm)
    assert not runner._comparable(one)
    stored = read_comparison(Path(model), one.layer_sha256())
    assert stored is not None
    found = {(point.dataset, point.estimator): point for point in stored.points}
    assert {dataset for dataset, _ in found} == {"test", "shifted", "answers to other prompts"}
    verified = found["test", "SDM: the model's own rule"].accepted
    assert len(verified) == 100
    assert verified.mean() > 0.5


def test_calibrating_again_goes_back_to_the_published_layer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The automatic layer over own answers has no learning rate; the next layer takes its alpha, and nothing else, from it."""
    before = SDMLanguageModel.from_pretrained(model, device="cpu")
    command = ["calibrate", model, "--data", "fresh.jsonl", "--force", "--documents", "paper", "--summary", "states"]
    assert main([*command, "--sdm-epochs", "2", "--exemplar-dim", "8"]) == 0
    after = SDMLanguageModel.from_pretrained(model, device="cpu")
    assert after.alpha == before.alpha
    assert (after.estimator.combine, after.estimator.learning_rate, after.estimator.center) == ("best", 1e-5, "global")
    assert after.answer_certificate is None
    assert after.reduction is None
    assert not (Path(model) / "sdm" / "reduction").exists()
