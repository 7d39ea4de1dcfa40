"""The chat, as people use it: by keyboard, on a phone, in the dark, and with a model that means harm."""

import asyncio
import json

import pytest
from fake_llm import REPLY
from playwright.async_api import expect
from scripted_llm import CALLS
from test_reasoning import REASONING, ThinkingLLM
from test_reasoning import REPLY as REASONINGFUL

from quire.server.app import ENDPOINTS
from quire.server.wire.openapi import openapi_document

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
WEATHER = {"type": "function", "function": {"name": "get_weather"}}
PING = {"type": "function", "function": {"name": "ping"}}


async def ask(page, text):
    await page.locator("#prompt").fill(text)
    await page.keyboard.press("Enter")


def answers(page):
    return page.locator("article.assistant.ended")


async def test_a_chat_by_keyboard_alone(site):
    site.llm.reply = REPLY
    page = await site.open()
    await expect(page.locator("#prompt")).to_be_focused()
    await page.keyboard.type("One line")
    await page.keyboard.press("Shift+Enter")
    await page.keyboard.type("and another")
    await page.keyboard.press("Enter")
    await expect(answers(page).locator(".text")).to_have_text(REPLY)
    assert site.llm.seen[-1].prompt == "One line\nand another"
    await expect(answers(page).locator(".meta")).to_contain_text(f"{len(REPLY)} tokens")
    await expect(page.locator("#prompt")).to_be_focused()
    await expect(page.locator("#prompt")).to_have_value("")

    order = []
    for _ in range(4):
        await page.keyboard.press("Tab")
        order.append(await page.evaluate("document.activeElement.textContent.trim().split('\\n')[0]"))
    assert order == ["Send", "New chat", "Settings", ""]
    await page.keyboard.press("Shift+Tab")
    await page.keyboard.press("Shift+Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator("article")).to_have_count(0)


async def test_the_conversation_goes_on(site):
    site.llm.reply = REPLY
    page = await site.open()
    await page.locator("[name=system]").fill("Be brief.")
    await ask(page, "First")
    await expect(answers(page)).to_have_count(1)
    await ask(page, "Second")
    await expect(answers(page)).to_have_count(2)
    messages, _, _ = site.llm.conversation
    assert [(one["role"], one["content"]) for one in messages] == [
        ("system", "Be brief."), ("user", "First"), ("assistant", REPLY), ("user", "Second"),
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["Escape", "Stop"])
async def test_an_answer_is_stopped(site, how):
    page = await site.open()
    await ask(page, "hold")
    await expect(page.locator("#stop")).to_be_visible()
    await page.wait_for_selector(".assistant .text:not(:empty)")
    if how == "Escape":
        await page.keyboard.press("Escape")
    else:
        await page.locator("#stop").click()
    await expect(page.locator("#chat-status")).to_have_text("Stopped.")
    await expect(answers(page).locator(".meta")).to_contain_text("stopped")
    assert await asyncio.to_thread(site.llm.abort_seen.wait, 60), "the server heard of it"
    await ask(page, "Go on")
    await expect(answers(page)).to_have_count(2)


async def test_a_new_chat_knows_nothing_of_an_answer_that_was_under_way(site):
    page = await site.open()
    await ask(page, "hold")
    await page.wait_for_selector(".assistant .text:not(:empty)")
    await page.locator("#clear").click()
    await expect(page.locator("#chat-status")).to_have_text("Stopped.")
    await expect(page.locator("article")).to_have_count(0)
    await ask(page, "Anew")
    await expect(answers(page)).to_have_count(1)
    messages, _, _ = site.llm.conversation
    assert [one["content"] for one in messages] == ["Anew"]


async def test_calls_that_are_cut_off_are_not_sent_back(site):
    page = await site.open()
    await page.locator("[name=tools]").fill(json.dumps([WEATHER]))
    await page.locator("[name=max_completion_tokens]").fill("60")
    await ask(page, "Call")
    await expect(answers(page).locator("details.call")).to_have_count(1)
    await ask(page, "And now?")
    await expect(answers(page)).to_have_count(2)
    messages, _, _ = site.llm.conversation
    assert [one["role"] for one in messages] == ["user", "assistant", "user"]
    assert "tool_calls" not in messages[1]


async def test_tools_are_folded_and_their_results_go_back(site):
    page = await site.open()
    await page.locator("[name=tools]").fill(json.dumps([WEATHER, PING]))
    await ask(page, "Call them")
    folds = answers(page).locator("details.call")
    await expect(folds).to_have_count(2)
    await expect(folds.nth(0).locator(".text")).to_be_hidden()
    await expect(folds.nth(0).locator("summary")).to_have_text("Calls get_weather")
    await folds.nth(0).locator("summary").click()
    assert json.loads(await folds.nth(0).locator(".text").inner_text()) == {"city": '}"é'}

    prompt = page.locator("#prompt")
    await expect(prompt).to_have_attribute("placeholder", "What get_weather returned")
    await ask(page, "rain")
    await expect(prompt).to_have_attribute("placeholder", "What ping returned")
    await ask(page, "pong")
    await expect(answers(page)).to_have_count(2)
    messages, _, _ = site.llm.conversation
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool"]
    ids = [call["id"] for call in messages[1]["tool_calls"]]
    assert [(one["tool_call_id"], one["content"]) for one in messages[2:]] == list(
        zip(ids, ["rain", "pong"], strict=True)
    )


async def test_what_the_model_thinks_is_folded(site):
    site.llm = ThinkingLLM()
    assert REASONING in REASONINGFUL
    page = await site.open()
    await page.locator("[name=tools]").fill(json.dumps([PING]))
    await ask(page, "Think")
    fold = answers(page).locator("details.reasoning")
    await expect(fold.locator("summary")).to_have_text("Reasoning")
    await expect(fold.locator(".text")).to_be_hidden()
    await fold.locator("summary").click()
    await expect(fold.locator(".text")).to_have_text(REASONING)
    await expect(answers(page).locator("> .text")).to_have_text("Well.")


@pytest.mark.parametrize(
    ("kind", "text", "field", "value"),
    [
        ("regex", "[0-9]+", "regex", "[0-9]+"),
        ("choice", "yes\nno\n", "choice", ["yes", "no"]),
        ("json_schema", '{"type": "object"}', "json", {"type": "object"}),
    ],
)
async def test_structured_output(site, kind, text, field, value):
    page = await site.open()
    await page.locator("[name=structure]").select_option(kind)
    await page.locator("[name=structure_text]").fill(text)
    await ask(page, "Answer")
    await expect(answers(page)).to_have_count(1)
    given = getattr(site.llm.seen[-1].params.structured_outputs, field)
    assert (json.loads(given) if isinstance(given, str) and kind == "json_schema" else given) in (
        value, tuple(value),
    )  # fmt: skip


async def test_limits_are_the_servers(site):
    page = await site.open()
    schema = openapi_document(ENDPOINTS, "1")["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty"):
        limits = schema[name]["anyOf"][0]
        field = page.locator(f"[name={name}]")
        assert float(await field.get_attribute("min")) == limits["minimum"]
        assert float(await field.get_attribute("max")) == limits["maximum"]
    longest = page.locator("[name=max_completion_tokens]")
    assert await longest.get_attribute("max") == str(site.llm.info.max_model_len)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [("temperature", "101", "Temperature"), ("top_p", "0", "above 0"), ("tools", "[", "Functions")],
)
async def test_what_is_beyond_a_limit_is_not_sent(site, name, text, problem):
    page = await site.open()
    await page.locator(f"[name={name}]").fill(text)
    await ask(page, "Hello")
    await expect(page.locator("#chat-status")).to_contain_text(problem)
    assert site.llm.seen == []
    await expect(page.locator("article")).to_have_count(0)
    await page.locator(f"[name={name}]").fill("")
    await ask(page, "Hello")
    await expect(answers(page)).to_have_count(1)


