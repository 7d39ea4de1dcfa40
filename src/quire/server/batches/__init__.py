"""OpenAI's Files and Batch API on a local disk: files of requests that are answered when there is room.

A batch of requests (`server/batches/`) is a `BatchJob` of the front process. `requests.py` has each line
answered by the handler that HTTP calls have, as the batch's tenant, without a connection. What is in the
files of results says which lines are done, and the database beside them only what the files are, so that a
job that is broken off anywhere goes on from there. Everything that takes the disk's time is done in one
thread, a bounded part at a time.
"""
