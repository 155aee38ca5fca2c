"""The page in a browser, on a stack of fake workers: what it shows, what it sends, and what it never does.

Skipped where there is no chromium: an installed one, or playwright's own (`playwright install chromium`).
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'decodefleet[browser]'")
from playwright.sync_api import Browser, Error, Page, Route, expect, sync_playwright

pytestmark = pytest.mark.browser

INSTALLED = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOSTILE = '<img src=x onerror="document.title=`owned`"><b>bold</b> & "quotes"'

CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    const unseen = node.disabled || node.closest("svg, .hidden, .skip, noscript, option");
    if (!own || unseen || !node.checkVisibility()) continue;
    const [one, two] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < 4.5) low.push(`${node.className}: ${node.textContent.trim().slice(0, 30)}, ${ratio}`);
  }
  return low;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, INSTALLED)), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except Error as error:
            pytest.skip(f"no chromium can be started: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def keyed(make_stack: Callable[..., Any]) -> Any:
    """A server that wants a key, with steps slow enough to be stopped in the middle."""
    return make_stack(workers=2, api_keys=("right",), step_s=0.02, prefill_token_s=0.0001)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens the page of a stack. At the end: no error in the console, nothing asked of another server."""
    pages: list[tuple[Page, str, list[str], list[str]]] = []

    def open_(url: str, prepare: Callable[[Page], None] | None = None, **options: Any) -> Page:
        page = browser.new_page(**options)
        errors: list[str] = []
        asked: list[str] = []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        pages.append((page, url.partition("#")[0], errors, asked))
        if prepare is not None:
            prepare(page)
        page.goto(url)
        return page

    yield open_
    for page, url, errors, asked in pages:
        page.close()
        # a refused key and a server that is away are what those tests are about
        assert [error for error in errors if not error.startswith("Failed to load resource")] == []
        assert [address for address in asked if not address.startswith(url)] == []


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def unlock(page: Page, key: str = "right") -> None:
    page.get_by_role("button", name="API key").click()
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")


def test_the_fleet_at_a_glance(stack: Any, open_page: Callable[..., Page]) -> None:
    with stack.http() as http:
        http.post("/v1/completions", json={"prompt": "some words to place", "max_tokens": 4})
    page = open_page(stack.url)
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    expect(page.locator("#workers")).to_contain_text("serving")
    expect(page.get_by_text("2 of 2")).to_be_visible()
    first = page.locator("#placements li").first
    expect(first).to_contain_text("cmpl-")
    expect(first.locator(".candidate").first).to_contain_text("worker-")
    expect(page.get_by_role("status").first).to_contain_text("tiny · live")
    # the recent past comes by itself, and can be read by those who cannot see a line
    expect(page.get_by_role("img", name="Sequences: running")).to_be_visible(timeout=15_000)


def overview_with(page: Page, change: Callable[[dict[str, Any]], None]) -> None:
    """The page is told another fleet than there is."""

    def fulfil(route: Route) -> None:
        seen = route.fetch().json()
        change(seen)
        route.fulfill(json=seen)

    page.route("**/debug/fleet*", fulfil)


def test_a_fleet_with_troubles_says_which(stack: Any, open_page: Callable[..., Page]) -> None:
    def trouble(seen: dict[str, Any]) -> None:
        seen["workers"][1]["state"] = "draining"
        seen["queue"] |= {"length": 3, "oldest_s": 4.0}
        seen["prefix_index"]["directory_up"] = False
        seen["changes"] = [
            {"at": seen["at"] - 90.0, "worker_id": "worker-2", "what": "came"},
            {"at": seen["at"] - 12.0, "worker_id": "worker-2", "what": "lost"},
        ]

    page = open_page(stack.url, lambda page: overview_with(page, trouble))
    expect(page.get_by_role("status").first).to_contain_text("tiny · 1 of 2 workers serve")
    expect(page.locator("#workers")).to_contain_text("draining")
    changes = page.get_by_role("list", name="Workers that came and went").get_by_role("listitem")
    expect(changes.first).to_contain_text("worker-2 lost 1")
    expect(page.locator("#tiles")).to_contain_text("3 waiting, 4 s")
    expect(page.locator("#tiles")).to_contain_text("directory away")
    assert page.evaluate(CONTRAST) == []
    # what is left serves, and that is not all there is to say
    page.unroute("**/debug/fleet*")
    expect(page.get_by_role("status").first).to_contain_text("tiny · live, lost worker-2", timeout=15_000)


