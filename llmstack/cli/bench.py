"""``llmstack bench``: measured figures beside their physical limit. A new bench is one file and one entry below."""

from __future__ import annotations

from typing import Any

from llmstack.cli import bench_data, bench_decode, bench_norm

BENCHES = (bench_decode, bench_norm, bench_data)


def add_parser(subparsers: Any) -> None:
    """Register ``bench``; ``subparsers`` is what ``ArgumentParser.add_subparsers`` returns."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed beside its physical limit",
        description="Measure speed beside its physical limit. The last line on standard output is JSON.",
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for bench in BENCHES:
        bench.add_parser(benches)
