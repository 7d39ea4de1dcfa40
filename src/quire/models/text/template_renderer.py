"""Renders chat templates in separate processes, with limits of time and memory.

A template is a file of the model, and loops over what a client sends: it may never end, or double a text
until there is no memory left. The sandbox that it runs in limits neither, and a limit inside of it would have
to know the cost of each operation in advance: a list of a list of itself, 60 times, is small until it is
written as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from quire.config import ChatTemplateConfig
from quire.errors import InvalidRequestError, QueueFullError, QuireError, RequestTimeoutError
from quire.models.text.message_content import ContentForms, Messages, forms_of
from quire.models.text.template_messages import (
    END_OF_TIME,
    MAX_ANSWER_BYTES,
    Conversation,
    RenderedChat,
    TemplateStart,
)

MAX_IDLE = 4  # processes that are kept for the next conversation
WALL_SECONDS = 20.0  # for one conversation, on a busy machine
END_SECONDS = 1.0  # that a process has to end which has closed its side
UNHURRIED_AFTER = 0.1  # seconds after which a process gets the lowest priority


class TemplateRenderer:
    """A chat template, rendered in processes that are started when they are needed. Any thread may use it.

    There are as many processes as conversations at a time, each with one at a time.

    Args:
        source: the jinja2 text.
        special_tokens: names that the template may use, such as bos_token.
        limits: for each conversation.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], limits: ChatTemplateConfig) -> None:
        self._limits = limits
        self._start = TemplateStart(
            source=source,
            special_tokens=dict(special_tokens),
            traces=not limits.special_tokens_in_content,
            cpu_seconds=limits.chat_template_timeout,
            memory_bytes=limits.chat_template_memory * 10**6,
        )
        self._refusal: str | None = None  # why the template itself cannot be used
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        weakref.finalize(self, _end_all, self._idle)

    def compile(self) -> None:
        """Have a process that has compiled the template.

        Raises:
            InvalidRequestError: the template is not valid, or takes too much.
            RequestTimeoutError: the machine is too busy.
            QueueFullError: no process can be started, or it was killed.
        """
        self._put_back(self._take())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> RenderedChat:
        """Return the text of a conversation; with `add_generation_prompt`, up to where the answer starts.

        The content of a message is a text or a list of text parts, and shown in the form that the template
        wants; where that is a text, parts are joined by line breaks. `variables` are what else the template
        may use.

        Raises:
            InvalidRequestError: the template is not valid, refuses these messages, or takes too much.
            RequestTimeoutError: the machine is too busy.
            QueueFullError: no process can be started, or it was killed.
        """
        forms = self._forms
        conversation = Conversation(
            messages=forms.apply(messages),
            add_generation_prompt=add_generation_prompt,
            tools=None if tools is None else [dict(tool) for tool in tools],
            variables=dict(variables),
        )
        rendered, refusal = self._answer(conversation)
        if refusal is not None:
            raise InvalidRequestError(refusal, param="messages")
        return rendered

    @functools.cached_property
    def _forms(self) -> ContentForms:
        """The forms of content that the template shows."""
        is_over = False  # a small conversation has taken too much, so that no other one is tried

        def text_of(messages: Messages) -> str | None:
            nonlocal is_over
            conversation = Conversation(
                messages=messages, add_generation_prompt=False, tools=None, variables={}
            )
            try:
                rendered, refusal = (None, "") if is_over else self._answer(conversation)
            except InvalidRequestError:
                if self._refusal is not None:
                    raise
                is_over = True
                return None
            return None if rendered is None or refusal is not None else rendered.text

        return forms_of(text_of)

    def _answer(self, conversation: Conversation) -> tuple[RenderedChat, str | None]:
        """Return the text of a conversation, and why the template refuses it, if it does."""
        try:
            line = _line(conversation)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages must be made of texts, numbers, lists and dictionaries: {error}", param="messages"
            ) from error
        process = self._take()
        try:
            answer = process.ask(line, UNHURRIED_AFTER)
        except BaseException:
            process.end()
            raise
        self._put_back(process)
        return answer

    def close(self) -> None:
        """End the processes that do nothing."""
        with self._lock:
            idle = self._idle[:]
            self._idle.clear()
        _end_all(idle)

    def _take(self) -> _Process:
        """Return an unused process that has compiled the template."""
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.popen.poll() is None:
                    return process
                process.end()
        if self._refusal is not None:
            raise InvalidRequestError(self._refusal, param="messages")
        process = _Process(self._limits)
        try:
            _, self._refusal = process.ask(_line(self._start), WALL_SECONDS)
        except BaseException as error:
            process.end()
            if isinstance(error, InvalidRequestError):
                self._refusal = str(error)
            raise
        if self._refusal is not None:
            process.end()
            raise InvalidRequestError(self._refusal, param="messages")
        return process

    def _put_back(self, process: _Process) -> None:
        with self._lock:
            if len(self._idle) < MAX_IDLE and not process.is_unhurried:
                self._idle.append(process)
                return
        process.end()


