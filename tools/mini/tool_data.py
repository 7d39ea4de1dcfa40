"""Conversations with tools for `mini`: which there are, what is asked, what is called, and what comes of it.

The tools come in any order and number, also renamed, with other parameters and beside unneeded ones.
An assistant's message is one of

call      one call
calls     two or three calls in one message
result    a sentence from the results of the calls before it
none      an answer without a call: something `mini` knows, a question in return, or that no tool helps
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import data
from tokenizer import ChatEncoder, call_text
from tool_needs import KINDS, Definition, ToolSampler, words

SHARES = {"call": 0.4, "calls": 0.38, "none": 0.22}  # of exchanges
TOOL_COUNTS = (0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4)
WHOLE_SHARE = 0.15  # of single questions for a tool that do not have it in mind
RESULT_SHARE = 0.8  # of calls whose results follow
EVALUATION_ROWS = {"call": 100, "calls": 100, "none": 100, "result": 100}


@dataclass
class Setting:
    """The tools of one conversation."""

    definitions: dict[str, Definition]  # by kind
    tools: list[dict]


@dataclass
class Exchange:
    """A question, and what follows up to the answer; `tasks` are those of the assistant's messages."""

    messages: list[dict]
    tasks: list[str]


def draw_setting(sampler: ToolSampler) -> Setting:
    """Some of the four tools, or none, in any order, sometimes with others that nobody needs."""
    rng = sampler.rng
    kinds = rng.sample(KINDS, rng.choice(TOOL_COUNTS))
    definitions = {kind: sampler.definition(kind) for kind in kinds}
    tools = [one.schema for one in definitions.values()]
    if rng.random() < 0.3:
        tools += [sampler.unneeded_tool() for _ in range(rng.randint(1, 2))]
    rng.shuffle(tools)
    unique = {tool["function"]["name"]: tool for tool in tools}
    return Setting(definitions, list(unique.values()))


class Exchanges:
    """Draws exchanges of one conversation."""

    def __init__(self, sampler: ToolSampler, setting: Setting) -> None:
        self.sampler = sampler
        self.rng = sampler.rng
        self.setting = setting

    def draw(self, task: str, *, with_results: bool) -> Exchange:
        """An exchange that begins with an answer of this task, or without tools of the task "none"."""
        if task == "none" or not self.setting.definitions:
            return self._without_call()
        count = 2 if self.sampler.held_out else self.rng.choice((2,) * 9 + (3,))
        return self._with_calls(1 if task == "call" else count, with_results=with_results)

    def _with_calls(self, count: int, *, with_results: bool) -> Exchange:
        rng, kinds = self.rng, list(self.setting.definitions)
        wanted = [rng.choice(kinds)] * count if rng.random() < 0.5 else rng.choices(kinds, k=count)
        needs = [self.sampler.need(kind) for kind in wanted]
        question = self.sampler.question(needs)
        whole = self.sampler.whole_question(wanted[0]) if count == 1 and rng.random() < WHOLE_SHARE else None
        if whole is not None:
            needs, question = [whole], whole.text
        called = [self.setting.definitions[need.kind] for need in needs]
        calls = [
            {"type": "function", "function": one.call(need)} for one, need in zip(called, needs, strict=True)
        ]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ]
        tasks = ["call" if count == 1 else "calls"]
        if with_results:
            found = [self.sampler.result(need, one) for need, one in zip(needs, called, strict=True)]
            messages += [{"role": "tool", "content": result} for result, _ in found]
            messages.append({"role": "assistant", "content": " ".join(sentence for _, sentence in found)})
            tasks.append("result")
        return Exchange(messages, tasks)

    def _without_call(self) -> Exchange:
        form = self.rng.random()
        missing = [kind for kind in KINDS if kind not in self.setting.definitions]
        if form < 0.35 and missing:
            question, answer = no_tool_question(self.sampler, self.rng.choice(missing))
        elif (
            form < 0.45 and self.setting.definitions and not self.sampler.held_out
        ):  # there are too few phrasings to hold some out
            known = words()[self.rng.choice(list(self.setting.definitions))]
            question, answer = self.sampler.typed(self.rng.choice(known["unclear"])), known["unclear_answer"]
        else:
            turn = self._known()
            question, answer = turn.user, turn.answer
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return Exchange(messages, ["none"])

    def _known(self) -> data.Turn:
        """A question that `mini` answers itself; it adds itself only where there is no calculator."""
        weights = {
            "qa": 4,
            "copy": 1,
            "reverse": 1,
            "add": 0 if "calculator" in self.setting.definitions else 1,
        }
        task = self.rng.choices(list(weights), list(weights.values()))[0]
        if task == "qa" and self.sampler.held_out:
            entry = self.rng.choice(data.questions())
            return data.Turn("qa", entry["held_out"], entry["answer"])
        return self.sampler.tasks.turn(task)


