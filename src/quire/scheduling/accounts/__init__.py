"""The accounts of the scheduler: slots, queues, blocks, and steps in flight."""
