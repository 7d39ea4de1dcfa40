"""The view that compares two texts, which only a server of embeddings has."""

import numpy as np
import pytest
from playwright.async_api import expect
from scripted_llm import ScriptedLLM

from quire.pooling_params import PoolingParams
from quire.request_output import PoolingOutput, PoolingRequestOutput
from quire.sampling_params import ONE_TOKEN
from quire.status import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="session")


class EmbeddingLLM(ScriptedLLM):
    """A text's row is how often it has a, b and c."""

    def __init__(self, *labels):
        super().__init__()
        self.info.pooling = PoolingParams()
        self.info.labels = labels

    async def encode(self, prompt, pooling_params, *, task, truncation_side, **options):
        async for output in self.generate(prompt, ONE_TOKEN, **options):
            if output.finished:
                row = np.array([prompt.count(letter) for letter in "abc"], np.float32)
                yield PoolingRequestOutput(
                    output.request_id,
                    prompt,
                    output.prompt_token_ids,
                    PoolingOutput(row, FinishReason.STOP),
                    finished=True,
                )


def links(page):
    return page.locator("nav a:visible")


async def test_two_texts_are_compared_by_keyboard_alone(site):
    site.llm = EmbeddingLLM()
    page = await site.open(has_model=False)
    await expect(links(page)).to_have_text(["Similarity", "Dashboard"])
    await expect(page.locator("[name=first]")).to_be_focused()
    await page.keyboard.type("aab")
    await page.keyboard.press("Tab")
    await page.keyboard.type("abb")
    await page.keyboard.press("Tab")
    await page.keyboard.press("Enter")
    await expect(page.locator("#cosine")).to_have_text("0.800")
    assert await page.locator("#cosine-bar").evaluate("bar => bar.value") == pytest.approx(0.8)
    await expect(page.locator("#cosine-of")).to_have_text("of two rows of 3 numbers, from 8 tokens")
    await expect(page.locator("#similarity-status")).to_have_text("")


async def test_an_error_is_shown_in_place_of_the_last_similarity(site):
    site.expected_complaints = ("400 (Bad Request)",)
    site.llm = EmbeddingLLM()
    page = await site.open(path="/#similarity", has_model=False)
    await page.locator("[name=first]").fill("a")
    await page.locator("[name=second]").fill("a")
    await page.locator("#compare").click()
    await expect(page.locator("#cosine")).to_have_text("1.000")
    await page.locator("[name=second]").fill("a" * 300)
    await page.locator("#compare").click()
    await expect(page.locator("#similarity-status")).to_contain_text("the prompt has 301 tokens")
    await expect(page.locator("#similarity-result")).to_be_hidden()


async def test_an_empty_text_is_not_sent(site):
    site.llm = EmbeddingLLM()
    page = await site.open(has_model=False)
    await page.locator("[name=first]").fill("a")
    await page.locator("#compare").click()
    await expect(page.locator("[name=second]")).to_be_focused()
    assert site.llm.seen == []


async def test_a_model_that_generates_has_no_such_view(site):
    page = await site.open(path="/#similarity")
    await expect(links(page)).to_have_text(["Chat", "Dashboard"])
    await expect(page.locator("#chat")).to_be_visible()


async def test_a_classifier_has_the_dashboard_alone(site):
    site.llm = EmbeddingLLM("good", "bad")
    page = await site.open(has_model=False)
    await expect(links(page)).to_have_text(["Dashboard"])
    await expect(page.locator("#dashboard")).to_be_visible()


async def test_a_phone_needs_no_sideways_scrolling(site):
    site.llm = EmbeddingLLM()
    page = await site.open(has_model=False, viewport={"width": 360, "height": 640}, has_touch=True)
    await page.locator("[name=first]").fill("a" * 200)
    await page.locator("[name=second]").fill("b" * 50)
    await page.locator("#compare").tap()
    await expect(page.locator("#cosine")).to_have_text("0.000")
    assert await page.evaluate("document.documentElement.scrollWidth") == 360
