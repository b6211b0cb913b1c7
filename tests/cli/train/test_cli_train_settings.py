"""`sdmlm train`: options, recipes, the dry run."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest
from cli_checks import fails, strict_json
from tiny_lm import copy_rows, tiny_lm, tiny_tokenizer
from train_checks import ROWS, SMALL, write_rows
from transformers import AutoModelForCausalLM

from sdmlm.cli import config_options, main
from sdmlm.cli.commands import dry_run
from sdmlm.finetuning import recipe, settings
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.encoding import Encoder

REPOSITORY = Path(__file__).parents[3]


# Settings


def test_options_are_those_of_the_class() -> None:
    fields = {f.name: f for f in dataclasses.fields(SDMConfig)}
    found = config_options.own_fields()
    assert [f.name for f in found] == list(SDMConfig.__annotations__)
    for field in found:
        assert field.default == fields[field.name].default
        assert field.help == fields[field.name].metadata["help"]


def test_every_field_can_be_set() -> None:
    settable = set(recipe.field_types())
    assert {f.name for f in dataclasses.fields(SDMConfig)} - settable == {"output_dir", "resume_from_checkpoint"}


@pytest.mark.parametrize(
    ("annotation", "given", "value"),
    [
        (float, "5e-5", 5e-5),
        (float, 3, 3.0),
        (int, "12", 12),
        (int | None, "none", None),
        (int | None, None, None),
        (bool, "False", False),
        (bool | None, True, True),
        (str, "1", "1"),
        (dict | str | None, '{"a": 1}', {"a": 1}),
        (None | str | list[str], "wandb, tensorboard", ["wandb", "tensorboard"]),
        (None | str | list[str], "wandb", "wandb"),
        (list[str], "a", ["a"]),
        (str | bool, "all", "all"),
    ],
)
def test_values_are_converted(annotation: Any, given: Any, value: Any) -> None:
    found = recipe.typed({"x": given}, {"x": annotation})["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("annotation", "given", "said"),
    [
        (int, "1.5", "x is '1.5' but must be a whole number."),
        (int, 1.0, "x is 1.0 but must be a whole number."),
        (int, True, "x is True but must be a whole number."),
        (float, "nan", "x is 'nan' but must be a number."),
        (float | None, "much", "x is 'much' but must be a number or none."),
        (bool, "maybe", "x is 'maybe' but must be true or false."),
        (float, None, "x is None but must be a number."),
        (str, False, "x is False but must be text (in YAML, yes, no, on and off need quotes to be text)."),
        (dict | None, "{a}", "x is '{a}' but must be JSON or none."),
        (types.ModuleType | None, "a", "x cannot be set here."),
    ],
)
def test_values_that_do_not_fit_are_refused(annotation: Any, given: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        recipe.typed({"x": given}, {"x": annotation})
    assert str(caught.value) == said


def dry_run_of(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    capsys.readouterr()
    assert main(["train", "--dry-run", "--json", *args]) == 0
    return strict_json(capsys.readouterr().out)


def test_options_win_over_the_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.yaml").write_text(
        "# a comment\nmodel: model\ndata: rows.jsonl\ncalibration: calibration.jsonl\nnum_train_epochs: 3\n"
        "learning-rate: 5e-5\nper_device_train_batch_size: 8\ngradient_accumulation_steps: 3\nuse_cpu: yes\n"
    )
    assert dry_run_of(capsys, "--recipe", "r.yaml")["steps"] == {
        "batch": 24, "per_epoch": 2, "total": 6, "generations_per_epoch": 6,
    }  # fmt: skip
    changed = dry_run_of(
        capsys, "--recipe", "r.yaml", "--per-device-train-batch-size", "4", "--hard-negatives", "false"
    )
    assert changed["steps"] == {"batch": 12, "per_epoch": 4, "total": 12, "generations_per_epoch": 0}
    other = dry_run_of(capsys, "--recipe", "r.yaml", "--data", "calibration.jsonl", "--max-steps", "7")
    assert (other["data"]["train"]["source"], other["steps"]["total"]) == ("calibration.jsonl", 7)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("learning_rat: 1\n", "r.yaml: there is no setting learning_rat (nearest: learning_rate)"),
        ("modle: model\n", "r.yaml: there is no setting modle (nearest: model)"),
        ("output_dir: x\n", "r.yaml: there is no setting output_dir: use --output"),
        ("resume: true\n", "r.yaml: there is no setting resume"),
        ("sdm_epochs: many\n", "r.yaml: sdm_epochs is 'many' but must be a whole number"),
        ("alpha: [1\n", "r.yaml, line 2: not YAML"),
        ("- alpha\n", "r.yaml must hold settings"),
        ("alpha: 0.3\nmodel: m\ndata: d\noutput: o\n", "alpha"),
    ],
)
def test_bad_recipes(here: Path, capsys: pytest.CaptureFixture[str], content: str, said: str) -> None:
    Path("r.yaml").write_text(content)
    assert said in fails(capsys, "train", "--recipe", "r.yaml")
    assert not Path("o").exists()


def test_recipes_of_the_repository_are_the_papers() -> None:
    found = sorted(REPOSITORY.glob("recipes/**/*.yaml"))
    assert found
    kinds: dict[str, Any] = {**settings.OPTIONS, **recipe.field_types()}
    for path in found:
        recipe.typed(recipe.read_recipe(str(path)), kinds, str(path))
    phi = recipe.typed(recipe.read_recipe(str(REPOSITORY / "recipes/phi-3.5-mini/sdm_hn.yaml")), kinds)
    assert 4 * phi["per_device_train_batch_size"] * phi["gradient_accumulation_steps"] == 64
    assert "dataloader_drop_last" not in phi  # so 79 steps an epoch, of 5000 rows: the last has 8 documents
    paper = {"loss": "sdm", "gamma_other": 0, "documents": "paper", "summary": "states"}  # where our defaults differ
    assert {name: phi[name] for name in paper} == paper
    # Where the paper says something, the recipe says what the other defaults are.
    apart = {"bf16", "gradient_accumulation_steps", "gradient_checkpointing", *paper}
    for name, value in phi.items():
        if name not in apart | set(settings.OPTIONS):
            assert value == recipe.field_default(name), name


# The dry run


def test_dry_run_shows_and_checks_without_weights(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded weights"))
    assert main(["train", *ROWS, "--output", "run", "--dry-run", *SMALL]) == 0
    out = capsys.readouterr().out
    row = json.loads(Path("rows.jsonl").read_text().split("\n")[0])
    assert f"{row['prompt']}[[{row['chosen']}\n<verified><-hYes</verified></s>]]" in out
    assert f"{row['prompt']}{row['rejected']}\n[[<verified><-hNo</verified></s>]]" in out
    assert out.count("<-h") == 4  # the legend and three documents
    words = " ".join(out.split())
    assert "limit 64; 0 rows over it" in words
    assert f"{sum(p.numel() for p in tiny_lm().parameters()):,} parameters" in words
    assert "Steps: 3 per epoch with batches of 16, 6 in total" in words
    assert not Path("run").exists()


def test_dry_run_facts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = dry_run_of(capsys, *ROWS, *SMALL)
    encoder = Encoder(tiny_tokenizer())
    lengths, counted = [], []
    for name in ("rows.jsonl", "calibration.jsonl"):
        for row in map(json.loads, Path(name).read_text().splitlines()):
            pair = (
                encoder.encode(row["prompt"], row["chosen"], True),
                encoder.encode(row["prompt"], row["rejected"], False),
            )
            lengths.append(max(len(e.input_ids) for e in pair))
            counted += [sum(label != -100 for label in pair[0].labels)] if name == "rows.jsonl" else []
    assert facts["lengths"]["longest"] == max(lengths)
    total = sum(p.numel() for p in tiny_lm().parameters())
    memory = facts["memory"]
    assert (memory["parameters"], memory["trainable"], memory["optimizer"]) == (total, total, 8 * total)
    assert memory["logits"] == 4 * len(tiny_tokenizer()) * sum(sorted(counted)[-16:])
    # The classes are those that the trainer draws.
    config = SDMConfig(output_dir="x", use_cpu=True, report_to="none", exemplar_dim=16, sdm_epochs=1)
    rows, ca = ([json.loads(x) for x in Path(n).read_text().splitlines()] for n in ("rows.jsonl", "calibration.jsonl"))
    trainer = SDMTrainer(tiny_lm(), config, rows, ca, tiny_tokenizer())
    trainer.begin_epoch(0)
    assert facts["documents"]["train"]["positive"] == sum(d.positive for d in trainer._documents)
    assert facts["documents"]["calibration"]["positive"] == sum(trainer.calibration_positive)
    small = dry_run_of(capsys, *ROWS, *SMALL, "--lora-r", "2")["memory"]
    assert small["trainable"] < total / 10
    assert small["gradients"] == 4 * small["trainable"]


def test_rows_over_the_limit_are_counted_then_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"prompt": "ab" * 40 + "=", "chosen": "ab", "rejected": "ba"}
    write_rows(here / "long.jsonl", [*copy_rows(30), long, long])
    args = ["train", "--model", "model", "--data", "long.jsonl", "--output", "run", *SMALL]
    assert main([*args, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert "2 rows over it, 2 of them refused" in " ".join(out.split())
    assert "Row 30 of long.jsonl needs" in err
    assert "Row 30 of long.jsonl needs" in fails(capsys, *args)  # the number in the file, not in a half
    assert main([*args, "--dry-run", "--truncate-prompt"]) == 0
    assert "2 rows over it, 0 of them refused" in " ".join(capsys.readouterr().out.split())


def test_examples_keep_the_terminal_safe() -> None:
    encoder = Encoder(tiny_tokenizer())
    document = encoder.encode("abc" * 300, "a", True)
    text = dry_run.example_text(encoder, document)
    assert "characters ...]" in text.plain
    styles = {text.plain[s.start : s.end]: str(s.style) for s in text.spans}
    assert styles["Yes</verified></s>"] == "bold underline green"
    assert "dim" in styles.values()
    assert dry_run._legible("a\x1b[31m\nb\r") == "a\\x1b[31m\nb\\x0d"
