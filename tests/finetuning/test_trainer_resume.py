"""Resuming: killed with SIGKILL at any moment and resumed, a run ends with the same bits as one that was left alone.

Run as a script this file is the driver: it forks a child for each run, so that the imports are paid for once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from script_checks import run_script

HERE = Path(__file__).parents[1]
# Four steps an epoch, two epochs, checkpoints after 2, 4, 6 and 8. Each moment is (where, at which step or epoch).
MOMENTS = {
    "before the first checkpoint": ("step", 1),
    "right after a mid-epoch checkpoint": ("saved", 6),
    "right after an end-of-epoch checkpoint": ("saved", 4),
    "between checkpoints": ("step", 7),
    "while the epoch's SDM layer is fitted": ("layer", 1),
    "while evaluating": ("evaluate", 6),
    "in a checkpoint: weights written, SDM state not": ("save:_save_state", 6),
    "in a checkpoint: optimiser not written": ("save:_save_optimizer_and_scheduler", 8),
    "in a checkpoint: trainer_state.json half written": ("save:json", 6),
    "in a checkpoint: while old ones are deleted": ("save:rotate", 6),
    "while the final layer is fitted": ("final", 0),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "limit 1": {"save_total_limit": 1},
    "ce": {"loss": "ce", "hard_negatives": False},
}
CASES = [
    *((moment, "") for moment in MOMENTS),
    ("in a checkpoint: trainer_state.json half written", "limit 1"),
    ("in a checkpoint: while old ones are deleted", "limit 1"),
    ("between checkpoints", "ce"),
]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: Path, settings: dict[str, Any], moment: tuple[str, int] | None, resume: bool) -> None:
    """One run, killed at a moment or to its end; then `final/` holds the SDM LM."""
    import transformers.trainer
    from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
    from transformers import TrainerCallback
    from transformers.trainer_callback import TrainerState

    from sdmlm.finetuning import trainer as module

    where, when = moment or ("", 0)
    config = tiny_config(
        folder,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        gamma_gen=1.0,
        gamma_diversity=1.0,
        **settings,
    )
    # Dropout, so that the run depends on torch's random state too.
    trainer = module.SDMTrainer(
        tiny_lm(attention_dropout=0.1), config, copy_rows(31, 0), copy_rows(16, 1), tiny_tokenizer()
    )

    class Killer(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if where == "step" and state.global_step == when:
                _die()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if where == "saved" and state.global_step == when:
                _die()

    trainer.add_callback(Killer())
    fit, saved = module.fit_and_broadcast, TrainerState.save_to_json

    def killing_fit(accelerator: Any, args: Any, seeds: list[int], *rest: Any) -> Any:
        if (where == "layer" and seeds == [1, when]) or (where == "evaluate" and seeds == [2, when]):
            _die()
        return fit(accelerator, args, seeds, *rest)

    def half_written(state: Any, path: str) -> None:
        saved(state, path)
        if state.global_step == when:
            Path(path).write_text(Path(path).read_text()[:1000])
            _die()

    def half_deleted(path: str, **_: Any) -> None:
        """rmtree, dead after its first file."""
        (Path(path) / "model.safetensors").unlink()
        _die()

    module.fit_and_broadcast = killing_fit
    if where == "final":
        trainer.fit_final_layer = _die  # type: ignore[method-assign,assignment]
    elif where == "save:json":
        TrainerState.save_to_json = half_written
    elif where == "save:rotate":
        rotate = transformers.trainer.rotate_checkpoints

        def killing_rotate(**kwargs: Any) -> None:
            if trainer.state.global_step == when:
                shutil.rmtree = half_deleted  # type: ignore[assignment]
            rotate(**kwargs)

        transformers.trainer.rotate_checkpoints = killing_rotate
    elif where.startswith("save:"):
        name = where.removeprefix("save:")
        plain = getattr(trainer, name)
        setattr(trainer, name, lambda *a: _die() if trainer.state.global_step == when else plain(*a))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    facts = {"best": trainer.state.best_model_checkpoint, "metric": trainer.state.best_metric}
    facts["losses"] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    facts["generated"] = [a for a in trainer.negatives.state_dict()["attempts"] if a["body"] is not None]
    (folder / "facts.json").write_text(json.dumps(facts))


def _drive(folder: Path) -> None:
    sys.path.insert(0, str(HERE))
    from tiny_lm import warm_up

    warm_up(folder / "warm")

    def run(name: str, *args: Any) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                (folder / name).mkdir(exist_ok=True)
                _train(folder / name, *args)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        return os.waitpid(child, 0)[1]

    for name, settings in SETTINGS.items():
        assert run(f"reference {name}", settings, None, False) == 0
    for n, (moment, name) in enumerate(CASES):
        status = run(f"case {n}", SETTINGS[name], MOMENTS[moment], False)
        assert os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
        left = sorted(int(p.name[11:]) for p in (folder / f"case {n}").glob("checkpoint-*"))
        (folder / f"left {n}.json").write_text(json.dumps(left))
        assert run(f"case {n}", SETTINGS[name], None, True) == 0, moment


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    run_script(__file__, folder)
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("n", range(len(CASES)), ids=[f"{m}{', ' + s if s else ''}" for m, s in CASES])
def test_killed_and_resumed_ends_bit_identical(runs: Path, n: int) -> None:
    reference, case = runs / f"reference {CASES[n][1]}", runs / f"case {n}"
    assert _files(case / "final") == _files(reference / "final")
    then, now = (json.loads((folder / "facts.json").read_text()) for folder in (reference, case))
    assert now["losses"] == then["losses"]
    assert now["metric"] == then["metric"]
    assert Path(now["best"]).name == Path(then["best"]).name
    assert now["generated"] == then["generated"]


def test_the_runs_are_what_they_should_be(runs: Path) -> None:
    facts = json.loads((runs / "reference " / "facts.json").read_text())
    assert {a["epoch"] for a in facts["generated"]} == {2}
    left = {
        MOMENTS[moment][0]: json.loads((runs / f"left {n}.json").read_text())
        for n, (moment, s) in enumerate(CASES)
        if not s
    }
    assert left["save:json"][-1] == 6  # the half-written checkpoint was there, and was passed over
    assert (
        _files(runs / "reference " / "final")["model.safetensors"]
        != _files(runs / "reference ce" / "final")["model.safetensors"]
    )


if __name__ == "__main__":
    _drive(Path(sys.argv[1]))
