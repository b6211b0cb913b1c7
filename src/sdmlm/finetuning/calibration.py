"""Fit a new SDM layer for an existing language model, fine-tuned or not (`sdmlm calibrate`)."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdmlm.estimator.persistence import KIND
from sdmlm.finetuning.config import LAYER_FIELDS, SDMConfig
from sdmlm.finetuning.final_layer import (
    FinalLayer,
    answers_metadata,
    certificate_summary,
    fit_final_layer,
    save_final_layer,
)
from sdmlm.finetuning.held_out import evaluated_rows
from sdmlm.finetuning.layers import position_limit
from sdmlm.finetuning.processes import is_main_process
from sdmlm.finetuning.run import layer_summary
from sdmlm.finetuning.settings import defaults_of
from sdmlm.finetuning.threads import threads_for
from sdmlm.finetuning.training_rows import completion_room, encode_rows
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.loading import load_lm, load_tokenizer
from sdmlm.language_model.rows import read_preferences
from sdmlm.language_model.sdm_folder import LM_FILE
from sdmlm.rewards import check_reward, reward_as_fitted
from sdmlm.storage.artifacts import CONFIG, SDM_FOLDER
from sdmlm.storage.output_paths import check_artifact_folder, check_output_file, whole_folder
from sdmlm.storage.record import copy_record, held_out, read_record


@dataclass(frozen=True)
class CalibrationRun:
    """The settings of `calibrate`.

    `output` is a new folder for the model with its `sdm/`; None writes `sdm/` into the model's own folder, which
    needs `force` if there is one already. `changes` are fields of `SDMConfig`; the other fields are those of the present
    SDM layer, if there is one, so that the new layer reads documents in the same format.
    """

    model: str
    data: str
    output: str | None = None
    force: bool = False
    reward: str | None = None
    changes: Mapping[str, Any] | None = None


def calibrate(run: CalibrationRun) -> dict[str, Any]:
    """Fit the SDM layer, save it and return the summary."""
    present, changes = _present_settings(run.model), run.changes or {}
    present_reward = {"reward": present.pop("reward")} if "reward" in present else {}
    if changes.get("documents", present.get("documents")) != present.get("documents"):
        present.pop("summary", None)  # other documents have another default
    config = SDMConfig(**{"output_dir": None, "report_to": "none", **present, **changes})
    target = _checked_target(run)
    data = read_preferences(run.data, config.tags())
    rows = held_out(data.rows, data.sha256, run.model)
    reward = reward_as_fitted(run.reward, present_reward)
    tokenizer = load_tokenizer(run.model)
    if len(rows) < len(data):
        warnings.warn(
            f"{data.source} was split for training: only the {len(rows)} rows are used that were held out.",
            stacklevel=2,
        )
    check_reward(reward, rows)
    if config.documents == "own" and (
        unused := [name for name in changes if name in LAYER_FIELDS.values() and name != "alpha"]
    ):
        warnings.warn(
            f"{', '.join(unused)} changes nothing here: the SDM layer over own answers is fitted automatically.",
            stacklevel=2,
        )
    model = load_lm(run.model, "auto").to(config.device)
    encoder = Encoder(tokenizer, config.tags(), position_limit(model, config.max_length), config.truncate_prompt)
    encoded = encode_rows(rows, encoder, data.source)
    config.max_new_tokens = config.max_new_tokens or completion_room(encoder, rows)
    one_or_more = threads_for(model.num_parameters())
    with one_or_more, contextlib.redirect_stdout(sys.stderr):  # a reward may print
        layer = fit_final_layer(model, encoder, encoded, config, reward)
    layer = _with_source(layer, _chosen_with(run.model, data.sha256, rows))
    source = {"source": data.source, "sha256": data.sha256, "rows": len(rows)}
    if is_main_process():
        weights = inner_lm(model).state_dict()
        if run.output is None:
            folder = target / SDM_FOLDER
            save_final_layer(folder, layer.estimator, weights, encoder, config, reward, False, source, layer)
        else:
            with whole_folder(target) as partial:
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                copy_record(run.model, partial)
                folder = partial / SDM_FOLDER
                save_final_layer(folder, layer.estimator, weights, encoder, config, reward, False, source, layer)
    return {
        "output": str(target),
        "model": run.model,
        "data": source,
        "answers": answers_metadata(layer.answers),
        "certificate": certificate_summary(layer.certificate),
        **layer_summary(layer.estimator, config.tags()),
    }


def _chosen_with(model: str, sha256: str | None, rows: Sequence[Mapping[str, Any]]) -> set[int]:
    """Which of these rows took part in the choice of the model's checkpoint."""
    record = read_record(model)
    if record is None or record["data"]["calibration"]["sha256"] != sha256:
        return set()
    if not record["config"].get("load_best_model_at_end") or record["data"]["calibration"]["used"] != len(rows):
        return set()
    names = ("documents", "summary", "seed", "alpha", "certificate_share", "certificate_delta", "certificate_epsilon")
    then = defaults_of(record) | {name: record["config"][name] for name in names if name in record["config"]}
    return set(evaluated_rows([row["prompt"] for row in rows], SDMConfig(None, report_to="none", **then)))


