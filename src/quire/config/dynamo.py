"""How an engine takes part in a deployment of NVIDIA Dynamo."""

from __future__ import annotations

from typing import Literal

from quire.config.fields import check_limits, config, knob


@config
class DynamoConfig:
    """An engine as a worker of NVIDIA Dynamo (`quire.dynamo`)."""

    namespace: str = knob(
        default="dynamo",
        help="Dynamo namespace of the worker.",
        environment_variable="DYN_NAMESPACE",
    )
    component: str = knob(
        default="",
        help="Dynamo component that the worker belongs to. Empty: prefill with role prefill, otherwise "
        "backend.",
    )
    served_model_name: str = knob(
        default="", help="Name under which Dynamo's front end serves the model. Empty: model."
    )
    discovery_backend: Literal["etcd", "kubernetes", "file", "mem"] = knob(
        default="etcd",
        help="How Dynamo's processes find each other. file: in the directory DYN_FILE_KV, on one machine.",
        environment_variable="DYN_DISCOVERY_BACKEND",
    )
    request_plane: Literal["tcp", "nats"] = knob(
        default="tcp",
        help="How Dynamo sends requests to workers.",
        environment_variable="DYN_REQUEST_PLANE",
    )
    event_plane: Literal["zmq", "nats"] = knob(
        default="zmq",
        help="How Dynamo passes KV events and load on to its routers.",
        environment_variable="DYN_EVENT_PLANE",
    )
    tool_call_parser: str = knob(default="", help="Dynamo's parser of tool calls for the model. Empty: none.")
    reasoning_parser: str = knob(default="", help="Dynamo's parser of reasoning for the model. Empty: none.")
    custom_jinja_template: str = knob(
        default="",
        help="A file with a chat template, for Dynamo's front end, in place of the model's own. Empty: the "
        "model's own.",
    )

    def __post_init__(self) -> None:
        check_limits(self)
