"""How SDMTrainer prepares the given model: load it by name, add an adapter, refuse adapters that cannot work."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed

from sdmlm.finetuning.config import SDMConfig
from sdmlm.language_model.loading import load_lm, load_tokenizer


def model_and_tokenizer(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """The loaded model and its tokenizer; a name (or a path, or "demo") is opened in float32."""
    if isinstance(model, (str, Path)):
        tokenizer = tokenizer or load_tokenizer(model)
        model = load_lm(model, torch.float32, trainable=True)
    if tokenizer is None:
        name = getattr(model.config, "_name_or_path", "")
        if not name:
            raise ValueError("SDMTrainer needs a tokenizer: give processing_class.")
        tokenizer = load_tokenizer(name)
    return model, tokenizer


def with_adapter(model: Any, peft_config: Any, args: SDMConfig) -> Any:
    """The model with a new adapter of PEFT, if one is asked for."""
    if peft_config is not None:
        if hasattr(model, "peft_config"):
            raise ValueError(
                "The model has an adapter already: leave out peft_config (lora_r) to train it further, or merge it "
                "into the model first."
            )
        from peft import get_peft_model, prepare_model_for_kbit_training

        if _is_quantised(model):
            options = args.gradient_checkpointing_kwargs or {"use_reentrant": False}  # the default of transformers
            model = prepare_model_for_kbit_training(model, args.gradient_checkpointing, options)
        set_seed(args.seed)  # the adapter's first weights are random, and drawn before Trainer sets the seed
        model = get_peft_model(model, peft_config)
    _check_adapter(model)
    return model


def _check_adapter(model: Any) -> None:
    """Refuse adapters that could not be opened again after training, or that put tokens before a document."""
    if not hasattr(model, "get_base_model"):
        return
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{model.active_peft_config.peft_type.value} puts virtual tokens before a document, which SDM fine-tuning cannot "
            "do: use an adapter of the weights, such as LoRA."
        )
    if model.active_adapters != ["default"]:
        raise ValueError(
            f'The adapter of the model is named {", ".join(model.active_adapters)}: name it "default", the only name with '
            "which a saved folder can be opened."
        )
    if not model.active_peft_config.base_model_name_or_path:
        warnings.warn(
            "The base model was not loaded from a folder or the Hub, so a saved adapter cannot name it and cannot be opened: "
            "save the base model and load it from there first.",
            stacklevel=4,
        )


def _is_quantised(model: Any) -> bool:
    """Whether transformers loaded the weights in a few bits; also by the attributes that PEFT looks for."""
    attributes = ("is_loaded_in_4bit", "is_loaded_in_8bit", "quantization_method")
    return any(getattr(model, attribute, None) for attribute in attributes)
