"""The benchmark of KV tiers, with the built-in model and a few blocks."""

from __future__ import annotations

import kv_tiers

from quire.kv.connectors.load_costs import LoadCosts


def test_every_figure_is_measured_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(LoadCosts, "prefers_loading", lambda *_: True)  # on a busy machine too
    (tmp_path / "reading").mkdir()
    figures = {
        "restart": kv_tiers.measure_restart(
            "mini", str(tmp_path / "restart"), kv_tiers.prompt_of(48, seed=0), rounds=1
        ),
        "reading": kv_tiers.measure_reading(str(tmp_path / "reading"), num_blocks=2, rounds=1),
        "overhead": kv_tiers.measure_overhead("mini", str(tmp_path), num_requests=1, rounds=1),
    }
    assert all(number > 0 for number in figures["reading"].values())
    text = kv_tiers.report(figures)
    for name in ("computed", "loaded, cold", "tier / dd, cold", "no tier", "never hits, stores all"):
        assert f"  {name} " in text
