"""The engine process as the front sees it: launch, messages, supervision, and recovery.

The front process runs HTTP, tokenization and detokenization, and never imports torch: an import contract
checks it, and lists the imports inside functions that only run where an engine is built. The engine process
runs the step loop. They exchange the msgspec messages of `engine/messages.py` over ZeroMQ ipc sockets in a
private directory. The front starts the engine process before its own slow imports, so that torch loads in the
meantime; commands do before they import most of the front (`started_ahead` in `front/process/launch.py`).
The front acknowledges received messages in bytes; without room in its `OutputWindow` the engine begins no
step. The front processes messages in turns of the event loop (`front/process/message_backlog.py`). Data from
connections is parsed in turns, too, a few connections in each (`server/http/protocol.py`). With a monitoring
port, a thread of the front with its own event loop answers probes (`server/monitoring/port.py`) from what the
main event loop last published (`probes.py`).

The engine process ignores SIGINT and SIGTERM (the front decides between draining and stopping) and holds the
read end of a pipe from the front; when the pipe closes, for any reason, it exits at once. The front watches
the engine through its standard output, and through the steps that it finishes. If the engine dies or
hangs, `EngineSupervisor` (`front/process/supervision.py`) starts another, or promotes the standby that it
keeps with `standby_engine` (`front/process/standby.py`, `engine/process/main.py`), and `Resumption`
(`front/process/resumption.py`) sends it the live requests, each with its tokens so far
(`EngineCoreRequest.resumed_outputs`): to the scheduler, such a request is one that was preempted. Requests
that repeatedly crash the engine are found and ended; docs/recovery.md has the rules. A sleeping engine
(`front/control.py`) has been ended in the same way, and is started again by `wake_up`. `LLM` runs the same
loop in the caller's process by default.
"""
