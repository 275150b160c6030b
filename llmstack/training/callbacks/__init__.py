"""What happens around the training step."""

from llmstack.training.callbacks.checkpointing import Checkpointing
from llmstack.training.callbacks.metrics import Metrics
from llmstack.training.callbacks.norm_life import NormLife
from llmstack.training.callbacks.progress import ProgressDisplay
from llmstack.training.callbacks.stopping import StopOnSignal

__all__ = ["Checkpointing", "Metrics", "NormLife", "ProgressDisplay", "StopOnSignal"]