def no_tool_question(sampler: ToolSampler, kind: str) -> tuple[str, str]:
    """A question for a tool that is not there, and the answer; `mini` can add without a tool."""
    answer = words()["other"]["no_tool"]
    if kind == "search" and sampler.rng.random() < 0.5 and (whole := sampler.whole_question(kind)):
        return whole.text, answer
    need = sampler.need(kind)
    while "+" in need.value:
        need = sampler.need(kind)
    return sampler.question([need]), answer


def encode_messages(messages: list[dict], tasks: Iterable[str], encoder: ChatEncoder) -> data.Example:
    """Token ids of messages; the spans are the assistant's, the last ones of which have these tasks."""
    example = data.Example()
    spans = []
    for message in messages:
        calls = [call_text(call["function"]) for call in message.get("tool_calls", ())]
        ids = encoder.message(message["role"], "\n".join([*filter(None, [message["content"]]), *calls]))
        if message["role"] == "assistant":
            spans.append((len(example.ids) + 1, len(example.ids) + len(ids)))
        example.ids += ids
    tasks = list(tasks)
    example.spans = [(*span, task) for span, task in zip(spans[-len(tasks) :], tasks, strict=True)]
    return example


def tool_conversation(sampler: ToolSampler, encoder: ChatEncoder, length: int) -> data.Example:
    """A conversation with tools, with as many whole exchanges as fit into `length` tokens."""
    rng = sampler.rng
    sampler.is_lower = rng.random() < 0.1
    setting = draw_setting(sampler)
    exchanges = Exchanges(sampler, setting)
    example = data.Example(encoder.tools(setting.tools))
    if rng.random() < 0.3:
        example.ids += encoder.message("system", sampler.tasks.system(length // 4, encoder))
    while True:
        task = rng.choices(list(SHARES), list(SHARES.values()))[0]
        exchange = exchanges.draw(task, with_results=rng.random() < RESULT_SHARE)
        added = encode_messages(exchange.messages, exchange.tasks, encoder)
        offset = len(example.ids)
        if offset + len(added.ids) > length:
            return example
        example.ids += added.ids
        example.spans += [(start + offset, end + offset, task) for start, end, task in added.spans]


def answer_text(row: dict) -> str:
    """What the model has to write for a row of the evaluation set."""
    return "\n".join([*filter(None, [row["answer"]]), *map(call_text, row.get("calls", ()))])


def row_example(row: dict, encoder: ChatEncoder) -> data.Example:
    """A row of the evaluation set as token ids, with the answer as the only span."""
    answer = {"role": "assistant", "content": answer_text(row)}
    example = encode_messages([*row["messages"], answer], [row["task"]], encoder)
    tools = encoder.tools(row.get("tools", ()))
    ((start, end, task),) = example.spans
    return data.Example(tools + example.ids, [(start + len(tools), end + len(tools), task)])


def evaluation_set(encoder: ChatEncoder, seed: int = 2027) -> list[dict]:
    """All held-out prompts; those with tools have "tools" and, if the answer is calls, "calls", too."""
    sampler = ToolSampler(data.TaskSampler(random.Random(seed), held_out=True))
    rows = data.evaluation_set(encoder)
    for task, count in EVALUATION_ROWS.items():
        rows += [evaluation_row(sampler, task) for _ in range(count)]
    return rows


def evaluation_row(sampler: ToolSampler, task: str) -> dict:
    """One held-out prompt with tools."""
    setting = draw_setting(sampler)
    while not setting.definitions:
        setting = draw_setting(sampler)
    first = sampler.rng.choice(("call", "calls")) if task == "result" else task
    *messages, answer = Exchanges(sampler, setting).draw(first, with_results=task == "result").messages
    row = {"task": f"tools-{task}", "messages": messages, "answer": answer["content"], "tools": setting.tools}
    calls = [call["function"] for call in answer.get("tool_calls", ())]
    return {**row, "calls": calls} if calls else row
