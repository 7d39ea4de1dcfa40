"""`serve` as a process of its own, with the real engine and the built-in model."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import psutil
import pytest

import engine_schedulers
import subprocesses
from quire.config import EdgeConfig, EngineConfig, ServerConfig
from quire.errors import ConfigError, ModelNotFoundError
from quire.server import serve as serve_module
from quire.server.http import server as http_server
from quire.server.http import stopping
from quire.server.http.listening import bound_socket
from quire.server.serve import serve

pytestmark = pytest.mark.processes

PROGRAM = """
import json
import sys
from quire.config import EdgeConfig, EngineConfig, SchedulerConfig, ServerConfig, SupervisionConfig
from quire.server.http import stopping
from quire.server.serve import serve

stopping.STOP_GRACE = stopping.IMMEDIATE_GRACE = 60.0  # on a busy machine, an end that is right may be slow
serve(
    EngineConfig(
        num_threads=1,
        scheduler=SchedulerConfig(num_kv_blocks=256),
        supervision=SupervisionConfig(**json.loads(sys.argv[3])),
        **json.loads(sys.argv[5]),
    ),
    ServerConfig(
        port=int(sys.argv[1]), drain_timeout=float(sys.argv[2]), edge=EdgeConfig(**json.loads(sys.argv[4]))
    ),
)
print("torch" in sys.modules)
"""
QUESTION = [{"role": "user", "content": "What is a KV block?"}]


class ServerProcess:
    def __init__(self, process, *, wait=True):
        self.process = process
        self.ready_line = self.process.stdout.readline() if wait else ""
        self.try_line = self.process.stdout.readline() if wait else ""
        self.url = self.ready_line.split()[1] if self.ready_line else ""
        self.children = psutil.Process(self.process.pid).children(recursive=True) if self.url else []

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stop(self, number=signal.SIGTERM):
        """Send a signal, wait for the end; return exit status, rest of stdout, stderr."""
        self.process.send_signal(number)
        return self.ended()

    def ended(self):
        out, err = self.process.communicate()
        _, alive = psutil.wait_procs(self.children, timeout=60)
        assert not alive
        return self.process.returncode, out, err


@contextlib.contextmanager
def server_process(
    *, port=0, drain_timeout=20, wait=True, preload=True, supervision=None, edge=None, scheduler=None, **limit
):
    engine = {"scheduler_cls": f"engine_schedulers.{scheduler}"} if scheduler else {}
    parts = [json.dumps(part) for part in (supervision or {}, edge or {}, engine)]
    command = [sys.executable, "-c", PROGRAM, str(port), str(drain_timeout), *parts]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(Path(engine_schedulers.__file__).parent)}
    with subprocesses.started(command, preload=preload, env=environment, **pipes, **limit) as process:
        yield ServerProcess(process, wait=wait)


@pytest.fixture
def started():
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(server_process(**options))


@pytest.fixture(scope="module")
def shared():
    """One server for the tests that leave it running."""
    with server_process(limit=600) as server:  # seconds for all of them
        yield server


def slow_stream(client, max_tokens=4000):
    """Start a stream that goes on for thousands of steps; return it after its first event."""
    stream = client.completions.create(
        model="mini", prompt="Once", max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    return stream


@pytest.mark.representative
def test_answers_and_ends_cleanly(started):
    server = started(preload=False)
    assert server.ready_line.startswith("Ready: http://127.0.0.1:")
    assert f"curl {server.url}/v1/chat/completions" in server.try_line
    client = server.client()
    plain = client.chat.completions.create(model="mini", messages=QUESTION, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model="mini", messages=QUESTION, temperature=0, max_tokens=24, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == plain.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    status, rest, _ = server.stop()
    assert (status, rest) == (0, "False\n")


def test_completions_agree_with_themselves(shared):
    client = shared.client()

    def create(**fields):
        return client.completions.create(model="mini", prompt="KV blocks are", max_tokens=12, **fields)

    first, second = (create(seed=11, n=2, logprobs=3) for _ in range(2))
    assert [choice.text for choice in first.choices] == [choice.text for choice in second.choices]
    assert first.choices[0].logprobs == second.choices[0].logprobs
    assert second.usage.prompt_tokens == first.usage.prompt_tokens
    scored = create(echo=True, logprobs=1, temperature=0).choices[0]
    assert scored.text.startswith("KV blocks are")
    for token, offset in zip(scored.logprobs.tokens, scored.logprobs.text_offset, strict=True):
        if "\N{REPLACEMENT CHARACTER}" not in token and offset < len(scored.text):
            assert scored.text[offset:].startswith(token)


def function(name, **types):
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_built_in_model_calls_tools(shared):
    tools = [
        function("get_weather", city="string"),
        function("calculator", expression="string"),
        function("set_timer", minutes="integer"),
    ]

    def answer(messages, **fields):
        asked = {"model": "mini", "messages": messages, "tools": tools, "temperature": 0, **fields}
        return shared.client().chat.completions.create(**asked).choices[0]

    def calls(message):
        return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]

    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = answer(asked)
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    assert calls(called.message) == [("get_weather", {"city": "Oslo"})]
    [call] = called.message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 12, "condition": "rain"}'}
    told = answer([*asked, called.message, result])
    assert (told.finish_reason, told.message.tool_calls) == ("stop", None)
    assert told.message.content == "It is 12 degrees in Oslo, rain."

    both = [{"role": "user", "content": "What is 23 * 17? Set a timer for 10 minutes."}]
    expected = [("calculator", {"expression": "23 * 17"}), ("set_timer", {"minutes": 10})]
    assert calls(answer(both).message) == expected
    assert calls(answer(both, parallel_tool_calls=False).message) == expected[:1]

    for tool_choice in ("auto", "none"):
        known = answer(QUESTION, tool_choice=tool_choice)
        assert (known.finish_reason, known.message.tool_calls) == ("stop", None)
        assert known.message.content.startswith("A fixed-size piece of the KV cache")
    other = [{"role": "user", "content": "Search for cheap flights to Rome."}]
    assert answer(other).message.content == "I have no tool for that."


def test_bad_requests_leave_it_serving(shared):
    url = f"{shared.url}/v1/completions"
    for fields, status in [
        ({"prompt": ""}, 400),
        ({"prompt": "word " * 20_000}, 400),
        ({"prompt": [10**9]}, 400),
        ({"prompt": "a", "logit_bias": {"999999": 1}}, 400),
        ({"prompt": "a", "stop_token_ids": [10**8]}, 400),
        ({"prompt": "x" * 10_000_000}, 413),
    ]:
        response = httpx.post(url, json={"model": "mini", **fields}, timeout=30)
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]
    long = httpx.post(url, json={"model": "mini", "prompt": [5] * 5000})
    assert "5000" in long.json()["error"]["message"]
    assert "max_model_len" in long.json()["error"]["message"]
    assert httpx.get(f"{shared.url}/health").status_code == 200
    metrics = httpx.get(f"{shared.url}/metrics").text
    assert "quire_requests_running 0.0" in metrics
    assert "quire_kv_cache_usage_ratio 0.0" in metrics


def test_sigterm_lets_running_requests_finish(started, slow_steps):
    server = started(scheduler="SlowScheduler")
    slow_steps.touch()
    stream = slow_stream(server.client(), max_tokens=400)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.stderr.readline().startswith("Loading")
    assert server.process.stderr.readline().startswith("Stopping: 1")
    health = httpx.get(f"{server.url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "draining")
    refused = httpx.post(f"{server.url}/v1/completions", json={"model": "mini", "prompt": "a"})
    assert refused.status_code == 503
    slow_steps.unlink()
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert server.ended()[0] == 0


def test_running_requests_finish_although_nobody_reads_the_log(started, slow_steps):
    server = started(scheduler="SlowScheduler")
    slow_steps.touch()
    stream = slow_stream(server.client(), max_tokens=50)
    server.process.stderr.close()
    server.process.send_signal(signal.SIGINT)
    while httpx.get(f"{server.url}/health").status_code == 200:
        pass
    slow_steps.unlink()
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert server.ended()[0] == 0


@pytest.mark.parametrize("patience", [0, 600])
def test_what_does_not_finish_in_time_is_told_so(started, slow_steps, patience):
    server = started(drain_timeout=patience, scheduler="SlowScheduler")
    slow_steps.touch()
    stream = slow_stream(server.client())
    server.process.send_signal(signal.SIGINT)
    if patience:
        assert server.process.stderr.readline().startswith("Loading")
        assert server.process.stderr.readline().startswith("Stopping: 1")
        server.process.send_signal(signal.SIGINT)
        slow_steps.unlink()
    with pytest.raises(openai.APIError) as told:
        list(stream)
    status, _, err = server.ended()
    assert status == 0
    if patience:
        assert told.value.code == "aborted"
        assert "Traceback" not in err


def engine_of(server):
    """Return the server's engine process; waits until there is one."""
    while not (children := list(filter(is_engine, psutil.Process(server.process.pid).children()))):
        pass
    server.children += children
    return children[0]