def _with_source(layer: FinalLayer, chosen_with: set[int]) -> FinalLayer:
    """The layer; if rows of its certificate helped to choose the checkpoint, the certificate says so."""
    n = len(chosen_with & set(layer.held_out))
    if layer.certificate is None or not n:
        return layer
    warnings.warn(
        f"The model's checkpoint was chosen with {n} of the {len(layer.held_out)} rows of the certificate, so its promise is a "
        "little too good. For one that holds strictly, give rows that training has not seen.",
        stacklevel=3,
    )
    source = f"{layer.certificate.source}, with which the checkpoint was chosen"
    return replace(layer, certificate=replace(layer.certificate, source=source))


def _present_settings(model: str) -> dict[str, Any]:
    """How documents were formatted for this model when its present SDM layer was fitted, and the settings of that layer.

    This does not use `read_lm_metadata`, which refuses the folder of an interrupted save: `calibrate` repairs such a
    folder, and the metadata in it are still valid.
    """
    sdm, settings = Path(model) / SDM_FOLDER, {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        metadata = json.loads((sdm / LM_FILE).read_text(encoding="utf-8"))
        names = ("max_length", "truncate_prompt", "max_new_tokens")
        settings = {"verification_tags": metadata["tags"], **{name: metadata[name] for name in names}}
        settings |= {"reward": metadata["reward"]} if "reward" in metadata else {}
        if metadata["training"] is not None:
            settings |= {name: metadata["training"][name] for name in ("gamma_plus", "seed")}
        settings["documents"] = "own" if "own" in metadata else metadata.get("documents", "paper")
        settings |= {"summary": metadata["summary"]} if "summary" in metadata else {}
        settings |= metadata.get("own", {})
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        parameters = json.loads((sdm / CONFIG).read_text(encoding="utf-8"))["parameters"]
        settings["alpha"] = parameters["alpha"]
        if parameters["learning_rate"] is not None:  # otherwise it is automatic, and says nothing about a trained layer
            settings |= {field: parameters[parameter] for parameter, field in LAYER_FIELDS.items()}
    return settings


def _checked_target(run: CalibrationRun) -> Path:
    """The folder for `sdm/`; refused if something in it would be replaced."""
    if run.output is not None:
        folder = Path(run.output)
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise ValueError(f"{run.output} is not empty: name a new folder (or leave --output out to write DIR/sdm).")
        check_output_file(folder / "x")
        return folder
    if not Path(run.model).is_dir():
        raise ValueError(f"{run.model} is not a folder here: give --output, a new folder for the model with its sdm/.")
    check_artifact_folder(Path(run.model) / SDM_FOLDER, KIND, run.force)
    return Path(run.model)
