"""Linear layers for decoding on a CPU, where a product with few rows should take the time of reading its weights."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmstack.errors import UserError
from llmstack.inference.kernels import NoKernels, load_kernels
from llmstack.model import Llama
from llmstack.model.head import LMHead

_logger = logging.getLogger(__name__)

FEW_ROWS = 8
"""Up to so many rows of input a product is bound by reading the weights, or nearly, and has its own kernel."""

INT4_GROUP = 64
"""int4 weights that share a scale."""

Weights = Literal["int8", "int4"]
"""How matrices are stored: one scale for each row of int8, or for each 64 numbers of int4. Activations stay as are."""


class FewRowsLinear(nn.Module, ABC):
    """A linear layer of bf16 activations that has a product of its own for few rows of input."""

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = cast(nn.Parameter | None, bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = self.of_few(rows) if rows.shape[0] <= FEW_ROWS else self.of_many(rows)
        product = product.view(*x.shape[:-1], -1)
        return product if self.bias is None else product + self.bias

    @abstractmethod
    def of_few(self, rows: Tensor) -> Tensor:
        """``rows`` [n, in] times the matrix, [n, out]."""

    @abstractmethod
    def of_many(self, rows: Tensor) -> Tensor:
        """The same in the time of arithmetic."""


class StreamedLinear(FewRowsLinear):
    """bf16 weights.

    With many rows the product is formed in fp32 where the processor has no instructions for bf16: PyTorch's own then
    takes several times as long.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        self.weight = cast(nn.Parameter, weight)
        self._native = torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def of_few(self, rows: Tensor) -> Tensor:
        """See :class:`FewRowsLinear`."""
        return torch.ops.llmstack.linear_bf16(rows, self.weight)

    def of_many(self, rows: Tensor) -> Tensor:
        """See :class:`FewRowsLinear`."""
        if self._native:
            return F.linear(rows, self.weight)
        return F.linear(rows.float(), self.weight.float()).to(rows.dtype)


class Int8Linear(FewRowsLinear):
    """Weights in int8."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.flatten())

    def of_few(self, rows: Tensor) -> Tensor:
        """See :class:`FewRowsLinear`."""
        return torch.ops.llmstack.linear_int8(rows, self.weight, self.scale)

    def of_many(self, rows: Tensor) -> Tensor:
        """See :class:`FewRowsLinear`."""
        return (F.linear(rows.float(), self.weight.float()) * self.scale).to(rows.dtype)


class Int4Linear(FewRowsLinear):
    """Weights in int4, two to a byte."""

    packed: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(bias)
        self.register_buffer("packed", pack_int4(weight))
        self.register_buffer("scale", scale)

    def of_few(self, rows: Tensor) -> Tensor:
        """See :class:`FewRowsLinear`."""
        return torch.ops.llmstack.linear_int4(rows, self.packed, self.scale)

    def of_many(self, rows: Tensor) -> Tensor:
        """See :class:`FewRowsLinear`."""
        weight = unpack_int4(self.packed).float().view(*self.scale.shape, -1) * self.scale[..., None]
        return F.linear(rows.float(), weight.flatten(1)).to(rows.dtype)


def pack_int4(weight: Tensor) -> Tensor:
    """[out, in] int8 of -8 to 7 -> [out, in / 2] bytes; of each group the first half low, the second high."""
    halves = (weight + 8).to(torch.uint8).view(weight.shape[0], -1, 2, INT4_GROUP // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_int4`."""
    bytes_ = packed.view(packed.shape[0], -1, 1, INT4_GROUP // 2)
    return (torch.cat([bytes_ & 15, bytes_ >> 4], dim=2).to(torch.int8) - 8).flatten(1)


def stream_on_cpu(model: Llama) -> None:
    """Give the matrices of ``model`` in bf16 on a CPU the products made for it. Without a compiler it stays."""
    weight = model.embed_tokens.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return
    try:
        load_kernels()
    except NoKernels as problem:
        _logger.warning("decoding is slower than it could be: %s", problem)
        return
    for parent, name, linear in _matrices(model):
        setattr(parent, name, StreamedLinear(linear.weight, linear.bias))


@torch.no_grad()
def quantise(model: Llama, weights: Weights) -> None:
    """Store the matrices of ``model`` (in bf16; those of the head too, not the embedding) as whole numbers.

    torchao finds the numbers, and on a GPU multiplies with them; the products on a CPU are ours.

    Raises:
        UserError: weights of another type, no torchao, a width that int4 cannot group, or no compiler.
    """
    weight = model.embed_tokens.weight
    if weight.dtype != torch.bfloat16:
        raise UserError(f"{weights} weights: the model must be in bf16, not {weight.dtype}")
    _import_torchao(weights)
    on_cpu = weight.device.type == "cpu"
    if on_cpu:
        try:
            load_kernels()
        except NoKernels as problem:
            raise UserError(f"{weights} weights on a CPU: {problem}") from problem
    for parent, name, linear in _matrices(model):
        if weights == "int4" and linear.weight.shape[1] % INT4_GROUP:
            raise UserError(
                f"int4 weights: {name} reads {linear.weight.shape[1]} numbers, not a multiple of {INT4_GROUP}; use int8"
            )
        setattr(parent, name, _on_cpu(linear, weights) if on_cpu else _on_gpu(linear, weights))


def _import_torchao(weights: Weights) -> None:
    # It says at length which of its libraries for other machines it could not load.
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        import torchao.quantization  # noqa: F401
    except ImportError:
        raise UserError(f"{weights} weights need torchao: pip install 'llmstack[quantize]'") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _matrices(model: Llama) -> list[tuple[nn.Module, str, nn.Linear | LMHead]]:
    """Every matrix that decoding multiplies with, as its owner and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear | LMHead)
    ]


def _as_linear(linear: nn.Linear | LMHead) -> nn.Linear:
    """A layer of its own over the same weights, as torchao wants them."""
    out, width = linear.weight.shape
    own = nn.Linear(width, out, bias=linear.bias is not None, device="meta")
    own.weight = nn.Parameter(linear.weight.detach(), requires_grad=False)
    if linear.bias is not None:
        own.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return own


def _on_cpu(linear: nn.Linear | LMHead, weights: Weights) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    own = _as_linear(linear)
    if weights == "int8":
        config: Any = Int8WeightOnlyConfig()
        kind: type[Int8Linear | Int4Linear] = Int8Linear
    else:
        four_bits = torch.int4  # type: ignore[attr-defined]
        config, kind = IntxWeightOnlyConfig(weight_dtype=four_bits, granularity=PerGroup(INT4_GROUP)), Int4Linear
    quantize_(own, config)
    found: Any = own.weight
    return kind(found.qdata, found.scale.float(), own.bias)


def _on_gpu(linear: nn.Linear | LMHead, weights: Weights) -> nn.Module:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    own = _as_linear(linear)
    if weights == "int8":
        quantize_(own, Int8WeightOnlyConfig())
    else:
        quantize_(own, Int4WeightOnlyConfig(group_size=INT4_GROUP, int4_packing_format="tile_packed_to_4d"))
    return own
