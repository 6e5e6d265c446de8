"""Reports in headless Chromium, through Debian's own driver: nothing is downloaded."""

import shutil

from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000")
"""Without a sandbox, because root, who runs the tests in a container, cannot have one."""


def find(name):
    path = shutil.which(name)
    assert path, f"{name} is missing: scripts/install-browser installs Debian's chromium and chromium-driver"
    return path


def open_browser():
    options = Options()
    options.binary_location = find("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return Chrome(options=options, service=Service(find("chromedriver")))


class Page:
    """A report that is open in the browser."""

    def __init__(self, browser, path, *, scheme="light", width=1280):
        self.browser = browser
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        media = {"features": [{"name": name, "value": value} for name, value in wishes.items()]}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(path.as_uri())
        self.settle()

    def settle(self):
        """Wait until the page is made, and what was asked for is drawn."""
        script = """const done = arguments[0];
            const look = () => document.documentElement.dataset.ready === undefined
                ? setTimeout(look, 5) : requestAnimationFrame(() => requestAnimationFrame(() => done()));
            look()"""
        self.browser.execute_async_script(script)

    def complaints(self):
        return list(self.browser.get_log("browser"))

    def text(self, selector):
        return str(
            self.browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)
        )

    def click(self, selector):
        self.browser.find_element(By.CSS_SELECTOR, selector).click()
        self.settle()

    def press(self, name, value):
        self.click(f"button[name='{name}'][value='{value}']")

    def hover(self, time, part, height=0.5):
        """What the picture says at a share of the pass that is looked at and of the height of a part."""
        script = """const plot = document.querySelector(`#figure .${arguments[0]} .u-over`);
            document.getElementById("figure").scrollIntoView({block: "center", behavior: "instant"});
            const {left, top, width, height} = plot.getBoundingClientRect();
            return [left, top, width, height]"""
        left, top, width, tall = self.browser.execute_script(script, part)
        margin = 0.05 / 1.1  # of the passes before and after, which show at the sides
        actions = ActionBuilder(self.browser, duration=0)
        x = left + width * (margin + time * (1 - 2 * margin))
        actions.pointer_action.move_to_location(round(x), round(top + tall * height))
        actions.perform()
        self.settle()
        return self.text("#tip")

    def rows(self):
        """The names of the weights that the table shows."""
        script = """return [...document.querySelectorAll("#weights tbody tr")]
            .map((row) => row.cells[0].innerText)"""
        return list(self.browser.execute_script(script))

    def legend(self):
        """What the curve says at the budget that is looked at: names and values."""
        script = """return [...document.querySelectorAll("#curve .u-series")]
            .map((row) => [".u-label", ".u-value"].map((part) => row.querySelector(part).innerText))"""
        return [(name, value) for name, value in self.browser.execute_script(script)]

    def search(self, words):
        field = self.browser.find_element(By.ID, "search")
        field.clear()
        field.send_keys(words or " ", *([] if words else [Keys.BACKSPACE]))
        return self.rows()

    def picture(self):
        """The pixels of the picture."""
        script = (
            "return [...document.querySelectorAll('#figure canvas')].map((one) => one.toDataURL()).join()"
        )
        return str(self.browser.execute_script(script))

    def keys(self, *keys):
        self.browser.find_element(By.ID, "figure").send_keys(*keys)
        self.settle()
