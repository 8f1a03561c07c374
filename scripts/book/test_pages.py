"""The pages of `make book` in a real browser, headless: `make test-book`. What needs no
browser is in scripts/tests/test_book.py."""

import functools
import http.server
import json
import os
import re
import shutil
import sys
import threading
import time

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

ROOT = os.path.abspath(f"{os.path.dirname(__file__)}/../..")
sys.path.append(f"{ROOT}/scripts/moves")

import moves  # noqa: E402  (the path has to be known)

BOOK = f"{ROOT}/build/book"
AXE = f"{ROOT}/build/axe/node_modules/axe-core/axe.min.js"
PAGES = sorted(os.path.relpath(f"{folder}/{name}", BOOK)
               for folder, _, names in os.walk(BOOK) for name in names
               if name.endswith(".html"))


def pages_with(text):
    """In the order of their numbers."""
    found = []
    for name in PAGES:
        with open(f"{BOOK}/{name}", encoding="utf-8") as file:
            if text in file.read():
                found.append(name)
    return sorted(found, key=lambda name: (len(name.split("_")[0]), name))


# The chapters with a program beside them, and those of which it is a step.
PROGRAMS, STEPS = pages_with('id="program"'), pages_with("data-view")
# Those that are told along moves.
MOVES = pages_with('id="program-moves"')
EXCERPTS = [page for page in pages_with('class="excerpt"') if page in PROGRAMS]
SIZES = {"phone": (360, 740), "tablet": (800, 1000), "half": (1000, 900), "wide": (1400, 900)}


class Browser:
    """A window of chromium."""

    def __init__(self, script=True):
        options = webdriver.ChromeOptions()
        options.binary_location = (os.environ.get("PUPPETEER_EXECUTABLE_PATH")
                                   or shutil.which("chromium")
                                   or shutil.which("chromium-browser"))
        for argument in ["--headless=new", "--disable-background-networking",
                         "--no-first-run", *["--no-sandbox"] * (os.getuid() == 0)]:
            options.add_argument(argument)
        if not script:
            options.add_experimental_option(
                "prefs", {"profile.managed_default_content_settings.javascript": 2})
        options.set_capability("goog:loggingPrefs",
                               {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(
            service=Service(shutil.which("chromedriver")), options=options)
        # The checks of a long page take their time on a busy machine.
        self.driver.set_script_timeout(300)
        self.script = self.driver.execute_script
        self.size()

    def size(self, name="wide"):
        width, height = SIZES[name]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def media(self, media="", **features):
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "media": media, "features": [{"name": name.replace("_", "-"), "value": value}
                                         for name, value in features.items()]})

    def open(self, page, base=f"file://{BOOK}/"):
        # Otherwise another place of the same page would not load it anew.
        self.driver.get("about:blank")
        self.driver.get(base + page)

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def press(self, *keys):
        self.find("body").send_keys(*keys)

    def click(self, selector):
        self.script("document.querySelector(arguments[0]).click()", selector)

    def until(self, what, *arguments):
        """Waits until an expression is true, which scripts may make so late."""
        return WebDriverWait(self.driver, 10).until(
            lambda _: self.script(f"return {what}", *arguments), what)

    def lit(self):
        """The numbers of the lines that are lit."""
        return [int(name[1:]) for name in self.script(
            "return [...document.querySelectorAll('.code .lit')].map(row => row.id)")]


@pytest.fixture(scope="module")
def shared_browser():
    found = Browser()
    yield found
    found.driver.quit()


@pytest.fixture
def browser(shared_browser):
    shared_browser.size()
    shared_browser.media()
    yield shared_browser
    # No test leaves an error behind, and none loads anything from elsewhere.
    errors = [entry for entry in shared_browser.driver.get_log("browser")
              if entry["level"] in ("SEVERE", "WARNING")]
    loaded = [json.loads(entry["message"])["message"]
              for entry in shared_browser.driver.get_log("performance")]
    loaded = [entry["params"]["request"]["url"] for entry in loaded
              if entry["method"] == "Network.requestWillBeSent"]
    # What a test has chosen is forgotten.
    shared_browser.script("try { localStorage.clear(); } catch { }")
    shared_browser.driver.get("about:blank")
    assert not errors
    assert not [url for url in loaded
                if not re.match(r"file:|data:|about:|http://127\.0\.0\.1:", url)]


# Whether an element can be seen as a whole, and nothing is in front of its corners.
IN_SIGHT = """(element => {
    const box = element.getBoundingClientRect();
    return box.width > 0 && box.left >= 0 && box.right <= innerWidth + 1 && box.top >= 0 &&
      box.bottom <= innerHeight + 1 && [box.top + 2, box.bottom - 2].every(y =>
        element.contains(document.elementFromPoint(box.left + box.width / 2, y)));
  })"""


def numbers(text):
    """The lines that "436-444,460-462" names."""
    found = []
    for part in text.split(","):
        first, last = part.split("-")
        found += range(int(first), int(last) + 1)
    return found


