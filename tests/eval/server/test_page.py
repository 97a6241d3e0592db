"""The page in headless Chromium, over the real server, against what the interface itself says."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import pytest

from pipeline.config.load import load
from pipeline.eval.server.page import page as page_and_headers
from pipeline.train.loop.trainer import train
from tests import tiers
from tests.browser import Chromium, Opened, browser
from tests.eval.server.running import Running, running
from tests.eval.small import trained
from tests.tiny import command

if TYPE_CHECKING:
    from playwright.sync_api import Dialog, Locator, Page, Request

with suppress(ImportError):  # the fixture says what is missing
    from playwright.sync_api import expect

__all__ = ["browser"]

NAME = "<img src=x onerror=alert(1)>"
TEXT = "<script>alert(2)</script><b>&amp; 海 é\n"
"""The corpus, again and again: a model learns to write it. Without merges, some characters are several tokens."""
REFUSED = "Failed to load resource: the server responded with a status of "


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run whose name and texts are HTML."""
    root = tmp_path_factory.mktemp("hostile")
    for source in ("sea", "land"):
        (root / source).mkdir()
        for number in range(40):
            (root / source / f"{number}.txt").write_text(f"{number} " + TEXT * 8)
    changes: dict[str, Any] = {
        "run.dir": str(root / NAME),
        "tokenizer": {"train": {"vocab_size": 260}},
        "train.duration": "90 steps",
        "train.sequence_length": 64,
        "train.validation.every_steps": 1000,
        "train.checkpoint.every_steps": 1000,
    }
    return trained(root, **changes)


@pytest.fixture(scope="module")
def served(hostile: Path) -> Iterator[Running]:
    """A server of it that takes up new checkpoints, and texts so long that one can be stopped."""
    changes = ["serve.port=0", "serve.max_length=20000", "serve.slots=1", "serve.queue=1", "serve.watch=true"]
    with running(load(hostile, changes)) as found:
        yield found


def fill(page: Page, prompt: str, **settings: object) -> None:
    page.get_by_label("Prompt").fill(prompt)
    for name, value in settings.items():
        page.locator(f"#{name}").fill(str(value))


def figures(page: Page) -> Locator:
    return page.locator("#figures")


def go_on(page: Page, button: str = "Continue") -> None:
    """Press a button and wait for the end of the text."""
    page.get_by_role("button", name=button, exact=True).click()
    # The button comes back last.
    expect(page.get_by_role("button", name="Continue", exact=True)).to_be_enabled()


def whole_text(page: Page) -> str:
    """Prompt and continuation, as they can be read."""
    return "".join(page.locator("#asked, .token:not(.unseen)").all_text_contents())


def rows(page: Page) -> list[list[str]]:
    """The tables of the token that is looked at."""
    return [row.locator("th, td").all_text_contents() for row in page.locator("#token tr").all()]


def visible(text: str) -> str:
    return text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")


def percent(logprob: float) -> str:
    share = 100 * math.exp(logprob)
    return "< 0.01 %" if share < 0.01 else f"{share:.2f} %" if share < 1 else f"{share:.1f} %"


def ask_all(server: Running, **body: Any) -> list[dict[str, Any]]:
    answer = server.post("/v1/completions", {"logprobs": 5, **body})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def ask(server: Running, **body: Any) -> dict[str, Any]:
    return ask_all(server, **body)[0]


