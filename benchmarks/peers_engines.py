"""The engines of the comparison: environment, worker, model files and their conversion."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peers_workload import NUM_THREADS

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
MODELS = PEERS / "models"
CHECKPOINT = MODELS / "bf16"  # all other files are converted from it

Command = list[str]


@dataclass(frozen=True)
class EngineKind:
    """How to run one engine. Without an environment, it runs in this interpreter."""

    label: str
    worker: str
    environment: str = ""
    model_names: Mapping[str, str] = field(default_factory=dict)  # by precision; default: the checkpoint
    variables: Mapping[str, str] = field(default_factory=dict)
    preloaded: tuple[str, ...] = ()  # libraries, as patterns inside the environment

    @property
    def python(self) -> str:
        """Its Python interpreter."""
        return interpreter(self.environment) if self.environment else sys.executable

    def command(self, precision: str) -> Command:
        """Return the command that starts its worker."""
        model = str(self.model(precision))
        return [self.python, str(HERE / self.worker), "--model", model, "--precision", precision]

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

    def model(self, precision: str) -> Path:
        """Return the directory of its model."""
        name = self.model_names.get(precision)
        return MODELS / name if name else CHECKPOINT


def interpreter(environment: str) -> str:
    """Return the Python interpreter of an environment that the Makefile sets up."""
    return str(PEERS / environment / "bin" / "python")


KINDS = {
    "quire": EngineKind("Quire", "peers_quire.py"),
    "vllm": EngineKind(
        "vLLM",
        "peers_vllm.py",
        "vllm",
        {"int8": "vllm-int8"},
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
        "OpenVINO", "peers_openvino.py", "openvino", {"bf16": "openvino-bf16", "int8": "openvino-int8"}
    ),
    "llamacpp": EngineKind(
        "llama.cpp", "peers_llamacpp.py", "llamacpp", {"bf16": "llamacpp-bf16", "int8": "llamacpp-int8"}
    ),
}


def conversion(name: str, target: Path) -> Command:
    """Return the command that writes the model directory `name` to `target`."""
    source = str(CHECKPOINT)
    kind, _, precision = name.rpartition("-")
    if kind == "openvino":
        weights = {"bf16": "fp16", "int8": "int8"}[precision]  # a model in fp16 runs in bf16
        tool = [str(PEERS / "convert" / "bin" / "optimum-cli"), "export", "openvino"]
        return [
            *tool,
            "-m",
            source,
            "--task",
            "text-generation-with-past",
            "--weight-format",
            weights,
            str(target),
        ]
    if kind == "llamacpp":
        script = [interpreter("llamacpp"), str(HERE / "peers_gguf.py")]
        return [*script, source, precision, str(target / "model.gguf")]
    return [sys.executable, str(HERE / "peers_model.py"), "--precision", precision, str(target)]
