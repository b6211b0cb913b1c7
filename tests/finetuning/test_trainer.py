"""SDM fine-tuning on tiny LMs: what is learned, what each step and evaluation computes, what is logged, saved, refused."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers import trainer as hf_trainer
from transformers.trainer_callback import TrainerState

from sdmlm.estimator.calibration_summary import summarize_calibration
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning import evaluation as evaluation_module
from sdmlm.finetuning.checkpoints import complete_checkpoint
from sdmlm.finetuning.config import METRICS, SDMConfig
from sdmlm.finetuning.final_layer import fit_final_layer
from sdmlm.finetuning.layers import fit_and_broadcast
from sdmlm.finetuning.loss import sdm_next_token_loss
from sdmlm.finetuning.schedule import EpochOrder
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.decoding import generate
from sdmlm.language_model.encoding import IGNORED, Encoder, collate
from sdmlm.language_model.forward import has_dropout
from sdmlm.language_model.sdm_folder import fingerprint, read_lm_metadata

CHAT = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ('</s>' if m['role'] == 'assistant' else '\n') }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def make(folder: Path, rows: int = 32, model: Any = None, **changes: Any) -> SDMTrainer:
    given = {k: changes.pop(k) for k in ("reward_funcs", "peft_config", "callbacks") if k in changes}
    config = tiny_config(folder, **changes)
    return SDMTrainer(model or tiny_lm(), config, copy_rows(rows, 0), copy_rows(24, 1), tiny_tokenizer(), **given)


def logged(trainer: SDMTrainer, metric: str) -> list[float]:
    return [log[metric] for log in trainer.state.log_history if metric in log]


def counting_decoder(model: Any) -> list[int]:
    """Grows by the number of sequences of every pass over the LM's layers."""
    calls: list[int] = []
    model.get_decoder().register_forward_hook(
        lambda m, args, kwargs, out: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return calls


def moved_on(trainer: SDMTrainer) -> SDMTrainer:
    """A trainer in the middle of its first epoch: its layer is fitted and the LM has changed since."""
    trainer.begin_epoch(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return trainer


def batch_of(trainer: SDMTrainer, numbers: list[int]) -> dict[str, Tensor]:
    batches, _ = trainer.get_batch_samples(iter([{"rows": torch.tensor(numbers)}]), 1, torch.device("cpu"))
    return dict(batches[0])


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
    theirs = fit_final_layer(tiny_lm(), encoder, copy_rows(24, 1), trainer.args, progress=False)
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


# What a step computes


def bases_by_hand(trainer: SDMTrainer, numbers: list[int], exclude: bool) -> list[float]:
    """2 + SDM(z')_y of documents, from the LM's states and the fitted layer's tensors, by the formulas of the spec."""
    assert trainer.training_layer is not None
    layer = trainer.training_layer.layers_[0]
    a, support = layer.adaptor, layer.support.state()
    calibration = layer.calibration
    bases = []
    for number in numbers:
        document = trainer._encoded_documents[number]
        ids = torch.tensor([document.input_ids[: document.verified_at + 1]])
        with torch.no_grad():
            states = trainer.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        h = torch.cat([states[-1], states.mean(dim=0)]).double()
        x = (h - a.mean.double()) / a.std.double()
        exemplar = a.weight.double() @ x + a.bias.double()
        z = a.out_weight.double() @ exemplar + a.out_bias.double()
        predicted = int(z.argmax())
        entries = [
            (float((vector.double() - exemplar).norm()), int(y), int(y_hat))
            for vector, y, y_hat, name in zip(
                support["vectors"], support["labels"], support["predictions"], layer.support_ids, strict=True
            )
            if not (exclude and name == number)
        ]
        entries.sort()
        q = next((n for n, (_, y, y_hat) in enumerate(entries) if not y == y_hat == predicted), len(entries))
        inside = exclude and number in layer.support_ids
        d = 1.0
        for c in (0, 1):
            stored = (
                layer.train_cdf.values[c]
                if inside
                else calibration.d_nearest[(calibration.labels == c) & (calibration.q > 0)].numpy()
            )
            below = float(np.mean(np.asarray(stored) < entries[0][0])) if len(stored) else 1.0
            d = min(d, 1 - below)
        p = torch.softmax(z * d * math.log(2 + q), dim=0)
        bases.append(2 + float(p[int(trainer._documents[number].positive)]))
    return bases


def test_the_loss_of_a_batch_is_that_of_the_spec(tmp_path: Path) -> None:
    trainer = moved_on(make(tmp_path, rows=64, sdm_epochs=30))
    assert trainer.training_layer is not None
    numbers = list(range(40))
    batch = batch_of(trainer, numbers)
    bases = bases_by_hand(trainer, numbers, exclude=True)
    assert all(2 <= b <= 3 for b in bases)
    assert max(bases) - min(bases) > 0.05
    with torch.no_grad():
        ours = trainer.compute_loss(trainer.model, batch)
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert float(ours) == pytest.approx(
        float(sdm_next_token_loss(logits, batch["labels"], torch.tensor(bases))), rel=1e-5
    )
    assert trainer._metrics["base"] == pytest.approx(bases, abs=1e-4)
    for name, positive in (("sdm/positive", True), ("sdm/negative", False)):
        own = [b - 2 for b, n in zip(bases, numbers, strict=True) if trainer._documents[n].positive == positive]
        assert len(own) > 5
        assert trainer._metrics[name] == pytest.approx(own, abs=1e-4)
    # A document whose prompt is in the support half ignores that entry, and it matters; the others have none to ignore.
    blind = bases_by_hand(trainer, numbers, exclude=False)
    inside = [n in trainer.training_layer.layers_[0].support_ids for n in numbers]
    differ = [abs(a - b) > 1e-3 for a, b in zip(bases, blind, strict=True)]
    assert any(differ)
    assert all(i for i, d in zip(inside, differ, strict=True) if d)


def test_ce_is_cross_entropy_over_the_same_mask(tmp_path: Path) -> None:
    trainer = moved_on(make(tmp_path, loss="ce"))
    assert trainer.training_layer is None
    batch = batch_of(trainer, list(range(16)))
    with torch.no_grad():
        logits = trainer.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
        assert float(trainer.compute_loss(trainer.model, batch)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("loss", ["sdm", "ce"])
def test_accumulation_changes_nothing(tmp_path: Path, loss: str) -> None:
    """40 rows: the last step of an epoch is a short one. In its first step the LM is the one that the layer was fitted
    over, so each d_nearest lies on a jump of its eCDF and noise moves d by 1/n: only there is the tolerance wide."""
    whole = make(tmp_path / "16", rows=40, loss=loss)
    parts = make(tmp_path / "8", rows=40, loss=loss, per_device_train_batch_size=8, gradient_accumulation_steps=2)
    for trainer in (whole, parts):
        trainer.train()
    for step, (a, b) in enumerate(zip(logged(whole, "loss"), logged(parts, "loss"), strict=True)):
        assert a == pytest.approx(b, rel=1e-2 if loss == "sdm" and step % 3 == 0 else 1e-5)
    assert logged(whole, "eval_loss") == pytest.approx(logged(parts, "eval_loss"), rel=1e-4 if loss == "sdm" else 1e-5)
    for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=5e-4 if loss == "sdm" else 2e-5)


def test_the_documents_of_a_step_are_dealt_by_length(tmp_path: Path) -> None:
    rows = [row for letters in (9, 2, 7, 4) for row in copy_rows(4, letters, letters)]
    config = tiny_config(tmp_path, loss="ce", per_device_train_batch_size=4, gradient_accumulation_steps=4)
    trainer = SDMTrainer(tiny_lm(), config, rows, copy_rows(16, 1), tiny_tokenizer())
    trainer.begin_epoch(0)
    numbers = torch.randperm(16, generator=torch.Generator().manual_seed(0)).split(4)
    batches, _ = trainer.get_batch_samples(iter([{"rows": n} for n in numbers]), 4, torch.device("cpu"))
    assert [set(b["rows"].tolist()) for b in batches] == [{4, 5, 6, 7}, {12, 13, 14, 15}, {8, 9, 10, 11}, {0, 1, 2, 3}]
    widths = [int(b["attention_mask"].shape[1]) for b in batches]
    assert widths == sorted(widths)
    for b in batches:  # what was moved is whole
        for i, ids, mask in zip(b["rows"].tolist(), b["input_ids"], b["attention_mask"], strict=True):
            assert ids[mask.bool()].tolist() == trainer._encoded_documents[i].input_ids


def test_one_pass_a_step(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer = make(tmp_path)
    trainer.begin_epoch(0)
    batch = batch_of(trainer, list(range(16)))
    calls = counting_decoder(trainer.model)
    trainer.compute_loss(trainer.model, batch)
    assert calls == [16]


def test_dropout_costs_a_second_pass_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="second pass"):
        trainer = make(tmp_path, model=tiny_lm(attention_dropout=0.5))
    moved_on(trainer)
    batch = batch_of(trainer, list(range(16)))
    calls = counting_decoder(trainer.model)
    trainer.model.train()
    losses = {trainer.compute_loss(trainer.model, batch).item() for _ in range(3)}
    assert calls == [16] * 6
    assert len(losses) == 3  # the training pass is random
    assert trainer._metrics["base"][:16] == trainer._metrics["base"][16:32]  # the bases are not
    assert trainer.model.training
    trainer.model.eval()
    assert trainer._metrics["base"][:16] == pytest.approx(bases_by_hand(trainer, list(range(16)), True), abs=1e-4)


def test_what_counts_as_dropout() -> None:
    assert not has_dropout(tiny_lm())
    assert has_dropout(tiny_lm(attention_dropout=0.1))
    gpt2 = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8}
    assert has_dropout(GPT2LMHeadModel(GPT2Config(**gpt2)))
    # summary_first_dropout stays 0.1, but belongs to another head.
    none = GPT2Config(**gpt2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    assert not has_dropout(GPT2LMHeadModel(none))


def test_gradient_checkpointing_gives_the_same_losses(tmp_path: Path) -> None:
    plain = make(tmp_path / "plain", num_train_epochs=1)
    checkpointed = make(tmp_path / "checkpointed", num_train_epochs=1, gradient_checkpointing=True)
    for trainer in (plain, checkpointed):
        trainer.train()
    assert checkpointed.model.is_gradient_checkpointing
    assert logged(plain, "loss") == pytest.approx(logged(checkpointed, "loss"), rel=1e-6)


def test_bfloat16_autocast_stays_near_float32(tmp_path: Path) -> None:
    plain = make(tmp_path / "32", gamma_gen=1.0, gamma_diversity=1.0, sdm_learning_rate=1e-4)
    mixed = make(tmp_path / "16", gamma_gen=1.0, gamma_diversity=1.0, sdm_learning_rate=1e-4, bf16=True)
    for trainer in (plain, mixed):
        trainer.train()
    assert max(logged(mixed, "hard_negatives")) > 0.2
    assert logged(mixed, "loss") == pytest.approx(logged(plain, "loss"), rel=3e-2)
    assert logged(mixed, "loss") != pytest.approx(logged(plain, "loss"), rel=1e-6)
    assert {p.dtype for p in mixed.model.parameters()} == {torch.float32}
    assert mixed._read(mixed._encoded_documents)[0].dtype == torch.float32


def test_h_and_the_base_are_float32_also_under_autocast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = moved_on(make(tmp_path))
    assert trainer.training_layer is not None
    support = trainer.training_layer.layers_[0].support
    query, seen = support.query, []
    monkeypatch.setattr(support, "query", lambda vectors, *rest: seen.append(vectors) or query(vectors, *rest))
    batch = batch_of(trainer, list(range(16)))
    with torch.no_grad():
        states = trainer.model.get_decoder()(input_ids=batch["input_ids"]).last_hidden_state
    h = trainer._summary(states, batch)
    base = trainer._base(h, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(trainer._summary(states, batch), h)
        assert torch.equal(trainer._base(h, batch), base)
    assert torch.equal(seen[0], seen[1])
    assert seen[1].dtype == torch.float32


def test_a_model_whose_logits_only_it_can_make(tmp_path: Path) -> None:
    trainer = moved_on(make(tmp_path))
    batch = batch_of(trainer, list(range(16)))
    loss, evaluation = trainer.compute_loss(trainer.model, batch).item(), trainer.evaluate()["eval_loss"]
    trainer._transform = None
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(loss, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluation, rel=1e-5)


def test_the_random_state_is_left_alone(tmp_path: Path) -> None:
    trainer = make(tmp_path, gamma_gen=1.0, gamma_diversity=1.0)
    before = torch.random.get_rng_state(), random.getstate()
    trainer.begin_epoch(1)
    trainer.evaluate()
    trainer.fit_final_layer()
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]


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


# Saving, and what is asked of a second run


def test_training_twice_starts_anew(tmp_path: Path) -> None:
    trainer = make(tmp_path, num_train_epochs=2, gamma_gen=1.0, gamma_diversity=1.0)
    trainer.train()
    first, attempts = trainer.training_layer, dict(trainer.negatives.attempts)
    trainer.train()
    assert trainer.training_layer is not first
    again = trainer.negatives.attempts  # made anew, by the model as it is now
    assert attempts.keys() == again.keys()
    assert not any(again[key] is attempts[key] for key in attempts)


def test_the_caller_keeps_its_config(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    trainer = SDMTrainer(tiny_lm(), config, copy_rows(32, 0), copy_rows(24, 1), tiny_tokenizer())
    assert config.max_new_tokens is None
    assert trainer.args.max_new_tokens > 3


def test_models_that_could_not_be_trained_or_opened_again_are_refused(tmp_path: Path) -> None:
    from accelerate import dispatch_model
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PROMPT_TUNING puts virtual tokens"):
        make(tmp_path, peft_config=PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match='named mine: name it "default"'):
        make(tmp_path, model=get_peft_model(tiny_lm(), lora, adapter_name="mine"))
    with pytest.raises(ValueError, match="has an adapter already"):
        make(tmp_path, model=get_peft_model(tiny_lm(), lora), peft_config=lora)
    with pytest.raises(ValueError, match="load it onto one device"):
        make(tmp_path, model=dispatch_model(tiny_lm(), {"": "cpu"}, force_hooks=True, main_device="cpu"))


def test_an_adapter_folder_is_trained_further(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    tiny_lm().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    trainer = make(tmp_path, model=str(tmp_path / "adapter"))
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_lora(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel

    tiny_lm().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    config = tiny_config(tmp_path / "run", gradient_checkpointing=True)
    trainer = SDMTrainer(str(tmp_path / "base"), config, copy_rows(64, 0), copy_rows(24, 1), peft_config=lora)
    trainer.train()
    losses = logged(trainer, "loss")
    assert losses[-1] < losses[0]
    trainer.save_model(str(tmp_path / "saved"))
    names = {p.name for p in (tmp_path / "saved").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "sdm"} <= names
    assert "model.safetensors" not in names
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "saved")
    facts = json.loads((tmp_path / "saved" / "sdm" / "lm.json").read_text())
    assert facts["fingerprint"] == fingerprint(again.get_base_model().state_dict())


def test_adapters_begin_as_the_seed_says(tmp_path: Path) -> None:
    from peft import LoraConfig

    def first(seed: int, noise: int) -> Tensor:
        torch.manual_seed(noise)
        lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        model = make(tmp_path, peft_config=lora, seed=seed).model
        return next(p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name)

    assert torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(7, 1))


def test_a_model_may_be_a_path(tmp_path: Path) -> None:
    tiny_lm().save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    trainer = SDMTrainer(tmp_path / "base", tiny_config(tmp_path / "run"), copy_rows(32, 0), copy_rows(24, 1))
    assert torch.equal(trainer.model.lm_head.weight, tiny_lm().lm_head.weight)


@pytest.mark.parametrize("mark", ["is_loaded_in_4bit", "is_loaded_in_8bit", None])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_quantised_model_is_prepared_for_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str | None, checkpointing: bool
) -> None:
    """Only that it is asked for: bitsandbytes needs a GPU."""
    import peft

    asked: list[Any] = []

    def prepare(model: Any, use_gradient_checkpointing: bool, gradient_checkpointing_kwargs: Any) -> Any:
        assert not isinstance(model, peft.PeftModel)
        asked.append((use_gradient_checkpointing, gradient_checkpointing_kwargs))
        delattr(model, str(mark))  # Trainer looks for bitsandbytes where it finds the mark
        return model

    monkeypatch.setattr(peft, "prepare_model_for_kbit_training", prepare)
    model = tiny_lm()
    if mark:
        setattr(model, mark, True)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    trainer = make(tmp_path, model=model, peft_config=lora, gradient_checkpointing=checkpointing)
    assert asked == ([(checkpointing, {"use_reentrant": False})] if mark else [])
    assert isinstance(trainer.model, peft.PeftModel)


def test_a_model_in_bfloat16_has_the_same_fingerprint() -> None:
    model = tiny_lm()
    assert fingerprint(model.state_dict()) == fingerprint(tiny_lm().bfloat16().state_dict())
    with torch.no_grad():
        model.lm_head.weight *= 1.01
    assert fingerprint(model.state_dict()) != fingerprint(tiny_lm().state_dict())


def test_conversations_with_a_chat_template(tmp_path: Path) -> None:
    def conversation(row: dict[str, str]) -> dict[str, Any]:
        answers = {k: [{"role": "assistant", "content": row[k]}] for k in ("chosen", "rejected")}
        return {"prompt": [{"role": "user", "content": row["prompt"]}], **answers}

    rows, held_out = ([conversation(r) for r in copy_rows(n, n)] for n in (64, 24))
    tokenizer = tiny_tokenizer(CHAT)
    trainer = SDMTrainer(tiny_lm(), tiny_config(tmp_path, learning_rate=1e-2), rows, held_out, tokenizer)
    text = trainer.encoder.decode(trainer.training_rows[0].positive.input_ids)
    body = rows[0]["chosen"][0]["content"]
    assert text == f"user:{body}=\nassistant:{body}\n<verified>Yes</verified></s>"
    trainer.train()
    assert logged(trainer, "loss")[-1] < 0.5 * logged(trainer, "loss")[0]
    assert trainer.estimator is not None


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_in_a_checkpoint_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    write = trainer._save_optimizer_and_scheduler
    monkeypatch.setattr(
        trainer,
        "_save_optimizer_and_scheduler",
        lambda folder: full_disk() if trainer.state.global_step == 3 else write(folder),
    )
    with pytest.raises(OSError, match=r"checkpoint-3.*No space left.*resume_from_checkpoint"):
        trainer.train()
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    again, straight = make(tmp_path), make(tmp_path / "straight")
    again.train(resume_from_checkpoint=True)
    straight.train()
    assert again.state.global_step == 4
    assert torch.equal(again.model.lm_head.weight, straight.model.lm_head.weight)


def test_a_full_disk_in_save_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    trainer.fit_final_layer()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.model, "save_pretrained", full_disk)
        with pytest.raises(OSError, match=r"Could not save the model to .*No space left.*still in memory"):
            trainer.save_model(str(tmp_path / "saved"))
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "sdm" / "lm.json").is_file()


