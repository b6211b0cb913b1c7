"""The search "continue" with a model that has learned to go on after a refused answer (gamma_revise)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_sdm_lm import marked_rows, train

from sdmlm import SDMLanguageModel, SearchPolicy

ROWS = marked_rows(24, 5)
PROMPTS = [row["prompt"] for row in ROWS]


def second_answers(folder: Path) -> list[str]:
    """What the model writes after a wrong answer of ours and the verdict No."""
    lm = SDMLanguageModel.from_pretrained(folder)
    read = lm.read_prompts(PROMPTS)
    starts = [lm.encoder.refused([row["rejected"]]) for row in ROWS]
    answers = lm.write(read, lm.sampling(), [[0]] * len(read), progress=False, contexts=read, prefixes=starts)
    return [answer.text for answer in answers]


def test_a_model_learns_to_go_on_with_the_right_answer(tmp_path: Path) -> None:
    right = [row["chosen"] for row in ROWS]
    learned = second_answers(train(tmp_path / "learned", gamma_revise=1.0, num_train_epochs=8))
    plain = second_answers(train(tmp_path / "plain", num_train_epochs=8))
    shares = [sum(a == b for a, b in zip(found, right, strict=True)) / len(right) for found in (learned, plain)]
    assert shares[0] > 0.8
    assert shares[0] > shares[1]


def test_each_try_goes_on_from_all_refused_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = SDMLanguageModel.from_pretrained(train(tmp_path, num_train_epochs=2))
    calls: list[dict[str, Any]] = []
    write = lm.write

    def watched(prompts: Any, sampling: Any, seeds: Any, **more: Any) -> Any:
        answers = write(prompts, sampling, seeds, **more)
        numbers = [seed[1] for seed in seeds]
        calls.append({"starts": dict(zip(numbers, more["prefixes"] or [], strict=False)), "texts": {}})
        calls[-1]["texts"] = {n: a.text for n, a in zip(numbers, answers, strict=True)}
        return answers

    monkeypatch.setattr(lm, "write", watched)
    found = lm.generate(PROMPTS, search=SearchPolicy("continue", budget=2, temperature=1.0), alpha=0.99, progress=False)
    assert len(calls) == 3
    assert calls[0]["starts"] == {}
    for attempt in (1, 2):
        assert calls[attempt]["starts"]
        for n, start in calls[attempt]["starts"].items():
            refused = [calls[k]["texts"][n] for k in range(attempt)]
            assert start == lm.encoder.refused(refused)
            assert not found[n].verified or found[n].tries > attempt
