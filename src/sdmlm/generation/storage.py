"""SDM language models on disk and on the Hub: the LM with its tokenizer, `sdm/` and a model card."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.estimator.persistence import KIND
from sdmlm.generation.feedback import FEEDBACK, FeedbackStore, load_feedback, save_feedback, with_feedback
from sdmlm.generation.search_calibration import joined, load_searches, save_searches
from sdmlm.generation.search_certificate import load_search_certificates, save_search_certificates, with_certificate
from sdmlm.language_model.answer_rule import load_certificate, save_certificate
from sdmlm.language_model.encoding import Encoder, VerificationTags
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.loading import loaded, open_lm
from sdmlm.language_model.reduction import load_reduction, save_reduction
from sdmlm.language_model.sdm_folder import fingerprint, read_lm_metadata, write_sdm_folder
from sdmlm.storage.artifacts import CONFIG, SDM_FOLDER, read_metadata, write_text_atomically
from sdmlm.storage.record import copy_record

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

FORMAT_VERSION = 1  # of sdm/lm.json


def load(
    cls: type[SDMLanguageModel],
    path: str | Path,
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
    allow_other_weights: bool,
    hub: Mapping[str, Any],
) -> SDMLanguageModel:
    """Open a folder or a model of the Hub; see `SDMLanguageModel.from_pretrained`."""
    folder, own = _local_folder(path, hub)
    sdm = folder / SDM_FOLDER
    if not sdm.is_dir():
        raise ValueError(_no_layer(folder, path))
    metadata = read_lm_metadata(sdm)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    estimator = SDMEstimator.from_pretrained(sdm, where)
    try:
        version = int(metadata["format_version"])
        tags = VerificationTags(**metadata["tags"])
        max_length, truncate_prompt = metadata["max_length"], metadata["truncate_prompt"]
        expected = metadata["fingerprint"]
        if metadata.get("autocast") not in (None, "bfloat16", "float16"):
            raise ValueError(f"autocast {metadata['autocast']!r}")
        own_dtype = metadata.get("dtype", "auto")  # older folders do not say; "auto" is that of the saved weights
        if own_dtype not in ("auto", "float64", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype {own_dtype!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{sdm / 'lm.json'} is damaged ({error}): run sdmlm calibrate --force.") from error
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{sdm} was written by a newer sdmlm (format {version}, this one reads up to {FORMAT_VERSION}): upgrade."
        )
    from transformers import AutoTokenizer

    tokenizer = loaded(AutoTokenizer.from_pretrained, folder, "tokenizer", path)
    model = loaded(open_lm, folder, "model", path, dtype=dtype or own_dtype).to(where)
    if not allow_other_weights and fingerprint(inner_lm(model).state_dict()) != expected:
        raise ValueError(
            f"The SDM layer in {sdm} was fitted over other weights than those of the model beside it: run sdmlm "
            "calibrate --force, or give allow_other_weights=True."
        )
    encoder, reduction = Encoder(tokenizer, tags, max_length, truncate_prompt), load_reduction(sdm, metadata)
    lm = cls(model, tokenizer, encoder, estimator, metadata, folder if own else None, reduction)
    lm.feedback_store = FeedbackStore(estimator, expected, load_feedback(sdm, expected))
    lm.estimator = with_feedback(estimator, lm.feedback_store.log.items)
    lm.search_calibrations = load_searches(sdm)
    lm.search_certificates = lm.saved_search_certificates = load_search_certificates(sdm)
    lm.answer_certificate = lm.saved_certificate = load_certificate(sdm)
    return lm


def save(lm: SDMLanguageModel, folder: Path) -> None:
    """Save into a folder; see `SDMLanguageModel.save_pretrained`."""
    own = lm.folder is not None and folder.exists() and folder.resolve() == lm.folder.resolve()
    store, sdm = lm.feedback_store, folder / SDM_FOLDER
    with store.latest(sdm if own else None) as log:
        if own:  # including what other processes have saved there since
            lm.estimator = store.use(log, None)
            lm.search_calibrations = joined(load_searches(sdm), lm.search_calibrations)
            kept, stored = load_search_certificates(sdm), load_certificate(sdm)
            for one in lm.search_certificates:
                if not any(one is known for known in lm.saved_search_certificates):  # made in this process
                    kept = with_certificate(kept, one)
            lm.search_certificates = kept
            renewed = lm.answer_certificate is not lm.saved_certificate
            if not renewed and stored is not None and stored.rule.estimator in (lm.digest(), store.fitted.digest()):
                lm.answer_certificate = stored
        _write(lm, folder, folder.name, weights=not own)
        lm.folder, lm.saved_certificate = folder, lm.answer_certificate
        lm.saved_search_certificates = lm.search_certificates
        store.saved()


def _write(lm: SDMLanguageModel, folder: Path, name: str, weights: bool = True) -> None:
    """Write all files. `name` is the model's name in its card; without `weights`, the present weights are kept."""
    from sdmlm.generation.model_card import WRITTEN_BY, model_card

    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: name a folder to save into.")
    if weights:
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
    sdm = folder / SDM_FOLDER
    lm.metadata |= save_reduction(sdm, lm.reduction)
    write_sdm_folder(sdm, lm.feedback_store.fitted, lm.metadata)
    log = lm.feedback_store.log
    if log.next > 1 or (sdm / FEEDBACK).exists():
        save_feedback(sdm, log, lm.metadata["fingerprint"])
    save_searches(sdm, lm.search_calibrations)
    save_search_certificates(sdm, lm.search_certificates)
    save_certificate(sdm, lm.answer_certificate)
    if lm.folder is not None:
        copy_record(lm.folder, folder)
    card = folder / "README.md"
    if not card.exists() or WRITTEN_BY in card.read_text(encoding="utf-8", errors="replace"):  # never a card of others
        write_text_atomically(card, model_card(lm, name))


