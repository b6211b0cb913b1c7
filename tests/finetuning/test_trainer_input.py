"""What SDMTrainer refuses, and what it says then."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
from trainer_checks import logged, make

from sdmlm.finetuning.trainer import SDMTrainer

# Bad input


def refused(tmp_path: Path, match: str, **given: Any) -> None:
    config = given.pop("config", {})
    arguments = {
        "model": tiny_lm(),
        "train_dataset": copy_rows(32, 0),
        "eval_dataset": copy_rows(24, 1),
        "processing_class": tiny_tokenizer(),
        **given,
    }
    with pytest.raises(ValueError, match=match):
        SDMTrainer(args=tiny_config(tmp_path, **config), **arguments)


def changed(**changes: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [dict(r) for r in copy_rows(32, 0)]
    rows[5] |= changes
    return rows


def test_bad_rows_are_named(tmp_path: Path) -> None:
    missing = [{k: v for k, v in row.items() if k != "rejected"} for row in copy_rows(32, 0)]
    refused(tmp_path, r"train rows.*Row 0: column 'rejected' is missing", train_dataset=missing)
    refused(tmp_path, r"train rows.*Row 5: 'prompt' is empty", train_dataset=changed(prompt=""))
    refused(tmp_path, r"calibration rows.*Row 5: 'chosen' is empty", eval_dataset=changed(chosen=" "))
    refused(tmp_path, r"train rows.*Row 5: 'chosen' is int", train_dataset=changed(chosen=3))
    refused(tmp_path, r"Row 5: 'chosen' and 'rejected' are equal", train_dataset=changed(chosen="ab", rejected="ab "))
    refused(tmp_path, r"Row 5 of the train rows needs \d+ tokens", train_dataset=changed(prompt="a" * 80))
    refused(tmp_path, r"calibration rows are too few for two halves", eval_dataset=copy_rows(3, 1))
    refused(tmp_path, r"train rows are too few for two halves", train_dataset=copy_rows(3, 1))
    refused(tmp_path, "no rows", train_dataset=[])
    refused(tmp_path, "needs train_dataset and eval_dataset", eval_dataset=None)


def test_bad_settings_are_named(tmp_path: Path) -> None:
    refused(tmp_path, "max_length is 100 but the model has only 64 positions", config={"max_length": 100})
    refused(tmp_path, "give processing_class", processing_class=None)
    refused(tmp_path, "takes one reward, got 2", reward_funcs=[len, len])
    refused(tmp_path, "no module", reward_funcs="there_is_no_such_module:f")
    for wrong, match in (
        ({"loss": "mse"}, 'must be "sdm" or "ce"'),
        ({"gamma_plus": 0.0}, "gamma_plus"),
        ({"gamma_gen": 1.5}, "gamma_gen is 1.5"),
        ({"alpha": 0.4}, "alpha"),
        ({"verification_tags": "{"}, "verification_tags"),
        ({"loss": "ce", "sdm_center": "x"}, "^sdm_center is 'x'"),
        ({"loss": "ce", "exemplar_dim": 0}, "^exemplar_dim is 0"),
        ({"loss": "ce", "sdm_epochs": 0}, "^sdm_epochs is 0"),
        ({"loss": "ce", "sdm_batch_size": 0}, "^sdm_batch_size is 0"),
        ({"loss": "ce", "sdm_rounds": 1.5}, "^sdm_rounds is 1.5"),
        ({"loss": "ce", "sdm_learning_rate": math.nan}, "^sdm_learning_rate is nan"),
        ({"label_smoothing_factor": 0.3}, "label_smoothing_factor is 0.3 but SDM fine-tuning knows only 0.0"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy is 'group_by_length'"),
        ({"num_generations": 3}, "num_generations is 3, which needs a temperature"),
        ({"num_generations": 0}, "num_generations is 0 but must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0 but"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        (
            {"metric_for_best_model": "accuracy"},
            "metric_for_best_model is 'accuracy' but an evaluation with loss 'sdm' has loss, sdm_loss",
        ),
        ({"loss": "ce", "metric_for_best_model": "admitted"}, "with loss 'ce' has loss\\."),
    ):
        with pytest.raises(ValueError, match=match):
            tiny_config(tmp_path, **wrong)


def test_long_prompts_are_cut_only_when_asked(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, truncate_prompt=True)
    trainer = SDMTrainer(tiny_lm(), config, changed(prompt="a" * 80), copy_rows(24, 1), tiny_tokenizer())
    assert len(trainer.training_rows[5].positive.input_ids) == 64


def test_hard_negatives_of_cut_prompts(tmp_path: Path) -> None:
    """The longest generation is longer than max_length: the rows train, so their prompts are generated from too."""
    config = tiny_config(tmp_path, max_length=32, truncate_prompt=True, gamma_gen=1.0, gamma_diversity=1.0)
    rows, held_out = copy_rows(32, 0, letters=12), copy_rows(24, 1, letters=12)
    for n, row in enumerate([*rows, *held_out]):
        row["prompt"] = "abc" * (n % 9) + row["prompt"]
    trainer = SDMTrainer(tiny_lm(), config, rows, held_out, tiny_tokenizer())
    assert config.max_length < trainer.args.max_new_tokens + 2 * trainer.encoder.suffix_length
    assert max(len(e.input_ids) for row in trainer.training_rows for e in (row.positive, row.negative)) == 32
    trainer.train()
    assert trainer.state.global_step == 4
    assert max(logged(trainer, "hard_negatives")) > 0
    assert max(len(e.input_ids) for e in trainer._encoded_documents) <= 32
    assert trainer.estimator is not None


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        (lambda prompts, completions, **_: [0], r"returned 1 values for \d+ completions"),
        (lambda prompts, completions, **_: [0.5] * len(prompts), r"returned 0.5"),
    ],
)
def test_a_bad_reward_is_named(tmp_path: Path, reward: Any, match: str) -> None:
    trainer = make(tmp_path, reward_funcs=reward)
    with pytest.raises(ValueError, match=match):
        trainer.fit_final_layer()


def test_a_reward_that_takes_no_columns_is_refused_at_once(tmp_path: Path) -> None:
    refused(
        tmp_path,
        r"Reward <lambda> cannot be called .*unexpected keyword.*\*\*columns",
        reward_funcs=lambda prompts, completions: [],
    )


def test_evaluation_and_resuming_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_train_epochs=1)
    with pytest.raises(ValueError, match="leave eval_dataset out"):
        trainer.evaluate(copy_rows(8, 2))
    (tmp_path / "checkpoint-9").mkdir()
    with pytest.raises(ValueError, match="checkpoint-9 is not a complete checkpoint"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    trainer.train(resume_from_checkpoint=True)  # none to resume from: it starts
    assert trainer.state.global_step == 2
    with pytest.raises(ValueError, match="written with 32 train rows, not 40"):
        make(tmp_path, rows=40).train(resume_from_checkpoint=True)
