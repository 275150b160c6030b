"""Best-fit packing: nothing lost, nothing learned across documents, and as few blocks as can be."""

import numpy as np
import pytest
import torch

from llmstack.data import IGNORE_INDEX, BestFitBlocks, PreparedData
from llmstack.data.best_fit import best_fit_decreasing
from llmstack.data.prepared import PreparedSplit
from llmstack.errors import UserError


class Documents(PreparedSplit):
    """A split in memory with documents of these lengths; token i is i + 1."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.num_documents, self.num_tokens = lengths, len(lengths), sum(lengths)

    def document_lengths(self) -> np.ndarray:
        return np.array(self.lengths)

    def read(self, start: int, length: int) -> torch.Tensor:
        assert 0 <= start <= start + length <= self.num_tokens
        return torch.arange(start + 1, start + length + 1)


def blocks_of(lengths: list[int], block_size: int) -> BestFitBlocks:
    return BestFitBlocks({"train": Documents(lengths)}, "train", block_size)  # type: ignore[arg-type]


def lengths_like_answers(count: int) -> list[int]:
    """Log-normal, as lengths of answers are; a few of one token, a few longer than a block of 256."""
    drawn = np.random.default_rng(0).lognormal(4, 1, count).astype(int) + 1
    return [*drawn.tolist(), 1, 2, 256, 257, 258, 900]


@pytest.mark.parametrize("block_size", [64, 256])
def test_of_each_document_every_token_but_the_first_is_a_label_once(block_size: int) -> None:
    lengths = lengths_like_answers(500)
    blocks = blocks_of(lengths, block_size)
    found = list[int]()
    for i in range(len(blocks)):
        inputs, labels, pieces = (blocks[i][name] for name in ("input_ids", "labels", "document_ids"))
        scored = labels != IGNORE_INDEX
        assert int(scored.sum()) == blocks.valid_tokens(np.array([i]))[0]
        assert torch.equal(labels[scored], inputs[scored] + 1)
        assert (pieces[~scored] == -1).all()
        assert (inputs[~scored] == 0).all()
        # Within a piece tokens follow one another; a new piece is another one.
        same = pieces[1:] == pieces[:-1]
        assert (inputs[1:][same & scored[1:]] == inputs[:-1][same & scored[1:]] + 1).all()
        assert pieces[scored].unique_consecutive().tolist() == list(range(int(pieces.max()) + 1))
        found += labels[scored].tolist()
    starts = np.cumsum([0, *lengths[:-1]])
    expected = [s + 1 + j for s, n in zip(starts, lengths, strict=True) for j in range(1, n)]
    assert sorted(found) == expected
    assert blocks.num_cut == sum(n - 1 > block_size for n in lengths)
    assert blocks.waste == pytest.approx(1 - len(expected) / (len(blocks) * block_size))


def test_few_blocks() -> None:
    """Within 11/9 of what volume alone demands, plus one (Johnson's bound for best-fit decreasing): here far closer."""
    blocks = blocks_of(lengths_like_answers(5000), 1024)
    assert len(blocks) <= int(blocks._sizes.sum()) // 1024 + 2
    assert blocks.waste < 0.003


def test_best_fit_takes_the_fullest_bin_that_has_room() -> None:
    """Sorted 7 6 5 4 3 2: bins of 10 get 7+3, 6+4, 5+2; the 3 goes to the 7 (room 3), not to the 5 (room 5)."""
    assert best_fit_decreasing(np.array([4, 7, 2, 6, 3, 5]), 10).tolist() == [1, 0, 2, 1, 0, 2]
    assert best_fit_decreasing(np.array([10, 10]), 10).tolist() == [0, 1]


def test_agrees_with_a_search_of_all_bins() -> None:
    sizes = np.random.default_rng(1).integers(1, 101, 400)
    rooms, expected = list[int](), np.empty(400, dtype=int)
    for item in np.argsort(-sizes, kind="stable"):
        fitting = [room for room in rooms if room >= sizes[item]]
        if not fitting:
            rooms.append(100)
            fitting = [100]
        # Of bins with equal room any will do: which one is compared by what is left, not by number.
        rooms[rooms.index(min(fitting))] -= sizes[item]
        expected[item] = min(fitting) - sizes[item]
    found = best_fit_decreasing(sizes, 100)
    left = 100 - np.bincount(found, weights=sizes)
    assert sorted(left.tolist()) == sorted(rooms)


def test_blocks_of_prepared_data(embedded: PreparedData) -> None:
    """Documents with BOS and EOS, as they lie on disk."""
    blocks = BestFitBlocks(embedded, "train", 512)
    split = embedded["train"]
    lengths = split.document_lengths()
    assert (lengths.sum(), len(lengths)) == (split.num_tokens, split.num_documents)
    assert sum(blocks.valid_tokens(np.arange(len(blocks)))) == split.num_tokens - split.num_documents
    bos, opened = split.read(0, 1), 0
    for i in range(len(blocks)):
        inputs, pieces = blocks[i]["input_ids"], blocks[i]["document_ids"]
        starts = torch.cat([torch.tensor([True]), pieces[1:] != pieces[:-1]]) & (pieces >= 0)
        opened += int((inputs[starts] == bos).sum())
        assert (inputs[~starts & (pieces >= 0)] != bos).all()
    assert opened == split.num_documents


@pytest.mark.parametrize(
    ("lengths", "complaint"), [([1, 1], "no document of two tokens"), ([2] * 11, "too many for data.packing best_fit")]
)
def test_sets_that_cannot_be_packed(lengths: list[int], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmstack.data.best_fit.MAX_DOCUMENTS", 10)
    with pytest.raises(UserError, match=complaint):
        blocks_of(lengths, 8)
