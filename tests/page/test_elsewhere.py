"""Pages that are not as ours: under a prefix, in a small window, in other languages, long names."""

from __future__ import annotations

from typing import Any

import pytest
from browser_page import PACK, ComfyPage
from comfyui_server import ROOT
from prefix_proxy import behind_prefix

MICRO = ROOT / "workflows" / "micro_text_to_image.json"


@pytest.mark.parametrize(
    ("kind", "locale", "details"),
    [("server", "zh-CN", "详情"), ("modern_server", "de-DE", "Details")],
    ids=["classic", "modern"],
)
def test_behind_a_prefix_in_a_small_window_and_another_language(
    browser: Any, request: pytest.FixtureRequest, kind: str, locale: str, details: str
):
    server = request.getfixturevalue(kind)
    settings = {"Comfy.VueNodes.Enabled": kind == "modern_server"}
    with behind_prefix(server.port) as address:
        page = ComfyPage(browser, server, settings, (1024, 700), address, locale)
        page.open_templates(PACK)
        image = page.card("micro_text_to_image").locator("img")
        page.card("micro_text_to_image").scroll_into_view_if_needed()
        assert image.evaluate("i => i.decode().then(() => i.naturalWidth)") > 0
        page.page.keyboard.press("Escape")
        page.load(MICRO)
        assert page.run()["status"]["status_str"] == "success"
        page.page.get_by_role("button", name=details).first.click()
        page.page.locator(".qwen-l40s-report pre").wait_for()
        page.page.keyboard.press("Escape")
        page.load(ROOT / "workflows" / "text_to_image.json")
        page.page.get_by_test_id("queue-button").click()
        page.page.locator(".qwen-l40s-box.error").first.wait_for()
        page.close()