def is_engine(process):
    """Whether a server's child is not the one that renders chat templates."""
    try:
        return "quire.models.text.template_process" not in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def text_of(stream):
    return "".join(chunk.choices[0].text for chunk in stream)


def test_an_engine_that_dies_is_a_pause_and_one_that_always_dies_is_the_end(started, slow_steps):
    server = started(supervision={"max_engine_crashes": 2}, scheduler="SlowScheduler")
    client = server.client()
    whole = {
        "model": "mini",
        "prompt": "Once",
        "max_tokens": 300,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    expected = client.completions.create(**whole).choices[0].text
    slow_steps.touch()
    stream = client.completions.create(**whole, stream=True)
    start = next(stream).choices[0].text
    engine = engine_of(server)
    engine.kill()
    engine.wait()
    slow_steps.unlink()
    assert start + text_of(stream) == expected
    assert httpx.get(f"{server.url}/health").status_code == 200
    metrics = httpx.get(f"{server.url}/metrics").text
    assert "quire_engine_restarts_total 1.0" in metrics
    assert "quire_requests_resumed_total 1.0" in metrics
    for _ in range(2):
        engine = engine_of(server)
        engine.kill()
        engine.wait()
    status, _, err = server.ended()
    assert status != 0
    assert "died 2 times" in err
    assert "max_engine_crashes 2" in err


def test_without_recovery_an_engine_that_dies_is_reported_and_leaves_no_orphan(started, slow_steps):
    server = started(supervision={"recovery": "off"}, scheduler="SlowScheduler")
    slow_steps.touch()
    stream = slow_stream(server.client())
    engine = engine_of(server)
    engine.kill()
    with pytest.raises(openai.APIError, match="engine"):
        list(stream)
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert httpx.get(f"{server.url}/live").status_code == 200
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "mini", "prompt": "a"})
    assert answer.status_code == 503
    assert server.stop()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_ends_although_its_engine_does_not(started, number):
    server = started(drain_timeout=0.1)
    engine_of(server).suspend()
    with contextlib.closing(http.client.HTTPConnection(server.url.removeprefix("http://"))) as connection:
        body = json.dumps({"model": "mini", "prompt": "Once"})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert httpx.get(f"{server.url}/health").status_code == 200  # so the request before it is there too
        server.process.send_signal(number)
        assert connection.getresponse().status == 500
    status, _, err = server.ended()
    assert status == 0
    assert "Stopping: 1" in err


