"""The page in a browser: it reads, writes, and shows what else was expected. Needs Playwright and Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from serving_live import language_model, live_server

pytestmark = pytest.mark.outside
browsers = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no Chromium", allow_module_level=True)


@pytest.fixture(params=[(1200, 900), (390, 844)], ids=["desktop", "phone"])
def page(request: pytest.FixtureRequest) -> Iterator[Any]:
    width, height = request.param
    with live_server(language_model()) as live, browsers.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = browser.new_page(viewport={"width": width, "height": height})
        errors: list[str] = []
        made.on("console", lambda message: errors.append(message.text))
        made.on("pageerror", lambda error: errors.append(str(error)))
        made.goto(live.url)
        yield made
        assert not errors
        assert made.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()


def test_a_text_is_read_and_goes_on(page: Any) -> None:
    page.fill("#prompt", "A bird sang")
    page.fill("#max_tokens", "7")
    page.keyboard.press("Control+Shift+Enter")
    page.focus("#prompt")
    page.keyboard.press("Control+Shift+Enter")
    page.wait_for_selector("#history li")
    assert page.locator("#tokens span").count() == 18 and page.locator("#tokens .new").count() == 7
    page.focus("#tokens")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#tokens span").nth(16).get_attribute("aria-selected") == "true"
    assert page.locator("#detail tr").count() >= 8
    page.locator("#mem_len").focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#history li:nth-child(2)")
    assert "memory 16" in page.inner_text("#history li:nth-child(1)")
    for _ in range(3):  # also while the text is read
        page.keyboard.press("ArrowLeft")
    page.get_by_text("memory 2:").wait_for()
    page.wait_for_selector("#read:not([disabled])")
    assert page.locator("#tokens [aria-selected=true]").count() == 1
