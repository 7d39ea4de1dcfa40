"""Who runs in a step; numpy and plain Python only.

The public names are imported when first used, so that the front, which needs what messages are made of, does
not import the scheduler.

`Accounts` (`accounts/accounts.py`) says where every request, block and step is. Running requests live in
*slots*, rows of numpy arrays (`accounts/running_slots.py`); the runner keeps its own rows under the same
numbers, so a decode step passes arrays and no dictionaries. `SlotManager` moves requests into slots and out
of them, `RequestFinisher` ends them, and each of their methods keeps all accounts. The phases of a step are
one module each: a phase is given the accounts and the phases and policies that it calls.

`Scheduler.schedule()` does, in this order:

1. drop steps that were planned and will never be applied;
2. end requests that have timed out;
3. cancel loads that timed out, and end leases that nobody renewed;
4. queue requests whose grammar has been compiled;
5. let a growing cache commit as many blocks as this step can use at most;
6. fill the plan, as `scheduling/phases/step_mix.py` says: the running requests, then the waiting ones;
   without `dynamic_split_fuse`, steps of whole prompts alternate with decode steps;
7. commit the plan: the arrays for the runner, and what it must know of new, resumed, finished and preempted
   requests.

Policies that are not built in are called through guards (`guards/policies.py`): one that raises or returns
nonsense is replaced by the default.

**Progress.** Why something always moves, or ends with a reason:

- A request is accepted only if the whole cache could hold it to its end, all beams included.
- The first request in the order of service is never a victim. All others are preempted for it, loads of
  waiting requests are dropped and pins are broken; then it has the whole cache, except for transfers.
- Blocks of a transfer come back: each transfer has a deadline. Until then a step may be empty. A live peer
  can renew its lease; a dead one cannot.
- If a growing cache is refused memory, it asks again. If no block will ever be given back, the request ends
  with an error that says how many blocks there were.
- A request waits for one load of another request at most, and that has a deadline.
- A grammar is compiled within 30 seconds, or its request ends. Siblings wait for a prompt only as long as the
  request that computes it runs or waits.
- Preempted requests precede new ones of their priority, and `priority_ageing` lets waiting time make up for
  priority.

`tests/scheduling/test_progress.py` has a test for each state that looks stuck.
"""

from __future__ import annotations

from quire.lazy_attributes import lazy_attributes

TYPE_CHECKING = False  # as in `quire.lazy_attributes`

if TYPE_CHECKING:
    from quire.scheduling.interface import PauseState, SchedulerInterface
    from quire.scheduling.outputs import EngineCoreOutput, EngineCoreOutputs, SchedulerStats
    from quire.scheduling.scheduler import Scheduler
    from quire.step import ModelRunnerOutput, SchedulerOutput

__all__ = [
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "ModelRunnerOutput",
    "PauseState",
    "Scheduler",
    "SchedulerInterface",
    "SchedulerOutput",
    "SchedulerStats",
]

_HOMES = {
    "EngineCoreOutput": "quire.scheduling.outputs",
    "EngineCoreOutputs": "quire.scheduling.outputs",
    "ModelRunnerOutput": "quire.step",
    "PauseState": "quire.scheduling.interface",
    "Scheduler": "quire.scheduling.scheduler",
    "SchedulerInterface": "quire.scheduling.interface",
    "SchedulerOutput": "quire.step",
    "SchedulerStats": "quire.scheduling.outputs",
}

__getattr__, __dir__ = lazy_attributes(globals(), _HOMES)
