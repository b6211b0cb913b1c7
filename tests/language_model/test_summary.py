import numpy as np
import pytest
import reference as slow
import torch

from sdmlm.language_model.reading import embed_sequences
from sdmlm.language_model.summary import GenerationReader, batches_by_length, summarize

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_summary_of_padded_rows():
    rng = torch.Generator().manual_seed(0)
    states = torch.randn(3, 6, 4, generator=rng)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    at = torch.tensor([3, 4, 2])
    expected = [slow.summary(states[i], int(at[i]), mask[i].tolist()) for i in range(3)]
    np.testing.assert_allclose(summarize(states, at, mask), expected, rtol=1e-5)
    assert summarize(states.bfloat16(), at, mask).dtype == torch.float32


def test_embeddings_equal_one_at_a_time(model):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 50, rng.integers(1, 30)).tolist() for _ in range(25)]
    at = [int(rng.integers(0, len(s))) for s in sequences]
    got = embed_sequences(model, sequences, at, tokens_per_batch=64, progress=False)
    for row, sequence, end in zip(got, sequences, at, strict=True):
        with torch.no_grad():  # the whole sequence: what follows `at` must not matter
            states = model(torch.tensor([sequence]), output_hidden_states=True).hidden_states[-1][0]
        np.testing.assert_allclose(row, slow.summary(states, end, [1] * len(sequence)), atol=1e-5)


def test_states_are_what_the_output_embedding_receives(model):
    h = embed_sequences(model, [[1, 2, 3]], progress=False)
    with torch.no_grad():
        torch.testing.assert_close(h[0, :16] @ model.lm_head.weight.T, model(torch.tensor([[1, 2, 3]])).logits[0, -1])


def test_train_mode_is_restored(model):
    model.train()
    embed_sequences(model, [[1]], progress=False)
    assert model.training
    model.eval()


def test_batches_cover_everything_within_the_budget():
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    batches = batches_by_length(lengths, 100)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(len(b) * max(lengths[i] for i in b) <= 100 or len(b) == 1 for b in batches)
    assert batches_by_length([], 10) == []


@pytest.mark.parametrize("prompt", [[1, 2], [1, 7]], ids=["", "a tag in the prompt"])
@pytest.mark.parametrize("written", [[3, 7, 9], [3, 4, 9]], ids=["with a tag", "without"])
def test_a_row_with_a_tag_is_compared_with_its_document_at_the_end(model, prompt, written):
    compared = []

    def document(row, generated):
        compared.append(row)
        return [*prompt, 3, 7] if 7 in written else [*prompt, *written, 7]

    reader = GenerationReader([7], document)
    with torch.no_grad(), reader.watching(model):
        read = model(torch.tensor([prompt]))
        reader.begin([0], [prompt], torch.ones(1, 2))
        for i in written[:-1]:
            read = model(torch.tensor([[i]]), past_key_values=read.past_key_values)
            reader.step([0], [[i]], torch.tensor([[i]]))
        rest = reader.rest(0, written)
        assert (rest, compared) == (([], []) if 7 in written else ([9, 7], [0]))
    assert compared == [0]
    if 7 in written:
        torch.testing.assert_close(reader.h[0], embed_sequences(model, [[*prompt, 3, 7]], progress=False)[0])
    else:
        assert not reader.h  # the rest was never read
