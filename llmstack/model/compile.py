"""torch.compile, applied where it pays: each block's forward and the loss kernel of the head."""

import torch

from llmstack.model.llama import Llama


def compile_model(model: Llama) -> Llama:
    """Compile in place: one graph serves all blocks, one the loss, for each mode (training, validation).

    ``block.forward`` is compiled, not the module: hooks of a sharding strategy stay outside the graph, and parameter
    names stay as they are. A graph break is an error, not a slow run.
    """
    for block in model.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
    model.lm_head.loss_kernel = torch.compile(model.lm_head.loss_kernel, fullgraph=True, dynamic=False)
    return model
