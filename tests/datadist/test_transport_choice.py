"""Both sides agree on the first transport that works."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
from failing import fails_with
from raw_peers import DECODER_ID, PROMPT_ID, address_of, started
from sides import byte_desc, link_of, pattern, read_cache, write_new_cache

from quire.datadist import CacheKey, LLMRole, LLMStatusCode
from quire.datadist.interface import link_ends
from quire.datadist.transports.tcp import TcpTransport

SUCCESS = LLMStatusCode.LLM_SUCCESS


class Declining(TcpTransport):
    """A transport whose DECODER's end cannot be set up."""

    name = "declining"

    def __init__(self, error: Exception) -> None:
        super().__init__(2)
        self.error = error
        self.opened = []

    def open_source(self, peer, *, use_checksum):
        self.opened.append(super().open_source(peer, use_checksum=use_checksum))
        return self.opened[-1]

    def open_destination(self, terms, peer, deadline):
        raise self.error


@contextlib.contextmanager
def sides_with(transports):
    """A PROMPT and a DECODER that have `transports`."""
    with (
        mock.patch.object(link_ends, "open_transports", return_value=transports),
        started(LLMRole.PROMPT, PROMPT_ID) as prompt,
        started(LLMRole.DECODER, DECODER_ID) as decoder,
    ):
        yield prompt, decoder


def transport_of(decoder) -> str:
    return link_of(decoder, PROMPT_ID).transport


@pytest.mark.parametrize("error", [OSError("no such road"), PermissionError("x" * 5000)])
def test_another_transport_is_used_where_the_best_cannot_be(error):
    declining = Declining(error)
    with sides_with([declining, TcpTransport(1)]) as (prompt, decoder):
        assert decoder.link_clusters([address_of(prompt)])[0] is SUCCESS
        assert transport_of(decoder) == "tcp"
        assert declining.opened[0]._has_ended
        cache = write_new_cache(prompt.kv_cache_manager, byte_desc(), [CacheKey(PROMPT_ID, 5)], seed=1)
        target = decoder.kv_cache_manager.allocate_cache(byte_desc())
        decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT_ID, 5), target)
        expected = pattern(cache.cache_desc, 1)[:, 0]
        assert (read_cache(decoder.kv_cache_manager, target)[:, 0] == expected).all()


def test_another_transport_is_used_where_the_prompt_cannot_have_the_best(caplog):
    class Unavailable(Declining):
        def open_source(self, peer, *, use_checksum):
            raise self.error

    with sides_with([Unavailable(OSError("no such road")), TcpTransport(1)]) as (prompt, decoder):
        assert decoder.link_clusters([address_of(prompt)])[0] is SUCCESS
        assert transport_of(decoder) == "tcp"
    assert "declining cannot be used: no such road" in caplog.text


def test_transports_are_closed_with_their_side():
    closed = []

    class Closing(TcpTransport):
        def close(self):
            closed.append(self)

    transport = Closing(1)
    with sides_with([transport]) as (prompt, decoder):
        assert decoder.link_clusters([address_of(prompt)])[0] is SUCCESS
        assert not closed
    assert closed == [transport, transport]


def test_no_link_where_no_transport_works(caplog):
    with sides_with([Declining(OSError("no such road"))]) as (prompt, decoder):
        assert decoder.link_clusters([address_of(prompt)])[0] is LLMStatusCode.LLM_LINK_FAILED
        assert "no transport in common that works" in caplog.text


@pytest.mark.parametrize("text", ["", "tcp,tcp", "pigeons", "tcp,", " tcp", "TCP"])
def test_names_of_transports_are_checked(text):
    with fails_with(LLMStatusCode.LLM_PARAM_INVALID), started(LLMRole.DECODER, 1, transports=text):
        pass
