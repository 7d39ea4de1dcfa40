"""Keys of the options of `LLMDataDist.init` and `LLMDataDist.add_model`."""

from __future__ import annotations

LISTEN_IP_INFO = "llm.listenIpInfo"
DEVICE_ID = "ge.exec.deviceId"
SYNC_KV_TIMEOUT = "llm.SyncKvCacheWaitTime"
POOL_SIZE = "ge.flowGraphMemMaxSize"

DEVICE = "quire.device"
TOKEN = "quire.token"
CHECKSUM = "quire.checksum"
TRANSPORTS = "quire.transports"
TCP_STREAMS = "quire.tcpStreams"

KV_SHAPES = "llm.RefInputShapes"
KV_DTYPES = "llm.RefInputDtypes"
KV_SEQ_LEN_DIM_INDEX = "llm.RefInputSeqLenDimIndex"
ENABLE_PAGE_ATTENTION = "llm.EnablePagedAttention"
ENABLE_SHARED_SYSTEM_PREFIX = "llm.EnableSharedSystemPrefix"
OM_PATHS = "llm.OmCachePath"
IS_FLOW_MODEL = "llm.IsFlowModel"
