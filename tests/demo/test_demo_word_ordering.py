"""The demo with a language model: `sdmlm demo --fast`, from the shipped base model to the report."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from benchmark_modules import benchmark
from rich.console import Console

from sdmlm import SDMLanguageModel
from sdmlm.cli import main
from sdmlm.cli.commands.data import read_sentences
from sdmlm.demo import word_ordering as word_ordering_demo
from sdmlm.demo.examples import pick_examples
from sdmlm.demo.word_ordering import FAST_SIZES, OURS, TRAINING, command, demo_splits
from sdmlm.evaluation.lm_evaluation import read_evaluation
from sdmlm.finetuning.recipe import read_recipe
from sdmlm.generation.certification import certify_lm
from sdmlm.language_model.content import TextEncoder
from sdmlm.tasks.word_ordering import make_splits

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "demo"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(the folder, what the terminal showed)."""
    path = tmp_path_factory.mktemp("demo")
    with redirect_stdout(io.StringIO()) as shown:
        assert main(["demo", "--fast", "--output", str(path / "run")]) == 0
    return path / "run", shown.getvalue()


def test_it_writes_everything(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    names = {"ce_hn", "sdm_hn", "data", "demo.json", "report.html", "tables.csv", "tables.json", "tables.tex"}
    names |= {"verified", "answers.json"}
    assert {p.name for p in folder.iterdir()} == names == OURS - {".before"}
    for setting in ("ce_hn", "sdm_hn"):
        assert not list((folder / setting).glob("checkpoint-*"))
        record = json.loads((folder / setting / "training.json").read_text(encoding="utf-8"))
        assert record["status"] == "finished"
        assert record["settings"]["loss"] == setting.split("_")[0]
        assert record["config"]["hard_negatives"] is True
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Answers of the SDM language model" in page
    assert (
        page.index("Which answers can be used without a person looking?") < page.index("<figure") < page.index("<table")
    )
    assert page.index("verified, right") < page.index("<table")
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_own_answers_are_verified_and_answers_to_other_prompts_are_not(demo: tuple[Path, str]) -> None:
    folder, shown = demo
    lm = SDMLanguageModel.from_pretrained(folder / "verified", device="cpu")
    assert lm.alpha == 0.95
    assert lm.answer_certificate is not None
    assert lm.answer_certificate.sentence()[:40] in " ".join(shown.split())
    scores = json.loads((folder / "answers.json").read_text(encoding="utf-8"))["scores"]
    coverage = {row["dataset"]: row["coverage"] for row in scores if row["estimator"] == "SDM: the model's own rule"}
    assert set(coverage) == {"test", "shifted", "answers to other prompts"}
    assert coverage["answers to other prompts"] <= 0.02
    assert coverage["shifted"] <= 0.1


def test_the_readme_uses_its_model(demo: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/demo").symlink_to(demo[0])
    text = (RECIPES.parents[1] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# after sdmlm demo\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with redirect_stdout(io.StringIO()) as shown:
        exec(code, {})
    assert "<sentence>" in shown.getvalue()
    assert shown.getvalue().rstrip().endswith(".")


def test_its_numbers_are_those_of_its_models(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    table = json.loads((folder / "tables.json").read_text(encoding="utf-8"))["tables"]
    for line in table["selective"]:
        evaluation, _ = read_evaluation(folder / line["setting"] / "evaluations" / f"{line['dataset']}.json")
        assert len(evaluation) == FAST_SIZES[line["dataset"]]
        share = line["quantities"]["share"]["values"][0]
        assert share == pytest.approx(evaluation.accepted.mean())
    lm = SDMLanguageModel.from_pretrained(folder / "sdm_hn")
    rows = [json.loads(line) for line in (folder / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    found = lm.generate([row["prompt"] for row in rows[:20]], progress=False)
    evaluation, _ = read_evaluation(folder / "sdm_hn" / "evaluations" / "test.json")
    assert [a.accepted for a in found] == evaluation.accepted[:20].tolist()
    assert [a.generated for a in found] == evaluation.generated[:20]
    assert evaluation.y[:20].tolist() == [int(a.text == row["chosen"]) for a, row in zip(found, rows, strict=False)]


def test_it_learns_in_a_minute_what_the_base_model_cannot_do(demo: tuple[Path, str]) -> None:
    """Most orders right after a thousand sentences; one in five would be by chance, if all words were copied."""
    folder, _ = demo
    for setting in ("ce_hn", "sdm_hn"):
        found = {
            name: read_evaluation(folder / setting / "evaluations" / f"{name}.json")[0] for name in ("test", "shifted")
        }
        assert found["test"].answer_right.mean() > 0.4
        assert found["shifted"].answer_right.mean() < found["test"].answer_right.mean()


def test_it_explains(demo: tuple[Path, str]) -> None:
    folder, shown = demo
    assert "The first of the test answers that is rejected" in shown
    assert re.search(r"similar, at distance [\d.]+:.*?, which\s+is\s+(right|wrong)\s+for\s", shown, re.DOTALL)
    assert re.search(r"The verdict on it is (Yes|No)\.\s+It is (right\.|wrong; the sentence was: )", shown)
    assert shown.index('"test" are 200 new sentences') < shown.index("Selective classification")
    assert shown.index("own rule") < shown.index("Selective classification")  # what is certified comes first
    assert re.search(r"^SDM \+ HN: epoch 1\.\d, loss", shown, re.MULTILINE)  # progress in a log
    assert "sdmlm chat" in shown
    comparisons = json.loads((folder / "tables.json").read_text(encoding="utf-8"))["comparisons"]
    assert [c["dataset"] for c in comparisons] == ["test", "shifted"]
    for c in comparisons:
        assert c["statement"] in " ".join(shown.split())


def test_its_examples_are_the_answers_that_were_evaluated(demo: tuple[Path, str]) -> None:
    """Also those that are longer than all that the model was fitted over, hence than its own bound."""
    folder, _ = demo
    lm = SDMLanguageModel.from_pretrained(folder / "sdm_hn")
    lm.metadata = {**lm.metadata, "max_new_tokens": 12}
    names = ("test", "shifted")
    rows = {n: [json.loads(line) for line in (folder / "data" / f"{n}.jsonl").read_text().splitlines()] for n in names}
    found = {n: read_evaluation(folder / "sdm_hn" / "evaluations" / f"{n}.json")[0] for n in names}
    shown = pick_examples(lm, found, rows)
    assert {title.split()[4] for title, _, _ in shown} == set(names)
    for title, row, answer in shown:
        name = title.split()[4]
        assert answer.generated == found[name].generated[rows[name].index(row)]


def test_forged_turns_are_not_verified(demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller version of the table in docs/security.md. At the demo's own alpha the fast model verifies nothing."""
    module, alpha = benchmark("adversary"), 0.6
    lm = SDMLanguageModel.from_pretrained(demo[0] / "sdm_hn")
    lines = (demo[0] / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:30]
    rows = [json.loads(line) for line in lines]
    results = {result.kind: result for result in module.measure(lm, rows, tails=3, alpha=alpha)}
    assert results["right answers"].verified > 0.1
    assert results["forged turns"].verified <= results["forged turns without the control strings"].verified
    for kind in ("forged turns", "wrong answers with words to the judge", "empty answers", "canned answers"):
        assert results[kind].verified < results["right answers"].verified / 2, kind
    assert results["wrong answers with a verification suffix"] == dataclasses.replace(
        results["wrong answers"], kind="wrong answers with a verification suffix"
    )
    # With text that may become control tokens the attack succeeds: the test can fail.
    forged = [module.forged_turn(lm, rows[n], rows[n - 1]) for n in range(len(rows))]
    monkeypatch.setattr(TextEncoder, "content", TextEncoder.trusted)
    verified = [v.verified for v in lm.verify([r["prompt"] for r in rows], forged, alpha=alpha, progress=False)]
    assert sum(verified) / len(verified) > results["right answers"].verified / 2


def test_the_certified_rule_verifies_no_forged_answer(demo: tuple[Path, str]) -> None:
    """The same for the certified model that the table is of; the fast one is certified anew, at an alpha that it can show."""
    module = benchmark("adversary")
    lm = SDMLanguageModel.from_pretrained(demo[0] / "verified", device="cpu")
    lines = (demo[0] / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    lm.alpha = 0.6
    assert certify_lm(lm, rows[30:], alpha=0.6, save=False).certified
    results = {result.kind: result for result in module.measure(lm, rows[:30], tails=3)}
    honest = results["right answers"].verified
    assert honest > 0.1
    forged = [kind for kind in results if not kind.startswith(("the model's own", "right answers"))]
    assert len(forged) > 10
    for kind in forged:
        assert results[kind].verified <= 0.05, kind
    for kind in (
        "right answers to other prompts",
        "right answers, cut in the middle",
        "right answers, then the payload",
    ):
        assert results[kind].verified <= 0.1, kind


def test_the_published_demo_keeps_its_word() -> None:
    """docs/results/demo.csv, which `make demo` is one seed of: a finite q'_min, accuracy at alpha, rejection under shift."""
    path = RECIPES.parents[1] / "docs" / "results" / "demo.csv"
    values: dict[tuple[str, ...], float | None] = {}
    for row in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))):
        key = tuple(row[name] for name in ("table", "dataset", "model", "seed", "quantity"))
        if row["table"] in ("selective", "calibration"):
            values[key] = float(row["value"]) if row["value"] else None
    for model in ("CE + HN", "SDM + HN"):
        assert values["calibration", "", model, "0", "q_min"] is not None
        accuracy, share = (values["selective", "test", model, "0", name] for name in ("accuracy", "share"))
        assert accuracy is not None
        assert share is not None
        assert accuracy >= TRAINING["alpha"]
        assert share > 0.1
        shifted = values["selective", "shifted", model, "0", "share"]
        assert shifted is not None
        assert shifted < 0.1


def test_rows_are_always_the_same_and_apart() -> None:
    splits = demo_splits(FAST_SIZES)
    assert splits == demo_splits(FAST_SIZES)
    own = splits.pop("own")
    assert make_splits(read_sentences("demo"), **FAST_SIZES, seed=0).rows == splits  # as `sdmlm data` would make them
    everything = [row["sentence"] for rows in (*splits.values(), own) for row in rows]
    assert len(set(everything)) == sum(FAST_SIZES.values()) + len(own)
    assert len(own) == FAST_SIZES["calibration"]


def test_an_earlier_demo_comes_back_when_the_next_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files() -> dict[str, str]:
        return {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}

    home = tmp_path / "run"
    (home / "sdm_hn").mkdir(parents=True)
    (home / "demo.json").write_text("{}")
    (home / "sdm_hn" / "model").write_text("earlier")
    before = files()

    def stopped(*_: object) -> None:
        assert {p.name for p in home.iterdir()} == {"demo.json", ".before"}
        with pytest.raises(ValueError, match="Another demo is running"):
            word_ordering_demo.run_demo(str(home), True, Console())
        raise KeyboardInterrupt

    monkeypatch.setattr(word_ordering_demo, "_run", stopped)
    with pytest.raises(KeyboardInterrupt):
        word_ordering_demo.run_demo(str(home), True, Console())
    assert files() == before
    # Killed half-way: what is half made goes, and the one before is kept until the new one is done.
    home.rename(tmp_path / "earlier")
    home.mkdir()
    (tmp_path / "earlier").rename(home / ".before")
    (home / "demo.json").write_text("half made")
    (home / "ce_hn").mkdir()
    with pytest.raises(KeyboardInterrupt):
        word_ordering_demo.run_demo(str(home), True, Console())
    assert files() == before
    # Somebody's own folders are nobody else's, and any way of naming ours will do.
    (tmp_path / "run.old").mkdir()
    (tmp_path / "run.old" / "demo.json").write_text("kept")
    monkeypatch.setattr(word_ordering_demo, "_run", lambda *_: (home / "tables.csv").write_text("x"))
    monkeypatch.chdir(home)
    word_ordering_demo.run_demo(".", True, Console())
    (tmp_path / "link").symlink_to(home)
    word_ordering_demo.run_demo(str(tmp_path / "link"), True, Console())
    (tmp_path / "link").unlink()
    assert set(files()) == {"run/demo.json", "run/tables.csv", "run.old/demo.json"}


def test_nothing_else_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").write_text("x")
    assert main(["demo", "--fast", "--output", str(tmp_path)]) == 2
    assert "another folder" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"precious"}
    (tmp_path / "demo.json").write_text("{}")  # a demo to which somebody has added something of their own
    assert main(["demo", "--fast", "--output", str(tmp_path)]) == 2
    assert "precious is no part of a demo: move it" in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {"precious", "demo.json"}


def test_a_model_that_somebody_has_worked_with_is_not_thrown_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.json").write_text("{}")
    (tmp_path / "sdm_hn" / "sdm" / "feedback").mkdir(parents=True)
    assert main(["demo", "--fast", "--output", str(tmp_path)]) == 2
    assert "holds feedback" in capsys.readouterr().err
    assert (tmp_path / "sdm_hn" / "sdm" / "feedback").exists()


@pytest.mark.parametrize("setting", ["ce_hn", "sdm_hn"])
def test_the_recipes_are_the_demo(setting: str) -> None:
    """`sdmlm replicate recipes/demo` repeats the demo with other seeds."""
    recipe = read_recipe(str(RECIPES / f"{setting}.yaml"))
    for name, value in TRAINING.items():
        assert recipe[name] == value, name
    options = dict(option[2:].split("=", 1) for option in command(Path("x"), setting, TRAINING)[1:])
    assert recipe["model"] == options["model"] == "demo"
    assert recipe["loss"] == options["loss"]
