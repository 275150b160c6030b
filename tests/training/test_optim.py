"""Parameter groups, schedules and clipping against their definitions."""

import math

import pytest
import torch

from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.training.optim import (
    OptimizerConfig,
    build_optimizer,
    clip_gradients,
    optimizer_tensors,
    restore_optimizer,
)


def small_model(method: str = "bhyt") -> Llama:
    return Llama(
        ModelConfig(vocab_size=64, hidden_size=32, num_layers=2, intermediate_size=48, norm={"method": method})
    )


@pytest.mark.parametrize("method", ["rmsnorm", "layernorm", "bhyt", "bhyt_star"])
def test_only_matrices_decay_and_each_parameter_has_one_group(method: str) -> None:
    """Zero gradients, rate 1, decay 0.1: one step leaves x0.9 of each matrix and all of everything else."""
    model = small_model(method)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1.0, weight_decay=0.1))
    grouped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(grouped) == len({id(parameter) for parameter in grouped}) == len(list(model.parameters()))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 0.9 if parameter.ndim >= 2 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_cosine_passes_through_its_known_points() -> None:
    config = OptimizerConfig(lr=2.0, warmup_ratio=0.1, min_lr_ratio=0.1)
    rate = [config.learning_rate(step, 1000) for step in range(1, 1001)]
    assert rate[0] == pytest.approx(2.0 / 100)
    assert rate[99] == max(rate) == 2.0
    assert rate[549] == pytest.approx(2.0 * 0.55)  # halfway down: the mean of peak and minimum
    assert rate[999] == pytest.approx(0.2)
    assert rate[99:] == sorted(rate[99:], reverse=True)


def test_wsd_is_stable_then_decays_linearly() -> None:
    config = OptimizerConfig(lr=1.0, schedule="wsd", warmup_ratio=0.1, decay_ratio=0.2, min_lr_ratio=0.0)
    assert config.learning_rate(50, 1000) == pytest.approx(0.5)
    assert {config.learning_rate(step, 1000) for step in (100, 500, 800)} == {1.0}
    assert config.learning_rate(900, 1000) == pytest.approx(0.5)
    assert config.learning_rate(1000, 1000) == 0.0


def test_constant_without_warmup_is_constant() -> None:
    config = OptimizerConfig(lr=3.0, schedule="constant", warmup_ratio=0.0)
    assert {config.learning_rate(step, 7) for step in range(1, 8)} == {3.0}


def test_clipping_returns_the_norm_before_and_leaves_the_limit() -> None:
    model = small_model()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    squares = sum(
        float(parameter.grad.double().pow(2).sum()) for parameter in model.parameters() if parameter.grad is not None
    )
    assert float(clip_gradients(model, 0.5)) == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert float(clip_gradients(model, None)) == pytest.approx(0.5, rel=1e-4)


def test_optimizer_state_comes_back_and_foreign_state_is_refused() -> None:
    model, config = small_model(), OptimizerConfig()
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(model, optimizer).items()}
    fresh = build_optimizer(model, config)
    restore_optimizer(model, fresh, saved)
    back = optimizer_tensors(model, fresh)
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[name], saved[name]) for name in saved)
    saved.pop("embed_tokens.weight/exp_avg"), saved.pop("embed_tokens.weight/exp_avg_sq")
    saved.pop("embed_tokens.weight/step")
    with pytest.raises(UserError, match=r"embed_tokens\.weight"):
        restore_optimizer(model, fresh, saved)


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", -1.0), ("lr", 0.0), ("lr", math.nan), ("beta2", 1.0), ("warmup_ratio", 1.5), ("weight_decay", -0.1)],
)
def test_bad_values_are_named(option: str, value: float) -> None:
    with pytest.raises(UserError, match=option):
        OptimizerConfig(**{option: value})
