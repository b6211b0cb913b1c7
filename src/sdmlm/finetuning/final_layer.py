"""The SDM layer that goes with a model: fitted over D_ca and the model's own generations, saved as `sdm/` beside the weights.

It is fitted in the same way for every model, whether that was fine-tuned with SDM layers, in another way, or not at all: over own
answers with a certificate (docs/method.md, section 9), or over the paper's documents, with gamma_gen = gamma_diversity = 1 (section 6).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor

from sdmlm import __version__
from sdmlm.errors import NoOwnAnswers
from sdmlm.estimator.estimator import SDMEstimator
from sdmlm.finetuning.config import SDMConfig
from sdmlm.finetuning.layers import check_halves, fit_and_broadcast, from_main_process
from sdmlm.finetuning.negatives import HardNegatives, NegativePolicy, generate_negatives
from sdmlm.finetuning.own_answers import fit_over_own_answers
from sdmlm.finetuning.training_rows import TrainingRow, completion_room, encode_document, training_rows
from sdmlm.language_model.answer_rule import AnswerCertificate, save_certificate
from sdmlm.language_model.encoding import Encoder
from sdmlm.language_model.forward import allow_inside
from sdmlm.language_model.likelihood import STATES
from sdmlm.language_model.reading import read_documents
from sdmlm.language_model.reduction import Reduction, save_reduction
from sdmlm.language_model.sdm_folder import LM_FILE, fingerprint, write_sdm_folder
from sdmlm.rewards import Reward, load_reward, reward_name


@dataclass(frozen=True)
class AnswerCount:
    """How many calibration prompts the model was asked, and how many it answered correctly."""

    prompts: int
    right: int


@dataclass(frozen=True)
class FinalLayer:
    """The SDM layer for use, and how the model answered the calibration prompts.

    `summary` and `documents` say what the layer reads and what it was fitted over. `certificate`, and `held_out`, those of the
    `rows` calibration rows that it was made with, exist only with documents="own".
    """

    estimator: SDMEstimator
    answers: AnswerCount
    summary: str = STATES
    documents: str = "paper"
    reduction: Reduction | None = None
    certificate: AnswerCertificate | None = None
    held_out: tuple[int, ...] = ()
    rows: int = 0


def answers_metadata(answers: AnswerCount | None) -> dict[str, int] | None:
    """The counts for training.json and the JSON output of commands."""
    return None if answers is None else asdict(answers)


def certificate_summary(certificate: AnswerCertificate | None) -> dict[str, Any] | None:
    """What is certified about own answers, for training.json and the commands' JSON; None without a certificate."""
    return None if certificate is None else certificate.figures()


def fit_final_layer(
    model: Any,
    encoder: Encoder,
    rows: Sequence[Mapping[str, Any]] | Sequence[TrainingRow],
    args: SDMConfig,
    reward: Reward | str | None = None,
    accelerator: Accelerator | None = None,
    progress: bool = True,
    fall_back: bool = False,
) -> FinalLayer:
    """Fit the SDM layer for use over calibration rows; works for a model that was not fine-tuned, too.

    With documents="own" it is fitted over the model's own answers, and comes with a certificate. With documents="paper"
    there is one document per prompt: with probability gamma_plus its positive; otherwise the model's own greedy completion
    if that is wrong (r = 0), or else the static negative. Where a layer over own answers cannot be fitted, that is an error
    (`NoOwnAnswers`), or with `fall_back` a warning, and the layer is the paper's.
    """
    reward = load_reward(reward)
    checked = training_rows(rows, encoder, reward, "calibration")
    columns = [row.columns for row in checked]
    allow_inside(model)
    accelerator = accelerator or Accelerator(cpu=args.device.type == "cpu")
    room = args.max_new_tokens or completion_room(encoder, columns)
    policy = NegativePolicy(args.gamma_plus, 1.0, 1.0, seed=args.seed, first_epoch=0)
    check_halves([policy.draw(i, epoch=0).positive for i in range(len(checked))], "calibration")
    if args.documents == "own":
        try:
            return _over_own_answers(model, encoder, columns, args, reward, room, accelerator, progress)
        except NoOwnAnswers as error:
            if not fall_back:
                raise
            warnings.warn(f"{error} The final SDM layer is the paper's instead, without a certificate.", stacklevel=3)
    store = HardNegatives(policy, reward, room, tokens_per_batch=args.tokens_per_batch)
    attempts = generate_negatives(accelerator, store, model, encoder, columns, epoch=0, step=0, progress=progress)
    if not any(attempt.body is not None for attempt in attempts):
        warnings.warn(
            "No generation over the calibration rows was wrong, so the final SDM layer has only static negatives: it has "
            "seen none of the model's own errors.",
            stacklevel=3,
        )
    documents = store.documents(columns, range(len(checked)), epoch=0)
    encoded = [encode_document(encoder, checked[d.row], d) for d in documents]
    h, _ = read_documents(
        model,
        encoded,
        encoder.pad_id,
        args.tokens_per_batch,
        accelerator.process_index,
        accelerator.num_processes,
        progress=progress,
    )
    labels = [int(d.positive) for d in documents]
    texts: dict[int | str, str] = {
        d.row: encoder.decode(e.input_ids[: e.verified_at + 1]) for d, e in zip(documents, encoded, strict=True)
    }
    estimator = fit_and_broadcast(accelerator, args, [4], h, labels, texts, progress)
    return FinalLayer(estimator, AnswerCount(len(attempts), sum(attempt.right for attempt in attempts)))


