"""Run up to three shims in sequence in one process, so that faults happen on either side of the other jobs.

    clients ── faults (side client) ── trace, guard, protect ── faults (side broker) ── brokers

The module owns their order and the addresses between them (127.0.0.1, free ports). Each is a whole shim, so a request
that is late between two of them is late exactly as between machines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from eos.shim.faults import FaultJob, Plan
from eos.shim.pipeline import Job, Traffic
from eos.shim.server import Shim
from eos.shim.settings import ShimSettings

_INTERNAL = ("127.0.0.1", 0)


class Chain:
    """Serve from `await start()` until `await stop()`. Raises the errors that `Shim` raises."""

    def __init__(self, settings: ShimSettings, jobs: Sequence[Job] = (), plan: Plan | None = None) -> None:
        self.settings, self._jobs, self._plan = settings, jobs, plan
        self.shims: list[Shim] = []  # clients connect to the last shim

    @property
    def front(self) -> Shim:
        return self.shims[-1]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return self.front.addresses

    @property
    def connections(self) -> int:
        return self.front.connections if self.shims else 0

    @property
    def connections_made(self) -> int:
        return self.front.connections_made if self.shims else 0

    @property
    def traffic(self) -> Traffic:
        """Return the traffic between clients and the first shim that they connect to."""
        return self.front.traffic if self.shims else Traffic()

    @property
    def not_ready_reason(self) -> str | None:
        if not self.shims:
            return "not listening yet"
        return next((reason for shim in self.shims if (reason := shim.not_ready_reason) is not None), None)

    async def start(self) -> None:
        stages = self._stages()
        upstream, tls = self.settings.upstream, self.settings.upstream_tls
        try:
            for at, jobs in enumerate(stages):
                last = at == len(stages) - 1
                settings = replace(self.settings, upstream=upstream, upstream_tls=tls)
                if not last:
                    settings = replace(
                        settings,
                        listen=_INTERNAL,
                        advertise=None,
                        tls=None,
                        is_internal=True,
                        most_connections=sys.maxsize,
                        most_per_address=sys.maxsize,
                    )
                for job in jobs:
                    if isinstance(job, FaultJob):
                        job.tls = tls
                shim = Shim(settings, jobs)
                self.shims.append(shim)
                await shim.start()
                upstream, tls = tuple(shim.addresses), None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        for shim in reversed(self.shims):
            await shim.stop()

    def _stages(self) -> list[Sequence[Job]]:
        """Return the jobs of each shim, from the brokers' side to the clients' side."""
        broker = self._plan.on("broker") if self._plan else []
        client = self._plan.on("client") if self._plan else []
        stages: list[Sequence[Job]] = [[FaultJob(broker)]] if broker else []
        if self._jobs or not (broker or client):
            stages.append(self._jobs)
        if client:
            stages.append([FaultJob(client)])
        return stages