# ---- All pages ----

@pytest.mark.parametrize("page", PAGES)
def test_no_error_and_no_overflow(browser, page):
    """The fixture looks for errors."""
    for size, (width, _) in SIZES.items():
        browser.size(size)
        browser.open(page)
        wide = browser.script("return document.documentElement.scrollWidth")
        assert wide <= width, (size, wide, browser.script("""
            return [...document.querySelectorAll("body *")].filter(element =>
              element.getBoundingClientRect().right > innerWidth + 1 &&
              !element.closest("pre, .code, .table, .wide")).map(e => e.outerHTML.slice(0, 80))"""))


AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_accessible(browser, page, scheme):
    """axe-core finds nothing: contrast, names, alternative texts, landmarks."""
    if page.startswith(("man/", "files/")) and PAGES.index(page) % 5:
        pytest.skip("one in five of these, which are all alike")
    browser.media(prefers_color_scheme=scheme)
    browser.open(page)
    with open(AXE, encoding="utf-8") as file:
        browser.script(file.read())
    check(browser)


def check(browser, selector="document"):
    found = browser.driver.execute_async_script("""
        const done = arguments[arguments.length - 1];
        axe.run(%s, {runOnly: arguments[0], preload: false,
            resultTypes: ["violations"]}).then(
          result => done(result.violations.map(found => [found.id, found.nodes.length,
            found.nodes.slice(0, 3).map(node => [node.html.slice(0, 120),
                                                 node.failureSummary])])),
          error => done([String(error)]));""" % selector, AXE_TAGS)
    assert not found, json.dumps(found, indent=1)


