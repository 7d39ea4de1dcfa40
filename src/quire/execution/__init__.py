"""Running one step: from a `SchedulerOutput` to a `ModelRunnerOutput`.

`model_runner.ModelRunner` is the door; it keeps the persistent batch, builds the ragged batch of a step, runs
the decoder and asks the `Sampler` for tokens. Importing this package loads nothing; its modules load torch.
"""
