"""Open the page of `eos run --http-port` in a headless Chromium: it shows a real worker's live numbers on any
screen."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

from eos.broker import LocalKafka
from tests.broker.test_operations import QUICK, SHORT_LIMITS, Running
from tests.support.chromium import Chromium, needs_chromium
from tests.support.reading import wait_until

if TYPE_CHECKING:
    from tests.support.pipeline import Pipelines
pytest_plugins = ["tests.support.pipeline"]

SCREENS = [(1280, 1100, "light"), (1280, 1100, "dark"), (390, 844, "light"), (390, 844, "dark"), (320, 640, "light")]


@needs_chromium
def test_status_page_shows_live_workers_without_external_resources(kafka: LocalKafka, pipelines: Pipelines) -> None:
    pipeline = pipelines.on(kafka, 600)
    run = Running(pipeline, "--workers", "2", settings=QUICK + SHORT_LIMITS)
    run.wait("/readyz", 200, "ok w-1")
    home = f"http://127.0.0.1:{run.port}/"
    with Chromium(run.folder) as browser:
        browser.screen(1280, 1100, "light")
        browser.open(home)

        def shows(wanted: str, timeout_s: float = 60.0) -> None:
            wait_until(f"the page shows {wanted}", lambda: re.search(wanted, browser.text()), timeout_s)

        shows(rf"^{pipeline.app}\s+ready")
        seen = browser.text()
        assert "w-0" in seen
        assert "partitions assigned" in seen, "the last incidents"
        # Live: the page shows records that arrive while it is open without a reload.
        pipeline.load(300)
        run.wait_metric("eos_records_in_total", 900)
        counts = "[...document.querySelectorAll('#workers dd:first-of-type')].map(d => parseInt(d.innerText))"
        wait_until("the page counts 900", lambda: sum(browser.ask(counts)) == 900, 60)
        for series in ("in", "out", "lag"):
            length = f"document.querySelector('path[data-series={series}]')?.getTotalLength() ?? 0"
            wait_until(f"the plot draws {series}", lambda length=length: browser.ask(length) > 20, 60)  # type: ignore[misc]
        backgrounds = {}
        for width, height, scheme in SCREENS:
            browser.screen(width, height, scheme)
            wait_until("the width", lambda width=width: browser.ask("innerWidth") == width, 30)  # type: ignore[misc]
            assert browser.ask("document.documentElement.scrollWidth") <= width, (
                f"{width} px: the page scrolls sideways"
            )
            smallest = browser.ask(
                "Math.min(...[...document.querySelectorAll('body *')].filter(e => e.innerText)"
                ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
            )
            assert smallest >= 11, f"{width} px: {smallest} px letters"
            backgrounds[scheme] = browser.ask("getComputedStyle(document.body).backgroundColor")
            browser.picture(run.folder / f"page-{width}-{scheme}.png")
        assert backgrounds["light"] != backgrounds["dark"]
        browser.screen(1280, 1100, "light")
        # An incident in words: the supervisor reports a killed worker.
        os.kill(run.worker_pids()[0], signal.SIGKILL)
        shows("supervisor: worker w-0 ended: SIGKILL")
        browser.picture(run.folder / "page-incident.png")
        outside = [url for url in browser.requested if not url.startswith((home, "data:", "about:"))]
        assert not outside
        assert any("status.json" in url for url in browser.requested)
        assert not browser.complaints
        # The page does not show an ended worker as healthy.
        run.process.kill()
        shows(r"No answer for \d")
