"""The page in a real browser: Debian's Chromium, driven by Playwright, on small runs."""

import random
import re
import shutil
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from playwright import sync_api

from tunable_magmax.runs.run import Run
from tunable_magmax.studio import writing
from tunable_magmax.studio.options import StudioOptions
from tunable_magmax.studio.server import listening, make_app
from tunable_magmax.studio.session import Studio

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
TOKEN = "the-token"
expect = sync_api.expect


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def serving(studio):
    """Serves a studio from a thread; yields its address."""
    with listening(0) as opened:
        port = opened.getsockname()[1]
        options = {"log_level": "error", "lifespan": "off", "ws": "none", "timeout_graceful_shutdown": 1}
        server = uvicorn.Server(uvicorn.Config(make_app(studio, port, TOKEN), **options))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        studio.start()
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/#token={TOKEN}"
        finally:
            studio.close()
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def studio(image_run, tmp_path_factory):
    """Measures on a few labelled pictures of the site."""
    data = image_run.pairs(tmp_path_factory.mktemp("site") / "test", {"red": 8, "blue": 6, "green": 4, "grey": 4})
    out = tmp_path_factory.mktemp("studio") / "out"
    return Studio(Run.open(image_run.path), StudioOptions(out=out, data=data, device="cpu"))


@pytest.fixture(scope="module")
def address(studio):
    with serving(studio) as address:
        yield address


@pytest.fixture
def open_page(browser):
    """Opens addresses in windows of their own. No script may fail, and the policy must forbid nothing that is asked."""
    contexts, wrong = [], []

    def open_page(address, **options):
        context = browser.new_context(reduced_motion="reduce", **options)
        contexts.append(context)
        window = context.new_page()
        window.set_default_timeout(20_000)
        window.on("pageerror", lambda error: wrong.append(str(error)))
        window.on("console", lambda message: wrong.append(message.text) if "Policy" in message.text else None)
        window.goto(address)
        return window

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def window(open_page, address):
    """The studio's page with its first point measured and compared."""
    opened = open_page(address)
    measured(opened)
    return opened


def measured(window):
    """Waits until what is set is measured and compared."""
    expect(window.locator("#badge")).to_have_text("measured", timeout=20_000)
    expect(window.locator("#sentence")).to_have_text(re.compile("than|distinguishable"), timeout=20_000)


def shares(window):
    """Returns the shares that the page shows, in percent, once it has drawn what is set."""
    window.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    return window.evaluate("() => [...document.querySelectorAll('input.share')].map((field) => Number(field.value))")


def drag(window, task, share):
    """Drags a slider with the mouse, from where it is, in a few steps."""
    slider = window.locator(f"#weight-{task}")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    start, height = int(slider.input_value()) / 1000, box["y"] + box["height"] / 2

    def place(value):
        return box["x"] + 8 + value * (box["width"] - 16)

    window.mouse.move(place(start), height)
    window.mouse.down()
    for step in range(1, 6):
        window.mouse.move(place(start + (share - start) * step / 5), height)
    window.mouse.up()


# -- weights ----------------------------------------------------------------------------------------------------------


def test_a_drag_is_measured_and_comes_back_from_the_address(window, open_page, address):
    assert shares(window) == [50, 50]
    drag(window, 0, 0.8)
    measured(window)
    after = shares(window)
    assert after[0] == pytest.approx(80, abs=1.5)
    assert sum(after) == pytest.approx(100)
    window.locator("#scale-marks [data-scale='0.5']").click()
    measured(window)
    command = window.locator("#tailor")
    expect(command).to_contain_text(f"--weights {after[0] / 100:g},{after[1] / 100:g}")
    expect(command).to_contain_text("--scale 0.5")
    assert "token" not in window.url
    accuracy = window.locator("#accuracy").inner_text()
    window.reload()
    measured(window)
    assert shares(window) == after
    assert window.locator("#scale-value").inner_text() == "0.5"
    assert window.locator("#accuracy").inner_text() == accuracy
    fragment = window.url.split("#")[1]
    elsewhere = open_page(f"{address}&{fragment}")  # a bookmark with the token of this session
    measured(elsewhere)
    assert shares(elsewhere) == after


def test_presets_keys_and_typed_numbers(window):
    window.locator("#only").select_option("only-1")
    assert shares(window) == [0, 100]
    window.get_by_role("button", name="equal", exact=True).click()
    assert shares(window) == [50, 50]
    window.locator("#weight-0").focus()
    window.keyboard.press("Home")
    assert shares(window) == [0, 100]
    window.locator("#weight-0").focus()
    for key in ("ArrowRight", "ArrowUp", "Shift+ArrowLeft"):
        window.keyboard.press(key)
    assert shares(window) == [1.9, 98.1]
    window.get_by_label("share of second in percent").fill("40")
    window.keyboard.press("Tab")
    assert shares(window) == [60, 40]
    assert window.locator("#weight-0").get_attribute("aria-valuetext") == "60.0 percent"


