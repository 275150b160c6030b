"""What ``bench norm`` times: the right operations, with their backward, their bytes and in the right order."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmstack.bench.bandwidth import Clock, Copy
from llmstack.bench.norm import PLACES, BlockNorms, Shape, Variant, rounds, variants
from llmstack.errors import UserError
from llmstack.model import Llama, ModelConfig
from llmstack.model.norms import METHODS

SHAPE = Shape(2, 6, 16)
NUMBERS = 2 * 6 * 16
CPU = torch.device("cpu")


def norms_of(variant: Variant, dtype: torch.dtype = torch.float32) -> BlockNorms:
    return BlockNorms(variant, SHAPE, dtype, CPU)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def test_every_method_but_the_mixtures_in_every_phase() -> None:
    removed = {"tapernorm_internal", "tapernorm_all", "taperln_internal", "taperln_all", "fake_ln"}
    expected = {(name, None) for name in set(METHODS) - removed - {"mix_ln", "by_layer"}}
    expected |= {(name, phase) for name in removed for phase in ("norm", "taper", "linear")}
    assert len(variants(None)) == len(expected)
    assert set(variants(None)) == expected
    assert variants(["dyt", "bhyt", "dyt"]) == [("dyt", None), ("bhyt", None)]


@pytest.mark.parametrize(("name", "message"), [("rsnorm", "unknown method"), ("mix_ln", "mixture")])
def test_other_methods_are_refused_with_the_known_ones(name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"--methods {name}: .*{message}.*bhyt, bhyt_star, deep_norm, dyt, fake_ln"):
        variants(["rmsnorm", name])


@pytest.mark.parametrize(
    ("method", "place", "forward", "backward"),
    [
        # [batch, seq, hidden] tensors, vectors [hidden], [batch, seq] tensors (in fp32) and single numbers.
        ("rmsnorm", "attention", (2, 1, 0, 0), (3, 2, 0, 0)),
        ("rmsnorm", "mlp", (2, 1, 0, 0), (3, 2, 0, 0)),
        ("rmsnorm", "block", (4, 2, 0, 0), (6, 4, 0, 0)),
        ("layernorm", "mlp", (2, 2, 0, 0), (3, 4, 0, 0)),
        ("bhyt", "attention", (2, 1, 1, 1), (3, 2, 1, 2)),  # writes the mean square, gets its gradient
        ("bhyt", "mlp", (2, 1, 1, 1), (3, 2, 2, 2)),  # reads the mean square, twice, and writes its gradient
        ("bhyt", "block", (4, 2, 0, 2), (6, 4, 0, 4)),
        ("peri_ln", "block", (8, 4, 0, 0), (12, 8, 0, 0)),
        ("post_ln", "block", (4, 2, 0, 0), (6, 4, 0, 0)),
        ("fake_ln", "attention", (3, 2, 0, 0), (4, 4, 0, 0)),  # one output for queries and keys, one for values
    ],
)
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes(
    method: str, place: str, forward: tuple[int, ...], backward: tuple[int, ...], dtype: torch.dtype, size: int
) -> None:
    def in_bytes(counts: tuple[int, ...]) -> int:
        streams, vectors, statistics, numbers = counts
        return size * (NUMBERS * streams + 16 * vectors + numbers) + 4 * 2 * 6 * statistics

    operation = norms_of(variants([method])[0], dtype).operations("eager")[place]
    assert operation.least_bytes("forward") == in_bytes(forward)
    assert operation.least_bytes("forward_backward") == in_bytes(forward) + in_bytes(backward)


def test_a_copy_reads_and_writes() -> None:
    copy = Copy(torch.randn(SHAPE, dtype=torch.bfloat16))
    copy()
    assert torch.equal(copy.target, copy.source)
    assert copy.bytes == 2 * 2 * NUMBERS


def test_the_gradients_of_rmsnorm_are_torchs() -> None:
    norms = norms_of(Variant("rmsnorm"))
    operation = norms.operations("eager")["attention"]
    x, weight = norms.x.detach().requires_grad_(), torch.ones(16, requires_grad=True)
    y = F.rms_norm(x, (16,), weight, eps=1e-5)
    torch.testing.assert_close(operation.forward()[0], y)
    assert not operation.forward()[0].requires_grad
    y.backward(operation.gradients[0])
    torch.testing.assert_close(operation.forward_backward(), (x.grad, weight.grad))


@pytest.mark.parametrize("variant", variants(None), ids=str)
def test_every_backward_really_runs(variant: Variant) -> None:
    """Every input and every parameter has a gradient; zero are only those that the phase does not use."""
    unused = {None: (), "norm": ("offset", "bias_offset"), "taper": (), "linear": ("weight", "bias")}[variant.phase]
    norms = norms_of(variant)
    names = [name for site in (norms.attention, norms.mlp, *norms.after) for name, _ in site.named_parameters()]
    if variant.method == "fake_ln":
        unused = ()
    operations = norms.operations("eager")
    assert tuple(operations) == PLACES
    for place in ("attention", "mlp"):
        assert all(gradient.abs().max() > 0 for gradient in operations[place].forward_backward()[:1])
    gradients = operations["block"].forward_backward()
    inputs = 2 + len(norms.after)
    assert [gradient.shape for gradient in gradients[:inputs]] == [torch.Size(SHAPE)] * inputs
    assert all(gradient.abs().max() > 0 for gradient in gradients[:inputs])
    for name, gradient in zip(names, gradients[inputs:], strict=True):
        assert (gradient.abs().max() > 0) == (name not in unused), name


@pytest.mark.parametrize("method", ["tapernorm_internal", "taperln_all", "fake_ln"])
def test_the_phases_are_what_they_are_called(method: str) -> None:
    """A norm forgets the scale of its input, a linear map keeps it, and between the two it is neither."""

    def growth(place: str, phase: str) -> float:
        operation = norms_of(Variant(method, phase)).operations("eager")[place]
        y, bigger = (_first(operation.call(factor * operation.inputs[0])) for factor in (1, 3))
        return (bigger.norm() / y.norm()).item()

    for place in ("attention", "mlp"):
        assert growth(place, "norm") == pytest.approx(1, abs=1e-3)
        assert growth(place, "linear") == pytest.approx(3, abs=1e-3)
        middle = growth(place, "taper")
        # A site of FakeLN is switched at once; what is left to measure of others costs it time, not its value.
        assert middle == pytest.approx(3, abs=1e-3) if method == "fake_ln" else 1.5 < middle < 2.5


def test_the_second_site_gets_what_the_first_hands_on() -> None:
    operation = norms_of(Variant("bhyt")).operations("eager")["block"]
    x, middle = (tensor.detach() for tensor in operation.inputs)
    assert not torch.equal(operation.call(x, middle)[1], operation.call(2 * x, middle)[1])


@pytest.mark.parametrize("method", ["rmsnorm", "bhyt", "peri_ln", "post_ln"])
def test_the_norms_are_those_of_a_block(method: str) -> None:
    """Every parameter of a decoder's block that is none of attention's or the MLP's."""
    model = Llama(ModelConfig(vocab_size=8, hidden_size=16, num_layers=1, num_heads=1, norm={"method": method}))
    expected = [
        parameter.shape
        for name, parameter in model.blocks[0].named_parameters()
        if not name.startswith(("attention.", "mlp."))
    ]
    found = norms_of(Variant(method)).operations("eager")["block"].parameters
    assert sorted(weight.shape for weight in found) == sorted(expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_and_eager_are_the_same_operation(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    norms = norms_of(Variant("tapernorm_internal", "taper"))
    compiled = norms.operations("compiled")
    for place, eager in norms.operations("eager").items():
        torch.testing.assert_close(compiled[place].forward(), eager.forward())
        same = replace(compiled[place], gradients=eager.gradients)
        torch.testing.assert_close(same.forward_backward(), eager.forward_backward())


def test_rounds_interleave_and_swap_the_pair() -> None:
    calls: list[str] = []
    runs = [lambda name=name: calls.append(name) for name in ("method", "rmsnorm", "copy")]
    series = rounds(runs, 4, Clock(CPU))
    assert [len(times) for times in series] == [4, 4, 4]
    there, back = ["method", "rmsnorm", "copy"], ["rmsnorm", "method", "copy"]
    assert calls[-12:] == [*there, *back, *there, *back]


def test_times_stay_with_their_operation_when_the_pair_is_swapped() -> None:
    class Known(Clock):
        """Seconds that tell the runs apart."""

        def seconds(self, runs):
            return [float(run()) for run in runs]

    assert rounds([lambda: 1, lambda: 2, lambda: 3], 3, Known(CPU)) == [[1] * 3, [2] * 3, [3] * 3]


def _first(value: object) -> Tensor:
    return _all(value)[0]


def _all(value: object) -> list[Tensor]:
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _all(part)]
    return [value] if isinstance(value, Tensor) else []
