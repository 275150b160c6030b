"""The report as one HTML page that needs nothing else: styles and pictures are inside, and there are no scripts."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from llmstack.reports.evaluation_text import Bold, Layout
from llmstack.reports.table import Gap, GroupNumbers, RunNumbers, Spread, digits

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff }
body { max-width: 1280px; margin: 2em auto; padding: 0 1em }
h1 { margin-bottom: 0 } h2 { margin: 2em 0 .3em }
p, ul { max-width: 62em }
nav a { margin-right: 1em; white-space: nowrap }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top }
th { border-bottom: 2px solid #888; vertical-align: bottom }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; overflow-wrap: anywhere }
tr.baseline { background: #f1f1f1 }
img { max-width: 100%; height: auto }
.missing { color: #666 }
"""


@dataclass(frozen=True)
class Section:
    """A picture on the page."""

    name: str
    title: str
    text: str
    png: bytes
    runs: list[str]
    """Who is in it."""


def page(
    runs: Sequence[RunNumbers],
    groups: Sequence[GroupNumbers],
    baseline: str,
    notes: Sequence[str],
    evaluations: Sequence[Mapping[str, Any]],
    downstream: Sequence[Layout],
    sections: Sequence[Section],
) -> str:
    """The whole page."""
    title = f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].name
    links = " ".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections)
    parts = [
        f"<!DOCTYPE html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>",
        f'<meta name=viewport content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>{escape(title)}</h1>",
        f"<p>Baseline: <b>{escape(baseline)}</b>. Losses are cross-entropy in nats per token.</p>",
        f"<nav>{links}</nav>",
        _list(notes),
        "<h2>Runs</h2>",
        _run_table(runs, baseline),
        _group_table(groups),
        _evaluation_table(evaluations),
        _downstream_tables(downstream),
        *(_section(section, [run.name for run in runs]) for section in sections),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _run_table(runs: Sequence[RunNumbers], baseline: str) -> str:
    head = (
        *("run", "norm", "seed", "steps", "tokens", "tokens/s", "train loss", "final val. loss", "gap", "%"),
        *("best val. loss", "at step", "gap", "%", "perplexity"),
    )
    rows = [
        (
            *(run.name, run.norm, _whole(run.seed), _whole(run.steps) + ("" if run.finished else " (unfinished)")),
            *(_whole(run.tokens), _whole(run.tokens_per_second), _loss(run.train_loss)),
            *(_loss(run.final_val_loss), *_gap(run.final_gap)),
            *(_loss(run.best_val_loss), _whole(run.best_step), *_gap(run.best_gap), _perplexity(run.best_perplexity)),
        )
        for run in runs
    ]
    text = (
        "<p>Gap: loss − baseline's, in nats and in percent of it; below 0 is better. Train loss: mean over the last "
        "logged steps, one in fifty (10 at least). Perplexity: exp of the best validation loss. Tokens/s: median "
        "over the steps, all devices together.</p>"
    )
    return _table(head, rows, [run.name == baseline for run in runs]) + text


def _group_table(groups: Sequence[GroupNumbers]) -> str:
    if not any(len(group.runs) > 1 for group in groups):
        return ""
    head = ("setting", "runs", "validation loss", "n", "mean", "lowest", "highest", "range", "deviation", "gap", "%")
    rows = [
        (group.label, ", ".join(group.runs), kind, *_spread(spread), *_gap(gap))
        for group in groups
        for kind, spread, gap in (
            ("final", group.final_val_loss, group.final_gap),
            ("best", group.best_val_loss, group.best_gap),
        )
    ]
    text = (
        "<p>Runs whose configurations differ in their seeds alone are one setting. Range: highest − lowest; deviation: "
        "sample standard deviation (n − 1); gap: mean − mean of the baseline's setting.</p>"
    )
    return "<h2>Over seeds</h2>" + _table(head, rows, [False] * len(rows)) + text


def _evaluation_table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if not evaluations:
        return ""
    head = ("run", "text", "perplexity", "nats per token", "bits per byte", "tokens")
    rows = [
        (
            *(one["run"], one["dataset"], _perplexity(one["perplexity"]), _loss(one["nats_per_token"])),
            *(_loss(one["bits_per_byte"]), _whole(one["tokens"])),
        )
        for one in evaluations
    ]
    text = "<p>Perplexity over texts, by <code>llmstack perplexity</code> on the newest checkpoint of the time.</p>"
    return "<h2>Evaluations</h2>" + _table(head, rows, [False] * len(rows)) + text


def _downstream_tables(tables: Sequence[Layout]) -> str:
    parts = [
        f"<h3>{escape(table.title)}</h3><p>{escape(table.caption)}</p>"
        + _table(table.head, table.rows, [False] * len(table.rows))
        + "".join(f"<p>{escape(note)}</p>" for note in table.notes)
        for table in tables
    ]
    return "\n".join(["<h2>Downstream tasks</h2>", *parts]) if parts else ""


def _section(section: Section, names: Sequence[str]) -> str:
    data = base64.b64encode(section.png).decode("ascii")
    missing = [name for name in names if name not in section.runs]
    without = f"<p class=missing>No such numbers: {escape(', '.join(missing))}.</p>" if missing else ""
    return (
        f'<h2 id="{section.name}">{escape(section.title)}</h2><p>{escape(section.text)}</p>{without}'
        f'<img alt="{escape(section.title)}" src="data:image/png;base64,{data}">'
    )


def _table(head: Iterable[str], rows: Sequence[Iterable[str]], marked: Sequence[bool]) -> str:
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}" for cell in head)]
    for row, is_marked in zip(rows, marked, strict=True):
        cells = "".join(f"<td>{_cell(cell)}" for cell in row)
        lines.append(f"<tr{' class=baseline' if is_marked else ''}>{cells}")
    return "<div class=wide><table>" + "\n".join(lines) + "</table></div>"


def _cell(text: str) -> str:
    return f"<b>{escape(text)}</b>" if isinstance(text, Bold) else escape(text)


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}" for item in items) + "</ul>" if items else ""


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _loss(value: float | None) -> str:
    return "–" if value is None else digits(value, 4)


def _perplexity(value: float | None) -> str:
    return "–" if value is None else digits(value, 2)


def _gap(gap: Gap | None) -> tuple[str, str]:
    return ("–", "–") if gap is None else (digits(gap.nats, 4, "+"), digits(gap.percent, 2, "+"))


def _spread(spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return ("0", *"–––––")
    losses = (spread.mean, spread.lowest, spread.highest, spread.range, spread.deviation)
    return (str(spread.n), *(_loss(loss) for loss in losses))
