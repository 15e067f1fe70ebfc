"""Who we are in the group: our member ids, and the instance id of a static member.

Owns what tells us from another member in our place, from one that we were before, and from one that must go first.
"""

from __future__ import annotations

from collections.abc import Collection

from confluent_kafka import Consumer

from eos import log
from eos.errors import ConfigurationError, EosError
from eos.kafka.client.cluster import ClusterAdmin
from eos.kafka.client.settings import STRATEGY, Settings
from eos.kafka.client.world import World

_LEAVE_MS = 5_000


class Member:
    """`ids`: member ids that were ours, in consumers before this one too; librdkafka forgets its own when the session
    ends. `instance_id`: None for a member that is not static."""

    def __init__(
        self, consumer: Consumer, settings: Settings, instance_id: str | None, ids: set[str], world: World
    ) -> None:
        self._consumer, self._settings, self._world = consumer, settings, world
        self._instance_id, self._ids = instance_id, ids
        self._group: str = settings["group.id"]
        self._was_member = False
        self._assigned_as: str | None = None  # the member id under which we got the first of what we have

    @property
    def known(self) -> bool:
        """The group coordinator knows us."""
        return bool(self._consumer.memberid())

    def id(self) -> str | None:
        """Ours, or None outside the group. It is kept. Asked for once a transaction: each call waits for a thread."""
        current: str | None = self._consumer.memberid()
        if current:
            self._was_member = True
            self._ids.add(current)
        return current

    def assigned(self) -> None:
        """We get partitions, and had none."""
        self._assigned_as = self._consumer.memberid()

    def has_changed(self, member_id: str) -> bool:
        """librdkafka tells of partitions that it lost when a heartbeat finds the member unknown; when it is a JoinGroup
        that does, it joins under a new id and goes on with the partitions it had (measured with 2.16, cooperative).
        Others may have handled them since, and the broker takes the new member's offsets."""
        return member_id != self._assigned_as

    def make_way(self, admin: ClusterAdmin, topics: Collection[str]) -> None:
        """Remove our predecessor from the group if brokers would give us its partitions or refuse us because of it.

        A static member that comes back gets its old partitions without a rebalance, whatever it subscribes to now
        (4.3.1, measured): the partitions of a new topic would have no owner, and the member would get records of a
        topic that it no longer reads. A predecessor with another assignment strategy makes brokers refuse ours.

        Raises ConfigurationError if the group has a member that is not a worker. Its strategy may be one of ours
        (librdkafka offers `roundrobin`, Java `cooperative-sticky`), so that brokers would let both share the topics.
        """
        if self._instance_id is None:
            return
        try:
            group = admin.classic_group(self._group)
            members, strategy = group["members"], group["protocol_data"]
            predecessors = [m for m in members if m.get("group_instance_id") == self._instance_id]
            # During a rebalance the group has no metadata, and our own subscription will count.
            known = [m["member_metadata"]["topics"] for m in predecessors if isinstance(m["member_metadata"], dict)]
            ours = str(self._settings.consumer()[STRATEGY]).split(",")
            if any(set(read) != set(topics) for read in known) or (known and strategy not in ours):
                admin.remove_member(self._group, self._instance_id)
        except EosError as error:
            # A group without a coordinator has no members yet.
            log.debug("group members unavailable", error=str(error), group=self._group)
            return
        if others := sorted({m["client_id"] for m in members if not m.get("group_instance_id")}):
            raise ConfigurationError(
                f"group {self._group} has members that are not workers of this App (client.id {', '.join(others)}): "
                "stop those consumers first"
            )

    def nobody_took_our_place(self) -> bool:
        """No other member of the group holds our group.instance.id; without one: we still have our member id, if we had
        one."""
        mine = self.id()  # another one than at the last commit, if librdkafka joined again by itself
        if self._instance_id is None:
            return bool(mine) or not self._was_member
        with self._world.admin(self._settings) as admin:
            members = admin.members(self._group)
        ours = [m for m in members if m.get("group_instance_id") == self._instance_id]
        return all(m.get("member_id") in self._ids for m in ours)

    def leave(self) -> None:
        """For good. One that is not static has left with its consumer's end."""
        if self._instance_id is None:
            return
        try:
            with self._world.admin(self._settings, timeout_ms=_LEAVE_MS) as admin:
                admin.remove_member(self._group, self._instance_id)
        except EosError as error:
            log.warning("could not leave the group: its partitions move at the session timeout", error=str(error))
