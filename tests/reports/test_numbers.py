"""The numbers of the table, from run folders whose answers are known."""

import math

import pytest

from llmstack.checkpoint import DiagnosticsRow
from llmstack.errors import UserError
from llmstack.reports import group_numbers, read_runs, run_numbers
from llmstack.reports.runs import group_by_setting
from llmstack.reports.table import Gap


def test_a_row_has_final_and_best_loss_and_their_gaps(make_run):
    runs = read_runs([make_run("base", {20: 2.5, 40: 2.0}), make_run("other", {20: 2.25, 40: 2.5}, norm="dyt", seed=7)])
    row = run_numbers(runs[1], baseline=runs[0])
    assert (row.final_val_loss, row.best_val_loss, row.best_step) == (2.5, 2.25, 20)
    assert row.final_gap == Gap(nats=0.5, percent=25.0)
    assert row.best_gap == Gap(nats=0.25, percent=12.5)
    assert row.best_perplexity == pytest.approx(9.487735836358526)
    assert (row.norm, row.seed, row.steps, row.tokens, row.val_tokens) == ("dyt", 7, 40, 4000, 5000)
    assert row.tokens_per_second == 1020.5, "the median of 1001 … 1040"
    assert row.train_loss == 3.0, "the mean of the last ten"
    assert not row.finished
    assert run_numbers(runs[0], baseline=runs[0]).best_gap == Gap(0.0, 0.0)


def test_seeds_of_one_setting_are_a_mean_a_range_and_a_deviation(make_run):
    paths = [
        make_run("base-s1", {40: 2.0}, seed=1),
        make_run("base-s2", {40: 2.2}, seed=2),
        make_run("taper-s1", {20: 2.2, 40: 2.3}, seed=1, norm="tapernorm_internal"),
        make_run("taper-s2", {20: 2.4, 40: 2.5}, seed=2, norm="tapernorm_internal"),
        make_run("taper-s3", {20: 2.0, 40: 2.1}, seed=3, norm="tapernorm_internal"),
    ]
    runs = read_runs(paths)
    base, taper = group_numbers(group_by_setting(runs), baseline=runs[1])
    assert (base.label, taper.label) == ("base-s*", "taper-s*")
    assert taper.runs == ["taper-s1", "taper-s2", "taper-s3"]
    final = taper.final_val_loss
    assert final is not None
    assert (final.n, final.lowest, final.highest) == (3, 2.1, 2.5)
    assert [final.mean, final.range, final.deviation] == pytest.approx([2.3, 0.4, 0.2])
    assert taper.final_gap is not None
    assert taper.final_gap.nats == pytest.approx(2.3 - 2.1), "means against means, whichever seed is the baseline"
    assert taper.best_gap is not None
    assert taper.best_gap.percent == pytest.approx(100 * (2.2 - 2.1) / 2.1)
    assert base.final_gap == Gap(0.0, 0.0)


def test_other_differences_than_seed_and_folder_make_another_setting(make_run):
    runs = read_runs(
        [
            make_run("a", {}, seed=0, run={"dir": "x", "validate_every": 5}),
            make_run("b", {}, seed=1, run={"dir": "y", "validate_every": 5}),
            make_run("c", {}, seed=0, run={"dir": "x", "validate_every": 6}),
        ]
    )
    assert [[run.name for run in group.runs] for group in group_by_setting(runs)] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (["rms-0", "rms-1"], "rms-*"),
        (["seed1-rms", "seed2-rms"], "seed*-rms"),
        (["one", "two"], "one … two"),
        (["other-0", "other"], "other*"),
        (["base-0", "base-1"], "base-0 … base-1"),
    ],
)
def test_a_setting_is_called_what_its_runs_have_in_common(make_run, names, label):
    """Unless another run would fit the pattern, too."""
    runs = [make_run(name, {}, seed=seed) for seed, name in enumerate(names)]
    runs.append(make_run("base-x", {}, norm="bhyt"))
    assert group_by_setting(read_runs(runs))[0].label == label


def test_a_run_that_was_never_validated_has_no_gap(make_run):
    runs = read_runs([make_run("base", {40: 2.0}), make_run("other", {}, seed=1)])
    row = run_numbers(runs[1], baseline=runs[0])
    assert (row.final_val_loss, row.best_val_loss, row.best_step, row.best_gap) == (None, None, None, None)
    group = group_numbers(group_by_setting(runs), baseline=runs[0])[0]
    assert group.best_val_loss is not None
    assert (group.best_val_loss.n, group.best_val_loss.deviation) == (1, None)


def test_a_diverged_run_keeps_its_best_loss_and_says_that_it_diverged(make_run):
    runs = read_runs([make_run("base", {40: 2.0}), make_run("other", {20: 2.5, 40: math.nan}, norm="dyt")])
    row = run_numbers(runs[1], baseline=runs[0])
    assert row.best_val_loss == 2.5
    assert row.final_val_loss is not None
    assert math.isnan(row.final_val_loss)
    assert row.final_gap is None


def test_the_perplexity_of_a_loss_beyond_all_numbers_is_infinite(make_run):
    run = read_runs([make_run("blown-up", {40: 30954.0})])[0]
    assert run_numbers(run, baseline=run).best_perplexity == math.inf


def test_diagnostics_come_as_lines_over_steps_and_as_profiles_over_layers(make_run):
    rows = [
        DiagnosticsRow(step, layer, "", "stream_rms", value)
        for step, layer, value in [(5, 1, 51.0), (5, 0, 50.0), (10, 0, 100.0), (10, 1, math.inf)]
    ]
    diagnostics = read_runs([make_run("a", {}, diagnostics=rows)])[0].diagnostics
    assert diagnostics is not None
    profiles = {step: [list(part) for part in profile] for step, profile in diagnostics.profiles("stream_rms").items()}
    assert profiles == {5: [[0, 1], [50, 51]], 10: [[0], [100]]}
    series = {place: [list(part) for part in line] for place, line in diagnostics.series("stream_rms").items()}
    assert series == {(0, ""): [[5, 10], [50, 100]], (1, ""): [[5], [51]]}


def test_a_run_without_metrics_and_two_of_one_name_are_refused(make_run, tmp_path):
    empty = make_run("empty", {}, steps=0)
    with pytest.raises(UserError, match=r"metrics\.csv has no rows"):
        read_runs([empty])
    with pytest.raises(UserError, match="there is no such run folder"):
        read_runs([tmp_path / "nothing"])
    first, second = make_run("one/same", {}), make_run("two/same", {})
    with pytest.raises(UserError, match="both called same"):
        read_runs([first, second])
    with pytest.raises(UserError, match="given twice"):
        read_runs([first, first])
