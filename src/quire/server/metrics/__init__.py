"""Prometheus metrics and OpenTelemetry traces.

`RequestTimer` makes observations of a request's outputs; the engine adds only when a request was first
scheduled (`EngineCoreOutput.first_scheduled_time`). `GenerationCall` makes a `CallSpan` of the same outputs
if there is a `Tracing` (`server/metrics/tracing.py`), which alone imports OpenTelemetry.
`explain(request_id)` says in a sentence what a request does or waits for. `KVEventCollector` gathers which
blocks become findable and which stop being so, and the engine publishes that after each step.
`RecordingScheduler` wraps any scheduler and records every call that decides something, with every answer the
scheduler got from its `SchedulerContext`; `quire replay` repeats the calls and compares every plan.
docs/observing.md has the formats.
"""