@pytest.mark.parametrize("size", ["wide", "half", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible_in_use(browser, scheme, size):
    """Also with lines held, only new lines, and the dialogs open."""
    browser.media(prefers_color_scheme=scheme)
    browser.size(size)
    browser.open("6_write.html")
    with open(AXE, encoding="utf-8") as file:
        browser.script(file.read())
    browser.click("#excerpt-5 figcaption a")
    browser.click("[data-view=new]")
    check(browser)
    browser.press("/")
    browser.find("dialog input").send_keys("fi_writemsg")
    browser.until("document.querySelector('dialog li')")
    check(browser, "'dialog'")
    browser.find("dialog input").send_keys(Keys.ESCAPE)
    browser.press("?")
    check(browser, "'dialog.help'")


def test_focus_is_visible(browser):
    browser.open("6_write.html")
    seen = []
    for _ in range(12):
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(browser.script("""
            const style = getComputedStyle(document.activeElement);
            return [document.activeElement.tagName, style.outlineStyle,
                    parseFloat(style.outlineWidth)]"""))
    assert all(style == "solid" and width >= 2 for _, style, width in seen), seen
    assert len({tag for tag, *_ in seen}) > 2


# ---- The program beside the chapter ----

@pytest.mark.parametrize("page", PROGRAMS)
def test_scrolling_lights_the_lines(browser, page):
    """Those of the excerpt in the middle, in sight, and no others."""
    browser.open(page)
    for excerpt in browser.all(".excerpt"):
        browser.script("arguments[0].scrollIntoView({block: 'center'})", excerpt)
        wanted = numbers(excerpt.get_attribute("data-lines"))
        browser.until("""[...document.querySelectorAll('.code .lit')].map(row =>
            Number(row.id.slice(1))).join() === arguments[0].join()""", wanted)
        assert excerpt.get_attribute("class") == "excerpt reading"
        # Some of them in sight, and all where there is room.
        assert browser.script("""
            const code = document.querySelector(".code").getBoundingClientRect();
            const boxes = [...document.querySelectorAll(".code .lit")].map(row =>
              row.getBoundingClientRect());
            const inside = boxes.filter(box => box.top >= code.top - 1 &&
                                               box.bottom <= code.bottom + 1);
            const height = boxes.at(-1).bottom - boxes[0].top;
            return height < code.height - 40 ? inside.length === boxes.length
                                             : inside.length > 0""")


# What is beside the chapter: its title, its lines, and those that are new.
BESIDE = """(() => {
    const rows = [...document.querySelectorAll(".code [id^=L]")];
    const code = row => row.textContent.replace(/^\\d+/, "");
    return [document.querySelector(".program h2").textContent, rows.map(code).join(""),
            rows.filter(row => row.matches(".new")).length];
  })()"""


def go_to_move(browser, name):
    """So far that its section is in the middle. A short one is not when it's at the top."""
    browser.script("document.querySelector(`h2[data-move='${arguments[0]}']`)"
                   ".scrollIntoView({block: 'start'})", name)
    for _ in range(20):
        time.sleep(0.1)
        if browser.script(f"return {BESIDE}")[0].startswith(f"After {name}: "):
            break
        browser.script("scrollBy(0, -30)")
    browser.until("document.querySelector('.program h2').textContent.startsWith("
                  "`After ${arguments[0]}: `)", name)


def go_to_the_end(browser):
    """Where no move is told, which a short last section has to have room for. Returns the
    finished program."""
    browser.script("document.querySelector('article').style.paddingBottom = '100vh'")
    browser.script("scrollTo(0, document.body.scrollHeight)")
    browser.until(f"!{BESIDE}[0].includes('After')")
    return browser.script(f"return {BESIDE}")


@pytest.mark.parametrize("size", ["wide", "phone"])
@pytest.mark.parametrize("page", MOVES)
def test_the_program_changes_with_the_move(browser, page, size):
    """In each section it is what it is after that move, with its new lines; around them
    it is the finished one."""
    browser.size(size)
    browser.open(page)
    if size == "phone":
        browser.click(".handle")
    finished = go_to_the_end(browser)
    step = finished[0].removesuffix(".cpp")
    states = moves.states(step)
    assert finished[1] == states[-1]
    told = [heading.get_attribute("data-move") for heading in browser.all("h2[data-move]")]
    for name in [*told, *told[::-2]]:
        k = int(name.split(".")[1])
        go_to_move(browser, name)
        added, removed = moves.counts(step, k)
        assert browser.script(f"return {BESIDE}") == [
            f"After {name}: {step}.cpp", states[k], added]
        assert browser.script("return document.querySelectorAll('.code del').length") == removed
        assert f"+{added} −{removed}" in browser.find(f"h2[data-move='{name}']").text
        assert browser.script(f"return {IN_SIGHT}(document.querySelector('.which'))")
    browser.script("scrollTo(0, document.body.scrollHeight)")
    browser.until(f"JSON.stringify({BESIDE}) === JSON.stringify(arguments[0])", finished)
    assert not browser.find(".which").is_displayed()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", MOVES[:1])
def test_accessible_at_a_move(browser, page, scheme):
    browser.media(prefers_color_scheme=scheme)
    for size in "wide", "phone":
        browser.size(size)
        browser.open(page)
        browser.script("document.querySelector('.program').classList.contains('open') ||"
                       " document.querySelector('.handle').click()")
        go_to_move(browser, browser.find("h2[data-move]").get_attribute("data-move"))
        with open(AXE, encoding="utf-8") as file:
            browser.script(file.read())
        check(browser)


@pytest.mark.parametrize("page", MOVES)
def test_the_finished_program(browser, page):
    """The switch shows it instead, with what is left of the lines that are read; and
    back."""
    browser.open(page)
    finished = go_to_the_end(browser)
    name = browser.find("h2[data-move]").get_attribute("data-move")
    go_to_move(browser, name)
    browser.press("j")
    browser.until("document.querySelector('.excerpt.reading')")
    name = re.match("After (.*):", browser.script(f"return {BESIDE}")[0])[1]
    texts = "return [...document.querySelectorAll('.code .lit')].map(row => row.innerText.trim())"
    assert browser.script(texts)
    browser.click("[data-which=finished]")
    assert browser.script(f"return {BESIDE}") == finished
    shown = moves.states(finished[0].removesuffix(".cpp"))[int(name.split(".")[1])]
    left = [re.sub(r"^\d+|\s", "", line) for line in browser.script(texts)]
    assert all(line in re.sub(r"\s", "", shown) for line in left)
    # It stays so in the next section.
    browser.script("document.querySelectorAll('h2[data-move]')[1].scrollIntoView()")
    time.sleep(0.3)
    assert browser.script(f"return {BESIDE}") == finished
    browser.press("f")
    assert browser.script(f"return {BESIDE}")[0] != finished[0]
    # Whoever asks for lines that it hasn't got sees them in their program.
    for gone in browser.script("""
            return [...document.querySelectorAll(".excerpt[data-move]")].map(e => e.id)"""):
        browser.press("f")
        browser.click(f"#{gone} figcaption a")
        assert browser.lit()
        if browser.script(f"return {BESIDE}")[0] != finished[0]:
            break
        browser.press(Keys.ESCAPE)
        browser.press("f")


@pytest.mark.parametrize("page", MOVES)
def test_lines_of_a_move(browser, page):
    """They are held after their move, have an address there, and lead back; New shows what
    the move adds; the finished program keeps its own addresses."""
    browser.open(page)
    excerpt = browser.find(".excerpt[data-move]")
    name, where = (excerpt.get_attribute(f"data-{what}") for what in ("move", "lines"))
    browser.script("arguments[0].querySelector('figcaption a').click()", excerpt)
    address = browser.script("return location.hash")
    assert address.startswith(f"#{name}-L") and "Held" in browser.find(".state").text
    first = address.split("L")[1].rstrip("-")
    browser.script("scrollTo(0, 0)")
    time.sleep(0.3)
    assert browser.script(f"return {BESIDE}")[0].startswith(f"After {name}: ")
    browser.press(Keys.ESCAPE)
    go_to_the_end(browser)
    browser.open(page + address)
    browser.until("document.querySelector('.found')")
    assert browser.script(f"return {BESIDE}")[0].startswith(f"After {name}: ")
    assert browser.lit()[0] == int(first) and set(browser.lit()) <= set(numbers(where))
    browser.open(f"{page}#{name}-new")
    browser.until("document.querySelector('.only-new')")
    assert browser.script("""
        return [...document.querySelectorAll(".code [id^=L]")].every(row =>
          row.checkVisibility() === row.matches(".new"))""")
    browser.open(page + "#L20")
    browser.until("document.querySelector('.lit')")
    assert "After" not in browser.script(f"return {BESIDE}")[0] and browser.lit() == [20]


def test_without_animation(browser):
    """Many jumps go backwards."""
    browser.open("6_write.html")
    assert browser.script("""
        return [document.documentElement, document.querySelector(".code")].every(element =>
          getComputedStyle(element).scrollBehavior === "auto")""")


def test_an_excerpt_does_not_stay_for_ever(browser):
    """In the exercises, none has been shown for long."""
    browser.open("6_write.html")
    browser.press("j")
    browser.until("document.querySelector('.lit')")
    browser.script("document.getElementById('exercises').scrollIntoView()")
    browser.until("!document.querySelector('.lit')")
    assert browser.find(".state").text == ""


def test_what_is_clicked_stays(browser):
    browser.open("6_write.html")
    browser.click("#excerpt-3 figcaption a")
    held = numbers(browser.find("#excerpt-3").get_attribute("data-lines"))
    assert browser.lit() == held
    assert browser.script("return location.hash") == address(browser, "#excerpt-3")
    browser.script("document.getElementById('excerpt-9').scrollIntoView()")
    time.sleep(0.3)
    assert browser.lit() == held
    assert "Held: lines" in browser.find(".state").text
    # Escape lets go: then it follows again.
    browser.press(Keys.ESCAPE)
    assert browser.lit() != held
    # A second click on the same excerpt does so, too; and so does the key.
    for release in [lambda: browser.click("#excerpt-3 pre"), lambda: browser.press("h"),
                    lambda: browser.click(".state button")]:
        browser.click("#excerpt-3 pre")
        assert browser.find(".excerpt.held").get_attribute("id") == "excerpt-3"
        release()
        assert not browser.all(".excerpt.held")


def address(browser, selector):
    """That of an excerpt's first lines, which are those of a move in its section."""
    excerpt = browser.find(selector)
    first, last = excerpt.get_attribute("data-lines").split(",")[0].split("-")
    move = excerpt.get_attribute("data-move")
    return "#" + (f"{move}-" if move else "") + f"L{first}" + (
        f"-L{last}" if last != first else "")


def test_the_address_of_lines(browser):
    """Opened anew, it lights them, and shows the passage."""
    browser.open("6_write.html")
    lines = browser.find("#excerpt-5").get_attribute("data-lines").split(",")[0]
    browser.open("6_write.html" + address(browser, "#excerpt-5"))
    browser.until("document.querySelector('.found')")
    assert browser.lit() == numbers(lines)
    assert browser.script("""
        const box = document.getElementById("excerpt-5").getBoundingClientRect();
        return box.top < innerHeight && box.bottom > 0""")


def section_lines(browser, slug):
    """The lines of the first excerpt in a section of the page, or None."""
    return browser.script("""
        const heading = document.getElementById(arguments[0]);
        const all = [...document.querySelectorAll("article :is(h1, h2, h3, .excerpt)")];
        const level = element => Number(element.tagName[1]);
        for (const element of all.slice(all.indexOf(heading) + 1))
          if (element.matches(".excerpt")) return element.dataset.lines;
          else if (level(element) <= level(heading)) return null;""", slug)


@pytest.mark.parametrize("page", EXCERPTS)
def test_the_address_of_a_section(browser, page):
    """Opens the program at the lines of the section, and nowhere at its #includes."""
    browser.open(page)
    slugs = browser.script("return [...document.querySelectorAll('article :is(h2, h3)')]"
                           ".map(heading => heading.id)")
    wanted = {slug: section_lines(browser, slug) for slug in slugs}
    assert any(wanted.values())
    # Some of them, because loading pages takes long.
    for slug in slugs[::4]:
        browser.open(f"{page}#{slug}")
        browser.until("document.readyState === 'complete'")
        time.sleep(0.1)
        if wanted[slug]:
            assert browser.lit() == numbers(wanted[slug]), slug
        assert browser.script("""
            const code = document.querySelector(".code").getBoundingClientRect();
            const row = document.elementFromPoint(code.left + 20, code.top + code.height / 2);
            return !/^\\d+#include/.test(row.closest("[id^=L]").textContent)"""), slug
        # Also when one goes there within the page.
    browser.open(page)
    slug = next(slug for slug in reversed(slugs) if wanted[slug])
    browser.script("location.hash = arguments[0]", slug)
    browser.until("document.querySelector('.lit')")
    assert browser.lit() == numbers(wanted[slug])
    # From there on, the lines follow again.
    browser.script("document.getElementById('excerpt-1').scrollIntoView({block: 'center'})")
    browser.until("document.querySelector('#excerpt-1.reading')")
    assert browser.lit() == numbers(browser.find("#excerpt-1").get_attribute("data-lines"))


def test_a_line_leads_to_its_passage(browser):
    """One that is shown, one that is named, one that an earlier chapter explains."""
    browser.open("6_write.html")
    runs = json.loads(browser.script(
        "return document.getElementById('passages').textContent"))
    for kind in "shown", "named":
        first, _, _, _, place = next(run for run in runs[::-1] if run[2] == kind)
        browser.click(f"#L{first}")
        assert browser.lit() == [first]
        assert browser.script("""
            const found = document.querySelector(".found");
            const box = found.getBoundingClientRect();
            return (found.id === arguments[0] || found.contains(
              document.getElementById(arguments[0]))) && box.top < innerHeight &&
              box.bottom > 0""", place)
        assert f"{kind} in the chapter" in browser.find(".state").text
    first, _, _, page, place = next(run for run in runs if run[2] == "earlier")
    browser.click(f"#L{first}")
    link = browser.find(".state a")
    assert link.get_attribute("href").endswith(f"{page}#{place}")
    browser.click(".state a")
    browser.until("document.querySelector('.found')")


def test_a_mention_leads_to_the_definition(browser):
    browser.open("6_write.html")
    mention = next(link for link in browser.all("p a[data-lines]")
                   if link.text == "HandleRequest")
    browser.script("arguments[0].click()", mention)
    assert "HandleRequest(" in browser.find(".code .lit").text
    lines = numbers(mention.get_attribute("data-lines"))
    assert browser.lit() == lines
    # That was a glance: the next excerpt takes over.
    browser.press("j")
    browser.until("!document.getElementById('L' + arguments[0]).matches('.lit')", lines[0])


def test_a_glance_is_over_when_one_comes_back(browser):
    """From a manual page, for example."""
    browser.open("6_write.html")
    link = next(link for link in browser.all("p a[data-lines]")
                if link.text == "HandleRequest")
    browser.script("arguments[0].click()", link)
    assert browser.script("return location.hash") == ""
    link = next(link for link in browser.all("a.man") if link.text == "fi_writemsg")
    browser.script("arguments[0].click()", link)
    browser.until("/fi_rma/.test(location.pathname)")
    browser.driver.back()
    browser.until("document.readyState === 'complete'")
    browser.press("j")
    browser.until("document.querySelector('.excerpt.reading')")
    assert "Held" not in browser.find(".state").text
    # The same holds for lines that have been let go.
    browser.click("#excerpt-3 figcaption a")
    browser.press(Keys.ESCAPE)
    assert browser.script("return location.hash") == ""


def test_the_way_back(browser):
    """A line carries the chapter away; letting it go brings it back, unless one has
    read on from there."""
    browser.open("6_write.html")
    runs = json.loads(browser.script(
        "return document.getElementById('passages').textContent"))
    far = next(run[0] for run in runs[::-1] if run[2] == "named")
    near = next(run[0] for run in runs if run[2] == "shown")
    at = "return Math.round(scrollY)"
    browser.script("scrollTo(0, 900)")
    browser.click(f"#L{far}")
    assert browser.script(at) > 1500
    browser.click(f"#L{near}")
    assert browser.script(at) != 900
    browser.press(Keys.ESCAPE)
    assert browser.script(at) == 900
    browser.click(f"#L{far}")
    browser.script("scrollBy(0, -600)")
    read = browser.script(at)
    browser.press(Keys.ESCAPE)
    assert browser.script(at) == read


def test_a_mention_opens_a_fold(browser):
    """Where only what is new is to be seen."""
    browser.open("6_write.html")
    browser.press("n")
    link = next(link for link in browser.all("p a[data-lines]") if link.text == "Submit")
    browser.script("arguments[0].click()", link)
    assert browser.script("""
        return [...document.querySelectorAll(".code .lit")].every(row =>
          row.checkVisibility())""")


def test_a_name_leads_to_its_manual_page(browser):
    browser.open("6_write.html")
    link = next(link for link in browser.all("a.man") if link.text == "fi_writemsg")
    browser.driver.get(link.get_attribute("href"))
    assert "fi_rma" in browser.find("h1").text
    assert "fi_writemsg" in browser.find(":target").text


def back_at(browser, place):
    browser.click(".back")
    browser.until("location.pathname.endsWith('/6_write.html')")
    assert browser.script("return location.hash") == "#" + place
    browser.until("document.readyState === 'complete'")


def test_the_way_back_from_what_was_looked_up(browser):
    """From a manual page, also over others, from a file, and after a line of code."""
    for size in "wide", "phone":
        browser.size(size)
        browser.open("6_write.html")
        link = next(link for link in browser.all("a.man") if link.text == "fi_writemsg")
        place = browser.script("return arguments[0].closest('[id]').id", link)
        browser.script("arguments[0].click()", link)
        browser.until("/fi_rma/.test(location.pathname)")
        assert browser.find(".back").text == "← Back to 6. Write"
        # Also in the middle of a page.
        browser.script("scrollTo(0, 2000)")
        assert browser.script(f"return {IN_SIGHT}(document.querySelector('.back'))")
        other = browser.script("return [...document.querySelectorAll('article a')].find(a => "
                               "/fi_\\w+.3.html/.test(a.getAttribute('href')))")
        browser.script("arguments[0].click()", other)
        browser.until("!/fi_rma/.test(location.pathname)")
        back_at(browser, place)
        assert browser.script(f"""
            const box = document.getElementById(arguments[0]).getBoundingClientRect();
            return box.top >= 0 && box.top < innerHeight""", place)
    browser.size()
    number = browser.script("""
        return [...document.querySelectorAll(".code [id^=L]")].find(row =>
          /fi_writemsg\\(ep/.test(row.textContent)).id""")
    browser.click(f"#{number}")
    link = next(link for link in browser.all(".state .name") if link.text == "fi_writemsg")
    browser.script("arguments[0].click()", link)
    browser.until("/fi_rma/.test(location.pathname)")
    back_at(browser, number)
    assert browser.lit() == [int(number[1:])]
    # Nothing but a page of the book can be gone back to.
    browser.open("man/fi_rma.3.html?javascript:alert(1).x")
    assert not browser.all(".back")


def test_the_way_back_from_a_file(browser):
    browser.open("contributing.html")
    link = browser.find("article a[href*='files/']")
    browser.script("arguments[0].click()", link)
    browser.until("/files/.test(location.pathname)")
    browser.click(".back")
    browser.until("location.pathname.endsWith('/contributing.html')")


def test_a_line_leads_to_what_its_names_mean(browser):
    """To their definitions, and to the manual pages."""
    browser.open("6_write.html")
    number = browser.script("""
        return [...document.querySelectorAll(".code [id^=L]")].find(row =>
          /fi_writemsg\\(ep/.test(row.textContent)).id""")
    browser.click(f"#{number}")
    names = {link.text: link for link in browser.all(".state .name")}
    assert "man/fi_rma.3.html" in names["fi_writemsg"].get_attribute("href")
    number = browser.script("""
        return [...document.querySelectorAll(".code [id^=L]")].find(row =>
          /^\\d+ .*[^\\w:]CheckSilence\\(what/.test(row.textContent)).id""")
    browser.click(f"#{number}")
    browser.click(".state .name")
    browser.until("/void CheckSilence/.test(document.querySelector('.lit').textContent)")


@pytest.mark.parametrize("width", [1280, 1400])
@pytest.mark.parametrize("page", PROGRAMS)
def test_lines_fit(browser, page, width):
    """Lines of 80 columns are read without moving them sideways."""
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False})
    browser.open(page)
    assert browser.script("""
        const code = document.querySelector(".code");
        return code.scrollWidth - code.clientWidth""") <= 0


