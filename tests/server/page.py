"""The status page of a running `eldr serve` in a real browser, headless: page.py URL KEY CHROMIUM [PICTURES].

Needs the package playwright; CHROMIUM is the program. Asks a prompt, and looks for what the page must show, on a desk, on a
phone and in the dark. PICTURES is a folder for screenshots. Only loopback.
"""

import json
import pathlib
import re
import sys
import threading
import time
import urllib.request

from playwright.sync_api import expect, sync_playwright

URL, KEY, CHROMIUM = sys.argv[1:4]
PICTURES = pathlib.Path(sys.argv[4]) if len(sys.argv) > 4 else None
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 3, "is_mobile": True, "has_touch": True}


def post(path, body):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(URL + path, json.dumps(body).encode(), headers))


class Load:
    """Requests on their way, so that there is something to see; only while it is looked at, as the browser needs the cores, too."""

    def __enter__(self):
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self.run, args=(i,)) for i in range(2)]
        [thread.start() for thread in self.threads]
        return self

    def run(self, i):
        while not self.over.is_set():
            body = {"prompt": f"def read_{i}(", "max_tokens": 400, "ignore_eos": True}
            json.load(post("/v1/completions", body))

    def __exit__(self, *_):
        self.over.set()
        [thread.join() for thread in self.threads]


def open_page(browser, **how):
    page = browser.new_context(**how).new_page()
    page.faults, page.asked = [], []
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    # The browser notes what is refused: all before there is a key, and a prompt that asks for no token.
    refusals = ("status of 401", "status of 400")
    page.on("console", lambda line: page.faults.append(line.text)
            if line.type == "error" and not any(refusal in line.text for refusal in refusals) else None)
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(URL)
    page.fill("#key", KEY)
    page.click("#key-form button")
    expect(page.locator("#door")).to_be_hidden()
    return page


def fits(page):
    width, wide = page.evaluate("[document.documentElement.clientWidth, document.documentElement.scrollWidth]")
    assert wide <= width, f"the page is {wide} wide on a screen of {width}"


def picture(page, name):
    if PICTURES:
        PICTURES.mkdir(exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png", full_page=True)


def shows_everything(page):
    workers = json.load(urllib.request.urlopen(urllib.request.Request(
        URL + "/v1/eldr/workers", headers={"Authorization": f"Bearer {KEY}"})))
    boxes = page.locator("#workers > div")
    expect(boxes).to_have_count(len(workers["workers"]))
    expect(page.locator("#model")).to_have_text(workers["model"])
    expect(page.locator("#policy")).to_contain_text(workers["policy"])
    for worker in workers["workers"]:
        box = boxes.nth(worker["id"])
        expect(box).to_contain_text(f"Worker {worker['id']}, CPU")
        expect(box.locator(".slots i")).to_have_count(worker["n_slots"])
        expect(box).to_contain_text(f"of {worker['n_slots']} slots")
        expect(box).to_contain_text("of its keys and values")
    # Some worker has a batch, and its experts are drawn.
    expect(page.locator(".slots i.on").first).to_be_visible()
    canvas = page.locator("#workers canvas").first
    expect(canvas).to_be_visible()
    inked = """canvas => { const p = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let n = 0; for (let i = 3; i < p.length; i += 4) n += p[i] > 0; return [canvas.width, canvas.height, n]; }"""
    width, height, n = canvas.evaluate(inked)
    assert width == 64 and height >= 1 and n >= 4 * height, f"{n} experts drawn of {width} in {height} layers"
    expect(page.locator("#workers").get_by_text("experts a layer in a step").first).to_be_visible()


def answers(page):
    page.fill("#prompt", "def read_lines(path):")
    page.fill("#n", "16")
    page.select_option("#by", "round_robin")
    page.click("#go")
    expect(page.locator("#answer")).not_to_be_empty()
    expect(page.locator("#route")).to_contain_text("its turn (round_robin)")
    expect(page.locator("#picked tbody tr").first).to_be_visible()
    expect(page.locator("#picked tbody tr").first).to_contain_text("of 64")
    expect(page.locator("#recent tr").filter(has_text="its turn").first).to_be_visible()
    for tile in ("#ttft", "#tpot"):
        expect(page.locator(tile)).to_contain_text("s")
    # Not by a function to wait for, which the page's policy forbids to be evaluated.
    expect(page.locator("#tpot-trend polyline")).to_have_attribute("points", re.compile(r"\S+ \S+ \S+"))
    page.fill("#n", "0")
    page.evaluate("document.getElementById('n').removeAttribute('min')")
    page.click("#go")
    expect(page.locator("#route")).to_contain_text("max_tokens")


def luminance(page):
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
    return red + green + blue


def main():
    # A busy machine draws slowly, and nothing here is about time.
    expect.set_options(timeout=120_000)
    started, times = time.monotonic(), []

    def timed(what, step, *given, **more):
        began = time.monotonic()
        result = step(*given, **more)
        times.append(f"{what} {time.monotonic() - began:.1f}")
        return result

    with sync_playwright() as playwright:
        # Without a GPU there is nothing to gain by a process that emulates one.
        browser = timed("start", playwright.chromium.launch, executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        desk = timed("desk", open_page, browser, viewport={"width": 1280, "height": 900}, color_scheme="light")
        with Load():
            timed("workers", shows_everything, desk)
            picture(desk, "desk")
        timed("prompt", answers, desk)
        fits(desk)
        phone = timed("phone", open_page, browser, **PHONE, color_scheme="dark")
        with Load():
            timed("workers", shows_everything, phone)
            picture(phone, "phone-dark")
        fits(phone)
        assert luminance(phone) < 150 < 600 < luminance(desk), (luminance(phone), luminance(desk))
        for page in (desk, phone):
            assert not page.faults, page.faults
            strangers = [url for url in page.asked if not url.startswith(URL)]
            assert not strangers, f"it asks others: {strangers}"
        timed("end", browser.close)
    print("page: workers, experts, times, routes and a prompt, on a desk, on a phone and in the dark: passed")
    print(f"page: {time.monotonic() - started:.0f} s ({', '.join(times)})")


main()
