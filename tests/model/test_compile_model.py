"""torch.compile: one block graph and one head graph per mode at 16 layers, and the same training as eager."""

import functools
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from llmstack.model import Llama, ModelConfig
from llmstack.model import head as head_module
from llmstack.model.compile import compile_model
from llmstack.model.norms import METHODS

LAYERS, BATCH, LENGTH, VOCAB = 16, 2, 11, 61
GRAPHS_PER_MODE = 2  # one of the block, one of the head


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before; 22 tokens, which the head takes in chunks of 8, 8 and 6."""
    monkeypatch.setattr(head_module, "_CHUNK_BYTES", {"cpu": 4 * VOCAB * 9})
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def narrow(**options: object) -> Llama:
    torch.manual_seed(0)
    return Llama(
        ModelConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_layers=LAYERS,
            num_heads=2,
            num_kv_heads=1,
            intermediate_size=24,
            max_position_embeddings=32,
            **options,
        )
    )


def train(model: Llama, steps: int, autocast: bool = False) -> list[float]:
    """Loss of each training step, with a validation pass after the first and the last; the latter's loss at the end."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    losses = []

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.lm_head(model.hidden_states(ids[:, :-1]), ids[:, 1:], BATCH * LENGTH)

    for step in range(steps):
        value = loss()
        value.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(value.item())
        if step in (0, steps - 1):
            model.eval()
            with torch.no_grad():
                validation = loss().item()
            model.train()
        if step == 0:
            # Both modes have been seen: from here on a recompilation is an error.
            torch._dynamo.config.error_on_recompile = True
    torch._dynamo.config.error_on_recompile = False
    return [*losses, validation]


def check_graphs() -> None:
    assert counters["stats"]["unique_graphs"] == 2 * GRAPHS_PER_MODE
    assert not counters["graph_break"]


FIFTY_STEPS = [norm if norm == "bhyt" else pytest.param(norm, marks=pytest.mark.full) for norm in sorted(METHODS)]


@pytest.mark.parametrize("norm", FIFTY_STEPS)  # about 40 s of C++ compilation each
def test_fifty_steps_equal_eager_without_recompiling(norm: str) -> None:
    eager = train(narrow(norm={"method": norm}), steps=50)
    compiled = train(compile_model(narrow(norm={"method": norm})), steps=50)
    check_graphs()
    assert eager[-1] < eager[0] - 0.2
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=0, atol=1e-4)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs as they are traced, run without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("norm", sorted(METHODS))
def test_one_graph_per_mode(norm: str) -> None:
    """With bf16 autocast and with a dropout rate of its own in every block, too."""
    options = {"residual_dropout": 0.2, "residual_dropout_schedule": "linear"}
    train(compile_model(narrow(norm={"method": norm}, **options)), steps=3, autocast=True)
    expected = 2 * GRAPHS_PER_MODE + (2 if norm == "mix_ln" else 0)
    assert counters["stats"]["unique_graphs"] == expected, "a mixture has a graph for each kind of block"
    assert not counters["graph_break"]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("norm", ["tapernorm_all", "taperln_internal"])
def test_a_tapering_model_has_a_block_graph_for_each_phase(norm: str) -> None:
    """And for each mode; a gate that moves within the taper makes no further one."""
    model = compile_model(narrow(norm={"method": norm}))
    sites = model.config.norm_method.sites(model).values()
    for number, gate in enumerate((1.0, 0.9, 0.3, 0.0)):
        for site in sites:
            if gate == 0.9:
                site.c.fill_(1.0)
                site.origin.fill_(1.0)
            site.set_gate(gate)
        train(model, steps=2)
        phases = (1, 2, 2, 3)[number]
        assert counters["stats"]["unique_graphs"] == 2 * (phases + 1)
    assert not counters["graph_break"]


@pytest.mark.usefixtures("traced_only")
def test_a_model_that_loses_its_norms_one_by_one_has_one_block_graph_and_one_without() -> None:
    model = compile_model(narrow(norm={"method": "fake_ln", "first_token": True, "start_merge": 200}))
    train(model, steps=2)
    sites = model.config.norm_method.sites(model)
    for name, (_, scales) in sites.items():
        for scale in scales:
            scale.scale.fill_(1.5)
            scale.first_scale.fill_(2.5)
        if name == "layers.7.mlp_norm":
            train(model, steps=2)
    model.config.norm_method.settle(model)
    train(model, steps=2)
    assert counters["stats"]["unique_graphs"] == 2 * GRAPHS_PER_MODE
    for _, scales in sites.values():
        for scale in scales:
            scale.first_scale.fill_(1.5)
    model.config.norm_method.settle(model)
    train(model, steps=2)
    assert counters["stats"]["unique_graphs"] == 2 * (GRAPHS_PER_MODE + 1)
    assert not counters["graph_break"]


@pytest.mark.full
def test_bf16_autocast_trains_like_eager() -> None:
    eager = train(narrow(norm={"method": "bhyt"}), steps=5, autocast=True)
    compiled = train(compile_model(narrow(norm={"method": "bhyt"})), steps=5, autocast=True)
    check_graphs()
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=0, atol=2e-2)


def test_names_stay_as_they_are() -> None:
    assert narrow().state_dict().keys() == compile_model(narrow()).state_dict().keys()
