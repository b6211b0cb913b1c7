"""SDMTrainer on a tiny language model: what is learned, the final layer, hard negatives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
from trainer_checks import batch_of, logged, make, moved_on
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdmlm.estimator.calibration_summary import summarize_calibration
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.final_layer import fit_final_layer
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import IGNORED, Encoder
from sdmlm.language_model.sdm_folder import fingerprint

# What is learned


@pytest.mark.parametrize("hard_negatives", [True, False], ids=["hard negatives", "static"])
@pytest.mark.parametrize("loss", ["sdm", "ce"])
def test_a_tiny_lm_learns_to_copy(tmp_path: Path, loss: str, hard_negatives: bool) -> None:
    rows, held_out = copy_rows(256, 0), copy_rows(64, 1)
    config = tiny_config(
        tmp_path / "run",
        num_train_epochs=6,
        learning_rate=1e-2,
        loss=loss,
        hard_negatives=hard_negatives,
        logging_steps=8,
    )
    trainer = SDMTrainer(tiny_lm(), config, rows, held_out, tiny_tokenizer())
    trainer.train()
    losses, evaluations = logged(trainer, "loss"), logged(trainer, "eval_loss")
    assert losses[-1] < 0.1 * losses[0]
    share = logged(trainer, "hard_negatives")
    assert share[:2] == [0.0, 0.0]
    assert (max(share[2:]) > 0.05) == hard_negatives

    # The best of two evaluations an epoch is what train() ends with.
    assert [log["step"] for log in trainer.state.log_history if "eval_loss" in log] == list(range(8, 97, 8))
    best = Path(str(trainer.state.best_model_checkpoint))
    assert trainer.state.best_metric == min(evaluations)
    assert best.name == f"checkpoint-{8 * (1 + evaluations.index(min(evaluations)))}"
    weights = load_file(best / "model.safetensors")
    assert all(torch.equal(weights[name], p) for name, p in trainer.model.named_parameters() if name in weights)

    folder = tmp_path / "saved"
    trainer.save_model(str(folder))
    assert not [p for p in folder.rglob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl")]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    encoder = Encoder(tokenizer)
    generated = generate(model, encoder, [row["prompt"] for row in held_out], 24)
    bodies = [encoder.read(ids)[0] for ids in generated]
    assert sum(b == row["chosen"] for b, row in zip(bodies, held_out, strict=True)) > 48
    assert all(encoder.read(ids)[1] is not None for ids in generated)  # each says Yes or No
    facts = json.loads((folder / "sdm" / "lm.json").read_text())
    assert facts["fingerprint"] == fingerprint(model.state_dict())
    assert facts["training"]["loss"] == loss
    reopened = SDMEstimator.from_pretrained(folder / "sdm")
    assert trainer.estimator is not None
    x = np.random.default_rng(0).normal(size=(5, 64))
    assert np.array_equal(reopened.score(x).p, trainer.estimator.score(x).p)
    assert "final_admitted" in trainer.state.log_history[-1]


def test_the_final_layer_stands_alone(tmp_path: Path) -> None:
    """The entry point for a model that was not fine-tuned gives what the trainer's last act gives."""
    trainer = make(tmp_path)
    ours = trainer.fit_final_layer()
    encoder = Encoder(tiny_tokenizer(), max_length=64)
    theirs = fit_final_layer(tiny_lm(), encoder, copy_rows(24, 1), trainer.args, progress=False).estimator
    x = np.random.default_rng(0).normal(size=(5, 64))
    assert np.array_equal(ours.score(x).p, theirs.score(x).p)
    assert ours.documents_ == theirs.documents_
    assert len(ours.documents_) == 24
    assert all(text.endswith("<verified>") for text in ours.documents_.values())
    with pytest.raises(ValueError, match="too few for two halves"):
        fit_final_layer(tiny_lm(), encoder, copy_rows(3, 1), trainer.args, progress=False)


def test_the_final_layer_has_every_wrong_generation_and_no_right_one(tmp_path: Path) -> None:
    """gamma_gen = gamma_diversity = 1, whatever the settings of training; greedy."""
    trainer = make(tmp_path, gamma_gen=0.0, gamma_diversity=0.0)
    rows, encoder = trainer.calibration_rows, trainer.encoder
    room = max(len(encoder.continuation(row["chosen"])) for row in rows) + 8
    bodies = [
        encoder.tags.split(encoder.decode(ids).removesuffix("</s>"))[0]
        for ids in generate(trainer.model, encoder, [row["prompt"] for row in rows], room + encoder.suffix_length)
    ]
    estimator = trainer.fit_final_layer()
    layer = estimator.layers_[0]
    labels = dict(zip(layer.support_ids, layer.support.labels.tolist(), strict=True))
    labels |= dict(zip(layer.calibration_ids, layer.calibration.labels.tolist(), strict=True))
    assert {0, 1} == set(labels.values())
    for i, row in enumerate(rows):
        text = estimator.documents_[i].removesuffix("\n<verified>")
        assert bodies[i] not in (row["chosen"], row["rejected"])  # an untrained LM
        assert text.endswith(row["prompt"] + (row["chosen"] if labels[i] else bodies[i]))


