"""The engine: the step loop, the engine process, the memory plan and KV events.

**Owners.** `EngineCore` keeps the ids of the requests that it was given and that have not had their terminal
output (`engine/owned_requests.py`). If the scheduler has another number of them after a step, it looks who is
missing; a request that the scheduler has not known for two steps ends with an error. If a step cannot be
planned or applied, all requests end and the invariants are checked; if they do not hold, or if steps keep
failing, `EngineDeadError` ends the loop, because an engine with wrong accounts would give wrong answers. What
others wrote is called through objects that check every answer and never raise: policies, connectors, drafts,
growth and events (`scheduling/guards`), grammars (`grammar/manager.py`), and the runner's results
(`runner_faults.py`).
"""
