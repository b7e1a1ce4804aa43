"""A transport that is no part of outergrad: sites are threads, a hub passes on what they send."""

import threading
from collections import Counter

from outergrad.comm.by_messages import MessageComm
from outergrad.comm.cost import StarCost
from outergrad.core.errors import ExchangeError, Failure


class Hub:
    def __init__(self, sites):
        self.sites, self.changed = sites, threading.Condition()
        self.kept, self.gone, self.texts = {}, set(), [None] * sites

    def put(self, messages):
        with self.changed:
            self.kept.update(messages)
            self.changed.notify_all()

    def take(self, sender, address, timeout_s):
        with self.changed:
            self.changed.wait_for(lambda: address in self.kept or sender in self.gone, timeout_s)
            if address in self.kept:
                return self.kept.pop(address)
            kind = Failure.CLOSED if sender in self.gone else Failure.TIMEOUT
            raise ExchangeError(kind.value, (sender,), kind=kind)


class QueueTransport:
    settings = frozenset({"timeout"})  # of the arguments of og.distribute, what it goes by

    def __init__(self, hub, rank):
        self.hub, self.rank, self.sent = hub, rank, Counter()

    def open(self, device, timeout=None):
        patience_s = 30.0 if timeout is None else timeout.total_seconds()
        comm = QueueComm(self.rank, StarCost(self.hub.sites), device, patience_s)
        comm.key, comm.hub = self, self.hub
        return comm


class QueueComm(MessageComm):
    def send(self, parts, lane):
        self.key.sent[lane] += 1
        sites, here, place = range(self.world_size), self.rank, (lane, self.key.sent[lane])
        self.hub.put({(here, site, *place): parts[site].clone() for site in sites})
        return lambda: [self.hub.take(s, (s, here, *place), self.patience_s) for s in sites]

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
