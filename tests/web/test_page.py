"""The page in a real browser."""

import pytest

FIRST_LOAD_BYTES, FIRST_LOAD_S = 400_000, 1.0


def at_rest(page):
    """Waits till no change is under way."""
    page.until("document.querySelector('#answers').ariaBusy === 'false'")


def text(page, panel):
    return page.inner_text(f"[data-panel={panel}] .body")


def drag(page, path, places):
    """Moves a slider by arrow keys, as a hand does: input events, then a change."""
    slider = page.locator(f"[id='c-{path}']")
    slider.focus()
    for _ in range(abs(places)):
        slider.press("ArrowRight" if places > 0 else "ArrowLeft")


def settled(page, panel, before):
    page.until(
        "([panel, before]) => document.querySelector(`[data-panel=${panel}] .body`).innerText !== before",
        [panel, before],
    )


def test_page_opens_with_an_answer_and_no_token_in_the_address(open_page, explorer):
    page = open_page()
    assert "token" not in page.url
    assert "tokens/s" in text(page, "headline")
    assert "backward" in text(page, "time")
    assert page.locator("[data-panel=memory] svg").count() == 1


def test_first_load_is_small(open_page, explorer):
    page = open_page()
    page.wait_for_load_state("networkidle")
    sizes = page.evaluate("performance.getEntriesByType('resource').map(e => e.transferSize)")
    document = page.evaluate("performance.getEntriesByType('navigation')[0].transferSize")
    assert 0 < sum(sizes) + document < FIRST_LOAD_BYTES


def test_slider_changes_numbers_and_charts(open_page):
    page = open_page()
    before, memory = text(page, "headline"), page.inner_html("[data-panel=memory] svg")
    drag(page, "plan.seq", -2)
    settled(page, "headline", before)
    page.until("document.querySelector('#plan').value.includes('seq=2048')")
    assert page.inner_html("[data-panel=memory] svg") != memory
    middle = text(page, "headline")
    drag(page, "network.inter.bandwidth", 6)
    settled(page, "headline", middle)
    assert "edited" in page.locator(
        ".control", has=page.locator("[id='c-network.inter.bandwidth']")
    ).get_attribute("class")


def test_scaling_follows(open_page):
    page = open_page()
    page.locator("[data-panel=scaling]").scroll_into_view_if_needed()
    page.wait_for_selector("[data-panel=scaling] svg")
    assert "of ideal" in text(page, "scaling")
    assert "log scale" not in page.inner_html("[data-panel=scaling] .body")
    page.check("#log")
    page.until("document.querySelector('[data-panel=scaling] .body').innerHTML.includes('log scale')")


def test_model_and_cluster_are_chosen_by_name(open_page):
    page = open_page()
    before = text(page, "headline")
    page.fill("#model", "llama3-8b")
    page.press("#model", "Enter")
    settled(page, "headline", before)
    page.fill("#cluster", "8xdgx-a100")
    page.press("#cluster", "Enter")
    page.until("document.querySelector('#title').innerText.includes('8xdgx-a100')")
    assert "llama3-8b" in page.inner_text("#title")


def test_plan_is_written_or_chosen(open_page):
    page = open_page()
    page.fill("#plan", "zero1 tp=4 gbs=512 seq=4096")
    page.press("#plan", "Enter")
    page.until("document.querySelector('[id=\"c-plan.sharding\"]').value === 'zero1'")
    page.select_option("[id='c-plan.recompute']", "recompute=full")
    page.until("document.querySelector('#plan').value.includes('recompute=full')")


@pytest.mark.parametrize(
    "field, wrong, says, then",
    [("model", "lama3-8b", "unknown model", "llama3-8b"), ("plan", "tp=8 gbs=100", "not a multiple", "gbs=")],
)
def test_what_cannot_be_explains_itself_and_offers_the_nearest(open_page, field, wrong, says, then):
    page = open_page()
    page.fill(f"#{field}", wrong)
    page.press(f"#{field}", "Enter")
    page.wait_for_selector("#problem:not([hidden])")
    assert says in page.inner_text("#problem")
    page.click("#problem button >> nth=0")
    page.wait_for_selector("#problem[hidden]", state="attached")
    assert then in page.input_value(f"#{field}")


def test_link_restores_the_scenario(open_page):
    page = open_page()
    before = text(page, "headline")
    drag(page, "network.inter.bandwidth", -5)
    settled(page, "headline", before)
    at_rest(page)
    page.click("#link")
    fragment = page.evaluate("location.hash")
    again = open_page(fragment)
    again.until("document.querySelector('.control.edited') !== null")
    assert text(again, "headline") == text(page, "headline")


@pytest.mark.parametrize("dark", [False, True])
def test_narrow_screen_needs_no_sideways_scrolling(open_page, dark):
    page = open_page(width=390, dark=dark)
    page.locator("[data-panel=scaling]").scroll_into_view_if_needed()
    page.wait_for_selector("[data-panel=scaling] svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 23, 27)") is dark
