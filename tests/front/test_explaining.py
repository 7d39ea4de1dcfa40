"""What is asked of an engine about groups of requests, and what becomes of requests that end meanwhile."""

from types import SimpleNamespace

from quire.front.control import Explaining


class Requests:
    """Live requests: the sequences of each that the engine has, of none if it waits in the front."""

    def __init__(self, **sequences):
        self.sequences = sequences
        self.asked = []

    def queued_sequence_ids(self, request_id):
        return self.sequences.get(request_id, "")

    def reasons_to_wait(self, request_id):
        return ["waits here"] * (self.sequences.get(request_id) == "")

    async def call(self, make):
        """Explain a few, as an engine that has no time for more."""
        self.asked.append(make(7).sequence_ids)
        return SimpleNamespace(texts=[name.upper() for name in self.asked[-1][:2]])


async def test_the_engine_is_asked_until_it_has_explained_all():
    requests = Requests(one="abc", two="d", held="", same="a")
    groups = [["one", "ended"], ["two", "held"], [], ["same"]]
    told = await Explaining(requests, requests.call).explain(groups, None)
    assert told == [["A", "B", "C"], ["D", "waits here"], [], ["A"]]
    assert requests.asked == [list("abcd"), list("cd")]


async def test_no_more_are_asked_for_than_the_limit_and_the_others_counted():
    requests = Requests(one="ab", two="cd", three="e", held="")
    groups = [["one", "two"], ["three", "held"], ["held", "three"]]
    told = await Explaining(requests, requests.call).explain(groups, 2)
    assert told == [["A", "B", "left out: 2 other completions"], ["E", "waits here"], ["waits here", "E"]]
    assert requests.asked == [list("abe"), list("e")]
    [told] = await Explaining(requests, requests.call).explain([["held", "held", "one"]], 1)
    assert told == ["waits here", "left out: 3 other completions"]


async def test_what_ends_meanwhile_is_not_told():
    requests = Requests(one="abc", two="de")

    async def call(make):
        reply = await requests.call(make)
        requests.sequences |= {"one": "c"}
        requests.sequences.pop("two", None)
        return reply

    assert await Explaining(requests, call).explain([["one", "two"]], None) == [["C"]]
