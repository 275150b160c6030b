"""What the documentation shows really works."""

import re
from pathlib import Path

import pytest
import torch

from llmstack.model import Llama, ModelConfig
from llmstack.model.norms import METHODS

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_example_of_a_new_norm_is_layernorm_scaling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code as printed, registered by its name: block l's input is RMSNorm's divided by sqrt(l)."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / "adding-a-norm.md").read_text(), flags=re.DOTALL)[0]
    names: dict[str, object] = {"__name__": "example"}
    exec(code, names)
    monkeypatch.setitem(METHODS, "lns", names["LayerNormScaling"])
    model = Llama(
        ModelConfig(vocab_size=32, hidden_size=16, num_layers=4, intermediate_size=24, norm={"method": "lns"})
    )
    x = torch.randn(2, 3, 16)
    expected = torch.nn.functional.rms_norm(x, (16,), eps=1e-5)
    for number, block in enumerate(model.blocks, start=1):
        torch.testing.assert_close(block.attention_norm(x)[0], expected / number**0.5)
        torch.testing.assert_close(block.mlp_norm(x, None), expected / number**0.5)
    assert model(torch.arange(6).view(2, 3)).shape == (2, 3, 32)