async def test_parameters_are_sent(site):
    page = await site.open()
    for name, value in {
        "temperature": "0.5",
        "seed": "7",
        "max_completion_tokens": "3",
        "stop": "a\nb",
    }.items():
        await page.locator(f"[name={name}]").fill(value)
    await ask(page, "Hello")
    await expect(answers(page)).to_have_count(1)
    params = site.llm.seen[-1].params
    assert (params.temperature, params.seed, params.max_tokens) == (0.5, 7, 3)
    assert list(params.stop) == ["a", "b"]
    await expect(answers(page).locator(".meta")).to_contain_text("cut off at the maximum")


async def test_an_error_is_shown_and_the_question_can_be_asked_again(site):
    site.expected_complaints = ("400 (Bad Request)",)
    page = await site.open()
    await ask(page, "x" * 300)
    await expect(page.locator("[role=alert]")).to_contain_text("the prompt has 301 tokens")
    await ask(page, "Shorter")
    await expect(page.locator("#chat-status")).to_have_text("Answered.")
    messages, _, _ = site.llm.conversation
    assert [one["content"] for one in messages] == ["Shorter"]


async def test_a_stream_that_fails_says_why(site):
    page = await site.open()
    await ask(page, "fail")
    await expect(page.locator("[role=alert]")).to_contain_text("a NaN in the logits")


