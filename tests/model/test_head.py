"""The LM head with its loss: equal to the plain formula, without the full logits."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llmstack.model import head as head_module
from llmstack.model.head import LMHead

HIDDEN, VOCAB, BATCH, LENGTH = 16, 37, 2, 11


def case(dtype: torch.dtype, bias: bool = True) -> tuple[LMHead, Tensor, Tensor]:
    """A head, hidden states that want a gradient, and labels of which some are left out."""
    torch.manual_seed(0)
    head = LMHead(HIDDEN, VOCAB, bias=bias).to(dtype)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0, 0.5)
    hidden = torch.randn(BATCH, LENGTH, HIDDEN, dtype=dtype, requires_grad=True)
    labels = torch.randint(VOCAB, (BATCH, LENGTH))
    labels[0, 3:6] = labels[1, -1] = -100
    return head, hidden, labels


def plain(head: LMHead, hidden: Tensor, labels: Tensor, valid: float) -> Tensor:
    logits = F.linear(hidden, head.weight, head.bias)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / valid


@pytest.fixture(params=[None, 4, 1], ids=["one-chunk", "chunks-of-4", "chunks-of-1"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """22 tokens in one chunk, in chunks of 4 (the last with 2), and one by one."""
    if request.param is not None:
        monkeypatch.setattr(head_module, "_CHUNK_BYTES", {"cpu": 4 * VOCAB * request.param})


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_loss_and_gradients_equal_the_plain_formula(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    head, hidden, labels = case(dtype, bias)
    leaves = [hidden, *head.parameters()]
    expected = plain(head, hidden, labels, 29.0)
    loss = head(hidden, labels, valid_tokens=29)  # of the whole step, more than are here
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    # An upstream factor, as gradient scaling has it.
    for ours, theirs in zip(
        torch.autograd.grad(loss * 3, leaves), torch.autograd.grad(expected * 3, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


@pytest.mark.usefixtures("chunked")
def test_without_gradients_and_per_token() -> None:
    head, hidden, labels = case(torch.float32)
    logits = head(hidden)
    assert torch.equal(logits, F.linear(hidden, head.weight, head.bias))
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    losses = head(hidden, labels)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert (losses[labels == -100] == 0).all()
    with torch.no_grad():
        torch.testing.assert_close(head(hidden, labels, 18), expected.sum() / 18, rtol=1e-5, atol=0)


def test_valid_tokens_as_a_number_or_a_tensor() -> None:
    head, hidden, labels = case(torch.float32)
    counts = (18, torch.tensor(18), torch.tensor(18, dtype=torch.int64))
    assert len({head(hidden, labels, count).item() for count in counts}) == 1


def test_nothing_to_predict_gives_zero() -> None:
    head, hidden, labels = case(torch.float32)
    loss = head(hidden, torch.full_like(labels, -100), 18)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == 0


@pytest.mark.usefixtures("chunked")
@pytest.mark.parametrize("autocast", [False, True], ids=["bf16-weights", "autocast"])
def test_loss_of_bf16_logits_is_not_quantised(autocast: bool) -> None:
    head, hidden, labels = case(torch.float32 if autocast else torch.bfloat16, bias=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, loss = head(hidden), head(hidden, labels, 18)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    flat = logits.float().flatten(0, 1)
    expected = F.cross_entropy(flat, labels.flatten(), reduction="sum") / 18
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    assert hidden.grad.dtype == hidden.dtype
    assert head.weight.grad.dtype == head.weight.dtype
    exact, wide_hidden, _ = case(torch.float32, bias=False)
    plain(exact, wide_hidden, labels, 18).backward()
    assert (head.weight.grad.float() - exact.weight.grad).norm() < 0.02 * exact.weight.grad.norm()
    assert (hidden.grad.float() - wide_hidden.grad).norm() < 0.02 * wide_hidden.grad.norm()


def test_second_backward_is_an_error() -> None:
    head, hidden, labels = case(torch.float32)
    loss = head(hidden, labels, 18)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward pass"):
        loss.backward()


PEAK = """
import sys, torch
from llmstack.model.head import LMHead

torch.set_num_threads(1)
head = LMHead(64, 128256)
torch.nn.init.normal_(head.weight, std=0.02)
if sys.argv[1] == "compiled":
    head.loss_kernel = torch.compile(head.loss_kernel, fullgraph=True, dynamic=False)

def step(batch, length):
    hidden = torch.randn(batch, length, 64, requires_grad=True)
    head(hidden, torch.randint(128256, (batch, length)), batch * length).backward()

step(1, 8)
def kilobytes(field):
    return int(open("/proc/self/status").read().split(field + ":")[1].split()[0])

# Not getrusage: its peak starts from that of the process that started this one.
resident = kilobytes("VmRSS")
step(2, 1024)
print((kilobytes("VmHWM") - resident) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("kernel", "limit"), [("compiled", 0.15), ("eager", 0.4)])
def test_peak_memory_stays_below_the_full_logits(kernel: str, limit: float) -> None:
    """Vocabulary 128,256, batch 2 x 1024: loss and gradients need a fraction of the logits' 1.05 GB in fp32.

    The compiled kernel has no temporaries; the eager one has a few of a chunk's size.
    """
    run = subprocess.run([sys.executable, "-c", PEAK, kernel], capture_output=True, text=True, check=True)
    share = int(run.stdout) / (2 * 1024 * 128256 * 4)
    assert share < limit, f"{share:.1%}"
