"""Every recipe is one that can be run, and differs from its siblings only where it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdmlm.experiments.evaluate import load_task
from sdmlm.experiments.runs import DATASETS, SETTINGS
from sdmlm.finetuning import recipe
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.settings import OPTIONS
from sdmlm.rewards import load_reward

FOLDER = Path(__file__).parents[2] / "recipes"
FAMILIES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
RECIPES = sorted(FOLDER.glob("*/*.yaml"))
LABELS = ("No fine-tuning", "CE", "CE + HN", "SDM", "SDM + HN", "SDM + HN, re-run")


def settings_of(path: Path) -> dict[str, Any]:
    return recipe.typed(recipe.read_recipe(str(path)), {**OPTIONS, **recipe.field_types()}, str(path))


def test_every_family_has_the_papers_settings() -> None:
    assert FAMILIES == ["demo", "phi-3.5-mini", "smollm2-135m", "stories15m"]
    for family in FAMILIES:
        assert {path.stem for path in (FOLDER / family).glob("*.yaml")} == set(SETTINGS)
    assert not list(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_can_be_run(path: Path) -> None:
    settings = settings_of(path)
    # bfloat16 is refused without a GPU, and is none of the recipe's business here.
    fields = {name: value for name, value in settings.items() if name not in OPTIONS} | {"bf16": False}
    config = SDMConfig(output_dir="nowhere", report_to="none", **fields)
    assert config.sdm_epochs == settings["sdm_epochs"]
    # What is ours, not the paper's, is off in all of them.
    assert (config.documents, config.summary) == ("paper", "states")
    if config.num_train_epochs:
        assert config.gamma_other == config.gamma_revise == 0
    task = load_task(settings["task"])
    assert load_reward(settings["reward"]) is task.reward
    assert set(settings["tests"]) <= set(DATASETS)
    assert {"test", "shifted"} <= set(settings["tests"])
    for source in (settings["data"], settings["calibration"], *settings["tests"].values()):
        assert source.endswith(".jsonl")
        assert not Path(source).is_absolute()
    assert len({settings["data"], settings["calibration"], *settings["tests"].values()}) == 2 + len(settings["tests"])
    assert settings["setting"] == dict(zip(SETTINGS, LABELS, strict=True))[path.stem]
    assert settings["output"].startswith(f"runs/{path.parent.name}")
    assert settings["output"].endswith(f"/{path.stem}")
    assert settings.get("save_steps") == settings.get("eval_steps")  # a checkpoint that was not evaluated is of no use
    # The comments name this recipe, and no other.
    comments = [line for line in path.read_text().split("\n") if line.startswith("#") and "recipes/" in line]
    assert comments
    assert all(f"recipes/{path.parent.name}/{path.stem}.yaml" in line for line in comments)


@pytest.mark.parametrize("family", FAMILIES)
def test_siblings_differ_only_where_they_should(family: str) -> None:
    found = {name: settings_of(FOLDER / family / f"{name}.yaml") for name in SETTINGS}
    full = found["sdm_hn"]
    assert (full["loss"], full["hard_negatives"]) == ("sdm", True)
    own = {"setting", "output"}
    gammas = {"gamma_gen", "gamma_diversity"}  # only where negatives are generated
    expected = {
        "ce": {"loss", "hard_negatives"} | gammas,
        "ce_hn": {"loss"},
        "sdm": {"hard_negatives"} | gammas,
        "sdm_hn_rerun": {"seed"},
    }
    for name, apart in expected.items():
        assert {key for key in {**full, **found[name]} if full.get(key) != found[name].get(key)} == apart | own, name
    for name in ("none", "ce", "ce_hn", "sdm"):
        assert found[name]["loss"] == ("sdm" if name == "sdm" else "ce")
        assert found[name]["hard_negatives"] == (name == "ce_hn")
    # Without fine-tuning all that is left are the rows, the SDM layer and the seed, the same as elsewhere.
    none = found["none"]
    assert none["num_train_epochs"] == 0
    changed = {"loss", "hard_negatives", "num_train_epochs"} | own
    assert {key: value for key, value in none.items() if full.get(key) != value}.keys() == changed
    layer = {name for name in full if name.startswith("sdm_")} | {
        "alpha",
        "exemplar_dim",
        "seed",
        "gamma_plus",
        "tests",
    }
    assert layer <= set(none)


def test_the_recipes_of_the_demo_are_what_it_does() -> None:
    from sdmlm.demo.word_ordering import LABELS as SHOWN
    from sdmlm.demo.word_ordering import LOSSES, SEED, SIZES, TRAINING

    for name, label in SHOWN.items():
        found = settings_of(FOLDER / "demo" / f"{name}.yaml")
        expected = {**TRAINING, "model": "demo", "setting": label, "loss": LOSSES[name], "seed": SEED}
        assert {key: found[key] for key in expected} == expected
        sizes = " ".join(f"--{split} {n}" for split, n in SIZES.items())
        assert sizes in (FOLDER / "demo" / f"{name}.yaml").read_text()
