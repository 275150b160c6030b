"""Products made for decoding on a CPU, and weights as whole numbers."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.inference import Generator
from llmstack.inference.linear import (
    FEW_ROWS,
    INT4_GROUP,
    Int4Linear,
    Int8Linear,
    StreamedLinear,
    pack_int4,
    quantise,
    stream_on_cpu,
    unpack_int4,
)
from llmstack.model import Llama

SHAPES = [(1, 1), (3, 5), (64, 1), (40, 97), (128, 256), (1024, 33)]
ROWS = [1, 2, FEW_ROWS, FEW_ROWS + 1]


@pytest.fixture(scope="module", autouse=True)
def operations() -> None:
    from llmstack.inference.kernels import load_kernels

    load_kernels()


def close(found: Tensor, x: Tensor, weight: Tensor, bits_of_x: int | None = None) -> None:
    """The product within what rounding to bf16 makes of it, and rounding ``x`` to whole numbers of its largest."""
    assert found.dtype == torch.bfloat16
    x, weight = x.double(), weight.double()
    exact = x @ weight.T
    allowed = 2**-8 * exact.abs() + 1e-5
    if bits_of_x is not None:
        half_a_step = x.abs().amax(1, keepdim=True) / (2**bits_of_x - 2) / 2
        allowed = allowed + half_a_step * weight.abs().sum(1)
    assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_bf16_is_the_product_in_double(width: int, out: int, rows: int) -> None:
    torch.manual_seed(width + out)
    x, weight = torch.randn(rows, width).bfloat16(), torch.randn(out, width).bfloat16()
    close(StreamedLinear(weight, None)(x), x, weight)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_int8_is_the_product_in_double(width: int, out: int, rows: int) -> None:
    torch.manual_seed(width + out)
    x, weight = torch.randn(rows, width).bfloat16(), torch.randint(-128, 128, (out, width), dtype=torch.int8)
    scale = torch.rand(out) / 100
    close(Int8Linear(weight, scale, None)(x), x, weight.double() * scale.double()[:, None], bits_of_x=15)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("width", "out"), [(INT4_GROUP, 1), (2 * INT4_GROUP, 37), (1024, 33)])
def test_int4_is_the_product_in_double(width: int, out: int, rows: int) -> None:
    torch.manual_seed(width + out)
    x, weight = torch.randn(rows, width).bfloat16(), torch.randint(-8, 8, (out, width), dtype=torch.int8)
    scale = torch.rand(out, width // INT4_GROUP) / 100
    exact = weight.double() * scale.double().repeat_interleave(INT4_GROUP, 1)
    close(Int4Linear(weight, scale, None)(x), x, exact, bits_of_x=15)


def test_int4_numbers_come_out_as_they_went_in() -> None:
    weight = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2 * INT4_GROUP // 16)
    assert torch.equal(unpack_int4(pack_int4(weight)), weight)


def test_nothing_leaks_from_beyond_a_view() -> None:
    """Rows of a wider matrix, numbers around them not finite."""
    x = torch.full((3, 40), torch.nan, dtype=torch.bfloat16)
    x[:, 3:35] = 1
    weight = torch.full((9, 32), 0.5, dtype=torch.bfloat16)
    assert torch.equal(StreamedLinear(weight, None)(x[:, 3:35]), torch.full((3, 9), 16.0, dtype=torch.bfloat16))


def test_which_matrices_have_them(random_model: Callable[..., Llama]) -> None:
    model = random_model().bfloat16()
    stream_on_cpu(model)
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(StreamedLinear) == 7 * 4 + 1
    assert nn.Linear not in kinds


def test_fp32_models_stay(random_model: Callable[..., Llama]) -> None:
    model = random_model()
    before = model.state_dict()
    stream_on_cpu(model)
    assert not any(isinstance(module, StreamedLinear) for module in model.modules())
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_numbers_are_the_nearest(weights: str, random_model: Callable[..., Llama]) -> None:
    pytest.importorskip("torchao")
    model = random_model(hidden_size=64, intermediate_size=128).bfloat16()
    exact = model.blocks[0].mlp.down_proj.weight.detach().float()
    quantise(model, weights)  # type: ignore[arg-type]
    found = model.blocks[0].mlp.down_proj
    if weights == "int8":
        steps = found.scale[:, None]
        numbers = found.weight * steps
    else:
        steps = found.scale.repeat_interleave(INT4_GROUP, 1)
        numbers = unpack_int4(found.packed) * steps
    # Half a step, and what rounding the quotients to bf16 moves.
    assert ((numbers - exact).abs() <= 0.5 * steps + 2**-7 * exact.abs() + 1e-6).all()


@torch.no_grad()
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_model_of_them_is_that_of_the_numbers_they_stand_for(
    weights: str, rows: int, random_model: Callable[..., Llama]
) -> None:
    pytest.importorskip("torchao")
    model = random_model(
        hidden_size=64, intermediate_size=128, initializer_range=0.1, tie_word_embeddings=False
    ).bfloat16()
    expected = deepcopy(model).float()
    quantise(model, weights)  # type: ignore[arg-type]
    for name, module in model.named_modules():
        if isinstance(module, Int8Linear):
            expected.get_submodule(name).weight.copy_(module.weight * module.scale[:, None])
        elif isinstance(module, Int4Linear):
            numbers = unpack_int4(module.packed) * module.scale.repeat_interleave(INT4_GROUP, 1)
            expected.get_submodule(name).weight.copy_(numbers)
    ids = torch.arange(rows).view(1, rows)
    found, exact = model(ids).float(), expected(ids)
    assert (found - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.parametrize(
    ("weights", "overrides", "dtype", "message"),
    [
        ("int8", {}, torch.float32, "int8 weights: the model must be in bf16, not torch.float32"),
        ("int4", {"hidden_size": 96}, torch.bfloat16, "reads 96 numbers, not a multiple of 64; use int8"),
    ],
)
def test_what_cannot_be_is_said(
    weights: str, overrides: dict, dtype: torch.dtype, message: str, random_model: Callable[..., Llama]
) -> None:
    pytest.importorskip("torchao")
    model = random_model(**overrides).to(dtype)
    with pytest.raises(UserError, match=message):
        Generator(model, 32, weights=weights)  # type: ignore[arg-type]
