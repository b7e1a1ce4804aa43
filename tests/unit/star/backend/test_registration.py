"""What an address of the star means, and what torch is told."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from outergrad.star.backend import NAME, register, registration
from outergrad.star.backend.registration import star_at
from stars import NAMES, Proxy, hub, kit_of


def test_an_address_has_the_kit_and_settings_of_the_star():
    address = "star:///etc/my%20site.kit?hub=h:1&wait_s=2.5&when_lost=go+on&min_sites=3&reach_s=60&blind=1"
    star, reach_s = star_at(address)
    assert (star.kit, star.hub, star.wait_s) == ("/etc/my site.kit", "h:1", 2.5)
    assert (star.when_lost, star.min_sites) == ("go on", 3)
    assert (reach_s, star.blind, star_at("star://a.kit?blind=0")[0].blind) == (60.0, True, False)
    assert star_at("star://site.kit")[0].kit == "site.kit"
    assert star_at("star://folder/site.kit")[0].kit == "folder/site.kit"
    assert star_at("star://")[0].kit is None


@pytest.mark.parametrize(
    ("address", "told"),
    {
        "star://a.kit?kit=b": "'kit' is none of hub, wait_s, reach_s, blind",
        "star://a.kit?wait_s=soon": "wait_s='soon' is no number",
        "star://a.kit?wait_s=-1": "pass seconds above 0",
        "star://a.kit?reach_s=nan": "reach_s=nan: pass seconds above 0",
        "star://a.kit?blind=yes": "blind='yes': pass 0 or 1",
        "star://a.kit?when_lost=cry": "pass 'raise' or 'go on'",
    }.items(),
)
def test_what_an_address_cannot_say_is_refused(address, told):
    with pytest.raises(ValueError, match=told):
        star_at(address)


def test_an_address_without_a_kit_needs_that_of_the_command(monkeypatch):
    monkeypatch.delenv("OUTERGRAD_KIT", raising=False)
    with pytest.raises(ValueError, match="needs kit="):
        next(registration._meeting("star://"))


def test_another_rank_or_size_than_the_hubs_is_refused():
    with hub(1) as server:
        address = f"star://{kit_of(NAMES[0])}?hub=127.0.0.1:{server.port}"
        for about, told in (({"rank": 1}, "rank 0, not 1"), ({"world_size": 2}, "size 1, not 2")):
            with pytest.raises(ValueError, match=told):
                next(registration._meeting(address, **about))
        meeting = registration._meeting(address, rank=0, world_size=1)
        store, rank, size = next(meeting)
        store.set("a", "b")
        assert (rank, size) == (0, 1)
        registration._Begun.store().held.star.close()


def test_it_is_registered_once():
    register()
    register("by an entry point")
    assert dist.Backend.backend_list.count(NAME) == 1


def test_the_library_alone_registers_nothing():
    """PyTorch names groups of two backends otherwise where there is one of its own."""
    program = (
        "import outergrad as og, torch.distributed as dist; og.distribute, og.Star\n"
        "assert 'outergrad' not in dist.Backend.backend_list\n"
        "import outergrad.star.backend\n"
        "assert 'outergrad' in dist.Backend.backend_list\n"
        "import sys; assert 'grpc' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_another_store_than_the_hubs_is_refused_in_one_line(tmp_path):
    program = (
        "import outergrad.star.backend, torch.distributed as dist\n"
        f"dist.init_process_group('outergrad', init_method='file://{tmp_path}/s', rank=0, "
        "world_size=1)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ValueError: outergrad: pass init_method='star:///path/of/the/site.kit'" in found.stderr


@pytest.mark.parametrize(("reach_s", "is_back"), {1: False, 30: True}.items())
def test_the_hub_may_be_out_of_reach_for_as_long_as_an_address_says(reach_s, is_back):
    with hub(1, grace_s=30.0) as server:
        proxy = Proxy(server.port)
        address = f"star://{kit_of(NAMES[0])}?hub=127.0.0.1:{proxy.port}&reach_s={reach_s}"
        store, *_ = next(meeting := registration._meeting(address))
        proxy.is_up = False
        proxy.cut()
        time.sleep(3.0)
        proxy.is_up = True
        if is_back:
            store.set("a", "b")
        else:
            with pytest.raises(dist.DistStoreError, match="for 1 s"):
                store.set("a", "b")
        registration._Begun.store().held.star.close()
        meeting.close()
        proxy.close()