def test_the_calibration_summary_by_hand(tmp_path: Path) -> None:
    trainer = moved_on(make(tmp_path, sdm_epochs=30))
    estimator = trainer.fit_final_layer()
    found, layer = summarize_calibration(estimator).metrics(), estimator.layers_[0]
    ca, region = layer.calibration, layer.region(0.8)
    points = list(
        zip(ca.labels.tolist(), ca.z.tolist(), ca.q.tolist(), ca.d.tolist(), ca.q_prime.tolist(), strict=True)
    )
    assert {y for y, *_ in points} == {0, 1}
    admitted, losses = 0, {0: [], 1: []}
    for y, z, q, d, q_prime in points:
        powers = [(2 + q) ** (d * value) for value in z]
        output = [power / sum(powers) for power in powers]
        losses[y].append(-math.log(output[y], 2 + q))
        best = z.index(max(z))
        reached = [c for c in (0, 1) if output[c] >= region.psi[c] - 1e-12]
        admitted += q_prime >= region.q_min and reached == [best]
    for c in (0, 1):
        own = [(z, q) for y, z, q, *_ in points if y == c]
        assert found[f"mean_q_{c}"] == pytest.approx(sum(q for _, q in own) / len(own))
        assert found[f"sdm_accuracy_{c}"] == sum(z.index(max(z)) == c for z, _ in own) / len(own)
        assert found[f"sdm_loss_{c}"] == pytest.approx(sum(losses[c]) / len(own), rel=1e-5)
        assert found[f"psi_{c}"] == region.psi[c]
    assert found["sdm_loss_0"] != found["sdm_loss_1"]
    assert found["admitted"] == admitted / len(points)
    assert found["q_min"] == region.q_min


def test_the_learning_rate_rises_for_a_tenth_and_falls_to_zero(tmp_path: Path) -> None:
    trainer = make(tmp_path, rows=320, num_train_epochs=1, learning_rate=1e-3, loss="ce")
    trainer.train()
    rates = logged(trainer, "learning_rate")
    expected = [1e-3 * (step / 2 if step < 2 else (20 - step) / 18) for step in range(20)]
    assert rates == pytest.approx(expected)


# Hard negatives


def test_hard_negatives_begin_with_the_second_epoch(tmp_path: Path) -> None:
    trainer = make(tmp_path, gamma_gen=1.0, gamma_diversity=1.0)
    trainer.begin_epoch(0)
    assert {d.source for d in trainer._documents} == {"positive", "static"}
    trainer.state.global_step = 2
    trainer.begin_epoch(1)
    generated = [d for d in trainer._documents if d.source == "generated"]
    assert len(generated) > 5
    attempts = trainer.negatives.attempts
    assert set(attempts) == {(2, d.row) for d in trainer._documents if not d.positive}
    assert {a.step for a in attempts.values()} == {2}
    for d in generated:
        encoded = trainer._encoded_documents[d.row]
        row, body = trainer.rows[d.row], attempts[2, d.row].body
        assert encoded == trainer.encoder.encode(row["prompt"], str(body), False)
        assert trainer.encoder.decode(encoded.input_ids).endswith(f"{row['prompt']}{body}\n<verified>No</verified></s>")
        assert [i for i in encoded.labels if i != IGNORED] == encoded.input_ids[encoded.verified_at - 2 :]
    batch = batch_of(trainer, [generated[0].row])
    assert batch["reward"].tolist() == [0]


def test_a_run_of_generations_without_negatives_is_named(tmp_path: Path) -> None:
    trainer = make(tmp_path, gamma_gen=1.0, reward_funcs=lambda prompts, completions, **_: [1] * len(prompts))
    with pytest.warns(UserWarning, match=r"none of \d+ generations was wrong"):
        trainer.begin_epoch(1)
    assert {d.source for d in trainer._documents} == {"positive", "static"}
    with pytest.warns(UserWarning, match="only static negatives"):
        trainer.fit_final_layer()