def push(
    lm: SDMLanguageModel,
    repo_id: str,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    commit_message: str,
) -> str:
    """Upload to the Hub; see `SDMLanguageModel.push_to_hub`."""
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as folder:
        _write(lm, Path(folder), repo_id)
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message=commit_message, revision=revision)
    return str(repo)


def _local_folder(path: str | Path, hub: Mapping[str, Any]) -> tuple[Path, bool]:
    """The folder of a model, and whether it is the user's own: that of a model of the Hub is a cache."""
    folder = Path(path)
    if folder.is_dir():
        if hub:
            raise ValueError(f"{path} is a folder here: {', '.join(hub)} goes only with a model of the Hub.")
        return folder, True
    name = str(path)
    here = folder.parent != Path() and folder.parent.is_dir()  # probably a misspelt folder
    if folder.exists() or here or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise ValueError(f"{path} is no folder here: name the folder of an SDM language model, or org/name of the Hub.")
    from huggingface_hub import snapshot_download

    try:
        # Weights are saved as safetensors; checkpoints of a training run are not needed.
        return Path(snapshot_download(name, ignore_patterns=["checkpoint-*", "*.bin", "*.pt"], **hub)), False
    except (OSError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        if "ConnectError" in why or "cannot find the requested files in the local cache" in why:
            why = "it cannot be reached"
        raise ValueError(f"{path} is no folder here, and the Hub did not give it: {why}.") from error


def _no_layer(folder: Path, path: str | Path) -> str:
    """What to say about a folder without `sdm/`."""
    try:
        estimator = read_metadata(folder / CONFIG).get("kind") == KIND
    except (OSError, ValueError):
        estimator = False
    if estimator:
        return (
            f"{path} is a saved SDMEstimator, which judges embeddings, not a language model: use sdmlm score or sdmlm "
            "explain with it, or name the folder of a language model that sdmlm train made."
        )
    return f"{path} has no sdm/ folder, so it is no SDM language model: run sdmlm calibrate on it."
