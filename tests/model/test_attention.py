"""Attention: who sees whom, grouped heads, and the cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from llmstack.model import KVCache, Llama, ModelConfig, cache_bytes
from llmstack.model.attention import Attention, attention_mask, dense_mask, document_positions, document_tiles
from llmstack.model.norms import METHODS
from llmstack.model.rope import RotaryEmbedding, rotate

Build = Callable[..., ModelConfig]
NORMS = sorted(METHODS)
POSITIONS = ["rope", "learned", "sinusoidal", "none"]


def sharp(config: ModelConfig) -> Llama:
    """A model whose attention is far from uniform, so that a leak shows."""
    torch.manual_seed(0)
    model = Llama(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8.0) if weight.ndim == 2 else None
    return model


@pytest.fixture(autouse=True)
def no_grad() -> object:
    with torch.no_grad():
        yield


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_causal(small: Build, norm: str, positions: str) -> None:
    model = sharp(small(norm={"method": norm}, positions=positions))
    ids = torch.randint(67, (2, 12))
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 67
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert ((before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)) > 1e-2).all()
    earlier = ids.clone()
    earlier[:, 0] = (earlier[:, 0] + 1) % 67
    assert (model(earlier)[:, -1] - before[:, -1]).abs().max() > 1e-3


def tiles_or_none(padding_mask: Tensor | None, document_ids: Tensor | None) -> Any:
    return None if document_ids is None else document_tiles(document_ids)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents are masked as on a GPU, by a kernel that the CPU has for inference."""
    monkeypatch.setattr("llmstack.model.llama.attention_mask", tiles_or_none)


@pytest.mark.parametrize("positions", POSITIONS)
def test_documents_do_not_see_each_other(small: Build, positions: str) -> None:
    check_documents_do_not_see_each_other(small, positions)


@pytest.mark.usefixtures("tiled")
def test_documents_do_not_see_each_other_by_tiles(small: Build) -> None:
    check_documents_do_not_see_each_other(small, "rope")


def check_documents_do_not_see_each_other(small: Build, positions: str) -> None:
    model = sharp(small(positions=positions))
    ids, documents = torch.randint(67, (2, 12)), torch.tensor([[0] * 5 + [1] * 7, [4] * 3 + [2] * 9])
    packed = model(ids, document_ids=documents)
    for row, start in ((0, 5), (1, 3)):
        assert_close(packed[row, start:], model(ids[row : row + 1, start:])[0])
        assert_close(packed[row, :start], model(ids[row : row + 1, :start])[0])
    changed = ids.clone()
    changed[0, :5] = (changed[0, :5] + 1) % 67
    assert torch.equal(model(changed, document_ids=documents)[0, 5:], packed[0, 5:])
    assert (model(ids)[0, 5:] - packed[0, 5:]).abs().max() > 1e-2  # without the mask they do


def random_documents(batch: int, length: int, seed: int) -> Tensor:
    """About one in forty tokens starts a document; ids begin anywhere, and the last tokens are filling."""
    starts = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < 1 / 40
    ids = starts.long().cumsum(1) + torch.arange(batch)[:, None] * 1000
    ids[:, -7:] = -1
    return ids


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_tiles_attend_as_the_dense_mask(small: Build, kv_heads: int) -> None:
    """At a length that no tile divides; compiled once for all masks."""
    module = attention(small(num_kv_heads=kv_heads))
    q, k, v = torch.randn(2, 4, 300, 8), torch.randn(2, kv_heads, 300, 8), torch.randn(2, kv_heads, 300, 8)
    compiled = torch.compile(module._attend, fullgraph=True, dynamic=False)
    for seed in range(3):
        ids = random_documents(2, 300, seed)
        expected = module._attend(q, k, v, dense_mask(None, ids))
        assert_close(module._attend(q, k, v, document_tiles(ids)), expected)
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            assert_close(compiled(q, k, v, document_tiles(ids)), expected)


def test_tiles_between_documents_are_left_out() -> None:
    """Four documents of two tiles: 3 of 4 tiles in each, none elsewhere; causal attention alone would visit 36."""
    tiles = document_tiles(torch.arange(4).repeat_interleave(256)[None])
    assert tiles.full_kv_num_blocks is not None
    # In the diagonal tiles some pairs are hidden; the one below the diagonal is whole.
    assert (int(tiles.kv_num_blocks.sum()), int(tiles.full_kv_num_blocks.sum())) == (8, 4)


@pytest.mark.gpu
def test_tiles_give_the_gradients_of_the_dense_mask(small: Build) -> None:
    if not torch.cuda.is_available():
        pytest.skip("the kernel has a backward pass on a GPU alone, and there is none")
    config = small(hidden_size=128, num_heads=4, num_kv_heads=2)
    module, ids = attention(config).cuda(), random_documents(2, 300, 0).cuda()
    found = []
    with torch.enable_grad():
        for mask in (attention_mask(None, ids), dense_mask(None, ids)):
            x = torch.randn(2, 300, 128, generator=torch.Generator().manual_seed(1)).cuda().requires_grad_()
            module(x, None, mask).pow(2).sum().backward()
            found.append(x.grad)
    assert isinstance(attention_mask(None, ids), BlockMask)
    assert_close(found[0], found[1], 1e-3)


