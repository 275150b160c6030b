"""What every method owes: it survives meta devices, casts and checkpoints, and has a file that shows its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from llmstack.checkpoint import load_model, write_checkpoint
from llmstack.model import Llama, ModelConfig
from llmstack.model.norms import METHODS, build_norm_method
from llmstack.shipped import configs_folder

Build = Callable[..., ModelConfig]

NORMS: dict[str, dict[str, Any]] = {name: {"method": name} for name in sorted(METHODS)} | {
    "bhyt of many kinds": {"method": "bhyt", "exact_layers": "1-2", "kappa_schedule": "sqrt", "lambda_final": 3.0},
    "dyt with bias": {"method": "dyt", "bias": True, "alpha_attention": 0.3},
    "sandwich": {"method": "peri_ln", "embedding_norm": False},
    "mixture": {
        "method": "by_layer",
        "layers": {"0": {"method": "deep_norm"}, "1-2": {"method": "bhyt", "kappa_schedule": "sqrt"}},
        "otherwise": {"method": "lns"},
    },
}
IDS = torch.arange(12).view(2, 6)
every_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())


def build(small: Build, norm: dict[str, Any], device: str = "cpu") -> Llama:
    torch.manual_seed(0)
    with torch.device(device):
        return Llama(small(norm=norm, num_layers=4))


def moved(model: Llama) -> Llama:
    """Every saved number off its initial value: norms that taper are in the midst of it."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn_like(tensor) * 0.1 if tensor.is_floating_point() else 7)
    model.config.norm_method.settle(model)
    return model


def all_tensors(model: Llama) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@every_norm
def test_a_materialised_meta_model_is_the_direct_one(small: Build, norm: dict[str, Any]) -> None:
    direct, model = build(small, norm), build(small, norm, "meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    for built in (model, direct):
        # Building on the CPU has drawn numbers, too.
        torch.manual_seed(0)
        built.initialise()
    assert all_tensors(model).keys() == all_tensors(direct).keys()
    for name, tensor in all_tensors(direct).items():
        assert torch.equal(all_tensors(model)[name], tensor), name
    assert torch.equal(model(IDS), direct(IDS))


@every_norm
def test_buffers_keep_fp32_under_a_cast(small: Build, norm: dict[str, Any]) -> None:
    model = build(small, norm)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(torch.bfloat16)
    assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
    for name, buffer in model.named_buffers():
        assert buffer.dtype == before[name].dtype, name
        assert torch.equal(buffer, before[name]), name
    assert model(IDS).dtype == torch.bfloat16


@every_norm
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_loaded_model_is_the_saved_one(
    small: Build, tmp_path: Path, norm: dict[str, Any], dtype: torch.dtype | None
) -> None:
    model = moved(build(small, norm)).eval()
    folder = write_checkpoint(
        tmp_path / "step-00000001", step=1, config=model.config.to_dict(), weights=model.state_dict()
    )
    loaded = load_model(folder, dtype=dtype)
    assert loaded.config == model.config
    model = model.to(dtype) if dtype is not None else model
    assert all_tensors(loaded).keys() == all_tensors(model).keys()
    for name, tensor in all_tensors(model).items():
        assert all_tensors(loaded)[name].dtype == tensor.dtype, name
        assert torch.equal(all_tensors(loaded)[name], tensor), name
    assert torch.equal(loaded(IDS), model(IDS))


@every_norm
def test_every_parameter_learns(small: Build, norm: dict[str, Any]) -> None:
    """No gradient is missing or zero, so that DDP, ZeRO and one process agree; and a few steps lower the loss."""
    model = build(small, norm)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.roll(-1, 1).flatten())
        optimiser.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
        losses.append(loss.item())
        optimiser.step()
    # After a few steps, when sub-layers no longer start from nearly nothing; a tapered norm's linear map still waits.
    waiting = {name for name, _ in model.named_parameters() if name.endswith("offset")}
    assert all((weight.grad.abs().max() > 0) == (name not in waiting) for name, weight in model.named_parameters())
    assert losses[-1] < losses[0] - 1


@every_norm
def test_decay_is_decided_for_each_parameter_by_its_name(small: Build, norm: dict[str, Any]) -> None:
    model = build(small, norm)
    method, name_of = model.config.norm_method, dict(model.named_parameters())
    decayed = {name for name, weight in name_of.items() if method.decayed(model.config, name, weight)}
    matrices = {name for name, weight in name_of.items() if weight.ndim == 2}
    assert decayed == (set(name_of) if norm["method"] == "dyt" else matrices)


def test_decay_sees_the_shape_beside_an_empty_shard() -> None:
    """What ZeRO-3 leaves in the place of a matrix, and of a vector."""
    config = ModelConfig(vocab_size=8)
    for shape, decayed in (((4, 4), True), ((4,), False)):
        shard = nn.Parameter(torch.empty(0))
        shard.ds_shape = torch.Size(shape)
        assert config.norm_method.decayed(config, "layers.0.mlp.up_proj.weight", shard) == decayed


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_shipped_file_shows_every_option_at_its_default(method: str) -> None:
    """One file per method, without lists; that of by_layer is an example of a mixture."""
    content = yaml.safe_load((configs_folder() / "norm" / f"{method}.yaml").read_text())
    assert content.keys() == {"model"}
    assert content["model"].keys() == {"config"}
    assert content["model"]["config"].keys() == {"norm"}
    options = content["model"]["config"]["norm"]
    shipped = build_norm_method(options)
    assert options.pop("method") == method == shipped.name
    assert options.keys() == asdict(shipped).keys()
    if method == "by_layer":
        blocks = Llama(ModelConfig(vocab_size=8, norm={"method": method, **options})).blocks
        assert len({type(block) for block in blocks}) == 2
    else:
        assert shipped == METHODS[method]()


def test_there_is_no_file_without_a_method() -> None:
    assert {path.stem for path in (configs_folder() / "norm").glob("*.yaml")} == set(METHODS)