@pytest.mark.parametrize("page", STEPS)
def test_new(browser, page):
    """New shows the new lines and the removed ones, which are struck out, and nothing
    else; All shows all."""
    browser.open(page)
    visible = """[...document.querySelectorAll(arguments[0])].filter(element =>
        element.checkVisibility()).length"""
    count = browser.script("return document.querySelectorAll('.code [id^=L]').length")
    new = browser.script("return document.querySelectorAll('.code .new').length")
    added, removed = map(int, re.findall(r"\d+", browser.find(".size").text)[:2])
    assert new == added
    assert browser.script(f"return {visible}", ".code del") == 0
    browser.press("n")
    assert browser.script(f"return {visible}", ".code [id^=L]") == new
    assert browser.script(f"return {visible}", ".code del") == removed
    assert "line-through" in browser.script(
        "return getComputedStyle(document.querySelector('.code del')).textDecoration")
    folded = sum(int(re.match(r"\d+", summary.text)[0])
                 for summary in browser.all(".code summary"))
    assert folded == count - new
    browser.click("[data-view=all]")
    assert browser.script(f"return {visible}", ".code [id^=L]") == count
    # `make diff-N` in the text leads there, too.
    browser.open(page + "#new")
    browser.until("document.querySelector('.only-new')")


def test_map(browser):
    browser.open("6_write.html")
    browser.script("document.querySelector('.code').scrollTop = 1e6")
    browser.until("parseFloat(document.querySelector('.view').style.top) > 90")
    box = browser.find(".map").rect
    browser.script("""document.querySelector(".map").dispatchEvent(
        new MouseEvent("click", {clientY: arguments[0], bubbles: true}))""",
        box["y"] + box["height"] / 2)
    browser.until("Math.abs(parseFloat(document.querySelector('.view').style.top) - 49) < 4")


