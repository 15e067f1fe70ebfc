"""A replaced producer is gone: its threads, its connections and the statistics that nobody reads any more."""

from __future__ import annotations

import gc
import threading
import time
import weakref

from eos.producer import _Client, _retire
from eos.settings import Settings


def test_a_replaced_client_is_destroyed_without_the_garbage_collector() -> None:
    settings = Settings({"bootstrap.servers": "127.0.0.1:9", "group.id": "g", "transactional.id": "t"})
    gc.disable()  # as good as it is in a worker that has frozen its objects and makes no new ones
    try:
        client = _Client(settings, "t", reports=False)
        gone = weakref.ref(client)
        _retire(client)
        del client
        deadline = time.monotonic() + 30
        while gone() is not None or any(t.name == "eos-retire" for t in threading.enumerate()):
            assert time.monotonic() < deadline, "the client is still there, and with it librdkafka's threads"
            time.sleep(0.01)
    finally:
        gc.enable()
