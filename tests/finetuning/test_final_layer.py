"""Which final SDM layer a run ends with when nothing is said about it, and when own answers are not enough."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_lm import copy_rows, tiny_lm, tiny_tokenizer
from tiny_sdm_lm import calibration_rows, train
from trainer_checks import make

from sdmlm import SDMConfig
from sdmlm.cli import main
from sdmlm.errors import NoOwnAnswers
from sdmlm.experiments.planning import first_difference
from sdmlm.finetuning.final_layer import fit_final_layer
from sdmlm.finetuning.held_out import evaluated_rows, held_out_rows, part_rows, rows_for_certificate
from sdmlm.finetuning.settings import defaults_of, read_settings


def test_own_answers_with_their_likelihood_are_the_default() -> None:
    config = SDMConfig("runs/x", report_to="none")
    assert (config.documents, config.summary) == ("own", "states+likelihood")
    config = SDMConfig("runs/x", report_to="none", documents="paper")
    assert (config.documents, config.summary) == ("paper", "states")


def test_a_reward_that_calls_everything_right_gets_the_papers_layer(tmp_path: Path) -> None:
    """Without a wrong answer there is nothing to certify, and a training run must not end in an error."""
    trainer = make(tmp_path, reward_funcs=lambda prompts, completions, **_: [1] * len(prompts), documents="own")
    with pytest.warns(UserWarning, match="too few wrong answers.* is the paper's instead, without a certificate"):
        trainer.fit_final_layer()
    with pytest.raises(NoOwnAnswers, match="give more rows, or check the reward"):  # where it is not the end of a run
        fit_final_layer(
            trainer.model, trainer.encoder, trainer.calibration_rows, trainer.args, trainer.reward, progress=False
        )
    assert trainer.final_layer is not None
    assert (trainer.final_layer.documents, trainer.final_layer.certificate) == ("paper", None)


def test_calibrate_keeps_the_kind_of_layer_and_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"documents": "own", "certificate_share": 0.5, "certificate_epsilon": 0.05, "own_samples": 2}
    folder = train(tmp_path / "lm", **own)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in calibration_rows()))

    def calibrated(name: str, *options: str) -> dict[str, object]:
        shutil.copytree(folder, name)
        assert main(["calibrate", name, "--data", "rows.jsonl", "--force", *options]) == 0
        return dict(json.loads(Path(name, "sdm", "lm.json").read_text()))

    before = json.loads((folder / "sdm" / "lm.json").read_text())
    again = calibrated("again")
    for name in ("summary", "documents", "own", "held_out", "estimator_sha256"):
        assert again[name] == before[name], name
    paper = calibrated("paper", "--documents", "paper")  # and so the paper's summary
    assert "summary" not in paper
    assert not Path("paper/sdm/certificate.json").exists()
    assert main(["calibrate", "paper", "--data", "rows.jsonl", "--force"]) == 0  # keeps the paper's
    assert not Path("paper/sdm/certificate.json").exists()
    assert main(["calibrate", "paper", "--data", "rows.jsonl", "--force", "--documents", "own"]) == 0
    assert json.loads(Path("paper/sdm/lm.json").read_text())["summary"] == "states+likelihood"
    assert Path("paper/sdm/certificate.json").exists()


def test_enough_rows_are_held_out_to_certify_something_if_half_are_enough() -> None:
    args = SDMConfig(
        None, alpha=0.95, certificate_delta=0.05, certificate_epsilon=0.1, certificate_share=0.4, report_to="none"
    )
    assert rows_for_certificate(args) == 79  # 59 without an error, a fifth more, and a tenth may be unusual
    assert held_out_rows(1000, args) == 400
    assert held_out_rows(160, args) == 79
    assert held_out_rows(158, args) == 79
    assert held_out_rows(157, args) == 63  # not enough anyway: fit on as many as usual
    prompts = [str(n) for n in range(160)]
    fitted, held_out = part_rows(prompts, args)
    assert (len(fitted), len(held_out)) == (81, 79)
    assert evaluated_rows(prompts, args) == fitted  # a certificate's rows must not choose the checkpoint
    paper = SDMConfig(None, documents="paper", report_to="none")
    assert evaluated_rows(prompts, paper) == list(range(160))


def test_the_dry_run_says_whether_anything_can_be_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_lm().save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    for name, rows in (("rows", copy_rows(40)), ("few", copy_rows(40, 1)), ("many", copy_rows(250, 1))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["train", "--model", "model", "--data", "rows.jsonl", "--output", "o", "--use-cpu", "--dry-run"]
    assert main([*command, "--calibration", "few.jsonl"]) == 0
    out, err = capsys.readouterr()
    held_out = round(0.4 * len({row["prompt"] for row in copy_rows(40, 1)}))
    assert f"Certificate: {held_out} calibration rows are held out for it; at least about 79 are needed" in " ".join(
        out.split()
    )
    assert "hardly anything can be certified at this alpha: give at least 158, or choose a lower --alpha" in err
    assert main([*command, "--calibration", "many.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "Certificate: 79 calibration rows" in " ".join(out.split())
    assert "certified" not in err
    assert main([*command, "--calibration", "few.jsonl", "--documents", "paper"]) == 0
    assert "ertificate" not in "".join(capsys.readouterr())


def test_a_run_begun_with_other_defaults_keeps_them_when_it_is_resumed() -> None:
    settings = {"model": "m", "data": "d", "output": "o", "seed": 3}
    now = {"loss": "ce", "gamma_other": 0.2, "documents": "own", "summary": "states+likelihood"}
    paper = {"loss": "sdm", "gamma_other": 0.0, "documents": "paper", "summary": "states"}
    for config, kept in (({}, paper), (now, now)):  # a record of an older version, and of this one
        resumed = read_settings({}, record={"settings": settings, "config": config}, resume=True)
        assert {name: getattr(resumed.config, name) for name in kept} == kept
        again = read_settings(dict(kept), record={"settings": settings, "config": config}, resume=True)
        assert again.config.documents == kept["documents"]
    with pytest.raises(ValueError, match=r"gamma_other was 0\.0 and is now 0\.5"):
        read_settings({"gamma_other": 0.5}, record={"settings": settings, "config": {}}, resume=True)


def test_replicate_compares_runs_by_the_defaults_they_were_begun_with() -> None:
    given = {"seed": 1, "model": "m"}

    def difference(config: dict[str, Any], recipe: dict[str, Any]) -> str | None:
        return first_difference(defaults_of({"config": config}) | given, given | recipe)

    now = {"loss": "ce", "gamma_other": 0.2, "documents": "own", "summary": "states+likelihood"}
    old = {"loss": "sdm", "gamma_other": 0.0, "documents": "paper"}  # a run of an older version
    assert difference({}, old) is None
    assert difference({}, {}) == "loss"
    assert difference({}, {"loss": "sdm"}) == "gamma_other"
    assert difference({}, {"loss": "sdm", "gamma_other": 0.0}) == "documents"
    assert difference(now, {}) is None
    assert difference(now, {"documents": "own"}) is None
    assert difference(now, {"summary": "states"}) == "summary"