# ---- Keys, search, themes ----

def test_keys(browser):
    browser.open("6_write.html")
    browser.press(Keys.ARROW_RIGHT)
    browser.until("location.pathname.endsWith('/6_gpu.html')")
    browser.press(Keys.ARROW_LEFT)
    browser.until("location.pathname.endsWith('/6_write.html')")
    browser.script("scrollTo(0, 0)")
    read = []
    for key in "jjjk":
        browser.press(key)
        time.sleep(0.2)
        read.append(browser.find(".excerpt.reading").get_attribute("id"))
    assert read == ["excerpt-1", "excerpt-2", "excerpt-3", "excerpt-2"]
    browser.press("?")
    assert browser.find("dialog[open]").is_displayed()
    browser.find("dialog").send_keys(Keys.ESCAPE)
    assert not browser.all("dialog[open]")


def test_search(browser):
    """Over chapters and programs, from any page."""
    browser.open("man/fi_mr.3.html")
    browser.press("/")
    browser.find("dialog input").send_keys("immediate overtake")
    browser.until("/Nothing|in the text/.test(document.querySelector('dialog p').textContent)")
    field = browser.find("dialog input")
    field.clear()
    field.send_keys("PollCompletion()")
    browser.until("document.querySelector('dialog li code mark')")
    field.clear()
    field.send_keys("delivery_complete")
    browser.until("document.querySelectorAll('dialog li').length > 3")
    field.send_keys(Keys.ARROW_DOWN)
    assert browser.script("return document.activeElement.closest('li') !== null")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.until("/(\\d+|appendix)_\\w+\\.html/.test(location.pathname) && location.hash")


