"""A PROMPT and a DECODER on machines of their own, and what must hold after a fault."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter

import sides
import strangers
from fault_hosts import (
    DEADLINE,
    KILLED,
    LATE,
    LINK_LIMIT,
    PORT,
    SLACK,
    SUCCESS,
    Decoder,
    Host,
    Source,
    ViolationError,
)
from faults import LONG, OF_STRANGERS, Fault, Injector
from network_namespaces import Network
from remote_sides import Census, census_of, growth

from quire.datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType

PROMPT, DECODER, BYSTANDER = "prompt", "decoder", "bystander"
OPERATIONS = {"pull": 4, "link": 1}
TOKEN = "shared by both"
SETTLE_LIMIT = 15.0  # seconds, more than anybody may keep a place or a source after a failure
VANISH_LIMIT = 30.0  # seconds until a machine that has vanished is noticed

NOT_EXIST = "LLM_KV_CACHE_NOT_EXIST"
FAILURES = {
    "pull": {LATE, "LLM_NOT_YET_LINK"},
    "link": {LATE, "LLM_LINK_FAILED"},
}
"""Codes of operations that a fault strikes."""
UNLINKED = {SUCCESS, "LLM_NOTIFY_PROMPT_UNLINK_FAILED"}

WARM_UP = 12  # pulls; a link keeps the descriptors of a few caches that were pulled in part or by prefix
TRIES = 4  # of what nothing hinders but other programs, if this machine is busy
LINK_BYTES = 400  # that a PROMPT sends over TCP for a link
UNKNOWN_KEY = CacheKey(1, 2**63)


class Split:
    """A PROMPT, a DECODER that faults hit, and another that shall not notice.

    Args:
        network: has the machines `PROMPT`, `DECODER` and `BYSTANDER`.
        stack: ends the processes.
        transport: as `quire.transports`; with shared memory, the DECODER is on the PROMPT's machine.
    """

    def __init__(self, network: Network, stack: contextlib.ExitStack, transport: str = "tcp") -> None:
        self.shares_host = "shared_memory" in transport
        self.counts: Counter[str] = Counter()
        self.longest_overrun = 0.0
        machines = dict(network.machines)
        if self.shares_host:
            machines[DECODER] = machines[PROMPT]
        self._hosts = {name: Host(machine, stack) for name, machine in machines.items()}
        self._processes = {name: host.process for name, host in self._hosts.items()}
        self._injector = Injector(network, self._processes, PROMPT, DECODER, shares_host=self.shares_host)
        self._limit_reached = network.switch.limit_reached
        self._ip = network.machines[PROMPT].address
        self._scale = 8 if self.shares_host else 1
        self._settings = {"pool": self._scale << 24, "token": TOKEN, "transport": transport}
        self._start_prompt()
        self._decoder = self._new_decoder(DECODER)
        self._bystander = self._new_decoder(BYSTANDER)
        self._baselines: dict[str, Census] = {}
        self._seconds_per_byte = 0.0
        self._warm_up()

    def run(self, fault: Fault) -> None:
        """Let a fault strike an operation, and expect that all is as before."""
        source = self._bind(random.Random(fault.seed))
        if fault.operation == "link":
            self._expect("unlinking", self._decoder.unlink(), {SUCCESS})
        try:
            code = self._operate(fault, source)
            self._judge(fault, code)
            if fault.operation == "pull" and code in FAILURES["pull"] and self._lasts(fault):
                self._fail_to_link()
            if fault.kind == "vanish":
                self._require_forgotten()
            if fault.kills:
                self._restart(fault.victim)
        finally:
            self._injector.heal(fault)
        self._recover(fault, source, code)
        self._require_settled()

    def _start_prompt(self) -> None:
        call = self._processes[PROMPT].call
        self._prompt = call(sides.start_prompt, 1, ip=self._ip, port=PORT, **self._settings)
        self._pm = self._prompt.kv_cache_manager
        desc, key = CacheDesc(4, [1, 10_000], DataType.DT_UINT8), CacheKey(1, 2**64 - 1, prefix_id=0)
        handle = call(sides.write_new_cache, self._pm, desc, [key], seed=0)
        self._of_bystander = Source("prefix", desc, 0, handle, key)

    def _new_decoder(self, name: str) -> Decoder:
        cluster_id = 2 if name == DECODER else 3
        decoder = Decoder(cluster_id, self._hosts[name], self._settings, self._ip)
        self._expect("linking", self._link(decoder), {SUCCESS})
        return decoder

    def _restart(self, name: str) -> None:
        """Start a process anew, while the network may be silent."""
        self._hosts[name].restart()
        self._processes[name] = self._hosts[name].process
        if name == PROMPT:
            self._start_prompt()
        else:
            self._count(self._decoder)
            self._decoder = Decoder(2, self._hosts[name], self._settings, self._ip)

    # Operations

    def _bind(self, choose: random.Random) -> Source:
        """Fill a cache on the PROMPT, of a size that needs one stream or several."""
        kind = choose.choice(["request", "prefix", "blocks"])
        num_blocks = choose.choice([1, 3, 8])
        num_bytes = choose.choice([40_000, 200_000, 1_000_000]) * self._scale
        slot_bytes, seed = num_bytes // num_blocks + choose.randrange(100), choose.randrange(1, 1 << 30)
        call = self._processes[PROMPT].call
        if kind == "blocks":
            desc, blocks_key = CacheDesc(4, [num_blocks, slot_bytes], DataType.DT_UINT8), BlocksCacheKey(1)
            handle = call(sides.write_new_blocks, self._pm, desc, blocks_key, seed=seed)
            return Source(kind, desc, seed, handle, blocks_key)
        desc = CacheDesc(4, [1, slot_bytes * num_blocks], DataType.DT_UINT8)
        key = CacheKey(1, seed) if kind == "request" else CacheKey(1, 2**64 - 1, prefix_id=seed)
        handle = call(sides.write_new_cache, self._pm, desc, [key], seed=seed)
        return Source(kind, desc, seed, handle, key)

    def _release(self, source: Source) -> None:
        self._pm.deallocate_cache(source.handle)
        if isinstance(source.key, CacheKey):
            self._pm.remove_cache_key(source.key)

    def _operate(self, fault: Fault, source: Source) -> str:
        """Return how an operation ended that a fault has struck."""
        limit = DEADLINE if fault.operation == "pull" else LINK_LIMIT
        stopped = LONG * limit if fault.kind == "stop" and fault.victim == DECODER else 0.0
        outcomes: list[str | BaseException] = []

        def operate() -> None:
            try:
                if fault.operation == "pull":
                    outcomes.append(self._decoder.pull(source, stopped=stopped))
                else:
                    outcomes.append(self._decoder.link(stopped=stopped))
            except BaseException as error:
                outcomes.append(error)

        num_bytes = source.num_bytes if fault.operation == "pull" else LINK_BYTES
        self._injector.arm(fault, num_bytes)
        operating = threading.Thread(target=operate, daemon=True)
        operating.start()
        self._injector.strike(fault, limit, num_bytes * self._seconds_per_byte)
        if fault.victim == DECODER and fault.kind in {"cut", "kill", "stop"}:
            self._expect_bystander()
        self._let_strangers_in(fault)
        self._injector.outlast(fault, limit)
        if stopped:
            self._injector.wake(fault)
        operating.join(limit + stopped + 2 * SLACK)
        if not outcomes:
            raise ViolationError(f"a {fault.operation} does not end")
        if isinstance(outcomes[0], BaseException):
            raise outcomes[0]
        return outcomes[0]

    def _let_strangers_in(self, fault: Fault) -> None:
        call, address = self._processes[BYSTANDER].call, (self._ip, PORT)
        if fault.kind == "garbage":
            call(strangers.garbage, address, fault.seed)
        elif fault.kind == "half-open connections":
            call(strangers.half_open, address, fault.seed)
        elif fault.kind == "wrong token":
            code = call(strangers.link_with, "another", address, int(LINK_LIMIT * 1e3))
            self._expect("linking with a wrong token", code, {"LLM_LINK_FAILED"})

    def _judge(self, fault: Fault, code: str) -> None:
        self.counts[f"{fault.operation}s " + ("succeeded" if code == SUCCESS else "failed")] += 1
        allowed = {SUCCESS, LATE} if fault.kind in OF_STRANGERS else {SUCCESS, *FAILURES[fault.operation]}
        if fault.kills and fault.victim == DECODER:
            allowed = {*allowed, KILLED}
        self._expect(f"a {fault.operation}", code, allowed)

    @staticmethod
    def _lasts(fault: Fault) -> bool:
        """Whether a DECODER can try to link while the fault lasts, and does."""
        lasts = fault.kind in {"cut", "silence"}
        lasts = lasts or (fault.kind in {"kill unheard", "stop"} and fault.victim == PROMPT)
        return lasts and fault.seed % 2 == 1

    def _fail_to_link(self) -> None:
        self._expect("unlinking", self._decoder.unlink(), UNLINKED)
        self._expect("linking", self._decoder.link(), FAILURES["link"])

    # What must hold after a fault

    def _recover(self, fault: Fault, source: Source, code: str) -> None:
        """Do what docs/datadist.md says a caller can do, and release everything."""
        was_usable = self._link_anew(fault, code)
        if fault.kind == "vanish" or (fault.kills and fault.victim == PROMPT):
            self._relink(self._bystander)
        if fault.kills and fault.victim == PROMPT:
            self._expect("a pull of what is gone", self._pull(self._decoder, source), {NOT_EXIST})
            source = self._bind(random.Random(fault.seed))
        if source.kind != "request" or not self._may_be_pulled(fault, code):
            self._expect("a pull after the fault", self._pull(self._decoder, source), {SUCCESS})
        else:  # if the pull was not confirmed, the key may have stayed
            unconfirmed = set() if was_usable else {SUCCESS}
            self._expect("pulling again", self._pull(self._decoder, source), {NOT_EXIST, *unconfirmed})
        self._expect_bystander()
        self._release(source)

    def _may_be_pulled(self, fault: Fault, code: str) -> bool:
        if fault.operation != "pull" or (fault.kills and fault.victim == PROMPT):
            return False
        # Of a process that is killed, the system still sends what it had sent: its second message, too.
        was_early = self._limit_reached.is_set() and fault.moment in {"data", "first message"}
        return code == SUCCESS or (code == KILLED and (self.shares_host or not was_early))

    def _link_anew(self, fault: Fault, code: str) -> bool:
        """Link again unless the link is still usable; return whether it is."""
        if fault.kills and fault.victim == DECODER:
            self._expect("linking of the next DECODER", self._link(self._decoder), {SUCCESS})
            return False
        desc = CacheDesc(1, [1, 1], DataType.DT_UINT8)
        of_pull = self._decoder.pull(Source("request", desc, 0, None, UNKNOWN_KEY))
        if of_pull == NOT_EXIST and code == SUCCESS:
            return True
        self._expect("a pull before linking again", of_pull, {"LLM_NOT_YET_LINK"})
        if fault.kind in OF_STRANGERS:
            self._count_retry()
        self._relink(self._decoder)
        return False

    def _relink(self, decoder: Decoder) -> None:
        linked = self._link(decoder)
        self._expect("linking before unlinking", linked, {"LLM_ALREADY_LINK", SUCCESS})
        if linked != SUCCESS:
            self._expect("unlinking", decoder.unlink(), UNLINKED)
            self._expect("linking again", self._link(decoder), {SUCCESS})

    def _link(self, decoder: Decoder) -> str:
        """Link, again if that is only late."""
        for _ in range(TRIES):
            if (code := decoder.link()) != LATE:
                break
            self._count_retry()
        return code

    def _pull(self, decoder: Decoder, source: Source) -> str:
        """Pull, again if that is only late."""
        for _ in range(TRIES):
            if (code := decoder.pull(source)) != LATE:
                break
            self._count_retry()
            self._relink(decoder)
        return code

    def _expect_bystander(self) -> None:
        self._expect("a bystander's pull", self._pull(self._bystander, self._of_bystander), {SUCCESS})

    def _count_retry(self) -> None:
        self.counts["retries"] += 1

    def _require_forgotten(self) -> None:
        """Expect that the PROMPT notices that the DECODER's machine has vanished."""
        limit = time.monotonic() + VANISH_LIMIT
        while (held := self._census(PROMPT))["links"] > 1 or held["transfers"]:
            if time.monotonic() > limit:
                raise ViolationError(f"{VANISH_LIMIT:g} s after a DECODER has vanished, there are {held}")
            time.sleep(0.1)

    def _require_settled(self) -> None:
        """Expect that what each side holds is, soon, what it held at first."""
        limit = time.monotonic() + SETTLE_LIMIT
        names = (PROMPT, DECODER, BYSTANDER)
        while grown := [(name, more) for name in names if (more := self._growth(name))]:
            if time.monotonic() > limit:
                raise ViolationError(f"left behind after {SETTLE_LIMIT:g} s: {grown}")
            time.sleep(0.02)

    def _growth(self, name: str) -> Census:
        return growth(self._baselines[name], self._census(name))

    def _census(self, name: str) -> Census:
        all_sides = {PROMPT: self._prompt, DECODER: self._decoder.side, BYSTANDER: self._bystander.side}
        return self._processes[name].call(census_of, all_sides[name])

    def _warm_up(self) -> None:
        """Pull what needs every stream, and remember how long it takes and what each side holds when idle."""
        for seed in range(WARM_UP):
            source = self._bind(random.Random(seed))
            self._expect("a pull", self._pull(self._decoder, source), {SUCCESS})
            self._seconds_per_byte = self._decoder.last_duration / source.num_bytes
            self._release(source)
        self._expect_bystander()
        self._baselines = {name: self._census(name) for name in (PROMPT, DECODER, BYSTANDER)}

    def _count(self, decoder: Decoder) -> None:
        """Add up what a DECODER has done that is no more."""
        self.counts["right"] += decoder.num_right
        self.longest_overrun = max(self.longest_overrun, decoder.longest_overrun)

    def close(self) -> None:
        """Add up everything."""
        self._count(self._decoder)
        self._count(self._bystander)

    def _expect(self, what: str, code: str, codes: set[str]) -> None:
        if code not in codes:
            expected = " or ".join(sorted(codes))
            last_error = self._decoder.last_error if hasattr(self, "_decoder") else ""
            raise ViolationError(f"{what} ended with {code}, not {expected}; the last error is: {last_error}")
