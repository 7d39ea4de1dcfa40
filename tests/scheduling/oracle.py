"""A scheduler in plain lists and dictionaries, to compare the real one with, step by step.

It knows what a plan depends on when nothing asynchronous happens: the order of service, the budget, chunks,
slots, blocks, the prefix cache by content and least recent use, cache eviction, the reserve for admission,
and preemption of the last. It shares no code with the real one. What a sequence generates is known before.
"""

from __future__ import annotations

from eviction_rules import rules_of


class Block:
    def __init__(self) -> None:
        self.num_holders = 0
        self.content = None  # what makes it findable: salt and all tokens up to its end


class Blocks:
    """Blank blocks are a count, idle ones a list, the least recently used first."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.num_blank = number
        self.idle: list[Block] = []

    def free(self) -> int:
        return self.num_blank + len(self.idle)

    def needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.size)

    def take(self, count: int) -> list[Block]:
        for _ in range(max(count - self.num_blank, 0)):
            self.idle.pop(0).content = None
        self.num_blank = max(self.num_blank - count, 0)
        taken = [Block() for _ in range(count)]
        self.hold(taken)
        return taken

    def hold(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block in self.idle:
                self.idle.remove(block)
            block.num_holders += 1

    def let_go(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.num_holders -= 1
            if block.num_holders == 0 and block.content is None:
                self.num_blank += 1
            elif block.num_holders == 0:
                self.idle.append(block)


class Sequence:
    def __init__(self, name: str, prompt: list[int], output: list[int], salt: str, key) -> None:
        self.name, self.salt, self.key = name, salt, key
        self.tokens = list(prompt)
        self.num_prompt = len(prompt)
        self.output = output
        self.computed = self.evicted = 0
        self.blocks: list[Block] = []
        self.num_offered = 0  # of them, to the prefix cache
        self.has_run = False


class Oracle:
    def __init__(self, config, num_blocks: int) -> None:
        self.config, self.rules = config, rules_of(config)
        self.blocks = Blocks(num_blocks, config.block_size)
        self.cached: dict[tuple, Block] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.preempted: list[str] = []
        self.plan: list[tuple[Sequence, int]] = []
        self.evictions: list[tuple[int, int]] = []  # of each row: tokens before it, blocks after it
        self.admitted: list[Sequence] = []
        self.had_prompts = False  # in the last step, without dynamic_split_fuse

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, *, throttles: bool, pause: str) -> None:
        self.plan, self.admitted, self.evictions = [], [], []
        if pause == "PAUSED_ALL":
            return
        may_admit = pause == "UNPAUSED" and not throttles
        budget = self.config.max_num_batched_tokens
        whole_prompts = not self.config.dynamic_split_fuse
        if whole_prompts and may_admit and not self.had_prompts:
            self._admit(budget)
        if not self.admitted:
            budget, has_preempted = self._serve_running(budget, throttles)
            its_turn = not whole_prompts or (self.had_prompts and not self.plan)
            if may_admit and its_turn and not has_preempted:
                self._admit(budget)
        if pause == "UNPAUSED":
            self.had_prompts = bool(self.admitted)
        if self.rules is not None:
            self._evict()

    def _serve_running(self, budget: int, throttles: bool) -> tuple[int, bool]:
        self.running.sort(key=lambda sequence: sequence.key)
        rows = []
        for sequence in self.running:
            missing = len(sequence.tokens) - sequence.computed
            wanted = 0 if throttles and missing > 1 else min(self._wanted(sequence), self._chunk(budget))
            count = min(wanted, budget - sum(count for _, count in rows))
            rows.append((sequence, count))
        has_preempted = False
        while sum(self._growth(*row) for row in rows) > self.blocks.free():
            sequence, _ = rows.pop()
            self._preempt(sequence)
            has_preempted = True
        for sequence, count in rows:
            sequence.blocks += self.blocks.take(self._growth(sequence, count))
        self._drop_evicted()
        self.plan = [row for row in rows if row[1]]
        return budget - sum(count for _, count in rows), has_preempted

    def _wanted(self, sequence: Sequence) -> int:
        known, computed = len(sequence.tokens), sequence.computed
        if self.rules is None:
            return known - computed
        return self.rules.first_stop(sequence.num_prompt, computed, sequence.evicted, known)

    def _evict(self) -> None:
        """What goes is free at once."""
        start = self.rules.start // self.blocks.size
        for sequence, count in self.plan:
            computed = sequence.computed + count
            is_due = computed >= sequence.num_prompt
            num_blocks = self.rules.num_going(computed - sequence.evicted) if is_due else 0
            self.evictions.append((sequence.evicted, num_blocks))
            self.blocks.let_go(sequence.blocks[start : start + num_blocks])
            del sequence.blocks[start : start + num_blocks]
            sequence.evicted += num_blocks * self.blocks.size

    def _chunk(self, budget: int) -> int:
        return self.config.long_prefill_token_threshold or budget

    def _growth(self, sequence: Sequence, count: int) -> int:
        held = sequence.computed - sequence.evicted + count
        needed = self.blocks.needed(held) - len(sequence.blocks)
        return max(needed, 0) if count else 0

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.let_go(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.evicted = [], 0, 0
        self.waiting.append(sequence)
        self.preempted.append(sequence.name)

    def _admit(self, budget: int) -> None:
        """Blocks are promised one by one and taken together; what one will fill, the next can use already."""
        filling: dict[tuple, Sequence] = {}
        for sequence, count in self.plan:
            if sequence.computed < sequence.num_prompt:
                first = sequence.computed // self.blocks.size
                self._note_filling(filling, sequence, first, sequence.computed + count)
        promised: list[tuple[Sequence, int, list[Sequence]]] = []
        for sequence in sorted(self.waiting, key=lambda sequence: sequence.key):
            found = self._find(sequence)
            fillers = self._find_fillers(sequence, len(found), filling)
            num_had = len(found) + len(fillers)
            num_found = sequence.computed = num_had * self.blocks.size
            chunk = self._first_chunk(self._wanted(sequence), budget)
            needed = self.blocks.needed(num_found + chunk) - num_had
            free = self.blocks.free() - sum(block in self.blocks.idle for block in found)
            free -= sum(count for _, count, _ in promised)
            has_slot = len(self.running) < self.config.max_num_seqs
            if not (budget and chunk and has_slot and self._fits(sequence, num_had, needed, free, promised)):
                sequence.computed = 0
                break
            self.blocks.hold(found)
            sequence.blocks, sequence.num_offered = found, len(found)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            promised.append((sequence, needed, fillers))
            first = self.blocks.needed(num_found)
            self._note_filling(filling, sequence, first, num_found + chunk)
            self.plan.append((sequence, chunk))
            self.admitted.append(sequence)
            budget -= chunk
        for sequence, count, fillers in promised:
            start = len(sequence.blocks)
            shared = [owner.blocks[index] for index, owner in enumerate(fillers, start)]
            self.blocks.hold(shared)
            sequence.blocks = sequence.blocks + shared + self.blocks.take(count)
        self._drop_evicted()

    def _note_filling(self, filling: dict, sequence: Sequence, first: int, num_tokens: int) -> None:
        if self.config.enable_prefix_caching:
            for index in range(first, self._sharable(num_tokens)):
                filling.setdefault(self._content(sequence, index), sequence)

    def _sharable(self, num_tokens: int) -> int:
        """Full blocks that others may use: none that could ever go."""
        most = num_tokens if self.rules is None else min(num_tokens, self.rules.start)
        return most // self.blocks.size

    def _find_fillers(self, sequence: Sequence, num_found: int, filling: dict) -> list[Sequence]:
        """Who fills, in this step, each of the blocks behind those that were found."""
        fillers: list[Sequence] = []
        while (num_found + len(fillers) + 1) * self.blocks.size < len(sequence.tokens):
            owner = filling.get(self._content(sequence, num_found + len(fillers)))
            if owner is None:
                break
            fillers.append(owner)
        return fillers

    def _first_chunk(self, missing: int, budget: int) -> int:
        if self.config.dynamic_split_fuse:
            return min(missing, budget, self._chunk(budget))
        most = self.config.max_num_batched_tokens
        if missing > most:
            return budget if budget == most else 0
        return missing if missing <= budget else 0

    def _fits(self, sequence: Sequence, num_had: int, needed: int, free: int, promised) -> bool:
        if not self.running:
            return needed <= free
        kept = int(self.config.watermark * self.blocks.number)
        if self.config.reserve_full_prompt:
            needed = self.blocks.needed(self._room(sequence)) - num_had
            coming = {id(other): count + len(fillers) for other, count, fillers in promised}
            for other in self.running:
                held = len(other.blocks) + coming.get(id(other), 0)
                kept += max(self.blocks.needed(self._room(other)) - held, 0)
        return needed <= free - kept

    def _room(self, sequence: Sequence) -> int:
        """Tokens that the sequence has to hold at once, from now on until all that are known are computed."""
        known, computed = len(sequence.tokens), sequence.computed
        if self.rules is None:
            return known
        return self.rules.max_held(sequence.num_prompt, known, computed, sequence.evicted)

    def _find(self, sequence: Sequence) -> list[Block]:
        found: list[Block] = []
        while (len(found) + 1) * self.blocks.size < len(sequence.tokens):
            block = self.cached.get(self._content(sequence, len(found)))
            if block is None:
                break
            found.append(block)
        return found

    def _content(self, sequence: Sequence, index: int) -> tuple:
        return (sequence.salt, *sequence.tokens[: (index + 1) * self.blocks.size])

    def _drop_evicted(self) -> None:
        self.cached = {content: block for content, block in self.cached.items() if block.content is not None}

    def land(self) -> None:
        ended = []
        for sequence, count in self.plan:
            sequence.computed += count
            if sequence in self.running and sequence.computed == len(sequence.tokens):
                num_output = len(sequence.tokens) - sequence.num_prompt
                sequence.tokens.append(sequence.output[num_output])
                if num_output + 1 == len(sequence.output):
                    ended.append(sequence)
        for sequence, _ in self.plan:
            if sequence in self.running and self.config.enable_prefix_caching:
                self._cache(sequence)
        for sequence in ended:
            self.end(sequence)

    def _cache(self, sequence: Sequence) -> None:
        """Make new full blocks findable; one whose content is known already never is."""
        num_full = self._sharable(sequence.computed)
        for index in range(sequence.num_offered, num_full):
            content, block = self._content(sequence, index), sequence.blocks[index]
            if content not in self.cached and block.content is None:
                self.cached[content] = block
                block.content = content
        sequence.num_offered = num_full

    def end(self, sequence: Sequence) -> None:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.blocks.let_go(sequence.blocks)

    def reset(self) -> None:
        self.running.sort(key=lambda sequence: sequence.key)
        for sequence in reversed(self.running.copy()):
            self._preempt(sequence)
        self.blocks.num_blank += len(self.blocks.idle)
        self.blocks.idle = []
        self.cached = {}
