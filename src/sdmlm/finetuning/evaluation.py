"""The next-token loss over the calibration documents, by which the checkpoint is chosen.

The bases of the loss are only known after an SDM layer was fitted over all documents. So the states of the tokens that
have a loss are kept from the pass that reads the documents. If they need too much memory, a second pass is made instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sdmlm.finetuning.loss import LogitTransform, sdm_loss_from_hidden
from sdmlm.language_model.encoding import IGNORED, Encoded
from sdmlm.language_model.forward import inner_lm
from sdmlm.language_model.reading import CountedStates, over_documents

if TYPE_CHECKING:
    from sdmlm.finetuning.trainer import SDMTrainer

STATES_BUDGET = 2 * 2**30  # bytes of states that a process keeps until the loss is computed
_TOKENS_AT_ONCE = 8192


def fits_states_budget(model: Any, documents: Sequence[Encoded], processes: int) -> bool:
    """Whether the states at positions with a loss fit the budget, in float32; the same answer in every process."""
    tokens = sum(label != IGNORED for document in documents for label in document.labels[1:])
    width = inner_lm(model).config.get_text_config().hidden_size
    return int(tokens * width * 4 // processes) <= STATES_BUDGET


def loss_of_states(model: Any, counted: CountedStates, base: Tensor, transform: LogitTransform | None) -> Tensor:
    """Sum and number of the token losses of this process's kept states, (2,)."""

    def inside(lm: Any) -> Tensor:
        head = lm.get_output_embeddings()
        total = torch.zeros((), device=head.weight.device)
        for part in torch.arange(len(counted.targets)).split(_TOKENS_AT_ONCE):
            # One token per row. The loss takes the label of a position from the next one, so the labels are shifted.
            labels = torch.nn.functional.pad(counted.targets[part, None], (1, 0), value=IGNORED)
            states, labels, bases = (
                t.to(total.device) for t in (counted.states[part, None], labels, base[counted.documents[part]])
            )
            total += sdm_loss_from_hidden(states, head.weight, labels, bases, 1, head.bias, transform)
        return torch.stack([total, total.new_tensor(float(len(counted.targets)))])

    with torch.no_grad():
        sums: Tensor = model(inside=inside)
    return sums


def loss_by_second_pass(trainer: SDMTrainer, documents: Sequence[Encoded], base: Tensor) -> Tensor:
    """The same if the states were not kept: they are too large, or only the model itself can compute its logits."""

    def inside(lm: Any, batch: dict[str, Tensor], numbers: Tensor) -> Tensor:
        total = trainer.loss_inside(lm, batch, base.to(numbers.device)[numbers], 1)
        return torch.stack([total, (batch["labels"][:, 1:] != IGNORED).sum()])

    sums = over_documents(
        trainer.model,
        documents,
        trainer.encoder.pad_id,
        trainer.args.tokens_per_batch,
        inside,
        trainer.accelerator.process_index,
        trainer.accelerator.num_processes,
    )
    return torch.stack([torch.zeros(2, device=trainer.args.device), *sums]).sum(dim=0)
