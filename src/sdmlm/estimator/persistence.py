"""A fitted SDMEstimator on disk: one folder of JSON and safetensors (docs/data-formats.md)."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sdmlm import __version__
from sdmlm.estimator.adaptor import ExemplarAdaptor
from sdmlm.estimator.layer import SDMLayer
from sdmlm.estimator.region import DistanceCDF, check_alpha
from sdmlm.estimator.validation import check_parameters, plain_id
from sdmlm.estimator.whitening import Whitening
from sdmlm.storage.artifacts import CONFIG, SDM_FOLDER, read_artifact, write_artifact

if TYPE_CHECKING:
    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.estimator.fitted import FittedLayers

KIND, VERSION = "sdmlm estimator", 2  # 1: before averaged layers and certified rules
_NOT_SAVED = ("self", "device", "progress")  # they are about the machine, not about the fit


def save(estimator: SDMEstimator, folder: str | Path) -> None:
    """Write everything that was fitted, in one atomic step."""
    names = [name for name in inspect.signature(type(estimator).__init__).parameters if name not in _NOT_SAVED]
    config = {
        "sdmlm_version": __version__,
        "parameters": {name: plain_id(getattr(estimator, name)) for name in names},  # NumPy scalars as plain ones
        "alpha": estimator.alpha_,
        "n_classes": len(estimator.classes_),
        "classes": [plain_id(label) for label in estimator.classes_],
        "class_names": estimator.class_names_,
        "n_features": estimator.n_features_in_,
        "rounds": [{"loss": layer.loss, "history": layer.history} for layer in estimator.layers_],
    }
    ids = [{"support": layer.support_ids, "calibration": layer.calibration_ids} for layer in estimator.layers_]
    documents = [[key, text] for key, text in estimator.documents_.items()]
    write_artifact(folder, KIND, VERSION, config, _tensors(estimator), {"ids": ids, "documents": documents})


def load(cls: type[SDMEstimator], folder: str | Path, device: str | torch.device | None) -> SDMEstimator:
    """Read what `save` wrote, after checking version, checksums and shapes."""
    if (Path(folder) / SDM_FOLDER / CONFIG).is_file():
        raise ValueError(f"{folder} is a language model: its SDM layer is {Path(folder) / SDM_FOLDER}.")
    config, tensors, texts = read_artifact(folder, KIND, VERSION)
    try:
        parameters = config["parameters"]
        if config["format_version"] == 1:
            parameters = _upgraded(parameters)
        estimator = cls(**parameters, device=device)
        check_parameters(estimator)
        n_classes, n_features = int(config["n_classes"]), int(config["n_features"])
        estimator.alpha_ = check_alpha(config["alpha"])
        layers = [
            _load_layer(estimator, f"layer.{i}.", tensors, n_classes, n_features, texts["ids"][i], metadata)
            for i, metadata in enumerate(config["rounds"])
        ]
        estimator.documents_ = dict(texts["documents"])
        estimator.class_names_ = config["class_names"]
        if estimator.class_names_ is not None and len(estimator.class_names_) != n_classes:
            raise KeyError("the number of class names")
    except (KeyError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{folder} is damaged ({error}): restore it from a copy or fit again.") from error
    if not layers:
        raise ValueError(f"{folder} is damaged (it holds no layer): restore it from a copy or fit again.")
    estimator.classes_ = np.array(config.get("classes", range(n_classes)))
    estimator.n_features_in_ = n_features
    held_out = None
    if "held_out.x" in tensors:
        device = estimator.torch_device()
        held_out = tensors["held_out.x"].to(device), tensors["held_out.labels"]
    estimator.set_layers(layers, held_out)
    return estimator


def _upgraded(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters of format 1, when every estimator was as published."""
    parameters = dict(parameters)
    combine = "all" if parameters.pop("ensemble") else "best"
    return {**parameters, "combine": combine, "rule": "region", "distance": "exemplar"}


def digest(estimator: FittedLayers) -> str:
    """SHA-256 of everything that decisions depend on, except alpha."""
    sha256 = hashlib.sha256(f"max_q={estimator.max_q}".encode())
    for name, part in _tensors(estimator).items():
        sha256.update(f"{name}{tuple(part.shape)}".encode())
        sha256.update(part.detach().cpu().contiguous().numpy().tobytes())
    return sha256.hexdigest()


def _tensors(estimator: FittedLayers) -> dict[str, Tensor]:
    """All fitted tensors by name."""
    tensors = {}
    for i, layer in enumerate(estimator.layers_):
        adaptor = layer.adaptor
        parts = {
            "mean": adaptor.mean,
            "std": adaptor.std,
            "weight": adaptor.weight,
            "bias": adaptor.bias,
            "out_weight": adaptor.out_weight,
            "out_bias": adaptor.out_bias,
            "calibration.vectors": layer.calibration_vectors,
            "calibration.z": layer.calibration.z,
            "calibration.labels": layer.calibration.labels,
            **{f"support.{name}": value for name, value in layer.support.state().items()},
        }
        if layer.whitening is None:
            parts |= {f"train_cdf.{c}": torch.from_numpy(v) for c, v in enumerate(layer.train_cdf.values)}
        if layer.whitening is not None and layer.whitened is not None and layer.calibration_whitened is not None:
            parts |= {
                "whitening.mean": layer.whitening.mean,
                "whitening.matrix": layer.whitening.matrix,
                "whitened.vectors": layer.whitened.state()["vectors"],
                "calibration.whitened": layer.calibration_whitened,
            }
        tensors.update({f"layer.{i}.{name}": value for name, value in parts.items()})
    if estimator.held_out_ is not None:
        tensors["held_out.x"], tensors["held_out.labels"] = estimator.held_out_
    return tensors


def _load_layer(
    estimator: SDMEstimator,
    prefix: str,
    tensors: dict[str, Tensor],
    n_classes: int,
    n_features: int,
    ids: Any,
    metadata: Any,
) -> SDMLayer:
    device = estimator.torch_device()
    own = {name.removeprefix(prefix): t.to(device) for name, t in tensors.items() if name.startswith(prefix)}
    names = ("mean", "std", "weight", "bias", "out_weight", "out_bias")
    adaptor = ExemplarAdaptor(*(own[name] for name in names))
    width = len(adaptor.bias)
    if adaptor.weight.shape != (width, n_features) or adaptor.out_weight.shape != (n_classes, width):
        raise KeyError("its weights have the wrong shape")
    parts = {name.removeprefix("support."): t for name, t in own.items() if name.startswith("support.")}
    support = estimator.make_support()(**parts)  # type: ignore[call-arg]
    if len(support) != len(ids["support"]) or len(own["calibration.labels"]) != len(ids["calibration"]):
        raise KeyError("ids and vectors differ in number")
    whitening: tuple[Any, ...] = ()
    if "whitening.matrix" in own:
        known = support.labels >= 0
        whitened = estimator.make_support()(own["whitened.vectors"], support.labels[known], support.labels[known])
        matrices = Whitening(own["whitening.mean"], own["whitening.matrix"])
        whitening = matrices, whitened, own["calibration.whitened"]
    return SDMLayer(
        adaptor,
        support,
        None if whitening else DistanceCDF([own[f"train_cdf.{c}"].cpu().numpy() for c in range(n_classes)]),
        own["calibration.vectors"],
        own["calibration.z"],
        own["calibration.labels"],
        ids["support"],
        ids["calibration"],
        metadata["loss"],
        metadata["history"],
        *whitening,
    )
