"""Vocabulary shards of an embedding add up to the lookup, in values and in gradients."""

import itertools

import pytest
import torch
from torch import nn

from hetero_megatron.errors import LayerError
from hetero_megatron.layers import Embedding
from hetero_megatron.runtime.binding import Binding

V, D = 97, 8
TOKENS = torch.tensor([0, 48, 49, 96, 5, 48, 60])


def _weight() -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0))


def _bound(lo: int, hi: int) -> Embedding:
    embedding = Embedding(V, D, 0.02)
    embedding.weight = nn.Parameter(_weight()[lo:hi])
    embedding.bind(Binding("embedding", {"weight": ((lo, hi), (0, D))}, {"weight": (V, D)}))
    return embedding


def test_an_unbound_embedding_looks_rows_up() -> None:
    embedding = Embedding(V, D, 0.02)
    embedding.weight = nn.Parameter(_weight())
    assert torch.equal(embedding(TOKENS), _weight()[TOKENS])


@pytest.mark.parametrize("edges", [(0, 97), (0, 49, 97), (0, 1, 50, 97)])
def test_shards_add_up_to_the_lookup_bit_for_bit(edges: tuple[int, ...]) -> None:
    shards = [_bound(lo, hi) for lo, hi in itertools.pairwise(edges)]
    assert torch.equal(sum(shard(TOKENS) for shard in shards), _weight()[TOKENS])


def test_each_shard_gets_the_gradient_of_its_own_rows_only() -> None:
    whole, gradient_TD = _weight().requires_grad_(), torch.randn(len(TOKENS), D)
    whole[TOKENS].backward(gradient_TD)
    assert whole.grad is not None
    for lo, hi in ((0, 49), (49, 97)):
        shard = _bound(lo, hi)
        shard(TOKENS).backward(gradient_TD)
        torch.testing.assert_close(shard.weight.grad, whole.grad[lo:hi])


def test_the_tokens_themselves_are_left_alone() -> None:
    tokens = TOKENS.clone()
    _bound(49, 97)(tokens)
    assert torch.equal(tokens, TOKENS)


def test_an_id_beyond_the_vocabulary_is_refused_whole_and_split() -> None:
    for embedding in (_bound(0, 97), _bound(0, 49)):
        with pytest.raises(LayerError, match="token id 150 is not in the vocabulary, which has ids 0-96"):
            embedding(torch.tensor([3, 150]))
