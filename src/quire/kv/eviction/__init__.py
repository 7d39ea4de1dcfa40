"""Which KV blocks a sequence evicts: numbers and arrays only, no tensors and no storage.

After the eviction algorithms of OpenVINO GenAI: attention scores (Zhang et al. 2023, "H2O"; Li et al. 2024,
"SnapKV"), KVCrush (Jha et al. 2025) and Adaptive R-KV (after Cai et al. 2025, "R-KV").

With `use_cache_eviction`, a sequence gives blocks back while it runs: how many and when follows from lengths
(`scheduling/accounts/cache_eviction.py`), which ones is decided for each layer beside the model
(`execution/eviction/cache_evictor.py`), by `kv/eviction/`. Only its start area, which never goes, is
findable. docs/cache-eviction.md says how one block table serves all layers.
"""
