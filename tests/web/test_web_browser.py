"""The pages in Debian's Chromium: `make test-long` installs what this needs, and prints the times."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from web_stand_ins import DESCRIPTION, write_metrics, write_timeline

from shoal.spec.run import Run
from shoal.web import PAGES, export

pytestmark = pytest.mark.long

CHROMIUM = "/usr/bin/chromium"
AXE = Path(__file__).parents[2] / "build/browser/node_modules/axe-core/axe.min.js"
SERIOUS = ("serious", "critical")
SIZES = {"desk": {"width": 1280, "height": 800}, "phone": {"width": 390, "height": 844}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run, and one whose texts are markup."""
    folder = tmp_path_factory.mktemp("runs")
    script = "</script><script>window.taken=1</script><img src=x onerror=window.taken=1>"
    hostile = {**DESCRIPTION, "name": script, "plan": script, "model": {"name": script, "parameters": 1}}
    for name, description, bucket in (
        ("<img src=x onerror=window.taken=1>", hostile, script),
        ("tiny", DESCRIPTION, "bucket 0"),
    ):
        run = Run.create(folder / name, description)
        write_timeline(run, range(1, 31), name=bucket)
        write_metrics(run, range(1, 31))
        (run.log / "rank-00000.log").write_text(f"RuntimeError: {script}\n")
    return folder


@pytest.fixture(scope="module")
def address(runs):
    """The address that the command prints."""
    command = [sys.executable, "-m", "shoal", "web", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        yield process.stdout.readline().strip()
        process.terminate()


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    assert Path(CHROMIUM).exists(), "install it: sudo apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A tab that remembers what went wrong in it."""

    def __init__(self, chromium, address=None, *, size="desk", scheme="light"):
        self.context = chromium.new_context(viewport=SIZES[size], color_scheme=scheme)
        self.page = self.context.new_page()
        self.wrong = []
        self.page.on("console", lambda said: self.wrong.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self._protocol = self.context.new_cdp_session(self.page)
        if address is not None:  # the token becomes a cookie, and the page goes on by itself
            self.page.goto(address)
            self.page.wait_for_url(lambda url: "token" not in url)

    def value(self, expression, *, wait=False):
        """What an expression gives; the debugger's protocol is not held to the pages' policy."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": wait}
        answer = self._protocol.send("Runtime.evaluate", asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, address):
        """Open a page, and wait until it has drawn."""
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=60_000)
        self.page.wait_for_timeout(200)


@pytest.fixture
def tab(chromium, address):
    """A tab that has the token."""
    made = Tab(chromium, address)
    yield made
    made.context.close()


def share_of_cores():
    """How many processes wanted each core in the last minute, 1 at least: a page gets that part of a core.

    A page that takes 0.2 s alone took up to 5 s at a load of 20 on two cores.
    """
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def first_paint(tab, url):
    """The milliseconds until a page first shows something: the best of three, unless the first will do."""
    best = math.inf
    for _ in range(3):
        tab.open(url)
        paint = tab.value("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        best = min(best, paint)
        if best <= 1000:
            break
    return best


def base_of(address):
    return address.partition("/?")[0]


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("size", "scheme"), [("desk", "light"), ("desk", "dark"), ("phone", "light")])
def test_a_page_draws_without_an_error_and_keeps_nobody_out(chromium, address, name, size, scheme):
    tab = Tab(chromium, address, size=size, scheme=scheme)
    paint = first_paint(tab, f"{base_of(address)}/{name}?run=tiny")
    print(f"\nfirst paint of {name}, {size}, {scheme}: {paint:.0f} ms")
    assert paint <= 1000 * share_of_cores()
    assert tab.value("document.documentElement.scrollWidth - innerWidth") <= 0, "wider than the screen"
    tab.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    tab.page.wait_for_timeout(100)
    tab.value(AXE.read_text(encoding="utf-8"))
    found = json.loads(tab.value("axe.run().then((found) => JSON.stringify(found.violations))", wait=True))
    serious = [
        (each["id"], [node["target"] for node in each["nodes"]][:3])
        for each in found
        if each["impact"] in SERIOUS
    ]
    assert serious == []
    assert tab.wrong == []
    tab.context.close()


def test_a_step_is_on_the_screen_soon_after_it_is_written(tab, runs, address):
    run = Run(runs / "tiny")
    tab.open(f"{base_of(address)}/live?run=tiny")
    delays = []
    for step in range(31, 51):
        write_metrics(run, [step])
        begun = time.monotonic()
        tab.page.wait_for_selector(f"html[data-step='{step}']", state="attached", timeout=10_000)
        delays.append(time.monotonic() - begun)
    delays.sort()
    told = {"median": delays[10], "95th percentile": delays[18], "most": delays[-1]}
    print("\nstep to screen: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in told.items()))
    assert tab.wrong == []


def test_keys_move_the_timeline_and_its_address_shows_the_same_again(tab, address):
    tab.open(f"{base_of(address)}/timeline?run=tiny")
    tab.page.locator(".viewport").focus()
    for key in ("+", "+", "ArrowRight", ","):
        tab.page.keyboard.press(key)
        tab.page.wait_for_timeout(400)
    assert "Step 29" in tab.page.inner_text("figure h2")
    tab.page.keyboard.press("+")
    tab.page.wait_for_timeout(500)
    link, shown = tab.page.url, tab.page.inner_text("figure .words")
    assert "step=29" in link
    assert "from=" in link
    tab.open(link)
    assert tab.page.inner_text("figure .words") == shown
    assert tab.wrong == []


def test_what_the_page_says_that_a_collective_costs_is_the_formula(tab, address):
    query = "collective=all_reduce&algorithm=ring&hosts=8&per_host=1&bytes=1048576&alpha=10&rate=12.5"
    tab.open(f"{base_of(address)}/collectives?{query}")
    row = tab.page.locator("tr", has=tab.page.get_by_role("button", name="ring", exact=True))
    seconds = 14 * 10e-6 + 2 * 7 / 8 * 2**20 / 12.5e9
    assert f"{seconds * 1e6:.0f} us" in row.inner_text()


def test_no_text_of_a_run_runs_in_a_page(tab, runs, address, tmp_path):
    name = next(path.name for path in runs.iterdir() if path.name != "tiny")
    run = quote(name)
    written = export(runs / name, tmp_path, [page.name for page in PAGES.values() if page.needs_run])
    addresses = [f"{base_of(address)}/{page.name}?run={run}" for page in PAGES.values() if page.needs_run]
    for each in [*addresses, *(f"file://{path}" for path in written)]:
        tab.open(each)
        tab.value("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        tab.page.wait_for_timeout(100)
        assert tab.value("window.taken === undefined && document.images.length === 0"), each
        assert "onerror" in tab.page.content(), "the text is shown"
    assert tab.wrong == []


def test_pages_as_files_draw_from_a_disk(chromium, runs, tmp_path):
    tab = Tab(chromium)
    for path in export(runs / "tiny", tmp_path):
        tab.open(f"file://{path}")
        assert tab.value("document.querySelectorAll('svg, table').length") > 0, path.name
    tab.page.goto(f"file://{tmp_path}/schedules.html?pp=8&microbatches=16")
    tab.page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert "8 ranks, 16 micro-batches" in tab.page.inner_text("#page")
    assert tab.wrong == []
    tab.context.close()
