"""Writes the comparison's model as GGUF files, for llama.cpp and for Quire.

    .peers/llamacpp/bin/python benchmarks/peers_gguf.py CHECKPOINT bf16|q8_0|q4_0|q4_k_m|mxfp4 FILE

CHECKPOINT was written by `peers_model.py`. llama.cpp's own script converts it, and llama.cpp quantizes the
result, including the embedding. mxfp4 is for experts; what else the model has is Q8_0.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
from peers_workload import NUM_THREADS

SOURCES = Path(sys.prefix) / "llama.cpp"
FILE_TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "mxfp4": 38,  # LLAMA_FTYPE_MOSTLY_MXFP4_MOE
}


def write_bf16(checkpoint: Path, path: Path) -> None:
    """Write the bf16 file with llama.cpp's script, which would not know the tokenizer."""
    sys.path.insert(0, str(SOURCES))
    import convert_hf_to_gguf
    from conversion.base import TextModel

    find = convert_hf_to_gguf.get_model_class

    def with_tokenizer(*names: Any, **options: Any) -> type[TextModel]:
        found = find(*names, **options)
        if not names[0].endswith("BertModel"):
            found.set_vocab = TextModel._set_vocab_gpt2
        found.get_vocab_base_pre = lambda model, tokenizer: "qwen2"
        found.no_mtp = True  # the models have no layers that predict further tokens
        return found

    convert_hf_to_gguf.get_model_class = with_tokenizer
    sys.argv = ["convert_hf_to_gguf.py", str(checkpoint), "--outfile", str(path), "--outtype", "bf16"]
    convert_hf_to_gguf.main()


def write_quantized(checkpoint: Path, path: Path, file_type: int) -> None:
    """Write a quantized file, from a temporary bf16 file."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = NUM_THREADS
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        source = Path(directory, "bf16.gguf")
        write_bf16(checkpoint, source)
        status = llama_cpp.llama_model_quantize(bytes(source), bytes(path), ctypes.byref(parameters))
    if status:
        raise SystemExit(f"llama.cpp could not quantize {source}: status {status}")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("form", choices=("bf16", *FILE_TYPES))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    if options.form == "bf16":
        write_bf16(options.checkpoint, options.file)
    else:
        write_quantized(options.checkpoint, options.file, FILE_TYPES[options.form])


if __name__ == "__main__":
    main()
