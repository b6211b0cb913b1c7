"""The model card (README.md) of a saved SDM language model: data, settings, the region, what is promised and what is not."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdmlm import __version__
from sdmlm.generation.measured import measured
from sdmlm.generation.search_certificate import applying
from sdmlm.storage.record import read_record

if TYPE_CHECKING:
    from sdmlm.generation.language_model import SDMLanguageModel

WRITTEN_BY = "Written by sdmlm"  # marks cards that may be overwritten
ALPHAS = (0.8, 0.9, 0.95, 0.99)

HEAD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- sdmlm
- uncertainty
- selective-classification
---

# SDM language model

A causal language model with a Similarity-Distance-Magnitude (SDM) layer. Every answer comes with a verdict of that layer
({yes} or {no}: does it follow the instructions?) and says whether the verdict can be accepted without a person looking.

## How to use

```python
from sdmlm import SDMLanguageModel

lm = SDMLanguageModel.from_pretrained("{name}")
answer = lm.generate("...")
print(answer.text, answer.verified, answer.reason)
lm.verify("...", "an answer written by anyone")
```

This needs sdmlm with its extra `lm`. `AutoModelForCausalLM.from_pretrained` opens the model too, without verdicts.
"""

LIMITS = """\
## Limits

- If nothing is promised above, verified means: accepted with the verdict {yes}, and not rejected by the model's certificate if it has one.
- Accepted means: in the high-reliability region, where accuracy is *estimated* to be at least alpha for each class. The
  estimate is for data like the calibration data; it can fail for other data.
- The LM's own next token after `{open}` is not the verdict. Without the SDM layer it is no more reliable than a softmax.
- The verdict is only about whether an answer follows the instructions, as the reward of the calibration data defined it.
- A search over several answers changes what accepted means; answers of a search that was neither certified nor calibrated
  say so.
- The folder `sdm/` holds the texts of the calibration documents, and of feedback, as evidence for decisions.
"""


def model_card(lm: SDMLanguageModel, name: str) -> str:
    """The card of a model of this name, as Markdown."""
    head = HEAD.format(yes=lm.tags.yes, no=lm.tags.no, name=name)
    parts = [
        head,
        _certificate(lm),
        _tests(lm),
        _layer(lm),
        _searches(lm),
        _data(lm),
        LIMITS.format(open=lm.tags.open, yes=lm.tags.yes),
    ]
    return "\n".join(part for part in parts if part) + f"\n{WRITTEN_BY} {__version__}.\n"


def _layer(lm: SDMLanguageModel) -> str:
    estimator, names = lm.estimator, (lm.tags.no, lm.tags.yes)
    ca, region = estimator.calibration_, estimator.region(lm.alpha)
    right, inside = ca.predictions == ca.labels, region.contains(ca.q_prime, ca.p, ca.predictions)
    classes = []
    for c, name in enumerate(names):
        own = ca.labels == c
        both = own & inside
        classes.append(
            [
                name,
                int(own.sum()),
                f"{float(ca.q[own].double().mean()):.1f}",
                _share(int((own & right).sum()), int(own.sum())),
                _number(region.psi[c]),
                _share(int(both.sum()), int(own.sum())),
                _share(int((both & right).sum()), int(both.sum())),
            ]
        )
    rows = []
    for alpha in sorted({*ALPHAS, lm.alpha}):
        at_alpha = estimator.region(alpha)
        admitted = at_alpha.contains(ca.q_prime, ca.p, ca.predictions)
        psi = [_number(value) for value in at_alpha.psi]
        share = _share(int(admitted.sum()), len(admitted))
        rows.append(
            [
                f"{alpha:g}",
                _number(at_alpha.q_min),
                *psi,
                share,
                _share(int((admitted & right).sum()), int(admitted.sum())),
            ]
        )
    feedback = f" {len(lm.feedback_ids)} of them are feedback." if lm.feedback_ids else ""
    made_of = (
        "the LM's own answers, greedy and sampled, and wrong ones"
        if lm.metadata.get("documents") == "own"
        else "about half of them are made-up negatives, not the LM's own answers"
    )
    by_class = ["true class", "documents", "mean q", "accuracy", "psi", "accepted", "accuracy of accepted"]
    by_alpha = ["alpha", "q'min", *(f"psi {name}" for name in names), "accepted", "accuracy of accepted"]
    return "\n".join(
        [
            "## The SDM layer",
            "",
            f"alpha {lm.alpha:g}, q'min {_number(region.q_min)}; {len(estimator.support_ids_)} support documents, "
            f"{len(ca.labels)} calibration documents; balanced loss {estimator.loss_:.4f}.{feedback}",
            "",
            f"Over the calibration documents, at alpha {lm.alpha:g} ({made_of}):",
            "",
            *_table(by_class, classes),
            "",
            "At several alphas:",
            "",
            *_table(by_alpha, rows),
            "",
        ]
    )