def test_a_save_of_the_final_layer_that_was_cut_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path)
    trainer.fit_final_layer()
    trainer.save_model(str(tmp_path / "saved"))
    folder = tmp_path / "saved" / "sdm"
    facts = read_lm_metadata(folder)
    assert facts["fingerprint"] == fingerprint(trainer.model.state_dict())
    trainer.args.sdm_epochs += 1
    trainer.fit_final_layer()
    with monkeypatch.context() as patch:
        patch.setattr("sdmlm.language_model.sdm_folder.write_metadata", full_disk)
        with pytest.raises(OSError, match="No space left"):
            trainer.save_model(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"lm\.json belongs to another SDM layer.*sdmlm calibrate --force"):
        read_lm_metadata(folder)
    trainer.save_model(str(tmp_path / "saved"))
    assert read_lm_metadata(folder)["estimator_sha256"] != facts["estimator_sha256"]
    (folder / "lm.json").write_text("{}")
    with pytest.raises(ValueError, match="no whole SDM layer"):
        read_lm_metadata(folder)


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


def test_several_processes_share_the_tokens_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config(tmp_path, average_tokens_across_devices=False)  # one process has nothing to share
    monkeypatch.setattr(SDMConfig, "world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match="average_tokens_across_devices is off"):
        tiny_config(tmp_path, average_tokens_across_devices=False)
    tiny_config(tmp_path)


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


def test_a_checkpoint_written_anew_is_incomplete_until_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older run's trainer_state.json must not vouch for a folder that is being overwritten."""
    make(tmp_path, num_train_epochs=1).train()
    trainer = make(tmp_path, num_train_epochs=1)
    seen: list[str | None] = []
    save = trainer._save_state

    def look(folder: Path) -> None:
        save(folder)
        seen.append(complete_checkpoint(tmp_path, None))

    monkeypatch.setattr(trainer, "_save_state", look)
    trainer.train()
    assert seen == [str(tmp_path / "checkpoint-2"), str(tmp_path / "checkpoint-1")]


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