def test_a_method_takes_its_usual_scale(window):
    assert window.locator("#scale-value").inner_text() == "1"
    window.locator("#method").select_option("magmax")
    measured(window)
    expect(window.locator("#method-why")).to_contain_text("takes no weights")
    expect(window.locator("#tailor")).to_contain_text("--method magmax --scale matched")
    window.locator("#scale-marks [data-scale='0.5']").click()
    window.locator("#method").select_option("average")
    expect(window.locator("#scale-value")).to_have_text("0.5")  # it was chosen


def test_what_is_not_measured_is_interpolated_and_says_so(window, studio, monkeypatch):
    release = threading.Event()
    measure = studio.measure_now
    monkeypatch.setattr(studio, "measure_now", lambda *args: release.wait(20) and measure(*args))
    drag(window, 0, 0.31)
    expect(window.locator("#badge")).to_have_text("interpolated")
    expect(window.locator("#accuracy")).to_contain_text("≈")
    expect(window.locator("#accuracy-about")).to_contain_text("not measured itself")
    assert window.locator(".task .bar-fill.interpolated").count() == 2
    before = window.locator(".measured-points circle").count()
    release.set()
    measured(window)
    assert window.locator(".measured-points circle").count() >= before + 1


# -- samples ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_pictures_becomes_the_estimate(window, image_run, tmp_path):
    site = image_run.pairs(tmp_path / "site", {"red": 3, "green": 6})
    (site / "notes.doc").write_text("no sample")
    window.locator("#folder").set_input_files(site)
    expect(window.locator("#trust")).to_be_visible(timeout=20_000)
    assert window.locator("#trust-facts div").first.inner_text().split() == ["samples", "9"]
    expect(window.locator("#presets [aria-pressed=true]")).to_have_text("from samples")
    expect(window.locator("#judge")).to_have_value("samples")
    assert window.locator(".band:visible").count() == 2
    expect(window.locator(".sample img")).to_have_count(9)
    measured(window)
    window.locator("#data").select_option("site")
    measured(window)
    window.locator("#samples-remove").click()
    expect(window.locator("#trust")).to_be_hidden()


def test_samples_given_at_the_start_without_the_other_tasks(open_page, image_run, tmp_path, monkeypatch):
    site = image_run.pairs(tmp_path / "site", {"red": 5, "blue": 4})
    options = StudioOptions(out=tmp_path / "out", data=site, inputs=site, device="cpu")
    studio = Studio(Run.open(image_run.path), options)
    release, take = threading.Event(), studio._take_site
    monkeypatch.setattr(studio, "_take_site", lambda *args: release.wait(20) and take(*args))
    with serving(studio) as address:
        window = open_page(address)
        preset = window.locator("#presets [data-preset=samples]")
        expect(preset).to_have_text("from samples: reading …")
        release.set()
        expect(preset).to_have_text("from samples", timeout=20_000)
        window.locator("#only").select_option("only-0")
        measured(window)
        expect(window.locator("#tradeoff-about")).to_contain_text("These samples hold none of the other tasks")
        expect(window.locator("#tradeoff-none")).to_be_hidden()
        before = window.locator("#tradeoff .measured-points circle").count()
        window.locator("#scale-marks [data-scale='0.5']").click()
        measured(window)
        circles = window.locator("#tradeoff .measured-points circle")
        expect(circles).to_have_count(before + 1)
        places = circles.evaluate_all("all => all.map((circle) => Number(circle.getAttribute('cx')))")
        assert places == sorted(set(places))  # from left to right, none on another


def test_a_dropped_csv_of_texts(open_page, text_run, tmp_path):
    table = text_run.pairs(tmp_path / "site", {"red": 4, "green": 2})
    studio = Studio(Run.open(text_run.path), StudioOptions(out=tmp_path / "out", device="cpu"))
    with serving(studio) as address:
        window = open_page(address)
        expect(window.locator("#accuracy-about")).to_contain_text("Nothing to measure on", timeout=20_000)
        expect(window.locator("#tradeoff-none")).to_contain_text("samples with labels")
        expect(window.locator("#tradeoff")).to_be_hidden()
        expect(window.locator("#choices")).to_be_hidden()
        transfer = window.evaluate_handle(
            "text => { const t = new DataTransfer(); t.items.add(new File([text], 'site.csv')); return t; }",
            table.read_text() + '"<img src=x onerror=alert(1)> hello",red\n',
        )
        window.locator("#drop").dispatch_event("drop", {"dataTransfer": transfer})
        expect(window.locator("[data-show^=task-] .lines .sample")).to_have_count(7, timeout=20_000)
        assert window.get_by_text("<img src=x onerror=alert(1)> hello").count() >= 1  # as text
        measured(window)  # on the dropped samples, which have labels
        expect(window.locator("#tradeoff .measured-points circle").first).to_be_visible()


# -- saving ------------------------------------------------------------------------------------------------------


