"""Represents this process as a member of its group: its member ids, and the instance id of a static member.

Decides whether a member of the group is this process, an earlier member of this process, another process with the same
instance id, or a predecessor that must be removed first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from confluent_kafka import Consumer

from eos import log
from eos.errors import ConfigurationError, EosError
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import STRATEGY, Settings
from eos.kafka.client.world import World

_LEAVE_MS = 5_000


class Member:
    """Represents this member. `ids`: member ids that were ours, in earlier consumers of this session too.
    `instance_id`: None for a dynamic member."""

    def __init__(
        self, consumer: Consumer, settings: Settings, instance_id: str | None, ids: set[str], world: World
    ) -> None:
        self._consumer, self._settings, self._world = consumer, settings, world
        self._instance_id, self._ids = instance_id, ids
        self._group: str = settings["group.id"]
        self._was_member = False
        self._assigned_as: str | None = None  # member id at the first assignment

    @property
    def is_known(self) -> bool:
        """Return True if the group coordinator knows this member."""
        return bool(self._consumer.memberid())

    def refresh_id(self) -> str | None:
        """Read the current member id from the client, note and return it; None outside the group. Call this once per
        transaction, because each call waits for a thread of the client."""
        current: str | None = self._consumer.memberid()
        if current:
            self._was_member = True
            self._ids.add(current)
        return current

    def note_first_assignment(self) -> None:
        """Record the member id under which the first of the present partitions were assigned."""
        self._assigned_as = self._consumer.memberid()

    def has_changed(self, member_id: str) -> bool:
        """Return whether this member rejoined under a new id and kept its old partitions.

        librdkafka reports partitions as lost when a heartbeat finds the member unknown. When a JoinGroup request finds
        the member unknown, the client joins under a new id and keeps its partitions (measured with 2.16, cooperative).
        Other members may have handled them meanwhile, and the broker accepts the new member's offsets."""
        return member_id != self._assigned_as

    def remove_predecessor(self, admin: ClusterAdmin, topics: Collection[str]) -> None:
        """Remove this member's predecessor from a classic group that would use the predecessor's subscription in place
        of ours.

        A static member that comes back gets its old partitions without a rebalance, even if it subscribes to other
        topics now (4.3.1, measured). The partitions of a new topic would have no owner, and the member would get
        records of a topic that it no longer reads. A predecessor with another assignment strategy makes brokers refuse
        the new one.

        Raises ConfigurationError if the group has a member that is not a worker (see `_refuse_others`).
        """
        if self._instance_id is None:
            return
        try:
            group = admin.classic_group(self._group)
            if self._predecessor_subscribed_differently(group, topics):
                admin.remove_member(self._group, self._instance_id)
        except EosError as error:
            # A group without a coordinator has no members yet.
            log.debug("group members unavailable", error=str(error), group=self._group)
            return
        self._refuse_others(group["members"])

    def _predecessor_subscribed_differently(self, group: Mapping[str, Any], topics: Collection[str]) -> bool:
        """Return whether a predecessor in the group subscribed to other topics or with another strategy."""
        predecessors = [m for m in group["members"] if m.get("group_instance_id") == self._instance_id]
        # During a rebalance the members have no metadata. The rebalance then uses our own subscription.
        known = [m["member_metadata"]["topics"] for m in predecessors if isinstance(m["member_metadata"], dict)]
        strategies = str(self._settings.consumer()[STRATEGY]).split(",")
        return any(set(read) != set(topics) for read in known) or (
            bool(known) and group["protocol_data"] not in strategies
        )

    def _refuse_others(self, members: Collection[Mapping[str, Any]]) -> None:
        """Raise ConfigurationError if a member is not a worker. A foreign member may use the same assignment strategy
        as a worker: librdkafka offers `roundrobin`, and Java `cooperative-sticky`. The brokers would then share the
        topics between workers and foreign members."""
        if others := sorted({m["client_id"] for m in members if not m.get("group_instance_id")}):
            raise ConfigurationError(
                f"group {self._group} has members that are not workers of this App (client.id {', '.join(others)}): "
                "stop those consumers first"
            )

    def query_is_ours(self) -> bool:
        """Return whether no other member of the group holds our group.instance.id. A dynamic member has no such id. For
        it, return whether it still has a member id, or never had one.
        """
        current = self.refresh_id()  # differs from the id of the last commit if librdkafka rejoined by itself
        if self._instance_id is None:
            return bool(current) or not self._was_member
        with self._world.admin(self._settings) as admin:
            members = admin.members(self._group)
        ours = [m for m in members if m.get("group_instance_id") == self._instance_id]
        return all(m.get("member_id") in self._ids for m in ours)

    def leave(self) -> None:
        """Leave the group for good. A dynamic member left when its consumer was closed."""
        if self._instance_id is None:
            return
        try:
            with self._world.admin(self._settings, timeout_ms=_LEAVE_MS) as admin:
                admin.remove_member(self._group, self._instance_id)
        except EosError as error:
            reason = "its partitions move after session.timeout.ms"
            log.warning("could not leave the group", group=self._group, result=reason, error=str(error))