def test_a_worker_that_has_gone_quiet_stands_out(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(
        stack.url, lambda page: overview_with(page, lambda seen: seen["workers"][1].update(heard_s=2.5))
    )
    expect(page.locator("#workers .late")).to_have_text(["2.50 s ago"])
    assert page.evaluate(CONTRAST) == []


def test_pointing_at_a_chart_reads_its_values(stack: Any, open_page: Callable[..., Page]) -> None:
    def measured(seen: dict[str, Any]) -> None:
        blank = dict.fromkeys(("ttft_s", "itl_s", "hit_rate"))
        counts = dict.fromkeys(("requests", "failures", "workers", "waiting", "queued", "kv_usage"), 0)
        counts |= {"generated_tokens": 0, "prompt_tokens": 0}
        points = [{"at": seen["at"] - 250 + 50 * n, "running": n, **counts, **blank} for n in range(6)]
        seen["history"]["points"] = points

    narrow = {"width": 360, "height": 800}
    page = open_page(stack.url, lambda page: overview_with(page, measured), viewport=narrow)
    figure = page.locator("figure", has_text="Sequences")
    chart = figure.get_by_role("img")
    expect(figure.locator(".legend")).to_have_text("running5waiting0queued0")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    chart.hover(position={"x": box["width"] / 2, "y": 40})
    expect(figure.locator(".legend")).to_have_text(re.compile(r"running[123]waiting0queued0"))
    expect(figure.locator(".when")).to_have_text(re.compile(r"\d+:\d\d"))
    # nothing moves under the pointer, however narrow
    assert chart.bounding_box() == box
    expect(chart.locator(".cross")).to_have_count(1)
    page.mouse.move(0, 0)
    expect(chart.locator(".cross")).to_have_count(0)


def test_nothing_is_drawn_across_a_gap(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(stack.url)
    drawn = page.evaluate(
        """async () => {
          const { sparkline } = await import("./page/chart.js");
          return [...sparkline([1, 2, null, 4, null, 2]).children].map((part) => part.getAttribute("d"));
        }"""
    )
    assert drawn == [
        "M0.0,19.0L20.0,14.0V26H0.0ZM60.0,4.0h0V26H60.0ZM100.0,14.0h0V26H100.0Z",
        "M0.0,19.0L20.0,14.0M60.0,4.0h0M100.0,14.0h0",
    ]


def test_a_fleet_that_sleeps_is_not_one_that_is_down(stack: Any, open_page: Callable[..., Page]) -> None:
    def asleep(seen: dict[str, Any]) -> None:
        seen |= {"workers": [], "sleeps": True}

    page = open_page(stack.url, lambda page: overview_with(page, asleep))
    status = page.get_by_role("status").first
    expect(status).to_contain_text("tiny · asleep")
    expect(status).to_have_attribute("data-state", "idle")
    expect(page.locator("#workers")).to_contain_text("a request starts one")
    page.unroute("**/debug/fleet*")
    overview_with(page, lambda seen: seen.update(workers=[]))
    expect(status).to_contain_text("tiny: no worker serves", timeout=15_000)
    expect(status).to_have_attribute("data-state", "bad")


def test_an_answer_comes_as_text_with_its_counts(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{stack.url}#playground")
    expect(page.get_by_label("Model")).to_have_value("tiny")
    # sampled, a fake worker begins anywhere in the prompt
    page.get_by_label("Temperature").fill("0")
    say(page, HOSTILE)
    answer = page.locator(".message.assistant")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer).to_contain_text("first token")
    expect(answer).to_contain_text("tokens/s")
    # fake workers answer by the prompt: its markup must come back as text
    expect(answer).to_contain_text("<img src=x")
    assert page.locator(".message b:not(.facts b)").count() == 0
    assert page.locator(".message img").count() == 0
    assert page.title() == "decodefleet"
    expect(page.locator("#said")).to_contain_text("Answer complete")


def test_parameters_are_sent_as_given(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{stack.url}#playground")
    expect(page.get_by_label("Model")).to_have_value("tiny")
    page.get_by_label("Temperature").fill("0.2")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Most tokens").fill("9")
    page.get_by_label("System prompt").fill("Be brief.")
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "hello")
    body = json.loads(sent.value.post_data or "")
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.2, 7, 9)
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    expect(page.locator(".message.assistant")).to_contain_text("answer 9 tokens")
    # the next turn carries the conversation
    with page.expect_request("**/v1/chat/completions") as sent:
        say(page, "and now")
    roles = [message["role"] for message in json.loads(sent.value.post_data or "")["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    page.get_by_label("Form").select_option("completion")
    with page.expect_request("**/v1/completions") as sent:
        say(page, "once upon a time")
    assert json.loads(sent.value.post_data or "")["prompt"] == "once upon a time"


def test_a_value_out_of_range_is_not_sent(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{stack.url}#playground")
    expect(page.get_by_label("Model")).to_have_value("tiny")
    page.get_by_label("Temperature").fill("9")
    say(page, "hello")
    assert page.locator(".message").count() == 0


def test_the_key_opens_and_stays_in_memory(keyed: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(keyed.url)
    expect(page.get_by_role("alert")).to_contain_text("wants an API key")
    unlock(page, "wrong")
    expect(page.get_by_role("alert")).to_contain_text("does not know the key")
    unlock(page)
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert "right" not in page.url
    assert "right" not in page.content()
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    expect(page.get_by_role("alert")).to_contain_text("wants an API key")


@pytest.mark.parametrize("way", ["button", "key"])
def test_an_answer_can_be_stopped(keyed: Any, open_page: Callable[..., Page], way: str) -> None:
    page = open_page(f"{keyed.url}#playground")
    unlock(page)
    expect(page.get_by_label("Model")).to_have_value("tiny")
    say(page, "a story without end " * 60)
    answer = page.locator(".message.assistant")
    expect(answer.locator(".text")).not_to_be_empty()
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(answer).to_contain_text("stopped here")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    # and the worker stops, too
    for _ in range(200):
        if sum(stats.running for stats in keyed.stats()) == 0:
            return
        time.sleep(0.05)
    raise AssertionError("the worker goes on")


def test_a_server_that_is_away_is_told_and_found_again(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(stack.url)
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    page.route("**/debug/fleet*", lambda route: route.abort())
    expect(page.get_by_role("alert")).to_contain_text("does not answer", timeout=15_000)
    expect(page.locator("#fleet")).to_have_class("stale")
    page.unroute("**/debug/fleet*")
    expect(page.get_by_role("alert")).to_be_hidden(timeout=15_000)
    expect(page.locator("#fleet")).not_to_have_class("stale")


def test_a_key_for_the_playground_alone(stack: Any, open_page: Callable[..., Page]) -> None:
    refused = json.dumps({"error": {"message": "this needs an admin key"}})

    def refuse(page: Page) -> None:
        page.route("**/debug/fleet*", lambda route: route.fulfill(status=403, body=refused))

    page = open_page(stack.url, refuse)
    expect(page.get_by_role("alert")).to_contain_text("may not see the fleet")
    page.get_by_role("tab", name="Playground").click()
    expect(page.get_by_label("Model")).to_have_value("tiny")
    say(page, "hello")
    expect(page.locator(".message.assistant")).to_contain_text("tokens/s")


def test_a_stream_that_breaks_off_is_told(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{stack.url}#playground")
    expect(page.get_by_label("Model")).to_have_value("tiny")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "hello")
    expect(page.locator(".message.failed")).to_contain_text("the server does not answer")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_what_came_of_a_stream_that_broke_off_stays(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{stack.url}#playground")
    expect(page.get_by_label("Model")).to_have_value("tiny")
    piece = {"id": "chatcmpl-1", "choices": [{"delta": {"content": "Once upon"}, "finish_reason": None}]}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(piece)}\n\n"),
    )
    say(page, "a story")
    failed = page.locator(".message.failed")
    expect(failed.locator(".text")).to_have_text("Once upon")
    expect(failed).to_contain_text("the stream broke off")
    # it was answered, if not to the end
    expect(page.get_by_label("Message", exact=True)).to_have_value("")


def test_what_was_refused_can_be_sent_again(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{stack.url}#playground")
    expect(page.get_by_label("Model")).to_have_value("tiny")
    busy = {"status": 429, "headers": {"retry-after": "41"}, "json": {"error": {"message": "too busy"}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**busy))
    say(page, "hello")
    expect(page.locator(".message.failed")).to_contain_text("too busy; try again in 41 s")
    expect(page.get_by_label("Message", exact=True)).to_have_value("hello")
    page.unroute("**/v1/chat/completions")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.keyboard.press("Enter")
    assert json.loads(sent.value.post_data or "")["messages"] == [{"role": "user", "content": "hello"}]
    expect(page.locator(".message.assistant").last).to_contain_text("tokens/s")


def test_a_model_that_came_later_is_found(keyed: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(f"{keyed.url}#playground")
    say(page, "hello")
    expect(page.locator(".message.failed")).to_contain_text("a valid API key is required")
    page.route("**/v1/models", lambda route: route.abort())
    unlock(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.get_by_label("Model")).to_have_value("")
    page.unroute("**/v1/models")
    say(page, "hello")
    expect(page.locator(".message.assistant").last).to_contain_text("tokens/s")
    expect(page.get_by_label("Model")).to_have_value("tiny")


def test_by_keyboard_alone(stack: Any, open_page: Callable[..., Page]) -> None:
    page = open_page(stack.url)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to content")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Fleet")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Playground")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Playground")).to_be_visible()
    expect(page.locator("#fleet")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["fleet", "playground"])
def test_legible_in_either_scheme(stack: Any, open_page: Callable[..., Page], scheme: str, view: str) -> None:
    with stack.http() as http:
        http.post("/v1/completions", json={"prompt": "words", "max_tokens": 2})
    page = open_page(f"{stack.url}#{view}", color_scheme=scheme)
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    if view == "playground":
        say(page, "hello there")
        expect(page.locator(".message.assistant")).to_have_attribute("aria-busy", "false")
    assert page.evaluate(CONTRAST) == []
    unnamed = (
        "[...document.querySelectorAll('input, select, textarea')].filter((f) => !f.labels.length).length"
    )
    assert page.evaluate(unnamed) == 0


@pytest.mark.parametrize("width", [360, 800])
def test_narrow_windows_scroll_only_downwards(stack: Any, open_page: Callable[..., Page], width: int) -> None:
    page = open_page(stack.url, viewport={"width": width, "height": 800})
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_role("tab", name="Playground").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