def test_a_model_is_written_and_one_is_cancelled(window, studio, monkeypatch):
    window.get_by_label("Write the model as").fill("mine")
    window.get_by_role("button", name="Write the model").click()
    model = window.locator("[data-model=mine]")
    expect(model).to_have_class("model done", timeout=60_000)
    expect(model).to_contain_text(str(studio.out / "mine"))
    assert (studio.out / "mine/model.safetensors").is_file()

    def waits(run, options, progress):
        while True:
            progress("merge <b>1</b>", 1, 3)
            threading.Event().wait(0.02)

    monkeypatch.setattr(writing, "tailor", waits)
    window.get_by_label("Write the model as").fill("slow")
    window.get_by_role("button", name="Write the model").click()
    slow = window.locator("[data-model=slow]")
    expect(slow).to_contain_text("merge <b>1</b>")
    expect(window.locator("#write")).to_be_disabled()
    slow.get_by_role("button", name="Cancel").click()
    expect(slow).to_contain_text("nothing is left")
    assert not (studio.out / "slow").exists()


def test_two_windows_at_once(window, open_page, address):
    other = open_page(address)
    measured(other)
    drag(window, 0, 0.23)
    drag(other, 0, 0.77)
    for opened, first in ((window, 23), (other, 77)):
        measured(opened)
        assert shares(opened)[0] == pytest.approx(first, abs=1.5)
    counts = {opened.locator("#tradeoff .measured-points circle").count() for opened in (window, other)}
    assert len(counts) == 1  # each sees what the other measured


def test_a_window_without_the_token_asks_for_the_address(open_page, address):
    window = open_page(address.split("#")[0])
    expect(window.get_by_text("This window needs the studio’s address")).to_be_visible()
    window.locator("#address-field").fill(address)
    window.get_by_role("button", name="Open").click()
    measured(window)


# -- many tasks, and the page in one file -----------------------------------------------------------------------------


def test_shares_give_way_in_proportion_and_locked_ones_stay(window):
    draws, cases = random.Random(0), []
    for _ in range(300):
        tasks = draws.randrange(2, 51)
        locked = draws.sample(range(tasks), draws.randrange(tasks))
        cases.append(
            ([draws.random() ** 3 for _ in range(tasks)], locked, draws.randrange(tasks), draws.randrange(-50, 1200))
        )
    answers = window.evaluate(
        """cases => cases.map(([weights, locked, moving, wanted]) => {
             const basis = studio.thousandths(weights);
             return [basis, studio.moved(basis, new Set(locked), moving, wanted)];
           })""",
        cases,
    )
    for (weights, locked, moving, wanted), (basis, found) in zip(cases, answers, strict=True):
        tasks = len(weights)
        held = sum(basis[t] for t in locked if t != moving)
        free = [t for t in range(tasks) if t != moving and t not in locked]
        assert sum(found) == 1000
        assert min(found) >= 0
        assert all(found[t] == basis[t] for t in locked if t != moving)
        if free:
            assert found[moving] == min(max(wanted, 0), 1000 - held)
            before, after = sum(basis[t] for t in free), sum(found[t] for t in free)
            if before:
                assert all(abs(found[t] - basis[t] * after / before) < 1 for t in free)


def made_up(state, tasks):
    """The state of a run with many tasks, one of which has a name that would be a script."""
    names = ["<script>alert(1)</script>", *(f"task {t}" for t in range(2, tasks + 1))]
    equal = {**state["presets"][0], "weights": [1 / tasks] * tasks}
    run = {**state["run"], "tasks": names, "classes": None}
    return {
        **state,
        "run": run,
        "presets": [equal],
        "data": [],
        "start": {**state["start"], "weights": equal["weights"]},
    }


def test_fifty_tasks_fit_and_locked_shares_stay(open_page, address, window):
    state = window.evaluate(
        "async () => (await fetch('/api/state', {"
        "headers: {'X-Studio-Token': sessionStorage.getItem('tmx-token')}})).json()"
    )
    window.set_viewport_size({"width": 1280, "height": 900})
    window.route("**/api/state", lambda route: route.fulfill(json=made_up(state, 50)))
    window.goto(address.replace("#", "?many#"))
    assert window.locator(".task .name").first.inner_text() == "<script>alert(1)</script>"
    window.get_by_role("button", name="lock task 2", exact=True).click()
    drag(window, 2, 0.5)
    after = shares(window)
    assert (after[1], after[2]) == (2, pytest.approx(50, abs=1.5))
    assert sum(after) == pytest.approx(100)
    expect(window.locator("#weight-1")).to_be_disabled()
    window.locator("#weight-2").press("ArrowRight")
    assert sum(shares(window)) == pytest.approx(100)
    window.locator("[data-sort=share]").click()
    assert window.locator(".task .name").first.inner_text() == "task 3"
    for width in (390, 1280):
        window.set_viewport_size({"width": width, "height": 900})
        assert window.evaluate("document.documentElement.scrollWidth") == width
