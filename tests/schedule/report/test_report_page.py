"""The page of a report in headless Chromium: it opens without a complaint, names things, and filters."""

import itertools
from dataclasses import replace

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from penstock.schedule.facts.problem import Problem
from penstock.schedule.planner import make_plan
from penstock.schedule.report.drawing import save_report
from penstock.schedule.report.pictures import views_of
from penstock.schedule.space.layout import packed_arena
from tests.hunt import nightly_but
from tests.schedule.report.report_browser import Page
from tests.schedule.report.report_plans import UNIT, corpus_plan, equal_plan, plan_behind_a_disk, two_links
from tests.schedule.traces import equal_problem

MOST_BYTES = 1_000_000
COMPUTE, LINK = ("lanes", 0.25), ("lanes", 0.75)
"""The lanes of a plan with one link: the part of the picture, and the share of its height."""


def save(folder, plan, **options):
    path = folder / "plan.html"
    save_report(plan, path, **options)
    return path


def names(count):
    return [f"block.{s}.weight" for s in range(count)]


@pytest.mark.parametrize(
    ("kind", "scheme"),
    nightly_but({("contiguous", "dark")}, itertools.product(("paged", "contiguous"), ("light", "dark"))),
)
def test_the_page_opens_and_names_what_the_pointer_is_at(browser, tmp_path, kind, scheme):
    plan = equal_plan(kind=kind)
    page = Page(browser, save(tmp_path, replace(plan, names=names(8))), scheme=scheme)
    assert page.text("h1").startswith("Streaming ")
    background = "return getComputedStyle(document.body).backgroundColor"
    assert (browser.execute_script(background) == "rgb(17, 20, 23)") == (scheme == "dark")

    steady = views_of(plan, 0).steady
    times = steady.passes[steady.focus]
    begin = times.call_start
    start, end = times.reads[3]
    shown = page.hover(((start + end) / 2 - begin) / steady.period_ns, *COMPUTE)
    assert shown.startswith("block.3\n")
    assert "block.3.weight (4.00 KiB" in shown
    start, end = times.transfers[4]
    shown = page.hover(((start + end) / 2 - begin) / steady.period_ns, *LINK)
    step = plan.schedules[0].transfers[4].step
    assert shown.startswith(f"block.{step}.weight\n")
    assert f"for step block.{step} ({step})" in shown.replace("\n", " ")
    assert "In memory" in page.hover(0.5, "memory")
    named = {page.hover(share / 20, "arena").split("\n")[0] for share in range(1, 20)}
    assert named - {""}
    assert named - {""} <= set(names(8))
    assert page.complaints() == []


def test_search_order_and_kinds_narrow_the_table_down(browser, tmp_path):
    page = Page(browser, save(tmp_path, replace(equal_plan(12, kind="contiguous", units=6), names=names(12))))
    assert page.rows() == names(12)
    assert page.search("block.1") == ["block.1.weight", "block.10.weight", "block.11.weight"]
    assert page.text("#count") == "3 of 12 weights, 12 KiB"
    assert page.search("no such weight") == []
    assert page.search("") == names(12)
    stays = page.search("never copied")
    assert 0 < len(stays) < 12
    page.search("")
    page.press("lives", "resident")
    assert page.rows() == stays
    page.press("lives", "all")
    page.click("#weights th:first-child button")
    assert page.rows() == names(12)
    page.click("#weights th:first-child button")
    assert page.rows() == names(12)[::-1]
    assert browser.find_element(By.CSS_SELECTOR, "#weights th").get_attribute("aria-sort") == "descending"
    assert page.complaints() == []


def test_the_picture_obeys_keys_buttons_and_the_wheel(browser, tmp_path):
    page = Page(browser, save(tmp_path, replace(equal_plan(), names=names(8))))
    streamed = page.picture()
    page.keys("0")
    whole = page.picture()
    assert whole != streamed
    page.keys("s")
    assert page.picture() == streamed  # as the page began
    page.keys("0", "n")
    assert page.text("#tip").startswith("block.0\n")
    page.keys("n", "n")
    assert page.text("#tip").startswith("block.2\ntakes\n")
    page.keys(Keys.ESCAPE)
    assert page.picture() == whole
    seen = {whole}
    for key in ("+", Keys.ARROW_RIGHT, Keys.PAGE_UP, Keys.ARROW_DOWN):
        page.keys(key)
        seen.add(page.picture())
    assert len(seen) == 5
    page.keys("0")
    assert page.picture() == whole
    page.press("key", "+")
    assert page.picture() in seen - {whole}  # as the key does
    page.press("key", "0")
    wheel = """document.querySelector("#figure .lanes .u-over").dispatchEvent(new WheelEvent("wheel",
        {deltaY: -300, ctrlKey: %s, clientX: 600, clientY: 600, bubbles: true, cancelable: true}))"""
    browser.execute_script(wheel % "false")
    page.settle()
    assert page.picture() == whole  # the page scrolls
    browser.execute_script(wheel % "true")
    page.settle()
    assert page.picture() != whole
    assert page.complaints() == []


