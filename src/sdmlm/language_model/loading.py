"""Opening models and tokenizers by name: a folder, a model of the Hugging Face Hub, or "demo".

Every failure is a ValueError with a message of one sentence. torch and transformers are imported on first use.
"""

from __future__ import annotations

import logging as standard_logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# The model that the name "demo" stands for everywhere: the small base model in the package.
DEMO_MODEL = Path(__file__).parents[1] / "demo" / "base"


def require_transformers() -> None:
    """Refuse to go on without the libraries of the extra `lm`."""
    missing = [name for name in ("transformers", "datasets", "accelerate", "peft") if find_spec(name) is None]
    if missing:
        raise ValueError(f'{missing[0]} is not installed: install the extra lm (in a clone: pip install -e ".[lm]").')
    from transformers.utils import logging

    logging.disable_progress_bar()  # "Loading weights" would appear between our own lines
    # A warning about the file system that does not matter here
    standard_logging.getLogger("transformers.trainer_utils").addFilter(_not_about_mtime)


def _not_about_mtime(record: standard_logging.LogRecord) -> bool:
    return not record.getMessage().startswith("mtime may not be reliable")


def model_path(model: str | Path) -> str:
    """The model as given, or the folder that "demo" stands for; a folder of that name is ./demo."""
    return str(DEMO_MODEL) if str(model) == "demo" else str(model)


def check_model_folder(model: str | Path) -> None:
    """Refuse a folder that lacks a configuration, weights or a tokenizer, and a path that does not exist."""
    name = model_path(model)
    folder = Path(name)
    if not folder.exists():
        if name.count("/") > 1 or name.startswith((".", "~", "/")) or "/" not in name:
            raise ValueError(f"The model {name} does not exist: name a folder, or a model of the Hub as org/name.")
        return
    if not folder.is_dir():
        raise ValueError(f"{name} is a file: name the folder of a model.")
    files = {p.name for p in folder.iterdir()}
    if not files & {"config.json", "adapter_config.json"}:
        raise ValueError(f"{name} holds no config.json: it is not a model folder.")
    if not any(n.endswith((".safetensors", ".bin")) for n in files - {"training_args.bin"}):
        raise ValueError(f"{name} holds no weights (.safetensors or .bin).")
    if not any(n.startswith(("tokenizer", "vocab.")) or n.endswith(".model") for n in files):
        raise ValueError(f"{name} holds no tokenizer: save the model's tokenizer into it.")


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model folder, which must hold weights too, or of a model on the Hub."""
    from transformers import AutoTokenizer

    check_model_folder(model)
    return load_by_name(AutoTokenizer.from_pretrained, model, "tokenizer")


def load_lm(model: str | Path, dtype: Any, trainable: bool = False) -> Any:
    """The causal language model of a folder or of the Hub; `trainable`: whether its adapter, if any, is to be trained."""
    return load_by_name(open_lm, model, "model", dtype=dtype, trainable=trainable)


def load_by_name(load: Callable[..., Any], model: str | Path, what: str, **options: Any) -> Any:
    """Call `load` for a model by name. The error says whether the name was looked for on the Hub."""
    path = model_path(model)
    called = str(model) if Path(path).exists() else f"{model} (no folder here, so looked for on the Hub)"
    return loaded(load, path, what, called, **options)


def loaded(load: Callable[..., Any], folder: str | Path, what: str, called: str | Path, **options: Any) -> Any:
    """What `load(folder)` returns; an error becomes one sentence that names the model as `called`."""
    try:
        return load(folder, **options)
    except Exception as error:  # damaged files and missing packages raise errors of any kind
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".:")
        raise ValueError(f"The {what} of {called} could not be loaded: {reason}.") from error


def open_lm(name: str | Path, dtype: Any, trainable: bool = False) -> Any:
    """The causal language model of a folder or of the Hub; `trainable`: whether its adapter, if any, is to be trained.

    Adapters are opened by PEFT: `AutoModelForCausalLM` does not know all kinds, and loads DoRA incompletely.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(str(name)) is None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(name))
    if not config.base_model_name_or_path:
        raise ValueError("its adapter_config.json names no base model (base_model_name_or_path)")
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, dtype=dtype, revision=config.revision)
    return PeftModel.from_pretrained(base, str(name), is_trainable=trainable)
