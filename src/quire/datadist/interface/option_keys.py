"""Keys of the options of `LLMDataDist.init` and `LLMDataDist.add_model`."""

from __future__ import annotations

LISTEN_IP_INFO = "llm.listenIpInfo"
DEVICE_ID = "ge.exec.deviceId"
SYNC_KV_TIMEOUT = "llm.SyncKvCacheWaitTime"
POOL_SIZE = "ge.flowGraphMemMaxSize"

ENABLE_CACHE_MANAGER = "llm.EnableCacheManager"
ENABLE_REMOTE_CACHE_ACCESSIBLE = "llm.EnableRemoteCacheAccessible"
ENABLE_SWITCH_ROLE = "llm.EnableSwitchRole"
LOCAL_COMM_RES = "llm.LocalCommRes"
MEM_POOL_CFG = "llm.MemPoolConfig"
TRANSFER_BACKEND = "llm.TransferBackend"
LINK_TOTAL_TIME = "llm.LinkTotalTime"
LINK_RETRY_COUNT = "llm.LinkRetryCount"

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
