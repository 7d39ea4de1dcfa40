"""The engines of the comparison: environment, worker, model files and their conversion."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peers_shapes import SHAPES
from peers_workload import NUM_THREADS, PRECISIONS

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
MODELS = PEERS / "models"
CHECKPOINT = "bf16"  # the directory that all other files of a shape are converted from

Command = list[str]


@dataclass(frozen=True)
class EngineKind:
    """How to run one engine, or one of its variants. Without an environment, it runs in this interpreter."""

    label: str
    worker: str
    models: Mapping[str, str]  # directories, by the precisions that it takes part in
    environment: str = ""
    computes: Mapping[str, str] = field(default_factory=dict)  # by precision; default: that precision
    variables: Mapping[str, str] = field(default_factory=dict)
    preloaded: tuple[str, ...] = ()  # libraries, as patterns inside the environment

    @property
    def python(self) -> str:
        """Its Python interpreter."""
        return interpreter(self.environment) if self.environment else sys.executable

    def command(self, precision: str, shape: str) -> Command:
        """Return the command that starts its worker."""
        computed = self.computes.get(precision, precision)
        options = ["--model", str(self.model(precision, shape)), "--precision", computed, "--shape", shape]
        return [self.python, str(HERE / self.worker), *options]

    def environ(self) -> dict[str, str]:
        """Return the environment variables for its worker, in addition to the inherited ones.

        Raises:
            FileNotFoundError: a library to preload is not in the environment.
        """
        if not self.preloaded:
            return dict(self.variables)
        root = PEERS / self.environment
        found = [next(root.glob(pattern), None) for pattern in self.preloaded]
        if None in found:
            raise FileNotFoundError(f"{root} lacks one of {', '.join(self.preloaded)}")
        return {**self.variables, "LD_PRELOAD": " ".join(map(str, found))}

    def model(self, precision: str, shape: str) -> Path:
        """Return the directory of its model."""
        return MODELS / shape / self.models[precision]


def interpreter(environment: str) -> str:
    """Return the Python interpreter of an environment that the Makefile sets up."""
    return str(PEERS / environment / "bin" / "python")


KINDS = {
    "quire": EngineKind("Quire", "peers_quire.py", dict.fromkeys(PRECISIONS, CHECKPOINT)),
    "quire-gguf": EngineKind("Quire, GGUF", "peers_quire.py", {"int4": "llamacpp-int4"}),
    "quire-int8": EngineKind(
        "Quire, int8", "peers_quire.py", {"int4": CHECKPOINT}, computes={"int4": "int8"}
    ),
    "vllm": EngineKind(
        "vLLM",
        "peers_vllm.py",
        {"bf16": CHECKPOINT, "int8": "vllm-int8", "int4": "vllm-int4"},
        "vllm",
        variables={
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(PEERS / "vllm" / "cache"),
            "HF_HUB_OFFLINE": "1",
        },
        preloaded=("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4", "lib/libiomp5.so"),
    ),
    "openvino": EngineKind(
        "OpenVINO",
        "peers_openvino.py",
        {precision: f"openvino-{precision}" for precision in PRECISIONS},
        "openvino",
    ),
    "llamacpp": EngineKind(
        "llama.cpp",
        "peers_llamacpp.py",
        {precision: f"llamacpp-{precision}" for precision in PRECISIONS},
        "llamacpp",
    ),
    "llamacpp-q4_0": EngineKind(
        "llama.cpp, Q4_0", "peers_llamacpp.py", {"int4": "llamacpp-q4_0"}, "llamacpp"
    ),
}
OLDER_EXPORTS = ("qwen3.5-0.8b",)  # that optimum-intel can only export with transformers up to 5.2
OPENVINO_WEIGHTS = {  # a model in fp16 runs in bf16
    "bf16": ["fp16"],
    "int8": ["int8"],
    "int4": ["int4", "--sym", "--group-size", "128", "--ratio", "1.0", "--group-size-fallback", "ignore"],
}


def conversion(target: Path, written: Path) -> Command:
    """Return the command that writes the model directory `target`, MODELS/SHAPE/NAME, to `written`."""
    source, shape = str(target.with_name(CHECKPOINT)), target.parent.name
    kind, _, form = target.name.rpartition("-")
    if kind == "openvino":
        tool = [str(PEERS / "convert" / "bin" / "optimum-cli"), "export", "openvino"]
        if shape in OLDER_EXPORTS:
            tool = ["env", f"PYTHONPATH={PEERS / 'convert' / 'transformers-5.2'}", *tool]
        weights = ["--weight-format", *OPENVINO_WEIGHTS[form]]
        return [*tool, "-m", source, "--task", "text-generation-with-past", *weights, str(written)]
    if kind == "llamacpp":
        form = {"int8": "q8_0", "int4": SHAPES[shape].gguf_type}.get(form, form)
        script = [interpreter("llamacpp"), str(HERE / "peers_gguf.py")]
        return [*script, source, form, str(written / "model.gguf")]
    if kind == "vllm":
        return [sys.executable, str(HERE / "peers_quantized.py"), source, form, str(written)]
    return [sys.executable, str(HERE / "peers_model.py"), "--shape", shape, str(written)]
