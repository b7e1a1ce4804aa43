"""A transport that is no part of outergrad: sites are threads, a hub passes on what they send."""

import threading
from collections import Counter
from types import SimpleNamespace

from outergrad.comm.cost import StarCost
from outergrad.core.errors import ExchangeError, Failure
from outergrad.core.transport import Comm


class Hub:
    def __init__(self, sites):
        self.sites, self.changed = sites, threading.Condition()
        self.kept, self.gone, self.texts = {}, set(), [None] * sites

    def put(self, messages):
        with self.changed:
            self.kept.update(messages)
            self.changed.notify_all()

    def take(self, address, timeout_s):
        sender, _, _, _ = address
        with self.changed:
            self.changed.wait_for(lambda: address in self.kept or sender in self.gone, timeout_s)
            if address in self.kept:
                return self.kept.pop(address)
            kind = Failure.CLOSED if sender in self.gone else Failure.TIMEOUT
            raise ExchangeError(kind.value, (sender,), kind=kind)


class QueueTransport:
    settings = frozenset({"timeout"})  # of the arguments of og.distribute, what it goes by

    def __init__(self, hub, rank):
        self.hub, self.rank, self.started = hub, rank, Counter()

    def open(self, device, timeout=None):
        return QueueComm(self, device, 30.0 if timeout is None else timeout.total_seconds())


class QueueComm(Comm):
    def __init__(self, transport, device, patience_s):
        self.key, self.device, self.patience_s = transport, device, patience_s
        self.rank, self.hub, self.world_size = transport.rank, transport.hub, transport.hub.sites
        self.cost, self.sent_bytes, self.received_bytes = StarCost(self.world_size), 0, 0

    def all_reduce(self, t):
        traffic = self.cost.all_reduce(t.nbytes)  # summed in the same order on every site
        return self._exchange([t] * self.world_size, traffic, lambda parts: t.copy_(sum(parts)))

    def all_gather(self, t, sizes, lane=0):
        others = (sum(sizes) - sizes[self.rank]) * t.itemsize
        traffic = self.cost.all_gather(t.nbytes, others)
        return self._exchange([t] * self.world_size, traffic, list, lane)

    def all_to_all(self, parts, sizes):
        own = sum(part.nbytes for part in parts) - parts[self.rank].nbytes
        others = (sum(sizes) - sizes[self.rank]) * parts[0].itemsize
        return self._exchange(parts, self.cost.all_to_all(own, others), list)

    def broadcast(self, t):
        none = self.cost.all_reduce(0)
        self._exchange([t] * self.world_size, none, lambda parts: t.copy_(parts[0])).wait()

    def _exchange(self, parts, traffic, then, lane=0):
        self.sent_bytes += traffic.sent
        self.received_bytes += traffic.received
        self.key.started[lane] += 1
        number, sites = self.key.started[lane], range(self.world_size)
        self.hub.put({(self.rank, site, lane, number): parts[site].clone() for site in sites})
        addresses = [(site, self.rank, lane, number) for site in sites]
        arrived = lambda: [self.hub.take(one, self.patience_s) for one in addresses]  # noqa: E731
        return SimpleNamespace(wait=lambda: then(arrived()))

    def give_up(self, text, final, enough, patience_s, session=0):
        with self.hub.changed:
            self.hub.texts[self.rank] = text
            self.close()
            if not self.hub.changed.wait_for(lambda: enough(self.hub.texts), patience_s):
                self.hub.texts[self.rank] = final
            return list(self.hub.texts)

    def close(self):
        with self.hub.changed:
            self.hub.gone.add(self.rank)
            self.hub.changed.notify_all()
