"""Comparison, search, downloads, uploads and the other panels, in a real browser."""

import gzip
import io
import json
import zipfile

import pytest

from paceline.api import capture
from paceline.spec.plan import Plan

PANELS = ("timeline", "bottlenecks", "roofline", "ways", "trust")
CONFIG = {
    "model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 32000,
    "_name_or_path": "my-<b>net</b>",
}  # fmt: skip


def shown(page, panel):
    """Scrolls to a panel and waits for its chart."""
    page.locator(f"[data-panel={panel}]").scroll_into_view_if_needed()
    page.wait_for_selector(f"[data-panel={panel}] .body svg")
    return page.inner_text(f"[data-panel={panel}] .body")


def test_every_panel_is_drawn(open_page):
    page = open_page()
    found = {panel: shown(page, panel) for panel in PANELS}
    assert "saves" in found["bottlenecks"]
    assert "peak" in found["roofline"]
    assert "this plan" in found["ways"]
    assert "interval" in found["trust"]


def test_timeline_zooms_by_button_and_by_dragging(open_page):
    page = open_page()
    shown(page, "timeline")
    before = page.inner_html("#timeline")
    page.click("[data-zoom=in]")
    page.until("(before) => document.querySelector('#timeline').innerHTML !== before", before)
    before = page.inner_html("#timeline")
    lanes = page.locator("#timeline svg")
    lanes.hover(position={"x": 200, "y": 20})
    page.mouse.down()
    lanes.hover(position={"x": 300, "y": 20}, force=True)
    page.mouse.up()
    page.until("(before) => document.querySelector('#timeline').innerHTML !== before", before)


def test_scenarios_are_kept_named_and_compared(open_page):
    page = open_page()
    page.click("#keep")
    page.fill("#plan", "zero1 tp=8 gbs=512 seq=8192 recompute=full")
    page.press("#plan", "Enter")
    page.until("document.querySelector('#title').innerText.includes('zero1')")
    page.click("#keep")
    page.wait_for_selector("#compare table")
    page.fill("#kept input >> nth=1", "zero")
    page.press("#kept input >> nth=1", "Enter")
    page.until(
        "document.querySelector('#compare .body').innerText.includes('zero\\t') || "
        "document.querySelector('#compare thead').innerText.includes('zero')"
    )
    marked = page.locator("#compare mark").all_inner_texts()
    assert any("zero1" in text for text in marked) and not any("dgx" in text for text in marked)
    page.click("#link")
    again = open_page(page.evaluate("location.hash"))
    again.wait_for_selector("#compare table")
    assert again.locator("#kept .chip").count() == 2


def test_search_runs_and_its_plan_is_taken(open_page):
    page = open_page("#model=llama3-8b&cluster=1xdgx-h100&plan=fsdp+gbs%3D16+seq%3D8192")
    page.locator("#search").scroll_into_view_if_needed()
    page.click("#search-start")
    page.wait_for_selector("#search .body table", timeout=240_000)
    assert "Certificate" in page.inner_text("#search .body")
    page.click("#search .take >> nth=0")
    page.wait_for_selector("#problem[hidden]", state="attached")
    page.until("document.querySelector('#plan').value.includes('framework')")


def test_search_is_stopped(open_page):
    page = open_page("#model=gpt3-175b&cluster=128xdgx-a100&plan=fsdp+tp%3D8+gbs%3D1536")
    page.locator("#search").scroll_into_view_if_needed()
    page.click("#search-start")
    page.until("document.querySelector('#search-state').textContent.includes('plans')")
    page.click("#search-stop")
    page.until("document.querySelector('#search-state').textContent.startsWith('stopped')")
    assert page.is_enabled("#search-start")


@pytest.mark.parametrize("kind", ["json", "plan", "report", "trace", "emit"])
def test_files_are_downloaded(open_page, kind, tmp_path):
    page = open_page()
    with page.expect_download() as waiting:
        page.click("#emit" if kind == "emit" else f"[data-download={kind}]")
    path = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(path)
    content = path.read_bytes()
    if kind == "json":
        assert json.loads(content)["model"] == "llama3-70b"
    elif kind == "plan":
        assert Plan.parse(content.decode().split('"')[1]) == Plan.parse("fsdp tp=8 gbs=512 seq=8192")
    elif kind == "report":
        assert b"<svg" in content and b"<script" not in content and len(content) < 500_000
    elif kind == "trace":
        assert json.loads(gzip.decompress(content))["traceEvents"]
    else:
        assert "plan.json" in zipfile.ZipFile(io.BytesIO(content)).namelist()


def upload(page, name, content):
    page.set_input_files("#file", {"name": name, "mimeType": "application/json", "buffer": content.encode()})


def test_configuration_is_uploaded_and_its_link_holds_it(open_page):
    page = open_page()
    upload(page, "config.json", json.dumps(CONFIG))
    page.until("document.querySelector('#title').innerText.includes('my-<b>net</b>')")
    assert page.locator("#title b").count() == 0
    page.click("#link")
    again = open_page(page.evaluate("location.hash"))
    assert "my-<b>net</b>" in again.inner_text("#title")


def test_workload_is_uploaded(open_page, tmp_path):
    capture("resnet18", batch=8).save(tmp_path / "resnet18.json")
    page = open_page("#model=llama3-8b&cluster=2xdgx-h100&plan=ddp")
    upload(page, "resnet18.json", (tmp_path / "resnet18.json").read_text())
    page.until("document.querySelector('#title').innerText.includes('resnet18')")
    assert "images/s" in page.inner_text("[data-panel=headline] .body")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "unheard"}', '{"model_type": "llama"}'])
def test_files_that_are_no_model_are_refused_in_words(open_page, content, explorer):
    status, _, body = explorer.call("POST", "/api/upload", content)
    assert status == 422 and body["message"]


def test_device_that_does_not_exist_yet(open_page):
    page = open_page()
    before = page.inner_text("[data-panel=memory] .body")
    page.click("#hypothetical summary")
    page.fill("#device-form [name='device.memory.size']", "192 GB")
    page.fill("#device-form [name='device.arithmetic']", "2")
    page.click("#device-form button")
    page.until("(before) => document.querySelector('[data-panel=memory] .body').innerText !== before", before)
    command = page.inner_text("#command")
    assert "--set device.memory.size=192GB" in command and "device.arithmetic=x2" in command
