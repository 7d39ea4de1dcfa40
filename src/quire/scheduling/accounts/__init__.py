"""The accounts of the scheduler: slots, queues, blocks, and steps in flight.

**Fences.** The blocks of a request that is preempted or aborted are free at once, even while a step in flight
still writes to them: steps are computed in order, so the next owner writes later. Its slot is not free:
outputs in flight name it, so it is fenced until the last of those steps has been applied. The same holds for
blocks that an asynchronous load may still write to: they become free when the step that cancels the load has
been applied.

**Steps in flight.** One, or two with `overlap_steps`: the next step is planned while one is computed, with a
placeholder for the token that is not known yet (`OverlappedStepper` in `engine/stepping.py`). On a device
that chooses tokens itself, it is begun then, too: by the thread that plans if the runner would wait for
nothing (`ModelRunner.only_launches`), or else by another. Requests that need the sampled token skip the
overlapped step: beams, a request that the token in flight ends by its length, and those that have drafts in
the step before or may get some after it (`SchedulerOutput.awaits_tokens`); the runner says for how many steps
a request will get none. After the step that is begun meanwhile nothing is proposed, so that all that wait do
so in the same steps. Where the step is in flight on a device, its drafts are asked for when its tokens have
been applied (`StepInFlight.drafts`). Grammars need the token only for the masks of the step
(`pending_structured_output_tokens`): the runner asks for these when nothing is left but to choose tokens, and
gets them once the step before has been applied. The tokens are the same either way.

**Lost steps.** A plan may be lost between `schedule()` and `update_from_output()`. When `schedule()` finds
more plans in flight than there can be, it considers them lost: their requests are preempted, and their
messages to the runner about finished and preempted requests are sent again. A step that failed as a whole
comes back with `is_applied=False` and the reason; its requests become `Suspects` (`suspects.py`) and are
preempted, and its messages are sent again, too. These messages are idempotent, so it does not matter whether
the runner saw them the first time.

**Suspects.** After a step that failed, the engine first computes one of a single token (the *probe*). If that
fails, too, the engine ends, and the front replaces it. Otherwise half of the suspects run, then half of those
if that step fails, until one fails alone: it ends with the error. Those of a step that is computed are
cleared and go on, with the same tokens. All other requests wait meanwhile.
"""
