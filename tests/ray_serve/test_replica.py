"""What a replica changes at run time."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ConfigError

pytest.importorskip("ray.serve", reason="Ray is not installed; make test-ray installs it")

from quire.ray.replica import QuireServer


@pytest.mark.parametrize("given", [{"max_num_seqs": 9}, {"paused": "yes"}, {"log_level": "LOUD"}, [], 1])
async def test_what_cannot_change_is_refused_by_name(given: Any) -> None:
    replica: Any = None  # its user_config is checked first
    with pytest.raises(ConfigError, match=r"user_config is invalid: .*it may hold log_level and paused"):
        await QuireServer.reconfigure(replica, given)
