"""Runs a cluster of containers, through testcontainers: the only backend that can inject every fault.

Owns the containers, their network and their names, and removes all of them however the block ends. After a killed run
its watcher and the next run remove them (leftovers.py). The broker settings are LocalKafka's, so that timeouts are the
same on both backends. It must never touch a container that it did not create.

A node advertises INTERNAL to the other nodes, by its name in the network, and EXTERNAL to clients on this machine: a
port of 127.0.0.1 that stays the same when the node is started again.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from eos.broker.jars import DEFAULT_VERSION, parse_version
from eos.broker.local import heap_for
from eos.broker.node import free_ports
from eos.broker.properties import HOST, NodePorts, server_properties
from eos.errors import ConfigurationError, Unavailable
from eos.testing.clusters.base import Cluster, NotSupported
from eos.testing.clusters.leftovers import CLUSTER_LABEL, OWNER_LABEL, Watcher, owner, remove_leftovers

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer

LOCAL_IMAGES = "eos-kafka"
BASE_IMAGE = "eos-base:bookworm"
_INTERNAL_PORT, _CONTROLLER_PORT = 9092, 9093
_ANSWER_TIMEOUT_S, _WORK_TIMEOUT_S = 5, 90
# Drop packets on all interfaces except loopback, which the node uses to connect to itself and to resolve names.
_DROP = ("INPUT ! -i lo -j DROP", "OUTPUT ! -o lo -j DROP")


def engine() -> Any:
    """Return a docker client of an engine that answers. Raise Unavailable with the reason if there is none."""
    try:
        import docker
        import testcontainers  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed: pip install 'eos-kafka[containers]'") from error
    try:
        client = docker.from_env(timeout=_ANSWER_TIMEOUT_S)
        client.ping()
        client.api.timeout = _WORK_TIMEOUT_S
    except (docker.errors.DockerException, OSError) as error:
        raise Unavailable("no container engine answers") from error
    return client


def image_for(version: str = DEFAULT_VERSION) -> str:
    """Return the image of this Kafka version.

    It is KAFKA_IMAGE, with this version as its tag if its tag is a version; else the image that `make image` builds.
    """
    repository, _, tag = os.environ.get("KAFKA_IMAGE", f"{LOCAL_IMAGES}:{version}").rpartition(":")
    if re.fullmatch(r"\d+\.\d+\.\d+", tag):
        return f"{repository}:{version}"
    return f"{repository}:{tag}" if repository else tag


def require_image(client: Any, image: str) -> None:
    """Raise Unavailable for an image that is missing here and in every registry."""
    import docker

    try:
        client.images.get(image)
    except docker.errors.ImageNotFound as error:
        if image.startswith(f"{LOCAL_IMAGES}:"):
            version = image.rpartition(":")[2]
            raise Unavailable(f"the image {image} is not built: make image VERSIONS={version}") from error


class ContainerCluster(Cluster):
    """Runs a cluster of 1, or of 3 and more containers.

    `config`: broker properties that override the default ones. `image`: replaces `image_for(version)`.
    """

    backend = "container"

    def __init__(
        self,
        nodes: int = 3,
        version: str = DEFAULT_VERSION,
        config: Mapping[str, object] | None = None,
        image: str | None = None,
    ) -> None:
        super().__init__()
        if nodes < 1 or nodes == 2:
            raise ConfigurationError(f"a cluster of containers has 1, or 3 and more nodes, not {nodes}")
        parse_version(version)
        self.size, self.version, self.image = nodes, version, image or image_for(version)
        self.name = f"eos-{secrets.token_hex(4)}"
        self._config = dict(config or {})
        self._ports: list[int] = []
        self._containers: list[DockerContainer] = []
        self._client: Any = None
        self._cleanup = ExitStack()

    def __enter__(self) -> ContainerCluster:
        self._client = engine()
        # Disable Ryuk, because its separate image needs a registry.
        os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"
        from testcontainers.core.network import Network

        require_image(self._client, self.image)
        with ExitStack() as cleanup:
            cleanup.callback(self._client.close)
            remove_leftovers(self._client)
            self._watcher = Watcher(self.name)
            cleanup.callback(self._watcher.close)
            network = Network(docker_network_kw={"labels": self._labels()})
            network.name = self.name
            cleanup.enter_context(network)
            self._ports = free_ports(self.size)
            cluster_id = secrets.token_urlsafe(16).replace("-", "A")
            for i in range(self.size):
                container = self._container(i, cluster_id, network)
                # Register the removal before the start, so that a container that does not start is removed too.
                cleanup.callback(container.stop)
                self._containers.append(container)
                container.start()
            self.wait_ready(range(self.size))
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if copies := os.environ.get("EOS_KEEP_LOGS"):
            self.save_logs(Path(copies) / self.name)
        self._cleanup.close()

    def _container(self, i: int, cluster_id: str, network: Any) -> DockerContainer:
        from testcontainers.core.container import DockerContainer

        container = DockerContainer(self.image, env=self._environment(i, cluster_id), name=f"{self.name}-{i}")
        container.with_network(network).with_network_aliases(_alias(i))
        container.with_kwargs(labels=self._labels(), hostname=_alias(i))
        # Bind the port on the loopback address only. testcontainers' own method binds it on every address of the
        # machine.
        container.ports[f"{self._ports[i]}/tcp"] = (HOST, self._ports[i])  # type: ignore[assignment]
        return container

    def _labels(self) -> dict[str, str]:
        return {OWNER_LABEL: owner(), CLUSTER_LABEL: self.name}

    def _environment(self, i: int, cluster_id: str) -> dict[str, str]:
        external = self._ports[i]
        properties = server_properties(
            i,
            [NodePorts(port, _CONTROLLER_PORT) for port in self._ports],
            Path("/var/lib/kafka/data"),
            str(self.version),
            {
                "controller.quorum.voters": ",".join(f"{n}@{_alias(n)}:{_CONTROLLER_PORT}" for n in range(self.size)),
                "listeners": f"INTERNAL://:{_INTERNAL_PORT},CONTROLLER://:{_CONTROLLER_PORT},EXTERNAL://:{external}",
                "advertised.listeners": f"INTERNAL://{_alias(i)}:{_INTERNAL_PORT},EXTERNAL://{HOST}:{external}",
                "listener.security.protocol.map": "INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT,EXTERNAL:PLAINTEXT",
                "inter.broker.listener.name": "INTERNAL",
                **self._config,
            },
        )
        return {_variable(name): value for name, value in properties.items()} | {
            "CLUSTER_ID": cluster_id,
            "KAFKA_HEAP_OPTS": f"-Xms256m -Xmx{heap_for(self.size)}",
            # Do not use the C2 compiler: the nodes live for minutes, and C2 took a third of their processor time on 2
            # cores without ever paying off.
            "KAFKA_JVM_PERFORMANCE_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            # A restarted node may have another address in the network under its old name.
            "KAFKA_OPTS": "-Dsun.net.inetaddr.ttl=1 -Dsun.net.inetaddr.negative.ttl=0",
        }

    def server(self, i: int) -> str:
        return f"{HOST}:{self._ports[i]}"

    def log(self, i: int) -> str:
        return str(self._docker(i).logs().decode(errors="replace"))

    def _docker(self, i: int) -> Any:
        return self._containers[i].get_wrapped_container()

    def _exit_reason(self, i: int) -> str | None:
        container = self._docker(i)
        container.reload()
        if container.status in ("created", "running", "paused"):
            return None
        lines = self.log(i).splitlines()
        errors = [line for line in lines if " ERROR " in line or " FATAL " in line]
        return f"{container.status}: {(errors or lines or ['it wrote nothing'])[-1].strip()[:400]}"

    def _state(self, i: int) -> str:
        container = self._docker(i)
        container.reload()
        load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
        return f"its container is {container.status} since {container.attrs['State']['StartedAt']} (load {load})"

    def _kill(self, i: int) -> None:
        container = self._docker(i)
        if i in self._paused:
            # Unfreeze the process first, because a frozen one receives no signal. It may run for a moment before the
            # kill.
            container.unpause()
        container.kill("SIGKILL")
        container.wait(timeout=_WORK_TIMEOUT_S)

    def _stop(self, i: int, timeout_s: float) -> None:
        self._docker(i).stop(timeout=int(timeout_s))

    def _launch(self, nodes: list[int]) -> None:
        import docker

        for i in nodes:
            try:
                self._docker(i).start()
            except docker.errors.APIError as error:
                raise Unavailable(f"the engine could not start node {i}: {error.explanation or error}") from error

    def _pause(self, i: int) -> None:
        import docker

        deadline = time.monotonic() + _WORK_TIMEOUT_S
        while True:
            try:
                self._docker(i).pause()
                return
            except docker.errors.APIError as error:
                # runc fails while a thread is in a call that cannot be frozen yet, and resumes the other threads.
                if "unable to freeze" not in str(error) or time.monotonic() > deadline:
                    raise Unavailable(f"the engine could not pause node {i}: {error.explanation or error}") from error
                time.sleep(0.5)

    def _resume(self, i: int) -> None:
        self._docker(i).unpause()

    def _partition(self, i: int) -> None:
        self._iptables(i, "-I")

    def _heal(self, i: int) -> None:
        self._iptables(i, "-D")

    def _iptables(self, i: int, change: str) -> None:
        """Change the packet filter of the node's network from a privileged container that shares nothing else with it.

        This needs neither root on this machine nor tools in Kafka's image.
        """
        import docker

        try:
            self._client.containers.run(
                BASE_IMAGE,
                ["sh", "-c", " && ".join(f"iptables {change} {rule}" for rule in _DROP)],
                network_mode=f"container:{self._docker(i).id}",
                cap_add=["NET_ADMIN"],
                labels=self._labels(),
                remove=True,
            )
        except docker.errors.ImageNotFound as error:
            raise NotSupported(f"a network cut needs iptables from the image {BASE_IMAGE}: run `make image`") from error
        except docker.errors.ContainerError as error:
            raise NotSupported(f"iptables does not work in containers here: {str(error)[-200:]}") from error


def _alias(i: int) -> str:
    return f"kafka-{i}"


def _variable(name: str) -> str:
    """Return the variable of a property: KAFKA_MIN_INSYNC_REPLICAS; `_` becomes `__`, a hyphen becomes `___`."""
    return "KAFKA_" + name.replace("_", "__").replace("-", "___").replace(".", "_").upper()
