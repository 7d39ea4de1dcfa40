"""`LLMDataDist`: one side of a prefill and decode split."""

from __future__ import annotations

import atexit
import logging
import time
from typing import Any

from quire.datadist.argument_checks import TIMEOUT_MS, U64, ArgumentChecks
from quire.datadist.enums import LLMRole
from quire.datadist.interface.kv_cache_manager import KvCacheManager
from quire.datadist.interface.llm_model import LLMModel
from quire.datadist.interface.model_runner import ModelRunner
from quire.datadist.interface.options import InitOptions, listen_address
from quire.datadist.interface.session import LinkResult, Session, one_for_all, overall
from quire.datadist.peers import LLMClusterInfo, LLMReq
from quire.datadist.status import LLMStatusCode, failure

logger = logging.getLogger(__name__)

MAX_CLUSTERS = 16
"""Maximum clusters per call of `link_clusters` or `unlink_clusters`."""


class LLMDataDist:
    """One side of a prefill and decode split: a cluster, with its device, caches and links.

    Args:
        role: PROMPT listens and serves; DECODER links and pulls; MIX does both, but has no models.
        cluster_id: unique among the PROMPTs that one DECODER links to, and among the DECODERs of one PROMPT.
    """

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        with ArgumentChecks() as check:
            check.instance("role", role, LLMRole)
            self._cluster_id = check.integer("cluster_id", cluster_id, U64)
        self._role = role
        self._session: Session | None = None

    @property
    def cluster_id(self) -> int:
        """The constructor's argument."""
        return self._cluster_id

    @property
    def role(self) -> LLMRole:
        """The initial role, or that of the last `switch_role`."""
        return self._role

    @property
    def listen_port(self) -> int | None:
        """The port that this side listens on, from `init` to `finalize`, if it does."""
        session = self._session
        return None if session is None or session.service is None else session.service.port

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The manager that allocates and pulls caches.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, before `init` and after `finalize`.
        """
        return self._opened().manager

    @property
    def cache_manager(self) -> KvCacheManager:
        """Another name of `kv_cache_manager`."""
        return self.kv_cache_manager

    def init(self, options: dict[str, str]) -> None:
        """Initialize; a PROMPT starts to listen, and so does MIX if it has `listen_ip_info`.

        Args:
            options: what `LLMConfig.generate_options` returns; unknown options are ignored.

        Raises:
            LLMException: LLM_PARAM_INVALID (an option is missing or malformed), LLM_REPEAT_REQUEST
                (already initialized), LLM_FAILED (cannot listen).
        """
        with ArgumentChecks() as check:
            checked = check.text_options("options", options)
        if self._session is not None:
            raise failure(LLMStatusCode.LLM_REPEAT_REQUEST, "already initialized; call finalize first")
        self._session = Session(self._role, self._cluster_id, InitOptions.read(self._role, checked))
        _initialised.add(self)

    def finalize(self) -> None:
        """Stop listening, drop links, release all models and caches. Has no effect if not initialized."""
        session, self._session = self._session, None
        _initialised.discard(self)
        if session is not None:
            session.close()

    def add_model(self, model_options: dict[str, str], model_runner: ModelRunner | None = None) -> LLMModel:
        """Add a model; both sides must add theirs in the same order.

        Args:
            model_options: what `ModelConfig.generate_options` returns; unknown options are ignored.
            model_runner: computes it; None: the registered factory makes a runner.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_PARAM_INVALID, LLM_DEVICE_OUT_OF_MEMORY,
                LLM_FEATURE_NOT_ENABLED (no runner, and no factory).
        """
        with ArgumentChecks() as check:
            options = check.text_options("model_options", model_options)
            check.instance("model_runner", model_runner, ModelRunner, type(None))
        return self._opened().add_model(options, model_runner)

    def link_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000
    ) -> LinkResult:
        """Link this DECODER to PROMPTs, each independently of the others.

        Args:
            clusters: at most 16.
            timeout: timeout of the whole call, in milliseconds.

        Returns:
            LLM_SUCCESS if every cluster is linked now, else the first failure; and what became of each:
            LLM_SUCCESS, LLM_ALREADY_LINK, LLM_REPEAT_REQUEST (twice in the call), LLM_LINK_FAILED,
            LLM_WAIT_PROCESS_TIMEOUT (no answer), LLM_PARAM_INVALID (it has no id, or not one address). Or one
            for all: LLM_PARAM_INVALID (on a PROMPT), LLM_CLUSTER_NUM_EXCEED_LIMIT, LLM_PROCESSING_LINK
            (another call is running).

        Raises:
            LLMException: LLM_ENGINE_FINALIZED.
        """
        checked, deadline = _checked_link_arguments(clusters, timeout)
        session = self._opened()
        if self._role is LLMRole.PROMPT:
            logger.warning("a PROMPT makes no links; call link_clusters on the DECODER")
            return one_for_all(LLMStatusCode.LLM_PARAM_INVALID, checked)
        if len(checked) > MAX_CLUSTERS:
            return one_for_all(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, checked)
        return session.with_links(checked, deadline, lambda: session.links.link(checked, deadline))

    def unlink_clusters(
        self,
        clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...],
        timeout: int = 3000,
        force: bool = False,
    ) -> LinkResult:
        """Take links down; a PROMPT drops its own end. Caches and keys stay.

        Args:
            clusters: at most 16 unless `force`; only `remote_cluster_id` is looked at.
            timeout: timeout of the whole call, in milliseconds.
            force: take down only this end, at once, without notifying the other.

        Returns:
            LLM_SUCCESS if every link is down, else the first failure; and what became of each: LLM_SUCCESS,
            LLM_NOT_YET_LINK, LLM_NOTIFY_PROMPT_UNLINK_FAILED (this end is down), LLM_LINK_BUSY (a pull was
            running all the time), LLM_PARAM_INVALID (it has no id). Or one for all:
            LLM_CLUSTER_NUM_EXCEED_LIMIT, LLM_PROCESSING_LINK (another call is running).

        Raises:
            LLMException: LLM_ENGINE_FINALIZED.
        """
        with ArgumentChecks() as check:
            check.instance("force", force, bool)
            checked, deadline = _checked_link_arguments(clusters, timeout)
        session = self._opened()
        if len(checked) > MAX_CLUSTERS and not force:
            return one_for_all(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, checked)
        ids = [one.remote_cluster_id for one in checked]
        if force:
            return overall([session.drop(one) for one in ids])
        return session.with_links(checked, deadline, lambda: [session.unlink(one, deadline) for one in ids])

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Check that a link is usable, asking the peer (for `sync_kv_timeout`) if this side made the link.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_NOT_YET_LINK (there is no link, or it is broken),
                LLM_LINK_BUSY (a pull is running), LLM_WAIT_PROCESS_TIMEOUT (the peer does not answer, and the
                link is broken now).
        """
        with ArgumentChecks() as check:
            cluster_id = check.integer("remote_cluster_id", remote_cluster_id, U64)
        self._opened().check_link(cluster_id)

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Take another role, without links. Caches and keys stay.

        Args:
            role: from now on.
            switch_options: as those of `init`; only the address to listen on is looked at. Without one this
                side listens no more, which a PROMPT cannot do.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED, LLM_EXIST_LINK (unlink first), LLM_PARAM_INVALID (the address
                is missing or malformed, or there are models), LLM_PROCESSING_LINK, LLM_WAIT_PROCESS_TIMEOUT
                (another call took too long), LLM_FAILED (cannot listen); nothing has changed.
        """
        with ArgumentChecks() as check:
            check.instance("role", role, LLMRole)
            options = {} if switch_options is None else check.text_options("switch_options", switch_options)
        self._opened().switch_role(role, listen_address(role, options))
        self._role = role

    def complete_request(self, llm_req: LLMReq) -> None:
        """Release a request: its keys on a PROMPT, its slot and staged KV on a DECODER.

        Unknown requests and placeholders are ignored.

        Raises:
            LLMException: LLM_ENGINE_FINALIZED.
        """
        with ArgumentChecks() as check:
            check.instance("llm_req", llm_req, LLMReq)
        session = self._opened()
        if not llm_req.is_placeholder:
            session.complete_request(llm_req)

    def _opened(self) -> Session:
        session = self._session
        if session is None:
            raise failure(LLMStatusCode.LLM_ENGINE_FINALIZED, "not initialized, or finalized; call init")
        return session


_initialised: set[LLMDataDist] = set()


@atexit.register
def _finalize_forgotten() -> None:
    for one in list(_initialised):
        one.finalize()


def _checked_link_arguments(clusters: Any, timeout: Any) -> tuple[list[LLMClusterInfo], float]:
    with ArgumentChecks() as check:
        checked = check.items("clusters", clusters, LLMClusterInfo)
        check.require(bool(checked), "clusters is empty")
        milliseconds = check.integer("timeout", timeout, TIMEOUT_MS)
    return checked, time.monotonic() + milliseconds / 1e3