class _Process:
    """A running `quire.models.text.template_process`.

    Args:
        limits: for it to keep.
    """

    def __init__(self, limits: ChatTemplateConfig) -> None:
        self._limits = limits
        self.is_unhurried = False  # has the lowest priority, for the rest of its life
        with contextlib.ExitStack() as sockets:
            try:
                ours, theirs = (sockets.enter_context(end) for end in socket.socketpair())
                self.popen: subprocess.Popen[bytes] = subprocess.Popen(
                    [sys.executable, "-m", "quire.models.text.template_process"],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    process_group=0,  # no Ctrl-C; of a session of its own, its priority would not count
                )
            except OSError as error:
                raise QueueFullError(
                    f"cannot start a process that renders the chat template: {error}; try again later"
                ) from error
            self._socket = ours.dup()

    def ask(self, line: bytes, unhurried_after: float) -> tuple[RenderedChat, str | None]:
        """Return the answer to a line: a text, and what is wrong, if it is none.

        Args:
            line: JSON.
            unhurried_after: seconds after which the process gets the lowest priority.

        Raises:
            InvalidRequestError: the process has ended of the line, or its answer is none.
            QueueFullError: the process was killed.
            RequestTimeoutError: there is no answer in time.
        """
        try:
            text, given, refusal = json.loads(self._answer(line, unhurried_after))
        except TimeoutError:
            raise RequestTimeoutError(
                f"the chat template was not rendered within {WALL_SECONDS:g} s; try again when the machine "
                "is less busy"
            ) from None
        except (OSError, EOFError, ValueError, TypeError):
            raise self._error_of_end() from None
        return RenderedChat(text, given), refusal

    def end(self) -> None:
        """End the process; what it was asked is given up."""
        self.popen.kill()
        self.popen.wait()
        self._socket.close()

    def _answer(self, line: bytes, unhurried_after: float) -> bytearray:
        started = time.monotonic()
        self._socket.settimeout(WALL_SECONDS)
        self._socket.sendall(line)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            limit = WALL_SECONDS if self.is_unhurried else min(unhurried_after, WALL_SECONDS)
            self._socket.settimeout(max(started + limit - time.monotonic(), 0.001))
            try:
                piece = self._socket.recv(1 << 20)
            except TimeoutError:
                if limit == WALL_SECONDS:
                    raise
                self._lower_priority()
                continue
            answer += piece
            if not piece or len(answer) > MAX_ANSWER_BYTES:
                raise EOFError
        return answer

    def _lower_priority(self) -> None:
        self.is_unhurried = True
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self.popen.pid, 19)

    def _error_of_end(self) -> QuireError:
        """Return why the process has ended, or is ended here because it answers without end."""
        try:
            exit_code = self.popen.wait(END_SECONDS)
            if exit_code == -signal.SIGKILL:  # no limit of its own ends it so: the machine's memory was short
                return QueueFullError(
                    "the process that renders the chat template was killed by SIGKILL; try again later"
                )
        except subprocess.TimeoutExpired:
            self.popen.kill()
            exit_code = self.popen.wait()
        cause = self._cause_of_end(exit_code)
        return InvalidRequestError(f"the model's chat template cannot be used: {cause}", param="messages")

    def _cause_of_end(self, exit_code: int) -> str:
        if exit_code == -END_OF_TIME:
            return (
                f"rendering it took more than {self._limits.chat_template_timeout:g} s of computing time "
                "(chat_template_timeout); send fewer or shorter messages"
            )
        return (
            f"rendering it took more than {self._limits.chat_template_memory} MB (chat_template_memory), or "
            f"ended its process (exit code {exit_code}); send fewer or shorter messages"
        )


def _line(document: TemplateStart | Conversation) -> bytes:
    return json.dumps(document).encode() + b"\n"


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()
