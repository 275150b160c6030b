"""Recomputation changes what is kept for the backward pass, and nothing else."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llmstack.model import Llama, ModelConfig
from llmstack.model.compile import compile_model
from llmstack.model.norms import METHODS
from llmstack.model.recompute import recompute_of_layer

SETTINGS: tuple[str | int, ...] = ("none", "full", 2, "selective")
VOCAB, BATCH, LENGTH = 61, 2, 11


def model(setting: str | int, layers: int = 4, norm: str = "bhyt", dropout: float = 0.0) -> Llama:
    """The same weights whatever the setting; every block has a dropout rate of its own."""
    torch.manual_seed(0)
    built = Llama(
        ModelConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_layers=layers,
            num_heads=2,
            num_kv_heads=1,
            intermediate_size=24,
            max_position_embeddings=32,
            norm={"method": norm},
            residual_dropout=dropout,
            residual_dropout_schedule="linear",
        )
    )
    for layer, block in enumerate(built.blocks):
        block.recompute = recompute_of_layer(setting, layer)
    return built


def loss(built: Llama) -> Tensor:
    ids = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    return built.lm_head(built.hidden_states(ids[:, :-1]), ids[:, 1:], BATCH * LENGTH)


def gradients(built: Llama) -> dict[str, Tensor]:
    loss(built).backward()
    return {name: parameter.grad for name, parameter in built.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("norm", sorted(METHODS))
def test_gradients_are_the_same_bit_for_bit(norm: str, dropout: float) -> None:
    """With dropout, too: the forward pass is repeated with the random numbers that it had."""
    plain = gradients(model("none", norm=norm, dropout=dropout))
    assert len(plain) == len(list(model("none", norm=norm).parameters()))
    for setting in SETTINGS[1:]:
        recomputed = gradients(model(setting, norm=norm, dropout=dropout))
        assert recomputed.keys() == plain.keys()
        assert all(torch.equal(recomputed[name], plain[name]) for name in plain), setting


class Alive(TorchDispatchMode):
    """Which of the memory that operations give is still in use."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Callable[[], torch.UntypedStorage | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = weakref.ref(storage)
        return result

    def sizes(self) -> dict[int, int]:
        """Bytes by address."""
        alive = {address: reference() for address, reference in self.storages.items()}
        return {address: storage.nbytes() for address, storage in alive.items() if storage is not None}


def bytes_a_block_keeps(setting: str | int) -> float:
    """For the backward pass, beside the weights; found from two depths."""
    kept = {}
    for layers in (2, 6):
        built = model(setting, layers)
        weights = {tensor.untyped_storage().data_ptr() for tensor in (*built.parameters(), *built.buffers())}
        with Alive() as alive:
            value = loss(built)
        assert value.requires_grad
        kept[layers] = sum(size for address, size in alive.sizes().items() if address not in weights)
    return (kept[6] - kept[2]) / 4


def test_less_is_kept_the_more_is_recomputed() -> None:
    kept = {setting: bytes_a_block_keeps(setting) for setting in SETTINGS}
    vector = BATCH * LENGTH * 4
    assert kept["full"] == 16 * vector, "the input alone"
    # Beside it queries, keys, values, attention with its normaliser, gate and up as the products gave them, and the
    # output of both sub-layers.
    assert kept["selective"] == kept["full"] + (16 + 8 + 8 + 16 + 2 + 24 + 24 + 16 + 16) * vector
    assert kept["none"] > kept["selective"]
    assert kept[2] == (kept["none"] + kept["full"]) / 2


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The graphs as they are traced and partitioned, run without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def bytes_saved(built: Llama) -> int:
    """Of a compiled model, whose graphs hand to autograd all that they keep."""
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss(built)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in saved}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.usefixtures("traced_only")
def test_compiled_less_is_kept_the_more_is_recomputed() -> None:
    kept = {setting: bytes_saved(compile_model(model(setting))) for setting in SETTINGS}
    assert kept["full"] < kept["selective"] < kept["none"]
    assert kept["full"] < kept[2] < kept["none"]


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize("setting", SETTINGS)
def test_sixteen_layers_have_as_many_graphs_as_kinds_of_block(setting: str | int) -> None:
    """One of the head and one of each kind of block; validation recomputes nothing, so that it has one kind."""
    built = compile_model(model(setting, layers=16, dropout=0.1))
    for _ in range(3):
        found = gradients(built)
        built.zero_grad()
    kinds = 2 if setting == 2 else 1
    assert counters["stats"]["unique_graphs"] == kinds + 1
    built.eval()
    with torch.no_grad():
        loss(built)
        loss(built)
    assert counters["stats"]["unique_graphs"] == kinds + 1 + 2
    assert not counters["graph_break"]
    plain = gradients(model("none", layers=16, dropout=0.1))
    for name in plain:
        torch.testing.assert_close(found[name], plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_compiled_dropout_is_repeated_as_it_was() -> None:
    """Generated code draws masks of its own, the same in both passes."""
    torch._dynamo.reset()
    plain = gradients(compile_model(model("none", dropout=0.1)))
    for setting in SETTINGS[1:]:
        torch._dynamo.reset()
        recomputed = gradients(compile_model(model(setting, dropout=0.1)))
        for name in plain:
            torch.testing.assert_close(recomputed[name], plain[name], rtol=1e-5, atol=1e-6)
