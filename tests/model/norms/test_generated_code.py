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


def backward_code(method: str, site: str) -> str:
    """C++ of the backward pass of one site of a block: what another backend would fuse of it, written for the CPU.

    For the CPU alone the compiler keeps every tanh that has more than one use; that rule is out of force here.
    """
    torch._dynamo.reset()
    config = ModelConfig(
        vocab_size=8, hidden_size=WIDTH, num_layers=1, num_heads=2, intermediate_size=8, norm={"method": method}
    )
    block = Llama(config).blocks[0]
    carry = block.attention_norm(torch.randn(2, ROWS // 2, WIDTH))[1]
    carry = None if carry is None else tuple(None if part is None else part.detach() for part in carry)

    def one(x: Tensor) -> Tensor:
        return block.attention_norm(x)[0] if site == "attention" else block.mlp_norm(x, carry)

    compiled = torch.compile(one, fullgraph=True)
    x = torch.randn(2, ROWS // 2, WIDTH, requires_grad=True)
    with torch._inductor.config.patch(fx_graph_cache=False), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor.ir, "is_cpu", lambda _: False)
        _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    return codes[-1]


@pytest.mark.parametrize("site", ["attention", "mlp"])
@pytest.mark.parametrize("method", ["bhyt", "bhyt_star", "dyt"])
def test_a_bounded_site_moves_no_more_backward(method: str, site: str) -> None:
    """RMSNorm reads its input and what comes back, each to sum and to scale; a bounded site needs no more."""
    reference, code = backward_code("rmsnorm", site), backward_code(method, site)
    assert (loads(reference), stores(reference)) == (4, 1)
    assert loads(code) <= 3
    assert stores(code) == 1
    columns = rf"static_cast<int64_t>\(x0 \+ {WIDTH}L\*x1\)"
    assert len(re.findall(columns, code)) == len(re.findall(columns, reference)) > 0, "of γ's gradient"
