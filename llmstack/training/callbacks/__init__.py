"""What happens around the training step."""

from llmstack.training.callbacks.checkpointing import Checkpointing
from llmstack.training.callbacks.diagnostics import Diagnostics
from llmstack.training.callbacks.evaluating import Evaluation
from llmstack.training.callbacks.guards import SameWeights, SkippedSteps
from llmstack.training.callbacks.metrics import Metrics
from llmstack.training.callbacks.norm_life import NormLife
from llmstack.training.callbacks.profiling import Profiling
from llmstack.training.callbacks.progress import ProgressDisplay
from llmstack.training.callbacks.stopping import StopOnSignal
from llmstack.training.callbacks.together import Together
from llmstack.training.callbacks.validation import Validation

__all__ = [
    "Checkpointing",
    "Diagnostics",
    "Evaluation",
    "Metrics",
    "NormLife",
    "Profiling",
    "ProgressDisplay",
    "SameWeights",
    "SkippedSteps",
    "StopOnSignal",
    "Together",
    "Validation",
]
