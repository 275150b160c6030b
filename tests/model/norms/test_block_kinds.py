"""Blocks of one kind share one compiled graph per mode, however their numbers differ; each further kind is one more."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.model.llama import Block

LAYERS, VOCAB = 16, 61

KINDS: list[tuple[str, dict[str, Any], int]] = [
    *[(name, {"method": name}, 1) for name in ("lns", "dyt", "peri_ln", "post_ln", "deep_norm")],
    ("mix_ln", {"method": "mix_ln"}, 2),
    ("kappa of every layer", {"method": "bhyt", "kappa_schedule": "fourth_root"}, 1),
    ("exact layers", {"method": "bhyt", "exact_layers": "0-1,14-"}, 2),
    (
        "three methods",
        {
            "method": "by_layer",
            "layers": {"0-3": {"method": "post_ln"}, "8-": {"method": "bhyt", "kappa_schedule": "sqrt"}},
            "otherwise": {"method": "lns"},
        },
        3,
    ),
]
every_kind = pytest.mark.parametrize(("norm", "kinds"), [case[1:] for case in KINDS], ids=[case[0] for case in KINDS])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs as they are traced, run without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def narrow(norm: dict[str, Any], **options: Any) -> Llama:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}
    return Llama(
        ModelConfig(
            **{"vocab_size": VOCAB, "num_layers": LAYERS, "max_position_embeddings": 32, **sizes, **options},
            norm=norm,
        )
    )


def run(model: Llama, steps: int) -> list[float]:
    """Losses of training steps, then that of a validation; graphs are complete after one of each."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))

    def loss() -> Tensor:
        logits = model(ids[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    losses = []
    for _ in range(steps):
        value = loss()
        value.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(value.item())
        model.eval()
        with torch.no_grad():
            validation = loss().item()
        model.train()
        torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False
    return [*losses, validation]


def check(norm: dict[str, Any], kinds: int, recompute: str, steps: int, tolerance: float) -> None:
    losses = []
    for compiled in (False, True):
        model = narrow(norm)
        for block in model.blocks:
            block.recompute = recompute  # type: ignore[assignment]
        losses.append(run(compile_model(model) if compiled else model, steps))
    assert counters["stats"]["unique_graphs"] == 2 * kinds
    assert not counters["graph_break"]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=tolerance)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("recompute", ["nothing", "all"])
@every_kind
def test_graphs_per_mode(norm: dict[str, Any], kinds: int, recompute: str) -> None:
    check(norm, kinds, recompute, steps=2, tolerance=1e-5)


@pytest.mark.full
@every_kind
def test_generated_code_trains_like_eager(norm: dict[str, Any], kinds: int) -> None:
    check(norm, kinds, "nothing", steps=5, tolerance=1e-4)


@pytest.mark.usefixtures("traced_only")
@every_kind
def test_one_compiled_forward_serves_the_blocks_of_a_mixture(norm: dict[str, Any], kinds: int) -> None:
    """As the generator compiles it: the class's forward, once, called with every block."""
    model, x = narrow(norm, positions="none").eval(), torch.randn(2, 5, 16)
    compiled = torch.compile(Block.forward, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for block in model.blocks:
            torch.testing.assert_close(compiled(block, x), block(x))
    assert counters["stats"]["unique_graphs"] == kinds


@every_kind
def test_recomputation_changes_no_gradient(norm: dict[str, Any], kinds: int) -> None:
    """Bit for bit, under dropout, too."""
    found: list[list[Tensor]] = []
    for recompute in ("nothing", "all", "cheap"):
        model = narrow(norm, residual_dropout=0.1, num_layers=16)
        for block in model.blocks:
            block.recompute = recompute  # type: ignore[assignment]
        torch.manual_seed(2)
        model(torch.arange(24).view(2, 12)).logsumexp(-1).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for gradients in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients, found[0], strict=True))