def _certificate(lm: SDMLanguageModel) -> str:
    """What is promised about verified answers, where there is a certificate."""
    certificate = lm.certificate(None if lm.answer_certificate is None else min(lm.alpha, lm.answer_certificate.alpha))
    return "" if certificate is None else f"## What is promised\n\n{certificate.sentence()}\n"


def _tests(lm: SDMLanguageModel) -> str:
    """What the model did on test sets, where that was measured."""
    rows = [
        [
            m.name,
            m.prompts,
            _share(m.right, m.prompts),
            f"{m.alpha:g}",
            _share(m.accepted, m.prompts),
            _share(m.accepted_right, m.accepted),
            _share(m.verified, m.prompts),
            _share(m.verified_right, m.verified),
        ]
        for m in measured(lm)
    ]
    columns = [
        "test set",
        "prompts",
        "answers right",
        "alpha",
        "accepted",
        "verdicts right",
        "verified",
        "of these right",
    ]
    head = ["## On test sets", "", "Greedy answers, judged by the SDM layer as it was fitted (without feedback).", ""]
    return "\n".join([*head, *_table(columns, rows), ""]) if rows else ""


def _searches(lm: SDMLanguageModel) -> str:
    certified = applying(lm)
    promised = ["## Certified searches", "", *(f"- {c.sentence()}" for c in certified), ""] if certified else []
    apply = [c for c in lm.search_calibrations if c.estimator == lm.digest() and lm.certificate(c.alpha) is None]
    if not apply:
        return "\n".join(promised)
    rows = []
    for c in apply:
        accepted = int(c.accepted.sum())
        rows.append(
            [
                c.policy.kind,
                c.policy.budget,
                f"{c.alpha:g}",
                _number(c.region().q_min),
                _share(accepted, len(c)),
                _share(c.accepted_right, accepted),
            ]
        )
    columns = ["search", "budget", "alpha", "q'min", "accepted", "accuracy of accepted"]
    return "\n".join([*promised, "## Calibrated searches", "", *_table(columns, rows), ""])


def _data(lm: SDMLanguageModel) -> str:
    settings: dict[str, Any] = dict(lm.metadata.get("training") or {})
    lines = ["## Data and settings", ""]
    for name, source in _sources(lm).items():
        lines.append(f"- {name} rows: {source.get('rows')} of {source.get('source')} (SHA-256 {source.get('sha256')})")
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    limits = {name: lm.metadata.get(name) for name in ("max_length", "max_new_tokens", "truncate_prompt")}
    lines += [f"- {name}: {value}" for name, value in limits.items()]
    return "\n".join([*lines, ""])


def _sources(lm: SDMLanguageModel) -> dict[str, dict[str, Any]]:
    """Where the rows came from, as `sdmlm train` recorded it, and `sdmlm calibrate` after it."""
    known: dict[str, dict[str, Any]] = {}
    if lm.folder is not None:
        with contextlib.suppress(ValueError):  # the card is complete without it
            data = (read_record(lm.folder) or {}).get("data", {})
            known = {str(name): dict(source) for name, source in data.items() if source}
    calibrated = lm.metadata.get("calibrated")
    return known | {"calibration": dict(calibrated)} if calibrated else known


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "none"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
