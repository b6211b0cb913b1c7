"""What SDMTrainer saves, opens again and adapts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
from torch import Tensor
from trainer_checks import logged, make
from transformers import AutoModelForCausalLM

from sdmlm.finetuning.checkpoints import complete_checkpoint
from sdmlm.finetuning.trainer import SDMTrainer
from sdmlm.language_model.sdm_folder import fingerprint, read_lm_metadata

CHAT = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ('</s>' if m['role'] == 'assistant' else '\n') }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


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
