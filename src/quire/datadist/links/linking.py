"""How a DECODER links to a PROMPT."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from quire.datadist.links.decoder_link import DecoderLink
from quire.datadist.transports.interface import DestinationEnd, LinkTerms, Transport
from quire.datadist.wire import sockets
from quire.datadist.wire.handshake import ConnectionKind, greet, new_greeting
from quire.datadist.wire.protocol import (
    BYTE_ORDER,
    NO_IDENTITY,
    LinkEstablished,
    LinkOffer,
    LinkRequest,
    OfferAccepted,
    OfferDeclined,
    ProtocolError,
    TransportOffer,
    decoder_channel,
)

logger = logging.getLogger(__name__)


def establish_link(
    address: tuple[str, int],
    token: bytes,
    *,
    prompt_cluster_id: int,
    decoder_cluster_id: int,
    transports: Sequence[Transport],
    use_checksum: bool,
    deadline: float,
    identity: Mapping[str, str] = NO_IDENTITY,
    block_size: int = 0,
) -> DecoderLink:
    """Link to a PROMPT; leaves nothing behind if that fails.

    `identity` says what the KV is that this side can use, in named parts; the PROMPT must have the same. What
    it lends goes into blocks of `block_size` tokens, a multiple of its own.

    Raises:
        TimeoutError: the PROMPT does not answer in time.
        OSError: it cannot be reached, is not who it should be, or refuses.
    """
    connection = sockets.connect(address, deadline)
    channel = decoder_channel(connection)
    destination_end: DestinationEnd | None = None
    try:
        key = greet(connection, token, new_greeting(ConnectionKind.CONTROL), deadline)
        offers = [TransportOffer(one.name, one.parameters) for one in transports]
        request = LinkRequest(
            prompt_cluster_id,
            decoder_cluster_id,
            BYTE_ORDER,
            dict(identity),
            use_checksum,
            offers,
            block_size,
        )
        channel.send(request, deadline)
        while destination_end is None:
            offer = channel.expect(LinkOffer, deadline)
            if offer.block_size and block_size % offer.block_size:
                raise ProtocolError(f"the peer offers blocks of {offer.block_size} tokens for {block_size}")
            terms = LinkTerms(offer.link_id, address, key, offer.use_checksum or use_checksum)
            try:
                destination_end = _open_destination(transports, offer.transport, terms, deadline)
            except ProtocolError:
                raise
            except OSError as error:
                logger.info(
                    "PROMPT %s: %s cannot be used: %s", prompt_cluster_id, offer.transport.name, error
                )
                channel.send(OfferDeclined(str(error)[:1024]), deadline)
        channel.send(OfferAccepted(), deadline)
        channel.expect(LinkEstablished, deadline)
    except BaseException:
        channel.close()
        if destination_end is not None:
            destination_end.close()
        raise
    return DecoderLink(prompt_cluster_id, channel, destination_end, offer, terms)


def _open_destination(
    transports: Sequence[Transport], offer: TransportOffer, terms: LinkTerms, deadline: float
) -> DestinationEnd:
    chosen = next((one for one in transports if one.name == offer.name), None)
    if chosen is None:
        raise ProtocolError(f"the peer chose the transport {offer.name!r}, which was not offered")
    try:
        return chosen.open_destination(terms, offer.parameters, deadline)
    except ValueError as error:
        raise ProtocolError(f"the peer's parameters are malformed: {error}") from error