def _over_own_answers(
    model: Any,
    encoder: Encoder,
    rows: Sequence[Mapping[str, Any]],
    args: SDMConfig,
    reward: Reward,
    room: int,
    accelerator: Accelerator,
    progress: bool,
) -> FinalLayer:
    """The final layer with documents="own". Every process does the work, so that none waits long; all take the first one's layer."""
    if accelerator.distributed_type == DistributedType.FSDP:
        raise NoOwnAnswers(
            "Under FSDP no process holds the whole model: for an SDM layer over own answers run sdmlm calibrate DIR --data ROWS "
            "--force on the saved model."
        )
    own, failed = None, ""
    try:
        own = fit_over_own_answers(model, encoder, rows, args, reward, room, progress)
    except NoOwnAnswers as error:
        failed = str(error)
    own, failed = from_main_process(accelerator, (own, failed), args.device)  # sampled answers may differ between GPUs
    if own is None:
        raise NoOwnAnswers(failed)
    own.estimator.device = args.device
    if own.warning is not None:
        warnings.warn(own.warning, stacklevel=4)
    answers = AnswerCount(own.prompts, own.right)
    fitted = own.reduction, own.certificate, own.held_out, len(rows)
    return FinalLayer(own.estimator, answers, str(args.summary), "own", *fitted)


TRAINING_FIELDS = (
    "loss", "hard_negatives", "gamma_plus", "gamma_gen", "gamma_diversity", "gamma_other", "gamma_revise", "learning_rate",
    "num_train_epochs", "seed", "alpha",
)  # fmt: skip
OWN_FIELDS = ("own_samples", "own_temperature", "certificate_share", "certificate_delta", "certificate_epsilon")


def save_final_layer(
    folder: Path,
    estimator: SDMEstimator,
    weights: Mapping[str, Tensor],
    encoder: Encoder,
    args: SDMConfig,
    reward: Reward,
    fine_tuned: bool = True,
    data: Mapping[str, Any] | None = None,
    final: FinalLayer | None = None,
) -> None:
    """Write `sdm/`: the estimator, and how documents are formatted for its model.

    `fine_tuned`: whether the model was trained with `args`. If not, the training settings that an earlier layer in this
    folder recorded are kept, if it belongs to the same weights. `data` describes the calibration rows if they are not
    those of the training run. `final` says how the layer was fitted, and holds its certificate.
    """
    tags, same = encoder.tags, fingerprint(weights)
    training = {name: getattr(args, name) for name in TRAINING_FIELDS} if fine_tuned else _training_before(folder, same)
    metadata = {
        "format_version": 1,
        "sdmlm_version": __version__,
        "fingerprint": same,
        "tags": {name: getattr(tags, name) for name in ("open", "close", "yes", "no", "separator")},
        "max_length": encoder.max_length,
        "truncate_prompt": encoder.truncate_prompt,
        "max_new_tokens": args.max_new_tokens,
        "reward": reward_name(reward),
        # The final layer read its documents in this type: h must be computed in the same when the layer is used.
        "dtype": next(str(t.dtype).removeprefix("torch.") for t in weights.values() if t.is_floating_point()),
        "autocast": ("bfloat16" if args.bf16 else "float16" if args.fp16 else None) if fine_tuned else None,
        "training": training,
        "calibrated": None if data is None else dict(data),
    }
    if final is not None and args.documents == "own":
        metadata["own"] = {
            name: getattr(args, name) for name in OWN_FIELDS
        }  # what was asked for, also where it could not be had
    if final is not None and final.documents == "own":
        metadata |= {"summary": final.summary, "documents": final.documents}
        metadata |= {"calibration_rows": final.rows, "held_out": list(final.held_out)}
    save_certificate(folder, None)  # the one of an earlier layer
    metadata |= save_reduction(folder, None if final is None else final.reduction)
    write_sdm_folder(folder, estimator, metadata)
    if final is not None:
        save_certificate(folder, final.certificate)


def _training_before(folder: Path, fingerprint: str) -> dict[str, Any] | None:
    try:
        metadata = json.loads((folder / LM_FILE).read_text(encoding="utf-8"))
        return dict(metadata["training"]) if metadata["fingerprint"] == fingerprint else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