def test_positions_restart_at_documents() -> None:
    documents = torch.tensor([[7, 7, 7, 3, 3, 9], [1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1]])
    expected = [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 0, 1]]
    assert document_positions(documents).tolist() == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_invisible(small: Build, side: str) -> None:
    model = sharp(small())
    short, padding = torch.randint(67, (1, 8)), torch.randint(67, (1, 4))
    parts = (padding, short) if side == "left" else (short, padding)
    ids, real = torch.cat(parts, 1), torch.cat([torch.full_like(p, p is short) for p in parts], 1)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, positions=positions, padding_mask=real)
    assert logits.isfinite().all()
    assert_close(logits[real.bool()], model(short)[0])


def test_mask_values() -> None:
    assert attention_mask(None, None) is None
    mask = attention_mask(torch.tensor([[0, 1, 1, 1]]), torch.tensor([[0, 0, 0, 1]]))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]]


def attention(config: ModelConfig) -> Attention:
    torch.manual_seed(0)
    module = Attention(config)
    for weight in module.parameters():
        weight.normal_(0, 0.4)
    return module


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("score_scaling", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_formula(small: Build, kv_heads: int, score_scaling: bool, bias: bool) -> None:
    """softmax(QKᵀ/√d)V written out, key-value head j serving query heads j·g … j·g+g−1."""
    config = small(num_kv_heads=kv_heads, score_scaling=score_scaling, attention_bias=bias)
    module, x = attention(config), torch.randn(2, 9, 32)
    rotation = RotaryEmbedding(config)(torch.arange(9)[None])

    def heads(projection: torch.nn.Linear) -> Tensor:
        split = projection(x).view(2, 9, -1, 8).transpose(1, 2)
        return split.repeat_interleave(4 // split.shape[1], dim=1)

    q, k, v = rotate(heads(module.q_proj), rotation), rotate(heads(module.k_proj), rotation), heads(module.v_proj)
    scores = q @ k.transpose(2, 3) / (8**0.5 if score_scaling else 1.0)
    scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = module.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert_close(module(x, rotation), expected, 1e-6)
    assert (module.o_proj.bias is not None) == bias


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_single_query_path_equals_the_general_one(small: Build, kv_heads: int) -> None:
    module = attention(small(num_kv_heads=kv_heads))
    q, k, v = torch.randn(3, 4, 1, 8), torch.randn(3, kv_heads, 10, 8), torch.randn(3, kv_heads, 10, 8)
    mask = torch.rand(3, 1, 1, 10) > 0.4
    mask[..., 0] = True
    k_all, v_all = k.repeat_interleave(4 // kv_heads, 1), v.repeat_interleave(4 // kv_heads, 1)
    expected = F.scaled_dot_product_attention(q, k_all, v_all, attn_mask=mask)
    assert_close(module._attend(q, k, v, mask), expected, 1e-6)
    # Two queries take the general path.
    two = module._attend(q.expand(-1, -1, 2, -1), k, v, mask.expand(-1, -1, 2, -1))
    assert_close(two[:, :, :1], expected, 1e-6)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cache_gives_the_full_forward(small: Build, norm: str, positions: str, kv_heads: int) -> None:
    """In fp64, since attention this sharp makes much of rounding under some norms."""
    config = small(norm={"method": norm}, positions=positions, num_kv_heads=kv_heads)
    model, ids = sharp(config).double(), torch.randint(67, (2, 12))
    full, index = model(ids), torch.arange(12)[None].expand(2, -1)
    for chunks in ([7, 1, 1, 1, 1, 1], [4, 4, 4], [12], [1] * 12):
        cache, parts = KVCache(config, batch_size=2, max_length=16, dtype=torch.float64), []
        for part, where in zip(ids.split(chunks, 1), index.split(chunks, 1), strict=True):
            parts.append(model(part, positions=where, cache=cache))
        assert_close(torch.cat(parts, 1), full, 1e-9)


def test_cache_rows_at_different_positions(small: Build) -> None:
    """Two prompts of different length decode together; the padding of the shorter is overwritten."""
    config = small()
    model, ids = sharp(config), torch.randint(67, (2, 9))
    cache = KVCache(config, batch_size=2, max_length=12)
    model(ids[:, :6], positions=torch.arange(6)[None].expand(2, -1), cache=cache)
    lengths = torch.tensor([[6], [4]])  # row 1 had 4 real tokens
    logits = model(ids.gather(1, lengths), positions=lengths, cache=cache)
    assert_close(logits[0, 0], model(ids[:1, :7])[0, -1])
    assert_close(logits[1, 0], model(ids[1:, :5])[0, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes(small: Build, dtype: torch.dtype) -> None:
    config = small(num_kv_heads=2)
    cache = KVCache(config, batch_size=3, max_length=20, dtype=dtype)
    stored = sum(buffer.numel() * buffer.element_size() for buffer in cache.buffers())
    assert stored == cache_bytes(config, 3, 20, dtype.itemsize)
    assert cache_bytes(ModelConfig.preset("1b"), 1, 1024, 2) == 2 * 16 * 8 * 64 * 1024 * 2