async def test_what_a_model_writes_stays_text(site):
    arguments = json.dumps({"city": HOSTILE})
    site.llm.reply = (
        f'{HOSTILE}\n<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    )
    page = await site.open()
    await page.locator("[name=tools]").fill(json.dumps([WEATHER]))
    await ask(page, HOSTILE)
    await expect(answers(page).locator("> .text")).to_have_text(HOSTILE)
    await answers(page).locator("details.call summary").click()
    assert json.loads(await answers(page).locator("details.call .text").inner_text()) == {"city": HOSTILE}
    await expect(page.locator("article.user")).to_have_text(HOSTILE)
    assert await page.locator("main img, main script").count() == 0
    assert await page.title() == "fake - Quire"


async def test_the_browser_refuses_html_from_strings(site):
    site.expected_complaints = ("TrustedHTML", "Trusted Type", "inline")
    page = await site.open()
    refusal = await page.evaluate(
        "(() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } })()"
    )
    assert refusal == "TypeError"


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_can_be_read_in_light_and_dark(site, scheme):
    page = await site.open(color_scheme=scheme)
    colors = await page.evaluate(
        """['body', 'button.main', '#prompt', '.hint'].map((one) => {
            const style = getComputedStyle(document.querySelector(one));
            return [style.color, style.backgroundColor, getComputedStyle(document.body).backgroundColor];
        })"""
    )
    is_dark = luminance(colors[0][1]) < 0.1
    assert is_dark == (scheme == "dark")
    for text, own, behind in colors:
        background = behind if own.endswith(", 0)") else own
        bright, dim = sorted((luminance(text), luminance(background)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) > 4.5, "WCAG 2, level AA"


def luminance(color):
    """Relative luminance by WCAG 2 of a color such as rgb(1, 2, 3)."""
    channels = [int(part) / 255 for part in color.split("(")[1].rstrip(")").split(",")[:3]]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


async def test_a_phone_needs_no_sideways_scrolling(site):
    site.llm.reply = f"{'w' * 100} {CALLS}"
    page = await site.open(viewport={"width": 360, "height": 640}, has_touch=True)
    await page.locator("#settings > summary").tap()
    await page.locator("[name=tools]").fill(json.dumps([WEATHER, PING]))
    await page.locator("#settings > summary").tap()
    await page.locator("#prompt").fill("x" * 100)
    await page.locator("#send").tap()
    await expect(answers(page)).to_have_count(1)
    await page.locator("details.call summary").first.tap()
    for view in ("chat", "dashboard"):
        await page.locator(f"nav a[href='#{view}']").tap()
        await expect(page.locator(f"main#{view}")).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") == 360
        boxes = page.locator("main:not([hidden]) > *")
        rights = await boxes.evaluate_all("all => all.map((one) => one.getBoundingClientRect().right)")
        assert max(rights) <= 360
    await page.locator("nav a[href='#chat']").tap()
    await expect(page.locator("#prompt")).to_be_in_viewport()


async def test_the_key_is_asked_for_and_kept_for_the_tab(site):
    site.expected_complaints = ("401 (Unauthorized)",)
    page = await site.open(site.serve(api_key="secret"), has_model=False)
    dialog = page.locator("#key-dialog")
    await expect(dialog).to_be_visible()
    await page.keyboard.type("wrong")
    await page.keyboard.press("Enter")
    await expect(page.locator("#key-problem")).to_have_text("The server does not know this key.")
    await page.keyboard.type("secret")
    await page.keyboard.press("Enter")
    await expect(dialog).to_be_hidden()
    await page.wait_for_selector("#sampling input", state="attached")
    await ask(page, "Hello")
    await expect(answers(page)).to_have_count(1)
    await page.reload()
    await page.wait_for_selector("#sampling input", state="attached")
    await expect(dialog).to_be_hidden()
    assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


async def test_who_declines_to_enter_a_key_is_not_asked_again(site):
    site.expected_complaints = ("401 (Unauthorized)",)
    page = await site.open(site.serve(api_key="secret"), "/#dashboard", has_model=False)
    dialog = page.locator("#key-dialog")
    await expect(dialog).to_be_visible()
    await page.keyboard.press("Escape")
    await expect(page.locator("#trouble")).to_contain_text("API key")
    await page.clock.run_for(5000)
    await expect(dialog).to_be_hidden()
    await page.locator("#change-key").click()
    await page.keyboard.type("secret")
    await page.keyboard.press("Enter")
    await page.clock.run_for(5000)
    await expect(page.locator("#trouble")).to_be_hidden()
    await expect(page.locator("#model")).to_have_text("fake")


@pytest.mark.parametrize("path", ["/llm/", "/"])
async def test_it_works_below_a_path(site, path):
    page = await site.open(site.serve(root_path="/llm"), path)
    await ask(page, "Hello")
    await expect(answers(page)).to_have_count(1)