def answer_with(page: Page, *parts: tuple[str, list[str]], logprob: float) -> None:
    """Answer the page's requests with these texts and their tokens."""
    events = []
    for number, (text, tokens) in enumerate(parts, 1):
        logprobs = {
            "tokens": tokens,
            "token_logprobs": [logprob] * len(tokens),
            "top_logprobs": [{token: logprob, " " * 60: -1.0, "W" * 60: -2.0} for token in tokens],
        }
        finish = "stop" if number == len(parts) else None
        events.append({"choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


# Painted parts of texts that reach over the edge of what they are in. Spaces that hang there count for no width.
OVER = """() => [...document.querySelectorAll('.piece, #figures, #state, #run')].flatMap(element => {
  const edge = element.closest('.text, #token, section, header').getBoundingClientRect().right;
  return [...element.getClientRects()].filter(box => box.right > edge + 1)
    .map(box => `${element.id} ${element.className}: ${box.right - edge} px`);
})"""


@pytest.mark.guard
def test_tokens_and_their_probabilities_are_those_of_the_interface(browser: Chromium, server: Running) -> None:
    expected = ask(server, prompt="the sea ", max_tokens=24, temperature=1.5, top_k=40, seed=5, stop=["~~"])
    logprobs = expected["logprobs"]
    health = server.health()
    with browser.open(server.url) as opened:
        page = opened.page
        expect(page.get_by_role("heading")).to_have_text(health["run"])
        expect(page.locator("#state")).to_contain_text(f"step {health['step']} · {health['tokens']:,} tokens trained")
        expect(page.locator("#limit")).to_have_text("at most 127 tokens")
        fill(page, "the sea ", max_tokens=24, temperature=1.5, top_k=40, seed=5, stops="~~")
        go_on(page)
        assert whole_text(page) == "the sea " + expected["text"]
        perplexity = math.exp(-sum(logprobs["token_logprobs"]) / 24)
        expect(figures(page)).to_contain_text(f"24 tokens · perplexity {perplexity:#.4g} · ")
        expect(figures(page)).to_contain_text("seed 5 · reached the limit of tokens")
        page.locator(".token").first.focus()
        seen = 0
        for span in page.locator(".token").all():
            span.hover()
            for text, said in zip(
                page.locator("#token strong").all_text_contents(),
                page.locator("#token p:has(strong) + p").all_text_contents(),
                strict=True,
            ):
                logprob = logprobs["token_logprobs"][seen]
                assert text == visible(logprobs["tokens"][seen])
                assert said == f"{percent(logprob)}, log-probability {logprob:.3f}"
                seen += 1
            if page.locator("#token strong").count() == 1:
                top = sorted(logprobs["top_logprobs"][seen - 1].items(), key=lambda item: -item[1])[:5]
                assert rows(page) == [[visible(text), percent(logprob)] for text, logprob in top]
                step = sum(math.exp(logprob) >= least for least in (0.01, 0.05, 0.2, 0.5))
                assert span.get_attribute("data-step") == str(step)
        assert seen == 24
        opened.check_quiet()


@pytest.mark.parametrize("dark", tiers.first(1, [False, True], rest="guard"), ids=["light", "dark"])
@pytest.mark.parametrize("phone", tiers.first(1, [False, True], rest="guard"), ids=["desktop", "phone"])
def test_readable(browser: Chromium, server: Running, dark: bool, phone: bool) -> None:
    with browser.open(server.url, dark=dark, phone=phone) as opened:
        page = opened.page
        opened.check_readable()
        if phone:
            page.get_by_text("Settings").tap()
        fill(page, "the sea " + "wide" * 15, max_tokens=40, temperature=0)
        go_on(page)
        span = page.locator(".token").nth(8)
        span.tap() if phone else span.click()
        expect(page.locator("#token table")).to_be_visible()
        opened.check_readable()
        page.locator("#asked").click(position={"x": 3, "y": 3})
        expect(page.locator("#token")).to_be_hidden()
        colours = page.locator("#legend [data-step]").evaluate_all(
            "all => all.map(e => getComputedStyle(e).backgroundColor)"
        )
        assert len(set(colours)) == 5
        opened.check_quiet()


@pytest.mark.guard
@pytest.mark.parametrize("phone", [False, True], ids=["desktop", "phone"])
def test_long_texts_and_numbers_fit(browser: Chromium, server: Running, phone: bool) -> None:
    with browser.open(server.url, phone=phone) as opened:
        page = opened.page
        words = ["sea "] * 40
        lone = [("", ["<|end|>" * 30]), ("", [""])]
        answer_with(
            page, (" " * 200, [" " * 200]), ("x" * 200, ["x" * 200]), ("".join(words), words), *lone, logprob=-10.0148
        )
        if phone:
            page.get_by_text("Settings").tap()
        fill(page, "the sea " + "wide" * 40 + " " * 100, seed=9_007_199_254_740_990)
        # Of a field, all that it shows counts as scrolled.
        assert (
            page.locator("#settings input").evaluate_all("all => all.filter(e => e.scrollWidth > e.clientWidth)") == []
        )
        go_on(page)
        expect(figures(page)).to_contain_text("44 tokens · perplexity 22,355 · ")  # e ** 10.0148 is 22,354.8...
        assert page.evaluate(OVER) == []
        for place in range(3):
            page.locator(".token").nth(place).dispatch_event("click")
            assert page.evaluate(OVER) == []
        opened.check_readable()
        for logprob, shown in {-0.5: "1.649", -4.0: "54.60", -50.0: "over 1,000,000,000"}.items():
            page.unroute_all()
            answer_with(page, ("sea", ["sea"]), logprob=logprob)
            go_on(page)
            expect(figures(page)).to_contain_text(f"1 token · perplexity {shown} · ")
        opened.check_quiet()


@pytest.mark.guard
@pytest.mark.parametrize("phone", [pytest.param(False, marks=pytest.mark.slow), True], ids=["desktop", "phone"])
def test_several_samples(browser: Chromium, server: Running, phone: bool) -> None:
    asked = {"max_tokens": 24, "temperature": 1.5, "seed": 5}
    expected = ask_all(server, prompt="the sea ", n=3, **asked)
    texts = [choice["text"] for choice in expected]
    assert len(set(texts)) == 3
    with browser.open(server.url, phone=phone) as opened:
        page = opened.page
        if phone:
            page.get_by_text("Settings").tap()
        page.get_by_label("Samples").fill("3")
        fill(page, "the sea ", **asked)
        go_on(page)
        samples = page.locator(".sample")

        def shown() -> list[str]:
            return ["".join(each.locator(".token:not(.unseen)").all_text_contents()) for each in samples.all()]

        assert shown() == texts
        expect(page.locator("#asked")).to_have_text("the sea ")
        total = 0
        for number, choice in enumerate(expected):
            logprobs = choice["logprobs"]["token_logprobs"]
            total += len(logprobs)
            perplexity = f"{math.exp(-sum(logprobs) / len(logprobs)):#.4g}"
            line = samples.nth(number).locator("p")
            expect(line).to_contain_text(f"{len(logprobs)} tokens · perplexity {perplexity} · seed {5 + number} · ")
            expect(samples.nth(number).get_by_role("heading")).to_have_text(f"Sample {number + 1}")
            group = page.get_by_role("group", name=f"Sample {number + 1}. Continued text.")
            assert group.locator(".token[tabindex='0']").count() == 1
        expect(figures(page)).to_contain_text(f"{total} tokens in all · ")
        expect(figures(page)).to_contain_text("3 of 3 samples have ended")
        opened.check_readable()
        # Beside each other, on a phone below each other.
        boxes = samples.evaluate_all("all => all.map(e => [e.getBoundingClientRect().x, e.getBoundingClientRect().y])")
        assert [len(set(of)) for of in zip(*boxes, strict=True)] == ([1, 3] if phone else [3, 1])
        tokens = samples.nth(1).locator(".token")
        tokens.first.focus()
        for key, place in {"End": tokens.count() - 1, "ArrowLeft": tokens.count() - 2, "Home": 0}.items():
            page.keyboard.press(key)
            expect(tokens.nth(place)).to_be_focused()
        # All of them go on, whatever the fields say by then.
        fill(page, "something else", n=2)
        prompts = [f"the sea {text}" for text in texts]
        more = ask_all(server, prompt=prompts, **asked)
        go_on(page, "Continue from here")
        assert shown() == [text + choice["text"] for text, choice in zip(texts, more, strict=True)]
        opened.check_quiet()


@pytest.mark.guard
def test_a_link_restores_the_settings(browser: Chromium, server: Running) -> None:
    fields: dict[str, object] = {
        "max_tokens": 12,
        "temperature": 1.25,
        "top_k": 30,
        "top_p": "",
        "n": 2,
        "stops": "<&=#\n\\n\n海",
    }
    prompt = "the sea \n é+%20&seed=1#x \t"
    with browser.open(server.url) as opened:
        page = opened.page
        fill(page, prompt, **fields)
        go_on(page)
        seed = re.search(r"seed (\d+)", page.locator(".sample p").first.inner_text())
        assert seed is not None
        text = whole_text(page)
        page.get_by_role("button", name="Copy link").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#linked")).to_contain_text("in the address bar.")
        link = page.url
        assert link.startswith(f"{server.url}/#")
        fill(page, "x" * 8001)
        page.get_by_role("button", name="Copy link").click()
        expect(page.locator("#error")).to_have_text("Prompt: too long for a link; 8,000 characters are allowed.")
        assert page.url == link
        opened.check_quiet()
    asked: list[str] = []
    with browser.open(server.url) as opened:
        page = opened.page
        fill(page, "something else", max_tokens=3, min_p=0.5)

        def note(request: Request) -> None:
            asked.append(request.url)

        page.on("request", note)
        # In the same tab and in a new one.
        page.evaluate("link => { location.href = link; }", link)
        expect(page.locator("#linked")).to_have_text("The settings are those of the link.")
        for again in (False, True):
            if again:
                page.goto("about:blank")
                page.goto(link)
            for name, value in {"prompt": prompt, **fields, "min_p": "", "seed": seed[1]}.items():
                expect(page.locator(f"#{name}")).to_have_value(str(value))
        go_on(page)
        assert whole_text(page) == text
        assert {urlsplit(url).path for url in asked if url.startswith("http")} == {"/", "/health", "/v1/completions"}
        opened.check_quiet()


@pytest.mark.guard
def test_hostile_links_are_harmless(browser: Chromium, server: Running) -> None:
    page_itself = {
        "prompt": "",
        "max_tokens": "64",
        "temperature": "0.8",
        "n": "1",
        "seed": "",
        "stops": "",
        "secret": "",
    }
    html = "<img src=x onerror=alert(1)>"
    links = {
        f"temperature={quote(html)}&max_tokens=1e999&n=-1&seed=0x10&top_k=javascript:alert(1)": (
            "Tokens, Temperature (0: greedy), Top-k, Samples, Seed"
        ),
        "n=" + "1" * 25: "Samples",
        "prompt=" + "x" * 8001: "Prompt",
        "stops=" + "%0A" * 5000: "Stop before",
        "prompt=" + "x" * 200_000: "The link is too long",
        "__proto__=1&constructor=2&secret=abc&go=1&error=%3Cb%3E&toString": "",
        "%": "",
        html: "",
    }
    with browser.open(server.url) as opened:
        page = opened.page
        sent: list[str] = []
        page.on("request", lambda request: sent.append(request.method))
        page.on("dialog", lambda dialog: sent.append(dialog.message))
        for fragment, said in links.items():
            page.goto("about:blank")
            page.goto(f"{server.url}/#{fragment}")
            expect(page.locator("#state")).to_contain_text("step")
            expect(page.locator("#error")).to_contain_text(said)
            for name, value in page_itself.items():
                expect(page.locator(f"#{name}")).to_have_value(value)
        page.goto("about:blank")
        page.goto(f"{server.url}/#prompt={quote(html)}&stops={quote(html)}&temperature=2")
        for name, value in {"prompt": html, "stops": html, "temperature": "2", "max_tokens": "64"}.items():
            expect(page.locator(f"#{name}")).to_have_value(value)
        assert (page.locator("img").count(), set(sent)) == (0, {"GET"})
        opened.check_quiet()


@pytest.mark.guard
def test_by_keyboard_alone(browser: Chromium, server: Running) -> None:
    with browser.open(server.url) as opened:
        page = opened.page
        page.keyboard.type("a boat")  # the prompt has the focus
        page.locator("#temperature").fill("0")
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(figures(page)).to_contain_text("reached the limit")
        tokens = page.locator(".token")
        while page.evaluate("document.activeElement.className") != "token piece":
            page.keyboard.press("Tab")
        for key, place in {"ArrowRight": 1, "End": tokens.count() - 1, "ArrowLeft": tokens.count() - 2}.items():
            page.keyboard.press(key)
            expect(tokens.nth(place)).to_be_focused()
            expect(tokens.nth(place)).to_have_attribute("aria-current", "true")
            assert page.locator("#token strong").text_content()
        page.keyboard.press("Escape")
        expect(page.locator("#token")).to_be_hidden()
        opened.check_quiet()


@pytest.mark.slow
def test_stopped_and_continued_from_there(browser: Chromium, served: Running) -> None:
    with browser.open(served.url) as opened:
        page = opened.page
        fill(page, "1 <", max_tokens=15000, temperature=0)
        page.get_by_role("button", name="Continue", exact=True).click()
        expect(page.locator(".token").nth(3)).to_be_attached()
        page.get_by_role("button", name="Stop").click()
        expect(figures(page)).to_contain_text("stopped")
        served.until(running=0, waiting=0)
        so_far = whole_text(page)
        assert len(so_far) > 5
        fill(page, "something else", max_tokens=10)
        expected = ask(served, prompt=so_far, max_tokens=10, temperature=0)
        go_on(page, "Continue from here")
        assert whole_text(page) == so_far + expected["text"]
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#asked")).to_have_text("something else")
        opened.check_quiet()


@pytest.mark.guard
def test_html_is_text(browser: Chromium, served: Running) -> None:
    expected = ask(served, prompt=f"1 {TEXT}", max_tokens=120, temperature=0)
    assert "<script>" in expected["text"]
    assert "海" in expected["text"]
    with browser.open(served.url) as opened:
        page = opened.page
        alerts: list[str] = []

        def alarm(dialog: Dialog) -> None:
            alerts.append(dialog.message)
            dialog.dismiss()

        page.on("dialog", alarm)
        fill(page, f"1 {TEXT}", max_tokens=120, temperature=0)
        go_on(page)
        assert whole_text(page) == f"1 {TEXT}{expected['text']}"
        expect(page.get_by_role("heading")).to_have_text(NAME)
        assert page.title() == NAME
        # A character of several tokens is one span that shows each of them.
        page.locator(".token", has_text="海").first.hover()
        assert page.locator("#token strong").count() == page.locator("#token table").count() > 1
        page.locator(".token", has_text="<").first.hover()
        assert (page.locator("img").count(), page.locator("script").count(), alerts) == (0, 1, [])
        opened.check_quiet()
        # And if the page had a hole: nothing that is written into it runs.
        assert "TrustedHTML" in page.evaluate(
            "html => { try { document.body.innerHTML = html; return ''; } catch (e) { return e.message; } }",
            "<img src=x onerror=alert(3)>",
        )


@pytest.mark.guard
def test_a_stop_string_cuts_tokens_off(browser: Chromium, served: Running) -> None:
    expected = ask(served, prompt="1 <", max_tokens=100, temperature=0, stop=["ale", "\n"])
    assert expected["finish_reason"] == "stop"
    with browser.open(served.url) as opened:
        page = opened.page
        fill(page, "1 <", max_tokens=100, temperature=0, stops="ale\n\\n")
        go_on(page)
        assert whole_text(page) == "1 <" + expected["text"]
        count = len(expected["logprobs"]["tokens"])
        expect(figures(page)).to_contain_text(f"{count} tokens · ")
        expect(figures(page)).to_contain_text("came to an end")
        opened.check_quiet()


def refused_alone(opened: Opened, status: int) -> None:
    """The browser itself notes refusals, and there is nothing else."""
    assert opened.errors
    assert [error for error in opened.errors if not error.startswith(f"{REFUSED}{status} ")] == []
    assert (opened.failed, opened.foreign) == ([], [])


@pytest.mark.guard
def test_refusals_are_told(browser: Chromium, served: Running) -> None:
    error = "#error"
    with browser.open(served.url) as opened:
        page = opened.page
        fill(page, "1 <", max_tokens=5)
        go_on(page)
        page.locator(".token").first.click()
        expect(page.locator("#token")).to_be_visible()
        fill(page, "1 <", temperature=2000, stops="")
        go_on(page)
        # Nothing old stays below it.
        for old in (".token", "#asked"):
            expect(page.locator(old)).to_have_count(0)
        expect(figures(page)).to_have_text("")
        for old in ("#token", "#legend"):
            expect(page.locator(old)).to_be_hidden()
        expect(page.locator(error)).to_contain_text("Temperature (0: greedy): input should be less than or equal to")
        expect(page.get_by_label("Temperature")).to_be_focused()
        expect(page.get_by_label("Temperature")).to_have_attribute("aria-invalid", "true")
        fill(page, "<" * 30000, temperature=1)
        go_on(page)
        expect(page.locator(error)).to_contain_text("at most 19999 are allowed")
        expect(page.get_by_label("Prompt")).to_be_focused()
        expect(page.get_by_label("Temperature")).not_to_have_attribute("aria-invalid", "true")
        fill(page, "1 <", max_tokens=1.5)
        go_on(page)
        expect(page.locator(error)).to_contain_text("Tokens: ")
        page.get_by_label("Seed").press_sequentially("1e")
        go_on(page)
        expect(page.locator(error)).to_have_text("Seed: this is no number.")
        opened.check_readable()
        refused_alone(opened, 422)


@pytest.mark.slow
def test_a_full_queue_is_told(browser: Chromium, served: Running) -> None:
    with browser.open(served.url) as opened, ExitStack() as others:
        # One has the only slot, and one waits for it. (The headers come with the first token.)
        first = others.enter_context(browser.open(served.url)).page
        fill(first, "1 <", max_tokens=15000, temperature=0)
        first.get_by_role("button", name="Continue", exact=True).click()
        served.until(running=1, waiting=0)
        second = others.enter_context(browser.open(served.url)).page
        fill(second, "1 <", max_tokens=15000, temperature=0)
        second.get_by_role("button", name="Continue", exact=True).click()
        served.until(running=1, waiting=1)
        expect(second.locator("#state")).to_contain_text("1 waiting")
        fill(opened.page, "1 <")
        go_on(opened.page)
        expect(opened.page.locator("#error")).to_have_text("The server is busy. Try again in 1 s.")
        first.close()
        expect(second.locator(".token").nth(1)).to_be_attached()
        refused_alone(opened, 429)
    served.until(running=0, waiting=0)


@pytest.mark.guard
def test_a_server_that_is_gone_is_told(browser: Chromium, hostile: Path) -> None:
    with ExitStack() as stack:
        with running(load(hostile, ["serve.port=0"])) as server:
            page = stack.enter_context(browser.open(server.url)).page
            expect(page.locator("#state")).to_contain_text("step")
        go_on(page)
        expect(page.locator("#error")).to_have_text("No connection to the server. Is it still running?")
        expect(page.locator("#state")).to_have_text("no connection to the server")


@pytest.mark.slow
@pytest.mark.parallel
@pytest.mark.parametrize(
    ("end", "says"),
    [
        (signal.SIGKILL, "The connection was lost before the text ended."),
        (signal.SIGTERM, "The text was cut off: "),
    ],
)
def test_a_text_that_breaks_off_is_told(browser: Chromium, hostile: Path, end: signal.Signals, says: str) -> None:
    words = command("serve", hostile, "serve.max_length=200000", "--port", 0)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
        with browser.open(url) as opened:
            page = opened.page
            fill(page, "1 <", max_tokens=150000, temperature=0)
            page.get_by_role("button", name="Continue", exact=True).click()
            expect(page.locator(".token").nth(3)).to_be_attached()
            process.send_signal(end)
            expect(page.locator("#error")).to_contain_text(says, timeout=60_000)
            expect(figures(page)).to_contain_text("cut off")
            expect(page.locator("#state")).to_have_text("no connection to the server")
            expect(page.get_by_role("button", name="Continue from here")).to_be_enabled()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.guard
def test_a_key_is_asked_for(browser: Chromium, hostile: Path) -> None:
    key = "0123456789abcdef"
    config = load(hostile, ["serve.port=0", "serve.max_length=100"])
    with running(config, key=key) as server, browser.open(server.url) as opened:
        page = opened.page
        fill(page, "1 <", max_tokens=5)
        go_on(page)
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        expect(page.locator("#error")).to_be_hidden()
        opened.check_readable()
        field.fill("wrong")
        field.press("Enter")
        expect(page.locator("#error")).to_have_text("API key: the server does not take this one.")
        field.fill(key)
        field.press("Enter")
        expect(figures(page)).to_contain_text("5 tokens")
        expect(field).to_be_hidden()
        go_on(page, "Continue from here")
        expect(figures(page)).to_contain_text("10 tokens")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]") == [
            0,
            0,
            "",
            server.url + "/",
        ]
        # A link has no key in it.
        field.evaluate("(field, key) => { field.value = key; }", key)
        page.get_by_role("button", name="Copy link").click()
        expect(page.locator("#linked")).to_contain_text("in the address bar.")
        assert "prompt=" in page.url
        assert key not in page.url
        refused_alone(opened, 401)
        # That of the server has it, and it is gone from the address at once; other settings of a link stay.
        page.goto(f"{server.url}/#key={key}&prompt=2+%3C")
        page.reload()
        page.goto(f"{server.url}/#key={key}&prompt=2+%3C")
        expect(page.get_by_label("Prompt")).to_have_value("2 <")
        assert key not in page.url
        go_on(page)
        expect(figures(page)).to_contain_text("tokens")
        expect(field).to_be_hidden()


@pytest.mark.slow
def test_a_newer_step_is_told(browser: Chromium, served: Running, hostile: Path) -> None:
    with browser.open(served.url) as opened:
        expect(opened.page.locator("#state")).to_contain_text("step 90 ·")
        train(load(hostile, ["train.duration=94 steps"]))
        expect(opened.page.locator("#news")).to_have_text("The server now serves step 94; before, it served step 90.")
        expect(opened.page.locator("#state")).to_contain_text("step 94 ·")
        opened.check_quiet()


def test_nothing_outside_of_the_page_is_named_in_it(server: Running) -> None:
    html, headers = page_and_headers()
    answer = server.get("/")
    assert answer.text == html
    assert {name: answer.headers[name] for name in headers} == headers
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert not [word for word in html.split('"') if urlsplit(word).scheme in ("http", "https")]
