"""Whether all parameters of the next message are ready."""

import random

from outergrad.step.step import Readiness


def test_a_message_is_ready_when_nothing_of_it_is_waited_for():
    rng = random.Random(0)
    for _ in range(200):
        names = [str(k) for k in range(rng.randrange(1, 12))]
        waiting = {name for name in names if rng.random() < 0.8}
        messages = [frozenset(n for n in names if int(n) % 3 == k) for k in range(3)]
        readiness, k = Readiness(waiting), 0
        for name in rng.sample(names, len(names)):
            readiness.note(name)
            waiting.discard(name)
            while k < len(messages):
                assert readiness.are_ready(messages[k]) == messages[k].isdisjoint(waiting)
                if not messages[k].isdisjoint(waiting):
                    break
                k += 1
        assert k == len(messages)
