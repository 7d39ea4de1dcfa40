"""Files and batches of requests."""

from __future__ import annotations

from quire.config.fields import check_limits, config, knob
from quire.limits import PositiveInt


@config
class BatchConfig:
    """The files of /v1/files, and the batches of /v1/batches."""

    batch_dir: str = knob(
        default="",
        help="Directory in which the files of /v1/files and the batches of /v1/batches are kept; it belongs "
        "to one server at a time. Empty: there are none.",
    )
    max_file_bytes: PositiveInt = knob(
        default=209_715_200, unit="bytes", help="Maximum size of a file that is uploaded."
    )
    max_stored_file_bytes: PositiveInt = knob(
        default=4_294_967_296,
        unit="bytes",
        help="Maximum size of a tenant's files, those that its batches write included. Uploads beyond that "
        "are refused, and results become errors.",
    )
    max_batch_requests: PositiveInt = knob(
        default=8, unit="requests", help="Maximum number of requests of batches that are served at once."
    )

    def __post_init__(self) -> None:
        check_limits(self)
