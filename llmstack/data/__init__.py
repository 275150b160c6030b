"""Text sources, prepared data on disk, and the order and shape in which training reads them."""

from llmstack.data.baselines import Baselines, BaselineScore, score_baselines
from llmstack.data.batches import EvaluationBatchSampler, KeyedSamples, StepBatchSampler, collate
from llmstack.data.best_fit import BestFitBlocks
from llmstack.data.holdout import Split
from llmstack.data.order import SampleOrder
from llmstack.data.packing import IGNORE_INDEX, PackedBlocks
from llmstack.data.prepare import prepare_source
from llmstack.data.prepared import PreparedData, bits_per_byte
from llmstack.data.sources import EMBEDDED, Document, Source, iterate_documents, resolve_files
from llmstack.data.tasks import TaskDataset

__all__ = [
    "EMBEDDED",
    "IGNORE_INDEX",
    "BaselineScore",
    "Baselines",
    "BestFitBlocks",
    "Document",
    "EvaluationBatchSampler",
    "KeyedSamples",
    "PackedBlocks",
    "PreparedData",
    "SampleOrder",
    "Source",
    "Split",
    "StepBatchSampler",
    "TaskDataset",
    "bits_per_byte",
    "collate",
    "iterate_documents",
    "prepare_source",
    "resolve_files",
    "score_baselines",
]
