"""Blocks lose no token but the last partial block, and evaluation scores each token but the first once."""

import numpy as np
import pytest
import torch

from llmstack.data import IGNORE_INDEX, PackedBlocks, PreparedData
from llmstack.data.prepared import PreparedSplit
from llmstack.errors import UserError


class Stream(PreparedSplit):
    """A split in memory: token i is i + 1, documents are ten tokens long."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def read(self, start: int, length: int) -> torch.Tensor:
        assert 0 <= start <= start + length <= self.num_tokens
        return torch.arange(start + 1, start + length + 1)

    def document_ids(self, start: int, length: int) -> torch.Tensor:
        return torch.arange(start, start + length) // 10


def blocks_of(num_tokens: int, block_size: int, **options: bool) -> PackedBlocks:
    prepared: dict[str, PreparedSplit] = {"train": Stream(num_tokens)}
    return PackedBlocks(prepared, "train", block_size, **options)  # type: ignore[arg-type]


def column(blocks: PackedBlocks, name: str) -> list[torch.Tensor]:
    return [blocks[i][name] for i in range(len(blocks))]


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("extra", [1, 2, 5, 7, 8, 16, 17])
def test_only_the_last_partial_block_is_lost(block_size: int, extra: int) -> None:
    num_tokens = 10 * block_size + extra
    blocks = blocks_of(num_tokens, block_size)
    labels = torch.cat(column(blocks, "labels"))
    inputs = torch.cat(column(blocks, "input_ids"))
    assert torch.equal(labels, inputs + 1)  # the next token, shifted once
    assert labels.tolist() == list(range(2, len(labels) + 2))
    lost = num_tokens - 1 - len(labels)
    assert 0 <= lost < block_size
    assert (blocks.valid_tokens(np.arange(len(blocks))) == block_size).all()
    with pytest.raises(IndexError):
        blocks[len(blocks)]


@pytest.mark.parametrize("num_tokens", [2, 7, 8, 9, 15, 16, 64, 65, 66])
def test_evaluation_scores_every_token_but_the_first_once(num_tokens: int) -> None:
    blocks = blocks_of(num_tokens, 8, keep_last=True, document_ids=True)
    labels = torch.stack(column(blocks, "labels"))
    inputs = torch.stack(column(blocks, "input_ids"))
    documents = torch.stack(column(blocks, "document_ids"))
    scored = labels != IGNORE_INDEX
    assert labels[scored].tolist() == list(range(2, num_tokens + 1))
    assert torch.equal(inputs[scored], labels[scored] - 1)
    assert torch.equal(documents[scored], (inputs[scored] - 1) // 10)
    assert (documents[~scored] == -1).all()
    assert blocks.valid_tokens(np.arange(len(blocks))).tolist() == scored.sum(1).tolist()


@pytest.mark.parametrize(("num_tokens", "keep_last"), [(8, False), (0, False), (1, True), (0, True)])
def test_block_longer_than_the_data(num_tokens: int, keep_last: bool) -> None:
    with pytest.raises(UserError, match=f"no block of 8 .* split of {num_tokens}: choose a shorter block"):
        blocks_of(num_tokens, 8, keep_last=keep_last)


def test_blocks_of_prepared_data(embedded: PreparedData) -> None:
    stream = embedded["train"].read(0, embedded["train"].num_tokens)
    blocks = PackedBlocks(embedded, "train", 64, document_ids=True)
    assert len(blocks) == (len(stream) - 1) // 64
    assert torch.equal(torch.cat(column(blocks, "input_ids")), stream[: len(blocks) * 64])
    assert torch.equal(torch.cat(column(blocks, "labels")), stream[1 : len(blocks) * 64 + 1])
    ids = torch.cat(column(blocks, "document_ids"))
    starts = torch.cat([torch.tensor([True]), ids[1:] != ids[:-1]])
    assert torch.equal(torch.nonzero(starts), torch.nonzero(stream[: len(ids)] == stream[0]))  # BOS
