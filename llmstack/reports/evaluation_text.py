"""The downstream tables as text: Markdown, CSV and LaTeX; ``layout`` is also what the page shows."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack.reports.evaluation_table import AVERAGE, CHANCE, LOSSES, Cell, Table
from llmstack.reports.table import digits

_CSV_HEAD = (
    *("table", "size", "num_fewshot", "limit", "weights", "chat_template", "run", "norm", "runs", "steps", "column"),
    *("metric", "documents", "mean", "spread", "spread_of", "results", "standard_error", "sample_error", "best"),
)
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': "''",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "…": r"\ldots{}",
}


class Bold(str):
    """A cell that is set in bold."""


@dataclass(frozen=True)
class Layout:
    """A table as cells of plain text."""

    title: str
    caption: str
    head: list[str]
    rows: list[list[str]]
    """Bold ones among them are :class:`Bold`."""
    ours: int
    """So many rows stand above the published."""
    notes: list[str]


def layout(table: Table) -> Layout:
    """The table's cells and what is said about it."""
    columns = table.columns
    return Layout(
        title=_title(table),
        caption=" ".join(_caption(table)),
        head=["run", "norm", *columns],
        rows=[
            [row.label, row.norm, *(_number(row.cells.get(name), 3 if name in LOSSES else 2) for name in columns)]
            for row in table.rows
        ],
        ours=sum(bool(row.runs) for row in table.rows),
        notes=table.notes,
    )


def markdown(tables: Sequence[Table]) -> str:
    """All tables, each with its caption above it and its notes below."""
    return "\n".join(line for table in tables for line in _markdown(layout(table)))


def latex(tables: Sequence[Table]) -> str:
    """A ``table*`` for each, to be \\input; in UTF-8."""
    lines = [r"% needs \usepackage{booktabs,graphicx}"]
    return "\n".join([*lines, *(line for table in tables for line in _latex(layout(table)))]) + "\n"


