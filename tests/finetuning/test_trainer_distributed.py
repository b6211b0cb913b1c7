"""Two processes (gloo, on the CPU) train like one: DDP and FSDP.

Run as a script this file is the driver: it forks the processes of each run with the environment that `torchrun` and
`accelerate launch` would give them, so that the imports are paid for once.

Accelerate turns FSDP on for accelerators only, although PyTorch's FSDP2 runs on the CPU: the driver tells it otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from script_checks import run_script

HERE = Path(__file__).parents[1]
OWN: dict[str, Any] = {
    "loss": "ce",
    "hard_negatives": False,
    "num_train_epochs": 1,
    "documents": "own",
    "summary": None,
}
# name: (processes, FSDP, settings). 56 rows in steps of 16: the last has 8, so one of two processes has none of them.
RUNS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "one": (1, False, {}),
    "ddp": (2, False, {}),
    "fsdp": (2, True, {}),
    "one ce": (1, False, {"loss": "ce"}),
    "ddp ce": (2, False, {"loss": "ce", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    "fsdp ce": (2, True, {"loss": "ce"}),
    "one dropped": (1, False, {"loss": "ce", "dataloader_drop_last": True}),
    "ddp dropped": (2, False, {"loss": "ce", "dataloader_drop_last": True}),
    "ddp own": (2, False, OWN),
    "fsdp own": (2, True, OWN),
}
RESUMED = ("ddp", "fsdp")  # killed after step 7 and resumed, beside


def _train(folder: Path, world: int, fsdp: bool, settings: dict[str, Any], kill: bool, resume: bool) -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from tiny_lm import copy_rows, tiny_config, tiny_lm, tiny_tokenizer
    from transformers import TrainerCallback

    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.finetuning.trainer import SDMTrainer

    rank = int(os.environ.get("RANK", 0))
    config = tiny_config(
        folder,
        **{
            "per_device_train_batch_size": 16 // world,
            "gamma_gen": 1.0,
            "gamma_diversity": 1.0,
            "tokens_per_batch": 256,
            "fsdp": fsdp,
            "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if fsdp else None,
            **settings,
        },
    )
    if fsdp:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    fits = 0
    fit = SDMEstimator.fit

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal fits
        fits += 1
        return fit(self, *args, **kwargs)

    SDMEstimator.fit = counted  # type: ignore[method-assign]

    class Killer(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if kill and state.global_step == 7:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = SDMTrainer(tiny_lm(), config, copy_rows(56, 0), copy_rows(24, 1), tiny_tokenizer(), callbacks=[Killer()])
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    layers = [trainer.estimator, trainer.training_layer]
    digests = [
        hashlib.sha256(e.layers_[0].adaptor.weight.numpy().tobytes()).hexdigest() for e in layers if e is not None
    ]
    facts = {
        "wrapped": type(trainer.model_wrapped).__name__,
        "type": str(trainer.accelerator.distributed_type),
        "log": trainer.state.log_history,
        "fits": fits,
        "final": [trainer.final_layer.documents, trainer.estimator.digest()],
        "layers": digests,
        "attempts": sorted([a["row"], a["body"]] for a in trainer.negatives.state_dict()["attempts"]),
    }
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
    if world > 1:
        torch.distributed.destroy_process_group()


def _drive(folder: Path) -> None:
    sys.path.insert(0, str(HERE))
    from tiny_lm import process_group, warm_up

    warm_up(folder / "warm")

    def run(name: str, run: str, kill: bool = False, resume: bool = False) -> None:
        world, fsdp, settings = RUNS[run]
        (folder / name).mkdir(exist_ok=True)
        children = []
        for environment in process_group(world):
            child = os.fork()
            if child == 0:
                if world > 1:
                    os.environ |= environment
                code = 1
                try:
                    _train(folder / name, world, fsdp, settings, kill, resume)
                    code = 0
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        assert kill or ended == [0] * world, (name, ended)

    for name in RUNS:
        run(name, name)
    for name in RESUMED:
        run(f"{name} resumed", name, kill=True)
        run(f"{name} resumed", name, resume=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    run_script(__file__, folder)
    return folder


def _facts(runs: Path, name: str, rank: int = 0) -> Any:
    return json.loads((runs / name / f"facts-{rank}.json").read_text())


def _values(runs: Path, name: str, metric: str) -> list[float]:
    return [log[metric] for log in _facts(runs, name)["log"] if metric in log]


def _difference(runs: Path, name: str, other: str) -> float:
    a, b = (load_file(runs / n / "final" / "model.safetensors") for n in (name, other))
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_cross_entropy_is_the_same_on_one_process_and_on_two(runs: Path, kind: str) -> None:
    for metric in ("loss", "eval_loss"):
        assert _values(runs, f"{kind} ce", metric) == pytest.approx(_values(runs, "one ce", metric), rel=1e-5)
    assert _values(runs, f"{kind} ce", "hard_negatives") == pytest.approx(_values(runs, "one ce", "hard_negatives"))
    assert _difference(runs, f"{kind} ce", "one ce") < 1e-4
    assert _difference(runs, f"{kind} ce", "one") > 1e-3  # so the comparison can fail


def test_a_last_step_that_is_dropped_is_dropped_by_both(runs: Path) -> None:
    """As in the recipes of the paper's model: 5000 rows are 78 steps of 64, and the 8 rows left over wait."""
    assert len(_values(runs, "ddp dropped", "loss")) == 2 * (56 // 16)
    assert _values(runs, "ddp dropped", "loss") == pytest.approx(_values(runs, "one dropped", "loss"), rel=1e-5)
    assert _difference(runs, "ddp dropped", "one dropped") < 1e-4
    assert _difference(runs, "ddp dropped", "one ce") > 1e-3


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_sdm_is_the_same_on_one_process_and_on_two(runs: Path, kind: str) -> None:
    """In an epoch's first step the LM is the one that the layer was fitted over: each document's d_nearest lies on a jump
    of the eCDF it was stored in, so noise in the last bit moves its d by 1/n, here 1/14. Everywhere else: noise only."""
    ours, theirs = _values(runs, kind, "loss"), _values(runs, "one", "loss")
    assert len(ours) == len(theirs) == 8
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert a == pytest.approx(b, rel=1e-2 if step % 4 == 0 else 1e-4)
    assert _values(runs, kind, "eval_loss") == pytest.approx(_values(runs, "one", "eval_loss"), rel=1e-4)
    for metric in ("base", "sdm/positive", "sdm/negative"):  # means over the documents of all processes
        assert _values(runs, kind, metric) == pytest.approx(_values(runs, "one", metric), abs=2e-2)
    assert _difference(runs, kind, "one") < 5e-4
    assert _difference(runs, kind, "one ce") > 1e-3


def test_the_runs_were_what_they_claim(runs: Path) -> None:
    assert _facts(runs, "ddp")["wrapped"] == "DistributedDataParallel"
    assert _facts(runs, "fsdp")["wrapped"].startswith("FSDP")
    assert _facts(runs, "fsdp")["type"] == "DistributedType.FSDP"
    assert _facts(runs, "one")["type"] == "DistributedType.NO"


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_layers_are_fitted_once_and_shared(runs: Path, kind: str) -> None:
    first, second = _facts(runs, kind, 0), _facts(runs, kind, 1)
    assert (first["fits"], second["fits"]) == (7, 0)  # two epochs, four evaluations, the final layer
    assert first["layers"] == second["layers"]
    assert len(first["layers"]) == 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_hard_negatives_are_merged(runs: Path, kind: str) -> None:
    first = _facts(runs, kind, 0)["attempts"]
    assert any(body for _, body in first)
    assert first == _facts(runs, kind, 1)["attempts"] == _facts(runs, "one")["attempts"]


@pytest.mark.parametrize("kind", RESUMED)
def test_killed_and_resumed_ends_bit_identical(runs: Path, kind: str) -> None:
    folders = [runs / name / "final" for name in (kind, f"{kind} resumed")]
    files = [{str(p.relative_to(f)): p.read_bytes() for p in sorted(f.rglob("*")) if p.is_file()} for f in folders]
    assert files[0] == files[1]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_saved_folder_is_a_plain_model_with_its_layer(runs: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    from sdmlm.estimator.estimator import SDMEstimator
    from sdmlm.language_model.sdm_folder import fingerprint

    folder = runs / kind / "final"
    model = AutoModelForCausalLM.from_pretrained(folder)
    facts = json.loads((folder / "sdm" / "lm.json").read_text())
    assert facts["fingerprint"] == fingerprint(model.state_dict())
    assert SDMEstimator.from_pretrained(folder / "sdm").n_features_in_ == 64


def test_all_processes_fit_the_same_layer_over_own_answers(runs: Path) -> None:
    """Under FSDP no process can write answers alone, so the layer is the paper's there."""
    from sdmlm.language_model.answer_rule import load_certificate

    for kind, documents in (("ddp", "own"), ("fsdp", "paper")):
        first, second = (_facts(runs, f"{kind} own", rank)["final"] for rank in (0, 1))
        assert first == second
        assert first[0] == documents
        certificate = load_certificate(runs / f"{kind} own" / "final" / "sdm")
        assert (certificate is not None) == (documents == "own")


if __name__ == "__main__":
    _drive(Path(sys.argv[1]))
