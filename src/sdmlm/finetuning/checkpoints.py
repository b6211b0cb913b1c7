"""What SDMTrainer adds to a checkpoint of `transformers.Trainer`, and which checkpoint a run resumes from.

`sdm_layer/` is the SDM layer of the epoch; `sdm_state.json` holds the epoch, the hard negatives and the choice of
positives over the calibration rows. trainer_state.json is written last: a checkpoint that has it is complete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.trainer import TRAINER_STATE_NAME

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.storage.artifacts import write_text_atomically

if TYPE_CHECKING:
    from sdmlm.finetuning.trainer import SDMTrainer

STATE = "sdm_state.json"
LAYER = "sdm_layer"


def save_state(trainer: SDMTrainer, folder: Path) -> None:
    """Write the part of a checkpoint that SDMTrainer adds."""
    if trainer.training_layer is not None:
        trainer.training_layer.save_pretrained(folder / LAYER)
    state = {
        "epoch": trainer.layer_epoch,
        "rows": len(trainer.rows),
        "calibration_positive": trainer.calibration_positive,
        "evaluated": trainer.evaluated,
        "gamma_other": trainer.args.gamma_other,
        "loss": trainer.args.loss,
        "negatives": trainer.negatives.state_dict(),
    }
    write_text_atomically(folder / STATE, json.dumps(state, ensure_ascii=False))


def load_state(trainer: SDMTrainer, folder: Path) -> None:
    """Restore the state that `save_state` wrote; refuses a checkpoint of other rows."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    for name, now, then in (
        ("train", len(trainer.rows), state["rows"]),
        ("calibration", len(trainer.calibration_rows), len(state["calibration_positive"])),
    ):
        if now != then:
            raise ValueError(f"{folder} was written with {then} {name} rows, not {now}: resume with the same rows.")
    # Before these two were stored, all rows were evaluated and there were no answers to other prompts.
    then = state.get("evaluated", list(range(len(trainer.calibration_rows)))), state.get("gamma_other", 0.0)
    if then != (trainer.evaluated, trainer.args.gamma_other):
        raise ValueError(
            f"{folder} was written with other settings: resume with the same documents, gamma_other, alpha, seed and settings of "
            "the certificate (before sdmlm 0.1.0: documents='paper', gamma_other=0)."
        )
    loss = state.get("loss", "sdm" if (folder / LAYER).exists() else trainer.args.loss)
    if loss != trainer.args.loss:
        raise ValueError(
            f"{folder} was written with loss={loss!r}, not {trainer.args.loss!r}: resume with the same loss."
        )
    trainer.calibration_positive = state["calibration_positive"]
    trainer.negatives.load_state_dict(state["negatives"])
    trainer.layer_epoch = int(state["epoch"])
    if trainer.layer_epoch < 0:
        return
    trainer.choose_documents(trainer.layer_epoch)
    if trainer.args.loss == "sdm":
        trainer.use_training_layer(SDMEstimator.from_pretrained(folder / LAYER, device=trainer.args.device))


def complete_checkpoint(output: Path, given: str | Path | None) -> str | None:
    """The checkpoint to resume from: the one given, or the newest complete one in `output`."""
    if given is not None:
        if not _is_complete(Path(given)):
            raise ValueError(
                f"{given} is not a complete checkpoint of SDMTrainer: name another, or True for the newest."
            )
        return str(given)
    prefix = "checkpoint-"
    numbered = [(path.name.removeprefix(prefix), path) for path in output.glob(f"{prefix}*")]
    complete = [(int(step), path) for step, path in numbered if step.isdigit() and _is_complete(path)]
    return str(max(complete)[1]) if complete else None


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        return (folder / STATE).is_file()
    except (OSError, ValueError):
        return False
