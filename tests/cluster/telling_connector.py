"""A KV connector that holds nothing for anyone, but says where it would be."""

from memory_connector import MemoryConnector


class TellingConnector(MemoryConnector):
    def __init__(self, block_size):
        super().__init__(block_size)

    def request_finished(self, request, block_ids):
        params = request.kv_transfer_params
        answer = {"do_remote_prefill": True} if params and params.get("do_remote_decode") else None
        return super().request_finished(request, block_ids)[0], answer
