"""Which KV blocks a sequence evicts: numbers and arrays only, no tensors and no storage.

After the eviction algorithms of OpenVINO GenAI: attention scores (Zhang et al. 2023, "H2O"; Li et al. 2024,
"SnapKV"), KVCrush (Jha et al. 2025) and Adaptive R-KV (after Cai et al. 2025, "R-KV").
"""
