"""Numbers that the BHyT paper prints (arXiv 2601.09719), to stand beside measured ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SIZES = {"374M": 374_637_568, "1B": 1_235_814_400, "3B": 3_212_749_824}
"""Parameters of the sizes in the paper's tables, with RMSNorm."""
NUM_FEWSHOT = 3
"""Of all downstream numbers in them."""

_SIZE_TOLERANCE = 0.02
"""Norms differ in their parameters, by far less than this."""

_TASKS = "arc_challenge arc_easy piqa hellaswag openbookqa winogrande mmlu boolq avg"
_LOSSES, _PERPLEXITIES = "train_loss eval_loss", "c4_ppl wikitext2_ppl"

_TABLE_1 = """
374M RMSNorm 3.532 3.216 24.916 24.13±.58 38.63±.45 66.62±.36 36.92±.15 26.84±1.35 51.51±.56  25.18±.02 50.40±.26 40.03±.21
374M Peri-LN 3.532 3.219 25.015 24.03±.43 37.31±.32 64.91±.48 36.77±.23 27.44±.85  50.70±.94  25.22±.01 51.30±.07 39.71±.18
374M LNS     3.549 3.229 25.250 23.81±.49 36.32±.50 66.12±.33 36.31±.12 26.72±.82  49.20±1.13 26.06±.01 50.24±.31 39.35±.24
374M DyT     3.614 3.299 27.085 24.27±.65 36.66±.56 63.59±.35 34.19±.22 27.64±.57  50.24±.70  25.96±.02 50.42±.22 39.12±.18
374M BHyT    3.519 3.207 24.714 24.40±.35 38.68±.29 65.80±.42 37.31±.09 27.88±.52  51.71±.56  26.19±.01 50.53±.63 40.31±.11
1B   RMSNorm 2.876 2.877 17.753 24.33±.22 39.43±.47 68.16±.54 44.83±.15 28.32±.72  50.29±.93  26.55±.03 53.62±.21 41.94±.15
1B   Peri-LN 2.884 2.884 17.892 23.17±.63 39.45±.50 68.07±.50 44.69±.19 29.40±.63  52.15±.17  26.99±.01 54.51±.71 42.31±.22
1B   LNS     2.848 2.848 17.259 24.15±.80 38.86±.17 68.70±.41 46.52±.14 30.56±.96  50.80±.65  26.30±.02 56.90±.26 42.85±.11
1B   DyT     2.891 2.894 18.065 24.50±.56 43.03±.33 68.74±.49 43.55±.13 28.96±1.00 52.41±.38  27.24±.03 53.30±.71 42.71±.21
1B   BHyT    2.828 2.802 16.470 24.28±.43 40.94±.38 69.06±.36 48.97±.03 30.04±1.13 51.29±.65  27.01±.06 55.74±.43 43.42±.25
"""  # noqa: E501
_TABLE_2 = """
374M RMSNorm 27.90±.03 39.45±.08 24.45±.79 43.16±.44 67.57±.43 37.74±.15 28.48±.57  50.66±.50 24.83±.08 51.50±.74 41.02±.22
374M Peri-LN 28.20±.04 38.62±.09 24.22±.41 41.98±.72 66.82±.30 37.51±.24 27.96±.50  50.26±.51 24.44±.06 51.84±.45 40.61±.20
374M LNS     28.39±.03 39.47±.06 24.91±.26 41.28±.20 67.51±.33 37.46±.16 28.32±.68  48.49±.43 26.65±.04 51.34±.41 40.79±.09
374M DyT     31.12±.02 44.67±.07 24.85±.34 41.20±.28 65.06±.70 35.11±.18 28.44±1.15 51.32±.59 26.83±.07 50.55±.34 40.42±.20
374M BHyT    27.40±.13 38.39±.39 25.44±.27 42.12±.48 66.18±.21 37.31±.11 29.08±.45  51.21±.91 26.23±.12 52.02±.40 41.20±.17
1B   RMSNorm 20.34±.01 25.99±.01 27.34±.50 49.88±.40 71.16±.63 47.93±.17 30.76±.92  51.90±.87 26.80±.07 50.27±.74 44.51±.23
1B   Peri-LN 21.33±.75 26.88±.97 25.87±.49 48.93±.32 70.17±.29 47.61±.70 31.76±1.21 52.17±.57 25.51±.10 48.79±.25 43.85±.12
1B   LNS     19.89±.21 25.99±.35 26.52±.28 48.90±.48 70.74±.57 50.11±.21 31.04±1.62 51.76±.68 24.57±.09 54.02±.36 44.71±.19
1B   DyT     20.27±.01 24.61±.01 25.70±.69 48.99±.35 70.17±.45 44.92±.19 31.36±1.35 52.68±.68 27.24±.07 50.29±.65 43.92±.29
1B   BHyT    19.37±.15 23.84±.29 27.18±.69 50.35±.67 72.29±.23 50.88±.71 32.16±1.11 51.07±.94 27.54±.07 57.05±.91 46.07±.16
"""  # noqa: E501
_TABLE_3_PRETRAINED = """
3B Peri-LN 2.811 2.812 23.29±.56 40.90±.34 68.86±.67 47.54±.13 30.36±.67  51.51±.22 27.02±.01 47.20±.66 42.08±.25
3B BHyT    2.756 2.760 25.03±.48 45.97±.58 70.18±.08 51.02±.20 31.12±1.26 52.14±.29 27.50±.02 55.88±.34 44.86±.11
"""
_TABLE_3_TUNED = """
3B Peri-LN 18.72±.06 23.04±.03 27.51±.60 51.08±.50 71.76±.48 50.10±.18 32.16±.53 52.23±.51 26.54±.25 42.56±1.19 44.24±.20
3B BHyT    17.43±.15 21.33±.20 28.21±.53 54.62±.40 73.46±.43 53.85±.50 32.36±.69 53.12±.40 26.79±.23 49.16±1.36 46.45±.28
"""  # noqa: E501


@dataclass(frozen=True)
class Printed:
    """A number and the ± behind it; None: it has none."""

    mean: float
    spread: float | None


@dataclass(frozen=True)
class PublishedRow:
    """A row of one of the paper's tables."""

    size: str
    method: str
    table: int
    tuned: bool
    """After supervised fine-tuning on LIMA (with a chat template), not straight after pretraining."""
    numbers: dict[str, Printed]
    """By column; tasks and their average in per cent."""


def published_size(parameters: int) -> str | None:
    """Name of the published size that a model of so many parameters has, within 2 %."""
    for name, count in SIZES.items():
        if abs(parameters - count) <= _SIZE_TOLERANCE * count:
            return name
    return None


def _rows(text: str, table: int, tuned: bool, columns: str) -> Iterator[PublishedRow]:
    for line in text.strip().splitlines():
        size, method, *cells = line.split()
        printed = (cell.partition("±") for cell in cells)
        numbers = [Printed(float(mean), float(spread) if spread else None) for mean, _, spread in printed]
        yield PublishedRow(size, method, table, tuned, dict(zip(columns.split(), numbers, strict=True)))


PUBLISHED = (
    *_rows(_TABLE_1, 1, False, f"{_LOSSES} ppl {_TASKS}"),
    *_rows(_TABLE_2, 2, True, f"{_PERPLEXITIES} {_TASKS}"),
    *_rows(_TABLE_3_PRETRAINED, 3, False, f"{_LOSSES} {_TASKS}"),
    *_rows(_TABLE_3_TUNED, 3, True, f"{_PERPLEXITIES} {_TASKS}"),
)
"""Tables 1 to 3."""
