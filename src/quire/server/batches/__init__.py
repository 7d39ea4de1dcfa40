"""OpenAI's Files and Batch API on a local disk: files of requests, served when the engine has room.

A batch is a `BatchJob` of the front process. `requests.py` answers each line with the handler of HTTP calls,
as the batch's tenant, without a connection. The result files are the only record of which lines are done (the
database describes the files), so a job that is interrupted anywhere resumes from there. Disk access happens
in one thread, a bounded part at a time.
"""
