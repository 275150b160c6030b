"""What the compiler makes of a block's two sites, read from the code that it generates for the CPU."""

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from llmstack.model import Llama, ModelConfig

ROWS, WIDTH = 48, 64
WHOLE = rf"static_cast<int64_t>\(x1 \+ {WIDTH}L\*x0\)"
"""The index of an element of a [batch, seq, hidden] tensor, where it is walked through row by row."""


def forward_code(method: str) -> str:
    """C++ of both sites of a block, the second with what the first carries."""
    torch._dynamo.reset()
    config = ModelConfig(
        vocab_size=8, hidden_size=WIDTH, num_layers=1, num_heads=2, intermediate_size=8, norm={"method": method}
    )
    block = Llama(config).blocks[0].eval()

    def sites(x: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        u, carry = block.attention_norm(x)
        return u, block.mlp_norm(after, carry)

    x, after = torch.randn(2, ROWS // 2, WIDTH), torch.randn(2, ROWS // 2, WIDTH)
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        _, (code,) = run_and_get_code(torch.compile(sites, fullgraph=True), x, after)
    return code


def reductions(code: str) -> int:
    return len(re.findall(r"float tmp_acc\d+ = ", code))


def loads(code: str) -> int:
    return len(re.findall(rf"loadu\(\w+ \+ {WHOLE}", code))


def stores(code: str) -> int:
    return len(re.findall(rf"\.store\(\w+ \+ {WHOLE}", code))


@pytest.fixture(scope="module")
def rmsnorm() -> str:
    return forward_code("rmsnorm")


def test_rmsnorm_reduces_at_both_sites(rmsnorm: str) -> None:
    """So the patterns find what they look for: each site reads its input twice (to sum, to scale) and writes once."""
    assert (reductions(rmsnorm), loads(rmsnorm), stores(rmsnorm)) == (2, 4, 2)


@pytest.mark.parametrize(("method", "expected"), [("bhyt", (1, 3, 2)), ("bhyt_star", (2, 4, 2)), ("dyt", (0, 2, 2))])
def test_a_bounded_block_reduces_less_and_moves_no_more(method: str, expected: tuple[int, int, int]) -> None:
    """BHyT: the second site measures nothing and reads its input once."""
    code = forward_code(method)
    assert (reductions(code), loads(code), stores(code)) == expected
