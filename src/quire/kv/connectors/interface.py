"""Where KV comes from and goes to besides this engine's own cache: one object with two sides.

The scheduler side decides, in the scheduler's thread, and touches no tensor; the worker side moves data, next
to the model. Requests, blocks and failures pass between them only through `build_connector_meta` and
`KVConnectorOutput`, so that the two sides may live in different processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from quire.kv.cache.state_cache import StateCache
    from quire.kv.connectors.stats import KVConnectorStats, KVPeerStats
    from quire.request import Request
    from quire.step import SchedulerOutput


class KVConnector(ABC):
    """Finds, loads and stores KV outside of this engine's cache.

    A load is *synchronous* if the step that the request is first scheduled in waits for it, and
    *asynchronous* if the request waits for it in WAITING_FOR_REMOTE_KVS.

    The engine constructs the class with `block_size=`, the number of tokens per block, as its only argument.
    `register_kv_caches` is called before the first step and `close` after the last.

    The calls of one step, in order. Scheduler side: `leases_renewed` once; `get_num_new_matched_tokens`,
    `update_state_after_alloc`, `lends_prompt` and `cancel_load`, any number of times; `build_connector_meta`
    once. `request_arrived`, `request_finished`, `lease_ended`, `reset` and `stats` may also come between
    steps. Worker side: `start_load_kv`; with `works_by_layer`, for each layer `wait_for_layer_load` and
    `save_kv_layer`; `wait_for_save`, `get_finished`, `get_block_ids_with_load_errors`, once each. The worker
    side takes part in every step, also in one that computes nothing, which has no calls for layers. A plan
    may be dropped before the worker side sees its metadata: its loads then never end, and the scheduler gives
    them up when they time out.

    On a GPU, where the cache is then, too, steps are asked for before they are computed. What a step's calls
    ask of torch's current stream comes in order with the steps, and no thread has to wait for it. A copy in
    another thread or stream has to begin behind the steps so far; what is to read the cache after it, or to
    overwrite it, has to come behind its end. With `saves_before_tokens`, the calls of a step may end, and
    those of the next begin, before it is known whose KV is invalid; `begin_save` is called in place of
    `wait_for_save`.
    """

    works_by_layer = True
    """Whether a step calls `wait_for_layer_load` and `save_kv_layer`; one that does cannot be replayed as a
    graph on a GPU."""

    by_group = False
    """Whether blocks and caches come by cache group, see `quire.kv.blocks.groups`. Without it, all layers are
    in one group, so that those with a window keep the KV of all tokens."""

    moves_states = False
    """Whether the states of recurrent layers are moved, too, see `quire.kv.blocks.checkpoints`. Without it, a
    model that has such layers is refused."""

    saves_before_tokens = False
    """Whether there is a `begin_save`. Without it, a GPU gets no step before the tokens of the one before are
    known, which tell who has failed."""

    # -- scheduler side ------------------------------------------------------------------------------------

    def request_arrived(self, request: Request) -> None:  # noqa: B027 - most have nothing to do yet
        """Note that a request is about to be queued; `request_finished` follows, also if that fails.

        Raises:
            InvalidRequestError: its `kv_transfer_params` are invalid; it is refused.
        """

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens beyond the first `num_computed_tokens` can be loaded.

        Has no visible side effects, and may be called again. The last token of a request is
        never offered: it has to be computed, for its logits.

        Args:
            request: that is about to start; with its prompt and `kv_transfer_params`.
            num_computed_tokens: at the start of its tokens, whose KV the engine's own cache has.

        Returns:
            The number of tokens; they may end within a block. None: not known yet, ask in a later step,
            for up to `kv_transfer_timeout`. And whether the load would be asynchronous, False if there is
            nothing to load.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Request, block_ids: Any, num_external_tokens: int) -> None:
        """Note that a request has got blocks and that its load may begin with the next metadata.

        Args:
            request: as in the latest `get_num_new_matched_tokens`.
            block_ids: its table from the start, at least up to the last token to load: a sequence, or with
                `by_group` an array [G, blocks]. There `NULL_BLOCK` stands for blocks that no token behind the
                load sees in layers of the group: nothing is to be written to them.
            num_external_tokens: tokens to load behind the `num_computed_tokens` last asked about; at most as
                many as were offered, and 0 if nothing is to be loaded.
        """

    def load_state(self, request: Request, checkpoint: int, num_local_tokens: int) -> None:
        """Note where the state behind a request's load goes; called before `update_state_after_alloc`.

        Beside states, only asynchronous loads of full blocks are begun, and `checkpoint` is to hold the state
        behind them when the load has ended. If it cannot, its last block has to be reported as failed.

        Args:
            request: as for `update_state_after_alloc`.
            checkpoint: its number.
            num_local_tokens: at the start of the tokens whose blocks are valid already and must not be
                written to: those that the connector was asked about, and maybe some that lack only a state.
                The last block of the load is never among them.
        """
        raise NotImplementedError(f"{type(self).__name__}.moves_states is set without load_state()")

    def lends_prompt(self, request: Request) -> bool:
        """Return whether a request's blocks are to be lent when it has ended; asked when it begins to run.

        If so, groups with windows keep what is seen by the last token of its prompt and those behind it. One
        that was preempted is not asked about again, and keeps nothing.
        """
        return False

    @abstractmethod
    def cancel_load(self, request_id: str) -> None:
        """Cancel an asynchronous load; nothing happens if there is none.

        The worker side must not write to the request's blocks once it has seen the metadata of the next step,
        and need not report the load as ended.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object | None:
        """Return what the worker side must know of this step, as data that can be pickled."""

    @abstractmethod
    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, Mapping[str, Any] | None]:
        """Note that a request has ended; called exactly once for each that was accepted.

        Args:
            request: with its terminal status, its tokens up to date and its own `kv_transfer_params`.
            block_ids: its table, as for `update_state_after_alloc`; empty if it never got one.

        Returns:
            Whether its blocks must be held until the worker side reports it as `finished_sending`, and what
            a client needs to find them. The scheduler frees them by itself after too long without news.
        """

    def lend_state(self, request: Request, checkpoint: int) -> None:  # noqa: B027 - most lend nothing
        """Note where the state behind the full blocks of a prompt is, but for that of its last token.

        Called right before `request_finished`, with `moves_states` only, and if the state is there. It stays
        for as long as the blocks are held.
        """

    @abstractmethod
    def leases_renewed(self) -> frozenset[str]:
        """Return the requests whose held blocks a peer has asked to keep since the last call: heartbeats."""

    def lease_ended(self, request_id: str) -> None:  # noqa: B027 - most check nothing after a read
        """Note that a request's held blocks are free: from the next step on, they may get other content.

        Called for every request whose `request_finished` said that they must be held, however that ended.
        """

    @abstractmethod
    def reset(self) -> bool:
        """Forget everything stored, as is needed when weights change; False if that is not possible.

        What is on its way at that moment must not arrive: such loads fail, such saves are dropped.
        """

    def stats(self) -> KVConnectorStats | KVPeerStats | None:
        """Return what there is and the counters since the engine started; None: nothing is counted."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to release
        """Finish or give up what is under way and release everything; called once, after the last step."""

    # -- worker side ---------------------------------------------------------------------------------------

    def register_states(self, states: StateCache) -> None:
        """Register the states of recurrent layers; called before `register_kv_caches` if there are any.

        Args:
            states: checkpoints to read from and write to, in pieces as large as a KV block of all groups. A
                plan's `state_copies` say what is saved in which; see `states_held`.
        """
        raise NotImplementedError(f"{type(self).__name__}.moves_states is set without register_states()")

    @abstractmethod
    def register_kv_caches(self, kv_caches: Any) -> None:
        """Register the cache to read from and write to, on the device that computes; called once.

        Args:
            kv_caches: a `PagedAttentionCache`, or with `by_group` a tuple of that of each group. `tensor` has
                all blocks, one after the other, and `views[layer]` the `key_pages` and `value_pages` of a
                layer, (num_kv_heads, num_blocks, block_size, head_dim). Without layers, a group has blocks of
                0 bytes.
        """

    @abstractmethod
    def start_load_kv(self, metadata: object | None) -> None:
        """Begin the loads of a step, before its forward pass.

        Args:
            metadata: what `build_connector_meta` returned for the step; None if it returned None.
        """

    @abstractmethod
    def wait_for_layer_load(self, layer: int) -> None:
        """Return once the synchronous loads of this layer have succeeded or failed."""

    @abstractmethod
    def save_kv_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin to store what the step has written to a layer.

        Args:
            layer: its number.
            keys: the whole cache's, [num_blocks, num_kv_heads, block_size, head_dim]. If they are int8, their
                scales are in the cache's tensor, in the same block.
            values: likewise.
        """

    @abstractmethod
    def wait_for_save(self, failed_ids: frozenset[str]) -> None:
        """Return once what the step has begun to store may be overwritten.

        Not called after a step that could not be computed; what that step has begun to store is void.

        Args:
            failed_ids: requests of the step that computed invalid KV: nothing of theirs may be found later.
        """

    def begin_save(self, failed_ids: Callable[[], frozenset[str]]) -> None:
        """Make sure that later steps do not overwrite what this one is to store, without waiting.

        Called in place of `wait_for_save` if a device has yet to compute the step, which it may fail to do.

        Args:
            failed_ids: returns what `wait_for_save` is given, once that is known; may be called from any
                thread. Of a step that could not be computed, all requests.
        """
        raise NotImplementedError(f"{type(self).__name__}.saves_before_tokens is set without begin_save()")

    @abstractmethod
    def get_finished(self, finished_ids: Sequence[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Return the requests whose sending or receiving has ended since the last call, each once.

        Args:
            finished_ids: requests that have ended in the scheduler since the last step.

        Returns:
            The requests whose held blocks a peer no longer needs, and those whose asynchronous load has
            ended. One that failed has ended, too, see `get_block_ids_with_load_errors`.
        """

    @abstractmethod
    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        """Return the blocks of the first group whose load has failed since the last call, in any group.

        Those of an asynchronous load come together with its end.
        """
