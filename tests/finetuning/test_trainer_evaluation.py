"""The evaluations of SDMTrainer, its best checkpoint, its logs."""

from __future__ import annotations

import io
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
from torch import Tensor
from trainer_checks import counting_decoder, logged, make, moved_on
from transformers import TrainerCallback
from transformers import trainer as hf_trainer
from transformers.trainer_callback import TrainerState

from sdmlm.finetuning import evaluation as evaluation_module
from sdmlm.finetuning.config import METRICS
from sdmlm.finetuning.held_out import part_rows
from sdmlm.finetuning.layers import fit_and_broadcast
from sdmlm.finetuning.loss import sdm_next_token_loss
from sdmlm.finetuning.schedule import EpochOrder
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.encoding import IGNORED, collate

# Evaluation


def test_evaluation_is_one_pass_over_fixed_documents(tmp_path: Path) -> None:
    trainer = moved_on(make(tmp_path, sdm_epochs=30, tokens_per_batch=100))
    labels = [int(p) for p in trainer.calibration_positive]
    documents = [
        trainer.encoder.encode(row["prompt"], row["chosen" if y else "rejected"], bool(y))
        for row, y in zip(trainer.calibration_rows, labels, strict=True)
    ]
    calls = counting_decoder(trainer.model)
    metrics = trainer.evaluate()
    assert sum(calls) == len(documents) == 24
    assert trainer.evaluate()["eval_loss"] == metrics["eval_loss"]

    # Slowly: one pass for h, the layer, another pass for the logits, document by document.
    h = []
    for document in documents:
        ids = torch.tensor([document.input_ids[: document.verified_at + 1]])
        with torch.no_grad():
            states = trainer.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        h.append(torch.cat([states[-1], states.mean(dim=0)]))
    read, _ = trainer._read(documents)
    torch.testing.assert_close(read, torch.stack(h), rtol=1e-4, atol=1e-5)
    estimator = fit_and_broadcast(trainer.accelerator, trainer.args, [2, 0], read, labels)
    p = estimator.score(read, exclude=estimator.support_index(range(24))).p
    total, count = 0.0, 0
    for document, y, bases in zip(documents, labels, p, strict=True):
        batch = collate([document], 0)
        with torch.no_grad():
            logits = trainer.model(input_ids=batch["input_ids"]).logits
        base = torch.tensor([2 + bases[y]])
        total += float(sdm_next_token_loss(logits, batch["labels"], base, 1))
        count += int((batch["labels"] != IGNORED).sum())
    assert metrics["eval_loss"] == pytest.approx(total / count, rel=1e-5)
    assert metrics["eval_sdm_loss"] == estimator.loss_
    assert metrics["eval_q_min"] == estimator.region_.q_min


def test_the_rows_of_a_certificate_do_not_choose_the_checkpoint(tmp_path: Path) -> None:
    trainer = moved_on(make(tmp_path, documents="own", summary="states+likelihood", tokens_per_batch=100))
    _, held_out = part_rows([row["prompt"] for row in trainer.calibration_rows], trainer.args)
    assert held_out
    calls = counting_decoder(trainer.model)
    before = trainer.evaluate()["eval_loss"]
    assert sum(calls) == 24 - len(held_out)
    for row in held_out:
        trainer.encoded_calibration[row] = trainer.encoded_calibration[held_out[0]]
    assert trainer.evaluate()["eval_loss"] == before


