"""Prometheus metrics and OpenTelemetry traces.

`RequestTimer` turns a request's outputs into observations; from the engine it only needs when a request was
first scheduled (`EngineCoreOutput.first_scheduled_time`). `GenerationCall` makes a `CallSpan` of the same
outputs if there is a `Tracing` (`server/metrics/tracing.py`, the only module that imports OpenTelemetry).
`explain(request_id)` says in a sentence what a request is doing or waiting for. `KVEventCollector` collects
the blocks that the prefix cache gains and loses, which the engine publishes after each step.
`RecordingScheduler` wraps any scheduler and records every call that decides something, with every answer from
its `SchedulerContext`; `quire replay` repeats the calls and compares every plan.
docs/observing.md has the formats.
"""