def comma_separated(tables: Sequence[Table]) -> str:
    """One line per number, so that tables of different tasks fit one file; fields that are not known are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_HEAD)
    writer.writerows(line for number, table in enumerate(tables, start=1) for line in _csv_rows(number, table))
    return text.getvalue()


def _title(table: Table) -> str:
    setting = table.setting
    parts = [setting.size, _shots(setting.num_fewshot)]
    if setting.limit is not None:
        parts.append(f"first {setting.limit:g} documents")
    if setting.weights is not None:
        parts.append(setting.weights)
    if setting.chat_template is not None:
        parts.append("chat template")
    return f"{', '.join(parts)}: {'acc alone' if table.plain else 'acc_norm where a task has it'}"


def _shots(number: int | None) -> str:
    return "each task's own number of examples" if number is None else f"{number}-shot"


def _caption(table: Table) -> Iterator[str]:
    setting, columns = table.setting, table.columns
    which = (
        "all documents"
        if setting.limit is None
        else f"first {setting.limit:g} documents of each task: a demonstration, not a benchmark"
    )
    yield f"Models of {setting.size} parameters, {_shots(setting.num_fewshot)}, {which}."
    if table.metrics:
        documents = ", ".join(f"{task} {count:,}" for task, count in table.documents.items())
        yield f"Documents: {documents}. Tasks in per cent: {_metrics(table)}."
    if AVERAGE in columns:
        whole = len(table.averaged) == len(CHANCE)
        yield f"{AVERAGE}: mean over {'the eight tasks' if whole else ', '.join(table.averaged)}."
    if any(name in columns for name in LOSSES):
        yield "Losses in nats per token, as they were when the checkpoint was written; ppl: exp(eval_loss)."
    yield _spread(table)
    if sum(bool(row.runs) for row in table.rows) > 1:
        yield "Bold: better than each other measured row by more than twice the standard error of the difference."
    if table.published:
        numbers = " and ".join(f"Table {number}" for number in table.published)
        yield f"published: {numbers} of the BHyT paper (arXiv 2601.09719); its metrics and its ± may be other ones."


def _metrics(table: Table) -> str:
    """Which tasks have which."""
    used = dict.fromkeys(table.metrics.values())
    tasks = {metric: [task for task, its in table.metrics.items() if its == metric] for metric in used}
    return "; ".join(f"{metric} of {', '.join(names)}" for metric, names in tasks.items())


def _spread(table: Table) -> str:
    measured = [row for row in table.rows if row.runs]
    scores = [[row.cells[task] for task in table.metrics if task in row.cells] for row in measured]
    counts = [max((cell.results or 0 for cell in cells), default=0) for cells in scores]
    if max(counts) < 2:
        return "±: standard error of the sample of documents (one result per row)."
    said = ", ".join(
        f"{row.label} {count} of {len(row.runs)} {'runs' if len(row.runs) > 1 else 'run'}"
        for row, count in zip(measured, counts, strict=True)
    )
    return (
        "±: sample standard deviation over all results of a row, one per training seed and few-shot seed, where there "
        f"are two or more that differ; else the standard error of the sample of documents. Results per row: {said}."
    )


def _number(cell: Cell | None, decimals: int) -> str:
    if cell is None:
        return "–"
    text = digits(cell.mean, decimals)
    if cell.spread is not None:
        text += f" ± {digits(cell.spread, decimals)}"
    return Bold(text) if cell.best else text


def _markdown(table: Layout) -> Iterator[str]:
    yield from (f"## {_escape_markdown(table.title)}", "", _escape_markdown(table.caption), "")
    yield _markdown_row(table.head)
    yield "|" + "|".join(["---", "---", *("---:" for _ in table.head[2:])]) + "|"
    yield from (_markdown_row(row) for row in table.rows)
    yield ""
    for note in table.notes:
        yield from (_escape_markdown(note), "")


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_set(cell, _escape_markdown, "**{}**") for cell in cells) + " |"


def _escape_markdown(text: str) -> str:
    """An underscore between letters is one."""
    return re.sub(r"([\\`*|<\[\]$]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text)


def _latex(table: Layout) -> Iterator[str]:
    yield from (r"\begin{table*}", r"\centering")
    yield rf"\caption{{{_escape_latex(f'{table.title}. {table.caption}')}}}"
    yield rf"\resizebox{{\textwidth}}{{!}}{{\begin{{tabular}}{{ll{'r' * (len(table.head) - 2)}}}"
    yield from (r"\toprule", _latex_row(table.head), r"\midrule")
    yield from (_latex_row(row) for row in table.rows[: table.ours])
    if table.rows[table.ours :]:
        yield from (r"\midrule", *(_latex_row(row) for row in table.rows[table.ours :]))
    yield from (r"\bottomrule", r"\end{tabular}}")
    yield from (rf"\par\footnotesize {_escape_latex(note)}" for note in table.notes)
    yield r"\end{table*}"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(_set(cell, _escape_latex, r"\textbf{{{}}}") for cell in cells) + r" \\"


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _set(cell: str, escape: Callable[[str], str], bold: str) -> str:
    return bold.format(escape(cell)) if isinstance(cell, Bold) else escape(cell)


def _csv_rows(number: int, table: Table) -> Iterator[list[Any]]:
    setting = table.setting
    for row in table.rows:
        of = [number, setting.size, setting.num_fewshot, setting.limit, setting.weights, setting.chat_template]
        of += [row.label, row.norm, " ".join(row.runs), " ".join(map(str, row.steps))]
        for name in table.columns:
            cell = row.cells.get(name)
            if cell is not None:
                task = [name, table.metrics.get(name), table.documents.get(name) if row.runs else None]
                numbers = [cell.mean, cell.spread, cell.spread_of, cell.results, cell.error, cell.sample_error]
                yield [*of, *task, *map(_short, numbers), int(cell.best)]


def _short(value: Any) -> Any:
    """Floats without the digits that rounding leaves."""
    return f"{value:.10g}" if isinstance(value, float) else value