@pytest.mark.parametrize("loss", ["sdm", "ce"])
def test_states_beyond_the_budget_are_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    trainer = moved_on(make(tmp_path, loss=loss, tokens_per_batch=100))
    kept: list[int] = []
    read = trainer._read

    def look(*args: Any, **kwargs: Any) -> Any:
        h, counted = read(*args, **kwargs)
        kept.append(counted.states.numel() * 4)
        return h, counted

    monkeypatch.setattr(trainer, "_read", look)
    calls = counting_decoder(trainer.model)
    in_one = trainer.evaluate()["eval_loss"]
    assert sum(calls) == 24
    monkeypatch.setattr(evaluation_module, "STATES_BUDGET", kept[0])
    assert trainer.evaluate()["eval_loss"] == in_one
    for budget in (kept[0] - 1, 0):
        calls.clear()
        monkeypatch.setattr(evaluation_module, "STATES_BUDGET", budget)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(in_one, rel=1e-5)
        assert sum(calls) == 48
    assert kept[1:] == [kept[0], 0, 0]


def test_the_best_checkpoint_is_kept_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, save_total_limit=1)  # evaluations after steps 1, 2, 3 and 4
    losses = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr("sdmlm.finetuning.trainer.loss_of_states", lambda *_: torch.tensor([next(losses), 1.0]))
    kept: list[Tensor] = []

    class Copy(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept.append(trainer.model.lm_head.weight.detach().clone())

    trainer.add_callback(Copy())
    trainer.train()
    assert trainer.state.best_metric == 1.0
    assert Path(str(trainer.state.best_model_checkpoint)).name == "checkpoint-2"
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert torch.equal(trainer.model.lm_head.weight, kept[1])
    assert not torch.equal(kept[1], kept[3])


def test_a_run_that_was_moved_still_ends_with_its_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after its last checkpoint, its folder renamed, and resumed: nothing is trained any more, the best is loaded."""
    trainer = make(tmp_path / "old")
    losses = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr("sdmlm.finetuning.trainer.loss_of_states", lambda *_: torch.tensor([next(losses), 1.0]))
    trainer.train()
    best = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    (tmp_path / "old").rename(tmp_path / "new")
    again = make(tmp_path / "new")
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-2")
    assert all(torch.equal(t, best[name]) for name, t in again.model.state_dict().items())
    shutil.rmtree(tmp_path / "new" / "checkpoint-2")
    with pytest.raises(ValueError, match="checkpoint-2, the best checkpoint of this run so far, is missing"):
        make(tmp_path / "new").train(resume_from_checkpoint=True)


def test_evaluation_waits_as_long_as_it_is_told_to(tmp_path: Path) -> None:
    trainer = make(tmp_path, eval_delay=1, num_train_epochs=2)
    trainer.train()
    assert min(log["epoch"] for log in trainer.state.log_history if "eval_loss" in log) >= 1


def test_other_strategies_are_left_to_the_trainer(tmp_path: Path) -> None:
    trainer = make(tmp_path, rows=64, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    trainer.train()
    assert not logged(trainer, "eval_loss")
    assert not list(tmp_path.glob("checkpoint-*"))
    trainer = make(tmp_path, rows=64, num_train_epochs=1, save_strategy="no", load_best_model_at_end=False)
    trainer.train()
    assert len(logged(trainer, "eval_loss")) == 2
    assert not list(tmp_path.glob("checkpoint-*"))


def test_every_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    orders = []
    for epoch in (0, 1, 0):
        trainer.layer_epoch = epoch
        orders.append(list(EpochOrder(trainer)))
    assert orders[0] == orders[2] != orders[1]
    for order in orders:
        assert sorted(order) == list(range(32)) != order


def test_every_epoch_has_an_sdm_layer_with_a_split_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    choose = trainer.choose_documents
    monkeypatch.setattr(trainer, "choose_documents", lambda epoch: choose(0))  # the same documents: only chance is left
    halves = []
    for epoch in (0, 1):
        trainer.begin_epoch(epoch)
        assert trainer.training_layer is not None
        halves.append(set(trainer.training_layer.layers_[0].support_ids))
    assert halves[0] != halves[1]
    assert all(len(half) == 16 for half in halves)


# Logs


def test_logs_and_reports(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Report(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = make(tmp_path, callbacks=[Report()], exemplar_dim=2, sdm_epochs=1)
    trainer.train()
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert len(steps) == 4
    for log in steps:
        assert 2 <= log["base"] <= 3
        assert 0 <= log["sdm/positive"] <= 1
        assert 0 <= log["sdm/negative"] <= 1
        assert log["time/sdm_score"] > 0
        assert "hard_negatives" in log
    for log in steps[::2]:  # the first step of an epoch carries the epoch's preparations
        assert {"time/generation", "time/reading", "time/sdm_layer"} <= set(log)
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    names = ["q_min", "psi_0", "psi_1", "mean_q_0", "mean_q_1", "sdm_loss", "sdm_loss_0", "sdm_loss_1"]
    names += ["sdm_accuracy_0", "sdm_accuracy_1", "admitted", "runtime"]
    assert all({f"eval_{name}" for name in names} <= set(log) for log in evaluations)
    final = trainer.state.log_history[-1]
    assert final["time/final_layer"] > 0
    assert {"final_q_min", "final_admitted"} <= set(final)
    assert [log["loss"] for log in seen if "loss" in log] == [log["loss"] for log in steps]
    # A layer this poor accepts nothing: q'_min is infinite, and the state must still be readable.
    assert math.inf in [log["eval_q_min"] for log in evaluations]
    state = TrainerState.load_from_json(str(tmp_path / "checkpoint-4" / "trainer_state.json"))
    assert [log for log in state.log_history if "eval_loss" in log] == evaluations


def test_a_terminal_shows_phases_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: one bar for all phases (rich refuses a second one), and what is logged above it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    trainer = make(tmp_path, disable_tqdm=False)
    shown: list[str] = []
    phase = trainer._phases.phase
    monkeypatch.setattr(trainer._phases, "phase", lambda text: shown.append(text) or phase(text))
    trainer.train()
    text = terminal.getvalue()
    assert "eval_loss" in text
    assert "4/4" in text
    assert shown[:4] == [
        "Epoch 1: choosing documents",
        "Epoch 1: reading the training documents",
        "Epoch 1: fitting the SDM layer",
        "Evaluating: reading the calibration documents",
    ]
    assert "Epoch 2: generating hard negatives" in shown
    assert shown[-1] == "Fitting the final SDM layer"
    assert "Fitting the final SDM layer" in text


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("loss", False),
        ("eval_loss", False),
        ("sdm_loss_1", False),
        ("q_min", False),
        ("admitted", True),
        ("eval_mean_q_1", True),
    ],
)
def test_the_best_checkpoint_is_the_best_by_its_metric(tmp_path: Path, metric: str, greater: bool) -> None:
    assert tiny_config(tmp_path, metric_for_best_model=metric).greater_is_better is greater
    assert (
        tiny_config(tmp_path, metric_for_best_model=metric, greater_is_better=not greater).greater_is_better
        is not greater
    )


def test_metrics_are_those_of_an_evaluation(tmp_path: Path) -> None:
    found = make(tmp_path).evaluate()
    assert {f"eval_{name}" for name in METRICS} <= set(found)


@pytest.mark.parametrize("tied", [True, False])
def test_the_best_checkpoint_loads_without_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """A tied model does not save its output embedding, and transformers says that it is missing."""
    said: list[str] = []
    monkeypatch.setattr(hf_trainer.logger, "warning", lambda text, *more: said.append(str(text)))
    model = tiny_lm(tie_word_embeddings=tied)
    config = tiny_config(tmp_path, num_train_epochs=1, load_best_model_at_end=True)
    trainer = SDMTrainer(model, config, copy_rows(32, 0), copy_rows(24, 1), tiny_tokenizer())
    trainer.train()
    assert not [text for text in said if "missing" in text]
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head is embedding) == tied
    trainer._issue_warnings_after_load(SimpleNamespace(missing_keys=["model.norm.weight"], unexpected_keys=[]))
    assert "missing" in said[-1]
