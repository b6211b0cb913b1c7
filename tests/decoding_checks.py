"""What the tests of decoding and of hard negatives share: a tokenizer, a small LM, one that follows a script."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sdmlm.finetuning.negatives import NegativePolicy
from sdmlm.language_model.encoding import Encoder


class Script(torch.nn.Module):
    """A stand-in for an LM that emits given texts: the answer to each prompt, one token a step."""

    def __init__(self, encoder: Encoder, answers: dict[str, str]) -> None:
        super().__init__()
        self.device, self.calls, self.rows_in = torch.device("cpu"), 0, 0
        self.size = len(encoder.tokenizer)
        end = encoder.tokenizer.eos_token_id
        self.answers = {tuple(encoder.encode_prompt(p)): [*encoder.continuation(a), end] for p, a in answers.items()}

    def forward(self, input_ids: Any, attention_mask: Any, past_key_values: Any, position_ids: Any, **_: Any) -> Any:
        assert not self.training
        self.calls, self.rows_in = self.calls + 1, self.rows_in + len(input_ids)
        if past_key_values is None:
            keys = [tuple(i[m.bool()].tolist()) for i, m in zip(input_ids, attention_mask, strict=True)]
            past_key_values = Cache([(key, 0) for key in keys])
        for (key, n), positions in zip(past_key_values.rows, position_ids, strict=True):
            assert positions[-1] == len(key) - 1 + n
        logits = torch.zeros(len(input_ids), 1, self.size)
        for row, (key, n) in enumerate(past_key_values.rows):
            logits[row, 0, self.answers[key][n]] = 1
        past_key_values.rows = [(key, n + 1) for key, n in past_key_values.rows]
        return type("Out", (), {"logits": logits, "past_key_values": past_key_values})


class Cache:
    def __init__(self, rows: list[tuple[tuple[int, ...], int]]) -> None:
        self.rows = rows

    def reorder_cache(self, keep: torch.Tensor) -> None:
        self.rows = [self.rows[i] for i in keep.tolist()]


ALWAYS = NegativePolicy(gamma_plus=0, gamma_gen=1, gamma_diversity=1)


ROWS = [
    {"prompt": "p0", "chosen": "fox", "rejected": "dog"},
    {"prompt": "p1", "chosen": "fox\n<verified>Yes</verified>", "rejected": "dog"},
    {"prompt": "p2", "chosen": "fox", "rejected": "dog"},
    {"prompt": "p3", "chosen": "fox", "rejected": "dog"},
]


def fox_encoder() -> Encoder:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the fox <verified>No</verified>", "the dog"], trainer)
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>"))


def fox_model(encoder: Encoder) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(encoder.tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.4,  # wide, so that greedy generations differ between prompts
        pad_token_id=None,
    )
    return LlamaForCausalLM(config)
