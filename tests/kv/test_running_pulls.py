"""How long a pull may take: less for what was only to be quicker than computing."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kv.connectors.load_costs import LoadCosts
from quire.kv.connectors.stats import KVPeerStats
from quire.kv.connectors.step_times import host_mark
from quire.kv.peers import running_pulls
from quire.kv.peers.peer import KnownPeers
from quire.kv.peers.pulls import LoanLoad, PrefixLoad
from quire.kv.peers.running_pulls import PREFIX_GRACE, PREFIX_PATIENCE, RunningPulls
from quire.kv.peers.transfer_params import BorrowingParams

ADDRESS = "127.0.0.1", 1
PREFIX = PrefixLoad("prefix", ADDRESS, b"d" * 32, np.array([[3, 4]]))
LOAN = LoanLoad("loan", BorrowingParams(*ADDRESS, transfer_id="t"), 32, b"d", np.array([[5, 6]]))


@pytest.mark.parametrize(
    ("load", "seconds_per_token", "patience"),
    [
        (LOAN, 0.1, 30.0),
        (PREFIX, 0.0, 30.0),  # nobody knows yet what computing takes
        (PREFIX, 0.1, PREFIX_GRACE + PREFIX_PATIENCE * 32 * 0.1),
        (PREFIX, 1.0, 30.0),
    ],
)
def test_a_prefix_is_not_waited_for_much_longer_than_computing_it_takes(
    monkeypatch, load, seconds_per_token, patience
):
    costs = LoadCosts(16)
    costs.seconds_per_token = seconds_per_token
    pulls = RunningPulls(KnownPeers(lambda _: None), 30.0, stats=KVPeerStats(), costs=costs)
    monkeypatch.setattr(running_pulls.time, "monotonic", lambda: 100.0)
    pulls.begin_step([load], [], host_mark())
    [pull] = pulls._pulls.values()
    assert pull.deadline == pytest.approx(100.0 + patience)
    assert pulls.finished() == {load.request_id}  # there is no such peer
    assert pulls.failed_block_ids() == set(load.block_ids[0])
