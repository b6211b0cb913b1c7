"""How `sdmlm train` and `sdmlm calibrate` show the final SDM layer of a language model."""

from __future__ import annotations

from typing import Any

from sdmlm.cli import common

ROWS_HELP = "rows of prompt, chosen, rejected: .jsonl, .json, .parquet, or a data set of the Hub (org/name:split)"
REWARD_HELP = "r, as module:function (default: the completion equals chosen)"

# Below this share of right answers, the language model itself has to be improved first.
FEW_RIGHT = 0.05


def show_answers(out: Any, summary: dict[str, Any]) -> None:
    """How many calibration prompts the LM answered correctly; if hardly any, what to do about it."""
    answers = summary.get("answers")  # not in the records of older versions
    if not answers or not answers["prompts"]:
        return
    right, prompts = answers["right"], answers["prompts"]
    out.print(
        f"The LM answered {right} of {prompts} calibration prompts correctly (greedy answers, judged by the reward)."
    )
    if right >= FEW_RIGHT * prompts:
        return
    losses = summary.get("training_loss")
    course = ""
    if losses:
        fell = losses["last"] < 0.8 * losses["first"]
        change = "fell" if fell else "hardly fell"
        course = f"Its training loss {change}, from {losses['first']:.3g} to {losses['last']:.3g}. "
    out.print(
        "Improve the language model before its SDM layer: the layer has learned to tell your chosen answers from wrong "
        "ones, and the accuracies below are about these, not about answers that the LM gives. "
        f"{course}Try a higher --learning-rate, more --num-train-epochs or rows, or a larger --model; and check that "
        "--reward accepts your chosen answers.",
        markup=False,
        soft_wrap=True,
    )


def show_layer(out: Any, summary: dict[str, Any]) -> None:
    """What is certified, then the final SDM layer in a table and two sentences."""
    from rich.text import Text

    show_certificate(out, summary)
    ca = summary["calibration"]
    columns = ("is right", "points", "mean q", "accuracy", "psi", "in region", "right there")
    caption = (
        "One line per true class of the calibration documents (is the answer right?). mean q: similar known documents that "
        "agree, on average. accuracy: verdicts that are right. psi: least output for the class to lie in "
        "the high-reliability region. in region: share that does. right there: right verdicts among these."
    )
    table = common.rich_table("The final SDM layer over its calibration half", columns, ["is right"], caption)
    for name, row in ca["classes"].items():
        accuracy = "-" if row["accuracy_accepted"] is None else f"{row['accuracy_accepted']:.1%}"
        numbers = f"{row['mean_q']:.1f}", f"{row['accuracy']:.1%}", _number(row["psi"])
        accepted = common.percent(row["accepted"], row["points"])
        table.add_row(Text(name), str(row["points"]), *numbers, accepted, accuracy)
    out.print(table)
    share = common.percent(ca["accepted"], ca["points"])
    out.print(f"alpha {summary['alpha']:g}: q'min {_number(summary['q_min'])}, balanced loss {summary['loss']:.4f}")
    out.print(f"{ca['accepted']} of {ca['points']} calibration points ({share}) lie in the high-reliability region.")


def show_certificate(out: Any, summary: dict[str, Any]) -> None:
    """What is certified about the model's own answers, if the final layer was fitted over those."""
    certificate = summary.get("certificate")  # not in the records of older versions
    if certificate is not None:
        out.print(certificate["says"], markup=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "none" if value is None else common.number(value)  # JSON has None for infinity


def show_next(out: Any, folder: str, summary: dict[str, Any]) -> None:
    """Suggest what to do next with an SDM LM."""
    out.print(
        f"Next: sdmlm report {folder}, sdmlm chat {folder}, sdmlm serve {folder}, or in Python "
        f'SDMLanguageModel.from_pretrained("{folder}").',
        markup=False,
        soft_wrap=True,
    )
    if not summary["calibration"]["accepted"] and not summary.get("certificate"):
        common.warn(
            f"{common.nothing_accepted(summary)} or another --sdm-learning-rate (small models need more) with sdmlm calibrate "
            f"{folder} --data ROWS --force, more rows, or longer training."
        )