def test_what_the_end_waits_for_is_over_before_the_process_ends_itself():
    assert http_server.LAST_BYTES_TIMEOUT + serve_module._END_TIMEOUT < stopping.STOP_GRACE
    assert http_server.LAST_WORD_TIMEOUT < stopping.IMMEDIATE_GRACE


def test_a_unix_socket_is_there_while_the_server_is(started, tmp_path):
    path = str(tmp_path / "quire.sock")
    server = started(edge={"uds": path, "access_log": "json"})
    assert server.url == f"unix:{path}"
    assert f"curl --unix-socket {path} http://localhost/v1/chat/completions" in server.try_line
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://any.name") as http:
        second = started(edge={"uds": path}, wait=False)
        assert "another server listens" in second.process.communicate()[1]
        body = {"model": "mini", "prompt": "Once", "max_tokens": 3, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 3
    status, rest, _ = server.stop()
    assert (status, list(tmp_path.iterdir())) == (0, [])
    logged = json.loads(rest.splitlines()[0])
    assert (logged["client"], logged["path"], logged["status"]) == ("unix", "/v1/completions", 200)
    assert logged["completion_tokens"] == 3


def test_a_port_that_is_taken(started):
    first = started()
    port = first.url.rsplit(":", 1)[1]
    second = started(port=port)
    assert second.ready_line == ""
    _, err = second.process.communicate()
    assert f"cannot listen on 127.0.0.1:{port}" in err


def test_a_host_that_is_not_ours():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        bound_socket("192.0.2.1", 0)


def test_sigterm_while_loading(started):
    server = started(wait=False, scheduler="UnfinishedScheduler")
    assert server.process.stderr.readline().startswith("Loading")
    status, out, _ = server.stop()
    assert status in (0, -signal.SIGTERM)  # before or after the handlers are in place
    assert "Ready" not in out


def test_a_model_that_does_not_exist():
    with pytest.raises(ModelNotFoundError):
        serve(EngineConfig(model="./nowhere"), ServerConfig(port=0))


@pytest.mark.representative
def test_a_certificate_is_checked_before_anything_is_loaded(tmp_path):
    edge = EdgeConfig(ssl_certfile=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match=r"ssl_certfile '.*none\.pem' cannot be read: No such file"):
        serve(EngineConfig(model="./nowhere"), ServerConfig(port=0, edge=edge))


def test_clients_that_leave_free_their_blocks(shared):
    client = shared.client()
    streams = [slow_stream(client) for _ in range(4)]
    threads = [threading.Thread(target=stream.close) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.completions.create(model="mini", prompt="after", max_tokens=1)
    values = httpx.get(f"{shared.url}/metrics").text
    assert "quire_requests_running 0.0" in values
    assert "quire_kv_cache_usage_ratio 0.0" in values
