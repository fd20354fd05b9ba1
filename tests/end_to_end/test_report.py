"""`report` on real runs and a real sweep, and its page in a real browser."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from playwright.sync_api import Browser, Page

from mgpu_slurm.metrics.reporter import Reporter
from mgpu_slurm.reports.facts.gather import ReportOptions, gather
from mgpu_slurm.reports.facts.report_facts import Facts
from mgpu_slurm.reports.page import html_page
from mgpu_slurm.reports.page.make_report import make
from mgpu_slurm.reports.page.markup import number
from mgpu_slurm.reports.page.svg import log_ticks, ticks
from tests.browser import opened, overflow, pdf_pages, violations
from tests.reports.page.hostile_runs import hostile_runs
from tests.reports.sweeps import make_sweep
from tests.support import Project, make_project

JOB = """
    from dataclasses import dataclass


    @dataclass
    class Config:
        lr: float = 0.1
        width: int = 8


    def train(run, config: Config):
        for epoch in range(1, 7):
            run.report(epoch, loss=config.width / epoch + config.lr, accuracy=1 - 1 / epoch)
            if config.lr > 1:
                raise ValueError("the loss is <infinite>")
        return run.last_metrics["loss"]
"""
SWEEP = """
    study: search
    job: train.py
    metric: loss
    direction: minimize
    sampler: {name: random, seed: 1}
    pruner: {name: median, startup_trials: 2}
    trials: 8
    space:
      lr: {float: [0.001, 1.0], log: true}
      width: {int: [8, 64]}