# Words of a transcript, of a command, of a figure and of a program; and what the text calls
# otherwise.
@pytest.mark.parametrize("what", ["Hello, world", "modprobe", "overtakes", "torn",
                                  "torn_reads", "torn read", "throughput", "out-of-order",
                                  "flow control", "PollCompletion"])
def test_search_finds(browser, what):
    browser.open("6_write.html")
    browser.press("/")
    browser.find("dialog input").send_keys(what)
    browser.until("document.querySelector('dialog li mark')")
    # It leads to the place.
    browser.find("dialog input").send_keys(Keys.ENTER)
    browser.until("location.hash.length > 1")
    browser.until("document.readyState === 'complete'")
    assert browser.script("return document.getElementById(location.hash.slice(1)) !== null")


@pytest.mark.parametrize("size", SIZES)
def test_menu(browser, size):
    """All chapters can be seen, and on a wide page what is on this one."""
    browser.size(size)
    browser.open("6_write.html")
    browser.click(".menu summary")
    for selector in [".chapters a"] + [".sections a"] * (size != "phone"):
        assert browser.script(f"return [...document.querySelectorAll(arguments[0])].every("
                              f"{IN_SIGHT})", selector)
    assert len(browser.all(".chapters a")) == len(
        [page for page in PAGES if re.match(r"\d+_|appendix_", page)])


