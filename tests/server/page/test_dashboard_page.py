"""The dashboard: what it shows, what it asks, and when it stops asking."""

import asyncio

import httpx
import pytest
from playwright.async_api import expect

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = "<img/src=x/onerror=document.title='taken'>"


async def turned(page, seconds):
    """Let time pass in the page, in steps that leave it time to hear answers."""
    for _ in range(seconds):
        await page.clock.run_for(1000)
        await page.wait_for_timeout(20)


async def test_figures_of_the_engine(site):
    page = await site.open(path="/#dashboard")
    tiles = page.locator(".tile")
    await expect(tiles).to_have_count(6)
    await expect(tiles.nth(1)).to_contain_text("Waiting2")
    await expect(tiles.nth(4)).to_contain_text("25 %")
    await expect(tiles.nth(5)).to_contain_text("40 %")
    squares = [
        await page.locator(f"#blocks .{state}").count() for state in ("used", "leased", "idle", "free")
    ]
    assert squares == [11, 5, 32, 16]
    words = (
        "11 in use, 0 of them just taken from evicted prefixes, 5 pinned, 32 idle: cached prefixes, 16 free"
    )
    await expect(page.locator("#blocks")).to_have_attribute("aria-label", f"64 KV blocks: {words}")
    await expect(page.locator("#requests-note")).to_have_text("No request is being served.")
    await expect(page.locator("#ttft-summary")).to_have_text("Nothing has been measured yet.")


async def test_latencies_and_rates(site):
    url = site.serve()
    body = {"model": "fake", "prompt": "Hello", "max_tokens": 5}
    async with httpx.AsyncClient() as http:
        page = await site.open(url, path="/#dashboard")
        await http.post(f"{url}/v1/completions", json=body)
        await turned(page, 3)
    await expect(page.locator("#ttft-summary")).to_contain_text("1 in all")
    await expect(page.locator("#itl-summary")).to_contain_text("4 in all")
    assert await page.locator("#ttft .bar").count() >= 2
    points = await page.locator("polyline.generated").get_attribute("points")
    assert float(points.split()[0].split(",")[1]) < 100, "above the ground line"


async def test_a_live_request_is_explained_and_can_be_ended(site):
    url = site.serve()
    body = {"model": "fake", "prompt": "hold", "max_tokens": 20}
    async with httpx.AsyncClient(timeout=60) as http:
        held = asyncio.create_task(
            http.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": HOSTILE})
        )
        assert await asyncio.to_thread(site.llm.held_seen.wait, 60)
        page = await site.open(url, path="/#dashboard")
        row = page.locator("#requests tbody tr")
        await expect(row.locator(".id")).to_have_text(f"cmpl-{HOSTILE}")
        await expect(row.locator(".state")).to_contain_text("running: ")
        assert await page.locator("main img").count() == 0
        assert await page.title() == "fake - Quire"
        await row.get_by_role("button").click()
        assert (await held).status_code == 499
        await turned(page, 3)
        await expect(row).to_have_count(0)


async def test_it_asks_only_while_somebody_looks(site):
    page = await site.open(path="/#dashboard")
    asked = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    await turned(page, 11)
    assert 4 <= asked.count("stats") <= 7
    assert asked.count("stats") == asked.count("requests")

    await hide(page, True)
    await turned(page, 3)
    asked.clear()
    await turned(page, 30)
    assert asked == []

    await hide(page, False)
    await turned(page, 3)
    assert asked.count("stats") >= 1

    await page.locator("nav a[href='#chat']").click()
    await turned(page, 3)
    asked.clear()
    await turned(page, 8)
    assert asked.count("stats") == 0


async def hide(page, is_hidden):
    await page.evaluate(
        """(isHidden) => {
            Object.defineProperty(document, 'hidden', { value: isHidden, configurable: true });
            document.dispatchEvent(new Event('visibilitychange'));
        }""",
        is_hidden,
    )


async def test_what_it_keeps_is_bounded(site):
    page = await site.open(path="/#dashboard")
    await page.clock.run_for(1000 * 60)
    for _ in range(100):
        async with page.expect_response("**/stats"):
            await page.clock.run_for(2000)
    points = await page.locator("polyline.generated").get_attribute("points")
    assert len(points.split()) <= 90
    assert await page.locator("#blocks span").count() == 64


async def test_an_engine_that_is_down_is_told_of(site):
    site.expected_complaints = ("503 (Service Unavailable)",)
    page = await site.open(path="/#dashboard")
    site.llm.dead = "the engine process ended with signal 9"
    await turned(page, 3)
    await expect(page.locator("#trouble")).to_contain_text("The engine is down")
    await expect(page.locator("#requests-note")).to_contain_text("signal 9")
    site.llm.dead = None
    await turned(page, 3)
    await expect(page.locator("#trouble")).to_be_hidden()


async def test_tenants(site, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.alice]\nkeys = ["alice-key"]\nrequests_per_minute = 10\n')
    keys.chmod(0o600)
    page = await site.open(site.serve(api_keys_file=str(keys)), path="/#dashboard", has_model=False)
    await page.locator("#key-form [name=key]").fill("alice-key")
    await page.keyboard.press("Enter")
    cells = page.locator("#tenants tbody td")
    await expect(cells).to_have_text(["alice", "0", "10", "no limit"])


async def test_the_picture_of_blocks_says_what_it_shows_aloud(site):
    page = await site.open(path="/#dashboard")
    await expect(page.locator("#blocks span")).to_have_count(64)
    tree = await page.locator("main#dashboard").aria_snapshot()
    assert "64 KV blocks" in tree
    assert "Tokens per second now" in tree