"""


@dataclass(frozen=True)
class Report:
    project: Project
    page: Path
    charts: Path
    facts: dict[str, Any]

    @property
    def runs(self) -> dict[str, dict[str, Any]]:
        return {run["run"]: run for run in self.facts["runs"]}

    def indices(self, **wanted: Any) -> set[int]:
        """The numbers on the page of the runs whose fields are so."""
        return {
            place
            for place, run in enumerate(self.facts["runs"])
            if all(run[name] == value for name, value in wanted.items())
        }


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    project = make_project(tmp_path_factory.mktemp("report"))
    project.write("train.py", JOB)
    project.write("sweep.yaml", SWEEP)
    sweep = project.json("sweep", "sweep.yaml", "--executor", "local", "--no-follow")
    runs = [project.submit("train.py", "lr=0.005"), project.submit("train.py", "lr=9")]
    for folder in (*runs, Path(sweep["folder"])):
        project.finish(folder)
    names = [run.name for run in runs] + ["search"]
    done = project.call("report", *names, "-o", "page.html", "--svg", "charts")
    assert (done.returncode, done.stderr) == (0, "")
    assert "written   page.html: 10 runs" in done.stdout
    return Report(project, project.folder / "page.html", project.folder / "charts", project.json("report", *names))


@pytest.fixture
def page(browser: Browser, report: Report) -> Iterator[Page]:
    with opened(browser, report.page) as view:
        yield view.page
        assert view.errors == view.requests == []


# -- the facts


def test_numbers_are_those_of_the_files(report: Report) -> None:
    runs = report.project.runs
    for name, shown in report.runs.items():
        folder = runs / name
        reports = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert (shown["progress"], shown["step"]) == (reports[-1]["progress"], reports[-1]["step"])
        for metric, facts in shown["metrics"].items():
            values = [each["metrics"][metric] for each in reports]
            assert facts["last"] == values[-1]
            assert facts["best"] == (min if metric == "loss" else max)(values)
        events = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
        assert [each["started"] for each in shown["attempts"]] == [
            each["time"] for each in events if each["event"] == "started"
        ]
    storage = JournalStorage(JournalFileBackend(str(runs / "search" / "study.journal")))
    trials = optuna.load_study(storage=storage, study_name="search").trials
    (sweep,) = report.facts["sweeps"]
    assert len(trials) == len(sweep["trials"]) == 8
    for trial, row in zip(trials, sweep["trials"], strict=True):
        assert (row["number"], row["state"], row["params"]) == (trial.number, trial.state.name, trial.params)
        assert row["value"] == (trial.value if row["state"] == "COMPLETE" else trial.intermediate_values.popitem()[1])
    pieces = [piece["trial"] for worker in sweep["workers"] for piece in worker["trials"]]
    assert sorted(pieces) == list(range(8))
    (failed,) = [run for run in report.runs.values() if run["state"] == "FAILED" and run["kind"] == "run"]
    assert "the loss is <infinite>" in failed["reason"]


def test_charts_are_files_of_their_own(report: Report) -> None:
    names = {path.stem for path in report.charts.iterdir()}
    assert names >= {
        *("loss-by-progress", "accuracy-by-progress", "search-loss-of-each-trial", "search-Parallel-coordinates"),
        *("Attempts-of-runs", "Where-the-time-went"),
    }
    for path in report.charts.iterdir():
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_outputs_are_checked_first(report: Report) -> None:
    project = report.project
    done = project.call("report", "no-such-run", "-o", "no/page.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert "-o no/page.html: there is no folder" in done.stderr
    assert done.stderr.count("\n") == 1
    before = (project.folder / "train.py").read_text()
    done = project.call("report", "search", "-o", "train.py")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "-o train.py: the file exists and is no report: delete it, or name another" in done.stderr
    assert (project.folder / "train.py").read_text() == before
    # a report is replaced by another one
    assert project.call("report", "search", "-o", "again.html").returncode == 0
    assert project.call("report", "search", "-o", "again.html").returncode == 0
    assert "leave -o, --svg" in project.call("report", "search", "--json", "-o", "facts.json").stderr
    done = project.call("report", "search", "-o", "-", "--svg", "more")
    assert done.returncode == 0
    assert done.stdout.startswith("<!doctype html>")
    assert done.stdout.endswith("</html>\n")
    assert {path.name for path in (project.folder / "more").iterdir()} >= {"loss-by-progress.svg"}


# -- the page in a browser


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_page_has_no_fault(browser: Browser, report: Report, dark: bool, width: int) -> None:
    with opened(browser, report.page, dark, width) as view:
        assert violations(view.page) == []
        assert overflow(view.page) == []
        assert view.errors == view.requests == []


def test_page_of_hostile_runs_has_no_fault(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    make([str(run) for run in hostile_runs(tmp_path / "runs")], ReportOptions(), tmp_path / "page.html", None, True)
    with opened(browser, tmp_path / "page.html", width=390) as view:
        assert view.page.locator("img").count() == 0
        assert overflow(view.page) == []
        view.page.click("#more-columns")
        view.page.locator("#log").check()
        view.page.locator("#smooth").fill("0.9")
        for axis in ("step", "minutes"):
            view.page.locator("#axis").select_option(axis)
        assert view.errors == view.requests == []


def test_all_charts_are_there_without_a_script(browser: Browser, report: Report, page: Page) -> None:
    with opened(browser, report.page, script=False) as view:
        charts = view.page.locator("svg.chart")
        assert charts.count() == page.locator("svg.chart").count() == len(list(report.charts.iterdir()))
        assert all(chart.is_visible() for chart in charts.all())
        assert not any(control.is_visible() for control in view.page.locator("button, input, select").all())
        assert violations(view.page) == []


def test_print_has_charts_and_no_control(page: Page) -> None:
    page.emulate_media(media="print")
    assert all(chart.is_visible() for chart in page.locator("svg.chart").all())
    assert not any(canvas.is_visible() for canvas in page.locator("canvas").all())
    controls = page.locator("button:not(thead button), input, select, nav")
    assert not any(control.is_visible() for control in controls.all())
    assert pdf_pages(page) <= 8


def visible(page: Page, marks: str = "#runs tbody tr") -> set[int]:
    """The numbers of the runs whose marks are visible."""
    found: list[str] = page.eval_on_selector_all(
        marks, "all => all.filter(each => each.checkVisibility()).map(each => each.dataset.r)"
    )
    return {int(each) for each in found}


def test_table_is_sorted_by_keyboard(page: Page) -> None:
    head = page.locator("#runs th", has=page.locator("button", has_text="Last loss"))
    head.locator("button").focus()
    place = head.evaluate("head => head.cellIndex")
    for order in ("descending", "ascending"):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == order
        assert page.locator("#runs th[aria-sort=none]").count() == page.locator("#runs thead th").count() - 1
        shown: list[str] = page.eval_on_selector_all(
            "#runs tbody tr", f"all => all.map(each => each.children[{place}].dataset.v)"
        )
        assert shown == sorted(shown, key=float, reverse=order == "descending")


def test_filter_holds_in_the_table_and_in_all_charts(report: Report, page: Page) -> None:
    low = {place for place, run in enumerate(report.facts["runs"]) if run["config"].get("lr", 0) < 0.01}
    failed = report.indices(state="FAILED")
    trials = report.indices(kind="trial")
    everything = visible(page)
    for words, expected in (
        ("lr<0.01", low),
        ("state:failed", failed),
        ("lr<0.01 state:comp", low & report.indices(state="COMPLETED")),
        ("search", trials),
        ("", everything),
    ):
        page.fill("#filter", words)
        assert visible(page) == expected, words
        assert visible(page, "#sweep-0-history .point") == expected & trials
        assert visible(page, "#sweep-0-parallel .line") == expected & trials
        count = f"{len(expected)} of {len(everything)} runs" if words else f"{len(everything)} runs"
        assert page.inner_text("#count") == count
    assert 0 < len(low) < len(everything)
    assert failed


def brush_upper_half(page: Page) -> None:
    """Drag along the first axis of the parallel coordinates."""
    axis = page.locator("#sweep-0-parallel .upright").first
    axis.scroll_into_view_if_needed()
    box = axis.locator("rect").bounding_box()
    assert box is not None
    x = box["x"] + box["width"] / 2
    page.mouse.move(x, box["y"] + 2)
    page.mouse.down()
    page.mouse.move(x, box["y"] + box["height"] / 2, steps=3)
    page.mouse.up()


def test_filter_by_a_name_that_no_run_has_says_so(page: Page) -> None:
    page.locator("#filter").fill("nonsense<3")
    assert page.locator("#count").inner_text() == "0 of 10 runs (no run has a value nonsense)"
    page.locator("#all").click()
    assert page.locator("#count").inner_text() == "10 runs"


def test_brush_of_an_axis_chooses_trials(report: Report, page: Page) -> None:
    everything = visible(page)
    middle = math.sqrt(0.001)
    expected = {
        place
        for place, run in enumerate(report.facts["runs"])
        if run["kind"] == "trial" and run["config"]["lr"] > middle
    }
    assert 0 < len(expected) < len(report.indices(kind="trial"))
    brush_upper_half(page)
    assert page.locator(".brush").count() == 1
    assert visible(page) == visible(page, "#sweep-0-parallel .line") == expected
    assert visible(page, "#sweep-0-history .point") == expected
    page.keyboard.press("Escape")
    assert visible(page) == everything
    assert page.locator(".brush").count() == 0


def seeded(base: Path) -> tuple[Facts, Path]:
    """The facts and the page of a sweep whose trials have two seeds each."""
    sweep = make_sweep(base, seeds=2, pruner="none", space={"lr": {"float": [0.0, 1.0]}})
    for _ in range(6):
        trial = sweep.begin()
        for seed in (0, 1):
            run = sweep.folder.of_trial(trial).of_seed(seed)
            run.path.mkdir(parents=True)
            Reporter(run, 1).report(1, 1, {"loss": 1.0 + seed})
        sweep.study.tell(trial, 1.5)
    return make([str(sweep.folder.path)], ReportOptions(), base / "page.html", None, True), base / "page.html"


def test_brush_chooses_all_seeds_of_a_trial(browser: Browser, tmp_path: Path) -> None:
    facts, file = seeded(tmp_path)
    expected = {place for place, run in enumerate(facts.runs) if run.config["lr"] > 0.5}
    assert 0 < len(expected) < len(facts.runs) == 12
    with opened(browser, file) as view:
        brush_upper_half(view.page)
        assert visible(view.page) == expected


def test_mark_of_a_trial_lights_all_its_seeds(browser: Browser, tmp_path: Path) -> None:
    _, file = seeded(tmp_path)
    with opened(browser, file) as view:
        mark = view.page.locator("#sweep-0-history .point[data-r]").nth(1)
        first = int(mark.get_attribute("data-r") or "")
        mark.dispatch_event("pointerover")
        lit = view.page.locator("#runs tbody tr.lit")
        assert [each.get_attribute("data-r") for each in lit.all()] == [str(first), str(first + 1)]
        mark.dispatch_event("pointerout")
        assert lit.count() == 0
        # and the other way around
        view.page.locator(f'#runs tr[data-r="{first + 1}"] td').first.dispatch_event("pointerover")
        assert "lit" in (mark.get_attribute("class") or "")


def test_page_that_is_loaded_again_keeps_what_its_reader_has_chosen(
    browser: Browser, report: Report, tmp_path: Path
) -> None:
    file = tmp_path / "page.html"
    names = [str(report.project.runs / name) for name in ("search", *report.runs) if "/" not in name]
    facts = gather(names, ReportOptions())
    file.write_text(html_page.page(facts, refresh=3600))
    with opened(browser, file) as view:
        page = view.page
        page.locator("#filter").fill("lr<0.5")
        page.locator("#smooth").fill("0.6")
        page.locator("#axis").select_option("step")
        page.locator("#theme").click()
        page.get_by_role("button", name="Best loss").click()
        row = page.locator("#runs tbody tr:not(.off)").first
        hidden = row.locator("th, td").nth(1).inner_text()
        row.locator("input").uncheck()
        page.evaluate("scrollTo(0, 500)")

        def chosen() -> Any:
            return page.evaluate(
                """() => ({
                    values: ["filter", "smooth", "axis"].map((id) => document.getElementById(id).value),
                    log: document.getElementById("log").checked,
                    theme: [document.documentElement.dataset.theme, document.getElementById("theme").textContent],
                    count: document.getElementById("count").textContent,
                    rows: [...document.querySelectorAll("#runs tbody tr:not(.off)")].map((row) => row.dataset.r),
                    unchecked: [...document.querySelectorAll("#runs tbody input:not(:checked)")].length,
                    scroll: scrollY,
                })"""
            )

        before = chosen()
        assert before["unchecked"] == 1
        assert before["scroll"] == 500
        page.reload()
        assert chosen() == before
        # the last one, as all has ended
        file.write_text(html_page.page(facts))
        page.reload()
        assert chosen() == before
        assert hidden in page.locator("#runs tbody tr", has=page.locator("input:not(:checked)")).inner_text()
        assert view.errors == view.requests == []


def test_mark_of_a_trial_lights_its_row_and_its_other_marks(page: Page) -> None:
    mark = page.locator("#sweep-0-history .point").nth(3)
    mark.hover()
    run = mark.get_attribute("data-r")
    lit: list[str] = page.eval_on_selector_all(".lit", "all => all.map(each => each.dataset.r)")
    assert set(lit) == {run}
    assert page.locator("#runs tr.lit").count() == page.locator("#sweep-0-parallel .line.lit").count() == 1
    assert page.inner_text("#tip") == mark.locator("title").text_content()
    page.mouse.move(0, 0)
    assert page.locator(".lit").count() == 0
    assert not page.is_visible("#tip")


def test_theme_button(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    assert page.inner_text("#theme") == "Dark"
    page.click("#theme")
    assert page.inner_text("#theme") == "Light"
    assert page.evaluate(background) != light
    page.click("#theme")
    assert page.evaluate(background) == light


def test_script_writes_numbers_and_ticks_as_the_static_page(page: Page) -> None:
    source = random.Random(0)
    values = [source.choice((-1, 1)) * 10 ** source.uniform(-12, 12) for _ in range(300)] + [0, 1, 9999.6, 999999.6]
    assert page.evaluate("values => values.map(value => report.number(value))", values) == [*map(number, values)]
    ends = [sorted(values[place : place + 2]) for place in range(0, 300, 2)]
    assert page.evaluate("ends => ends.map(([low, high]) => report.ticks(low, high))", ends) == [
        ticks(low, high) for low, high in ends
    ]
    positive = [sorted(map(abs, pair)) for pair in ends]
    assert page.evaluate("ends => ends.map(([low, high]) => report.logTicks(low, high))", positive) == [
        log_ticks(low, high) for low, high in positive
    ]