def test_themes(browser):
    """The system's at first; then what the reader has chosen, on all pages."""
    back = "getComputedStyle(document.body).backgroundColor"
    browser.media(prefers_color_scheme="light")
    browser.open("6_write.html")
    light = browser.script(f"return {back}")
    browser.media(prefers_color_scheme="dark")
    dark = browser.script(f"return {back}")
    assert light != dark
    shown = "[...document.querySelectorAll('.drawn img')].filter(i => i.offsetParent)"
    assert browser.script(f"return {shown}.every(i => i.className === 'dark')")
    browser.press("t")
    assert browser.script(f"return {back}") == light
    assert browser.script(f"return {shown}.every(i => i.className === 'light')")
    browser.open("7_queue.html")
    assert browser.script(f"return {back}") == light


# ---- A phone, paper, no script, a server ----

def test_phone(browser):
    """A tap on an excerpt opens the program, with both in sight, and it closes again."""
    browser.size("phone")
    browser.open("6_write.html")
    assert not browser.find(".code").is_displayed()
    assert browser.script(f"return {IN_SIGHT}(document.querySelector('.handle'))")
    # At the bottom, where the sheet will be.
    browser.script("document.getElementById('excerpt-3').scrollIntoView({block: 'end'})")
    browser.click("#excerpt-3 pre")
    assert browser.lit() == numbers(
        browser.find("#excerpt-3").get_attribute("data-lines"))
    assert browser.script("""
        const code = document.querySelector(".code").getBoundingClientRect();
        const row = document.querySelector(".lit").getBoundingClientRect();
        return row.top >= code.top && row.bottom <= code.bottom && code.bottom <= innerHeight""")
    assert browser.script(f"return {IN_SIGHT}(document.querySelector('#excerpt-3'))")
    browser.click(".handle")
    assert not browser.find(".code").is_displayed()