@pytest.mark.parametrize("kind", nightly_but({"contiguous"}, ["paged", "contiguous"]))
def test_a_thousand_storages_stay_usable(browser, tmp_path, kind):
    plan = corpus_plan("llama-3.1-405b, decode", "h200", kind, 0.12)
    assert len(plan.names) > 1100
    path = save(tmp_path, plan)
    assert path.stat().st_size < MOST_BYTES
    page = Page(browser, path)
    assert len(page.rows()) == len(plan.names)
    assert page.search("layers.77.down") == ["layers.77.down.weight"]
    page.press("key", "f")
    page.keys("n")
    assert page.text("#tip").startswith(f"{plan.traces[0].steps[0].name}\n")
    page.press("key", "f")
    assert page.hover(0.5, *LINK)
    assert page.complaints() == []


def test_a_sweep_draws_a_line_for_each_policy(browser, tmp_path):
    plan = equal_plan()
    sweep = [
        {
            "budget": plan.budget * share // 4,
            "predicted_ns": plan.schedules[0].predicted_ns * (8 - share) // 4,
            "lower_bound_ns": None if share == 5 else 3000,
            "policies": {"on demand": 9000, "one block ahead": 8000 if share > 3 else None},
        }
        for share in range(2, 7)
    ]
    page = Page(browser, save(tmp_path, plan, sweep=sweep))
    legend = dict(page.legend())
    lines = {"plans by penstock", "this plan", "best possible", "on demand", "one block ahead"}
    assert legend.keys() >= lines | {"budget", "some of every group"}  # and policies at the plan's own budget
    assert legend["budget"] == "16 KiB"  # the plan's own, until the pointer or a key asks for another
    seen = {}
    for key in [Keys.ARROW_LEFT] * 3 + [Keys.ARROW_RIGHT] * 5:
        browser.find_element(By.ID, "curve").send_keys(key)
        page.settle()
        legend = dict(page.legend())
        seen[legend["budget"]] = legend
    assert seen.keys() == {"8 KiB", "12 KiB", "16 KiB", "20 KiB", "24 KiB"}
    assert len({one["plans by penstock"] for one in seen.values()}) == 5
    assert {one["on demand"] for one in seen.values()} == {"9 us"}
    drawn = "return [...document.querySelectorAll('.u-marker')].slice(1).map((one) => one.style.%s)"
    assert set(browser.execute_script(drawn % "borderStyle")) == {"solid", "dashed", "dotted"}
    colours = set(browser.execute_script(drawn % "borderColor"))
    assert len(colours) == len(legend) - 2  # the budget has none, and both of ours have one
    none = {budget for budget, one in seen.items() if one["best possible"] == "not found"}
    assert none == {"20 KiB"}
    assert {budget for budget, one in seen.items() if one["one block ahead"] == "does not fit"} == {
        "8 KiB",
        "12 KiB",
    }
    assert page.complaints() == []


def odd_plans():
    p = equal_problem(6, 0.5)
    traces = (p.traces[0], replace(p.traces[0], method="decode", graph=1, steps=p.traces[0].steps[::-1]))
    arena = packed_arena(p.storages, traces, kind="paged", granule=64, alignment=64)
    two = make_plan(Problem(p.storages, traces, arena, hardware=p.hardware), 5 * UNIT)
    without = replace(
        equal_plan(), sizes=(), schedules=(replace(equal_plan().schedules[0], lower_bound_ns=None),)
    )
    empty = replace(p.traces[0], steps=())
    arena = packed_arena((), [empty], kind="paged", granule=64, alignment=64)
    none = make_plan(Problem((), (empty,), arena, hardware=p.hardware), 1)
    fits = equal_plan(units=8, kind="contiguous")
    return (
        ("two methods", two),
        ("two links", two_links(equal_plan())),
        ("a host with a disk", plan_behind_a_disk()),
        ("no bound", without),
        ("nothing to read", none),
        ("everything fits", fits),
    )


@pytest.mark.parametrize(("what", "plan"), odd_plans())
@pytest.mark.parametrize("width", [360, 1600])
def test_odd_plans_open_at_any_width(browser, tmp_path, what, plan, width):
    page = Page(browser, save(tmp_path, plan), width=width)
    assert page.complaints() == [], what
    wide = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
    assert browser.execute_script(wide) == 0
    cut = """const [over, wrap] = [".u-over", ".u-wrap"].map((part) =>
            document.querySelector(`#figure .lanes ${part}`).getBoundingClientRect());
        const label = document.createElement("canvas").getContext("2d");
        label.font = `12px ${getComputedStyle(document.body).fontFamily}`;
        return label.measureText("700 ms").width / 2 > wrap.right - over.right"""
    assert not browser.execute_script(cut), what
    page.press("view", "first")
    if len(plan.traces) > 1:
        browser.find_element(By.ID, "method").send_keys("decode")
        page.settle()
        assert "pass of decode takes" in page.text("#pass-note")
        assert page.text("#weights tbody tr").startswith("storage 5")
    assert page.complaints() == [], what


def test_names_are_shown_and_never_obeyed(browser, tmp_path):
    hostile = ["</script><script>document.title = 'hit'</script>", "<img src=x onerror=alert(1)>", *"cdefgh"]
    page = Page(browser, save(tmp_path, replace(equal_plan(), names=hostile)))
    assert page.rows() == hostile
    assert browser.title == "plan within 50% (16.00 KiB) - penstock"
    assert page.complaints() == []
