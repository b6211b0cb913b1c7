"""What one training step of SDMTrainer computes."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
from trainer_checks import batch_of, counting_decoder, logged, make, moved_on
from transformers import GPT2Config, GPT2LMHeadModel

from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.loss import sdm_next_token_loss
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.encoding import IGNORED
from sdmlm.language_model.forward import has_dropout

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


def test_several_processes_share_the_tokens_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config(tmp_path, average_tokens_across_devices=False)  # one process has nothing to share
    monkeypatch.setattr(SDMConfig, "world_size", property(lambda self: 2))
    with pytest.raises(ValueError, match="average_tokens_across_devices is off"):
        tiny_config(tmp_path, average_tokens_across_devices=False)
    tiny_config(tmp_path)