@pytest.mark.parametrize("size", ["half", "tablet"])
def test_half_a_window(browser, size):
    """Shows the program, too, below the text; it follows, and can be put away."""
    browser.size(size)
    browser.open("6_write.html")
    for at in "excerpt-3", "excerpt-7":
        browser.script("document.getElementById(arguments[0]).scrollIntoView({block: 'center'})",
                       at)
        wanted = numbers(browser.find("#" + at).get_attribute("data-lines"))
        browser.until("""[...document.querySelectorAll('.code .lit')].map(row =>
            Number(row.id.slice(1))).join() === arguments[0].join()""", wanted)
        for selector in f"#{at}", ".code .lit":
            assert browser.script(f"return {IN_SIGHT}(document.querySelector(arguments[0]))",
                                  selector), selector
    browser.click(".handle")
    assert not browser.find(".code").is_displayed()
    # It says how to get it back, here and on the next page.
    browser.open("7_queue.html")
    assert not browser.find(".code").is_displayed()
    assert browser.find(".handle").text == "Show the program"
    assert browser.script(f"return {IN_SIGHT}(document.querySelector('.handle'))")
    browser.find(".handle").click()
    assert browser.find(".code").is_displayed()


def test_the_end_of_a_page_is_read(browser):
    """The sheet leaves it free."""
    for size in SIZES:
        browser.size(size)
        browser.open("6_write.html")
        browser.script("scrollTo(0, 1e6)")
        assert browser.script(f"return {IN_SIGHT}([...document.querySelectorAll('article p')]"
                              ".at(-1))"), size


@pytest.mark.parametrize("page", [page for page in PAGES if "/" not in page])
def test_what_is_cut_fades(browser, page):
    """On a phone: code, tables and enlarged figures, at the edge where they go on. What
    programs print and whole figures are not cut."""
    browser.size("phone")
    browser.open(page)
    wrong = """return [...document.querySelectorAll("pre, .table, .wide, .code")].filter(box => {
        const right = box.scrollWidth - box.clientWidth - box.scrollLeft > 2;
        const fades = getComputedStyle(box).maskImage !== "none";
        return box.clientWidth && (right !== box.matches(".more-right") ||
                                   (right || box.scrollLeft > 2) !== fades);
      }).map(box => box.outerHTML.slice(0, 80))"""
    assert not browser.script(wrong)
    assert not browser.script("""
        return [...document.querySelectorAll("pre.console, .wide")].filter(box =>
          box.scrollWidth > box.clientWidth).map(box => box.outerHTML.slice(0, 80))""")
    for button in browser.all(".enlarge"):
        if button.is_displayed():
            browser.script("arguments[0].click()", button)
    # Moved to their ends, they fade on the left.
    browser.script("""
        for (const box of document.querySelectorAll("pre, .table, .wide")) box.scrollLeft = 1e6""")
    browser.until("document.querySelectorAll('article .more-right').length === 0")
    assert not browser.script(wrong)
    assert not browser.script("""
        return [...document.querySelectorAll("article .wide.large")].filter(box =>
          !box.matches(".more-left")).length""")


def test_a_figure_is_enlarged(browser):
    """On a phone: by a tap, at this place. The whole of it is there at first."""
    browser.size("phone")
    browser.open("6_write.html")
    at = """[...document.querySelectorAll(".wide")].find(box =>
        /overtak/.test(box.firstChild.src))"""
    browser.script(f"{at}.scrollIntoView()")
    assert browser.script(f"return {IN_SIGHT}({at}.firstChild)")
    browser.script(f"""
        const box = {at}.getBoundingClientRect();
        {at}.firstChild.dispatchEvent(new MouseEvent("click", {{bubbles: true,
            clientX: box.right - 20, clientY: box.top + 20}}))""")
    assert browser.script(f"return {at}.scrollLeft > 100 && {at}.firstChild.width >= 700")
    browser.script(f"{at}.nextElementSibling.click()")
    assert browser.script(f"return {IN_SIGHT}({at}.firstChild)")


def test_printed(browser):
    """The chapter alone."""
    browser.open("6_write.html")
    browser.media("print")
    assert browser.script("""
        return ["#program", ".bar"].every(selector =>
          getComputedStyle(document.querySelector(selector)).display === "none") &&
          document.querySelector("article").offsetHeight > 1000""")


def test_without_script():
    """The text and the program are there, and a plain link leads to the lines."""
    browser = Browser(script=False)
    try:
        browser.open("6_write.html")
        assert browser.find("article h1").is_displayed()
        assert not browser.find("[data-do=search]").is_displayed()
        link = browser.find("#excerpt-5 figcaption a")
        target = link.get_attribute("href").partition("#")[2]
        link.click()
        row, code = browser.find(f"#{target}").rect, browser.find(".code").rect
        assert browser.driver.current_url.endswith("#" + target)
        assert row["height"] > 0 and row["y"] >= code["y"] - 1
    finally:
        browser.driver.quit()


def test_on_a_web_server(browser):
    """As from files. What is loaded comes from there."""
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=BOOK)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open("6_write.html", f"http://127.0.0.1:{server.server_port}/")
        browser.press("/")
        browser.find("dialog input").send_keys("FI_HMEM")
        browser.until("document.querySelector('dialog li')")
        server.shutdown()
