"""Garbage collections of the server, which hold up every request."""

import gc

from quire.server.serve import spare_full_collections

OBJECTS_OF_CONNECTIONS = 4000 * 40


def test_thousands_of_connections_cause_no_full_collection():
    full_collections = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            full_collections.append(info)

    thresholds = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(note)
    try:
        spare_full_collections()
        kept = [[] for _ in range(OBJECTS_OF_CONNECTIONS)]
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*thresholds)
    assert len(kept) == OBJECTS_OF_CONNECTIONS
    assert not full_collections
