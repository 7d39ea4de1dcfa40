"""What a model is: one decoder definition, families, weight loading, tokenizer.

`Decoder.forward` is Python over a handful of kernels for each layer: a fused product for queries, keys and
values; one kernel that normalizes and rotates them and writes the KV; attention; the output product; a norm
that first adds to the residual stream; gate and up; activation; down; another norm. Results go into buffers
that are kept from step to step (`models/decoder.py`); the logits of the rows that sample have a buffer of
their own. A layer's matrices are `Linear` objects, which know their own layout. A `KernelSet` is chosen once,
by `EngineConfig.kernels`: `kernels/interface.py` says what each kernel computes, and `reference.py`,
`cpu/kernel_set.py` and `triton/kernel_set.py` implement it. `kernels/bounds.py` holds the sizes that the
kernels and the memory plan share.

`models/` says what a model is and knows no files. `models/checkpoints/` stands above it and reads configs,
tokenizers and weights (`read_model_config`, `read_tokenizer`, `load_decoder`); `model_files.py` opens them
all, and `config_entries.py` has the types and limits of what a config says. Weights are loaded matrix by
matrix: a `Checkpoint` maps the files and hands out parts, in floating point or quantized; `KernelSet.linear`
packs them, for a GPU there, where `StagedMemory` (`kernels/devices/staging.py`) brings them through pinned
buffers that threads fill; the pages of the file are released. `WeightCache` keeps packed weights as
safetensors files.
"""
