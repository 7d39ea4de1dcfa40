"""How often what happens, and how every history ends: everything accepted ends, and nothing is held."""

from __future__ import annotations

from census import held_by_scheduler, requests_among
from mixed_driver import MixedDriver
from mixed_world import Chooser

from quire.scheduling import PauseState

ACTIONS = {  # by name of the driver's method, how often
    "add": 22,
    "add_siblings": 6,
    "add_burst": 4,
    "run_steps": 25,
    "plan_step": 10,
    "abort": 3,
    "abort_all": 0.1,
    "break_in_runner": 0.5,
    "pause": 2,
    "reset": 2,
    "pass_time": 3,
    "compile": 6,
    "let_connector_misbehave": 5,
    "let_policy_misbehave": 2,
    "let_surroundings_misbehave": 3,
    "change_memory": 1,
    "propose": 3,
    "replace_drafts": 3,
    "look": 1,
}
MOST_IDLE_STEPS = 50  # a second each: more than kv_transfer_timeout, less than request_timeout
MOST_STEPS = 6000  # a livelock takes more; the longest honest end has a budget of one token per step
NEED_LIVE = ("abort", "break_in_runner")
_DRAWN_FROM = [name for name, often in ACTIONS.items() for _ in range(round(often * 10))]


def act(driver: MixedDriver, choose: Chooser) -> None:
    """Do one thing at random, and check."""
    name = choose.among(_DRAWN_FROM)
    if name in NEED_LIVE and not driver.live:
        return
    getattr(driver, name)(choose)
    if driver.in_flight and choose.chance(50):
        driver.update()
    driver.check()


def run_random(driver: MixedDriver, choose: Chooser, num_steps: int) -> None:
    """Do things at random until so many steps have been planned."""
    while driver.counts["steps"] < num_steps:
        act(driver, choose)


def drain(driver: MixedDriver) -> None:
    """Stop interfering, and see everything end, in little time and fewer steps than a livelock takes."""
    world, scheduler = driver.world, driver.scheduler
    scheduler.set_pause_state(PauseState.UNPAUSED)
    if world.connector is not None:
        world.connector.is_reluctant = False
    num_steps = num_idle = 0
    while scheduler.has_requests() or driver.in_flight:
        while driver.in_flight:
            driver.update()
        world.compiler.finish(100)
        driver.schedule()
        moves = driver.in_flight[-1].plan.total_num_scheduled_tokens > 0
        driver.update()
        driver.check()
        num_steps += 1
        num_idle = 0 if moves else num_idle + 1
        world.now += 0.05 if moves else 1.0
        waiting = [] if moves else [scheduler.explain(name) for name in driver.live]
        assert num_idle < MOST_IDLE_STEPS, f"nothing moves: {waiting}"
        assert num_steps < MOST_STEPS, "nothing ends"
    check_nothing_held(driver)


def check_nothing_held(driver: MixedDriver) -> None:
    """Invariant 8, from outside."""
    scheduler, world = driver.scheduler, driver.world
    assert not driver.live
    assert scheduler.reset_prefix_cache()
    assert scheduler.get_kv_cache_usage() == 0
    assert scheduler.accounts.kv.pools.first.num_in_use == 0
    assert not world.runner.tables
    assert not world.runner.tokens
    assert not requests_among(held_by_scheduler(world))
    if world.connector is not None:
        driver.counts += world.connector.settle()
    scheduler.check_invariants()
