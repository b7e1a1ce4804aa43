"""A step over og.Star, beside one through an NVFLARE job: milliseconds, by the delay of the line.

    python benchmarks/star_nvflare.py --sites 2 --kilobytes 200 --delays 0,40

All processes are on this machine. NVFLARE runs in its POC mode, with certificates: a server,
clients, and their job processes. Sites reach the hub, and clients the server, through a process
that hands on what it is given half of the delay later; the rate is that of this machine. The table
shows the median over steps at the slowest site.

    python benchmarks/star_nvflare.py --where --kilobytes 1 --kinds gather --delays 0

tells where a message through NVFLARE is for how long, by stamps that `nvflare_hops` sets in its
processes: milliseconds from the tunnel of one job process to that of the other, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from multiprocessing import Process
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from tempfile import TemporaryDirectory
from threading import Thread

import torch
from star import KINDS, _listed, _median, _stepping

import outergrad as og

PORT, DIALLED = 8002, 8012
"""Of NVFLARE's server in its POC mode, and of what delays it."""
_WAIT_S = 150
_STAMPS = 8
"""Of a message that came."""


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sites", type=int, default=2)
    parser.add_argument("--kilobytes", type=float, default=200.0)
    parser.add_argument("--delays", type=_listed, default=["0", "40"])
    parser.add_argument("--kinds", type=_listed, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--where", action="store_true", help="where messages are, hop by hop")
    parser.add_argument("--site", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """Prints the table."""
    ways = {"NVFLARE": through_nvflare}
    if not options.where:
        ways = {"og.Star": over_star, **ways}
    print("| there and back, ms | transport |", " | ".join(options.kinds), "|")
    print("|---" * (2 + len(options.kinds)) + "|")
    for delay in options.delays:
        line = Process(target=hand_on, args=(float(delay) / 2e3,), daemon=True)
        line.start()
        for name, run in ways.items():
            with TemporaryDirectory() as folder:
                run(options, Path(folder))
                medians = _slowest(options, Path(folder))
                print(f"| {delay} | {name} |", " | ".join(f"{m:.1f}" for m in medians), "|")
                if options.where:
                    tell_hops(Path(folder))
        line.terminate()
        line.join()


def hand_on(delay_s: float) -> None:
    """What comes to one port goes to the other, and back, so much later."""
    with socket.create_server(("127.0.0.1", DIALLED)) as listener:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", PORT))
            except OSError:  # nobody listens yet
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                queue = SimpleQueue[tuple[float, bytes]]()
                Thread(target=_read, args=(one, queue, delay_s)).start()
                Thread(target=_write, args=(other, queue)).start()


def _read(one: socket.socket, queue: SimpleQueue[tuple[float, bytes]], delay_s: float) -> None:
    data = b"-"
    while data:
        try:
            data = one.recv(1 << 18)
        except OSError:
            data = b""
        queue.put((time.monotonic() + delay_s, data))


def _write(other: socket.socket, queue: SimpleQueue[tuple[float, bytes]]) -> None:
    data = b"-"
    while data:
        due, data = queue.get()
        time.sleep(max(0.0, due - time.monotonic()))
        with suppress(OSError):
            other.sendall(data) if data else other.shutdown(socket.SHUT_RDWR)


def _slowest(options: argparse.Namespace, folder: Path) -> list[float]:
    files = list(folder.glob("site-*.json"))
    if len(files) < options.sites:
        raise SystemExit(f"only {len(files)} sites came to the end")
    told = [json.loads(file.read_text()) for file in files]
    return [1e3 * max(one[kind] for one in told) for kind in options.kinds]


def _site_command(options: argparse.Namespace, folder: Path, site: str) -> list[str]:
    own = [f"--kilobytes={options.kilobytes}", f"--steps={options.steps}"]
    return [*own, f"--kinds={','.join(options.kinds)}", f"--site={site}", f"--out={folder}"]


def over_star(options: argparse.Namespace, folder: Path) -> None:
    """A hub, and sites."""
    outergrad = [sys.executable, "-m", "outergrad", "hub"]
    at = ["--folder", str(folder / "hub")]
    address = ["--address", f"127.0.0.1:{DIALLED}"]
    subprocess.run([*outergrad, "init", str(folder / "hub"), *address], check=True, stdout=-3)
    names = [f"site-{rank + 1}" for rank in range(options.sites)]
    for name in names:
        kit = ["--out", str(folder / f"{name}.kit")]
        subprocess.run([*outergrad, "invite", name, *at, *kit], check=True, stdout=-3)
    listen = ["--listen", f"127.0.0.1:{PORT}", "--grace", "5"]
    hub = subprocess.Popen([*outergrad, "serve", *at, *listen], stderr=-3)
    sites = []
    for name in names:
        command = [sys.executable, __file__, *_site_command(options, folder, name)]
        environment = {**os.environ, "OUTERGRAD_KIT": str(folder / f"{name}.kit")}
        sites.append(subprocess.Popen(command, env=environment))
    for site in sites:
        site.wait(_WAIT_S)
    hub.terminate()
    hub.wait()


def through_nvflare(options: argparse.Namespace, folder: Path) -> None:
    """A job of NVFLARE's POC mode."""
    os.environ["HOME"] = str(folder)
    os.environ["NVFLARE_POC_WORKSPACE"] = str(folder / "poc")
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if options.where:
        (folder / "hops").mkdir()
        os.environ["OUTERGRAD_HOPS"] = str(folder / "hops")
        path = [str(Path(__file__).parent / "nvflare_hops"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    script = folder / "train.py"
    here = str(Path(__file__).parent)
    run = f"runpy.run_path({__file__!r}, run_name='__main__')"
    script.write_text(f"import runpy, sys\nsys.path.insert(0, {here!r})\n{run}\n")
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-c", _JOB, str(script), str(options.sites)]
        command.append(" ".join(_site_command(options, folder, "%site%")))
        subprocess.run(command, check=True, stdout=log, stderr=log)


_JOB = f"""
import sys
from pathlib import Path
from nvflare.recipe import poc_env
from outergrad.integrations.nvflare import star_job

script, sites, args = sys.argv[1:]
prepare = poc_env.prepare_poc_provision


def prepare_delayed(*args, **settings):
    prepare(*args, **settings)
    for file in Path(settings["workspace"]).rglob("fed_client.json"):
        file.write_text(file.read_text().replace("localhost:{PORT}", "localhost:{DIALLED}"))


poc_env.prepare_poc_provision = prepare_delayed
env = poc_env.PocEnv(num_clients=int(sites))
job = env.deploy(star_job("star", script, args, min_clients=int(sites)))
try:
    env.get_job_result(job, timeout={_WAIT_S})
finally:
    env.stop()
"""


HOPS = {
    "is sent": ("sends", "sent"),
    "travels to the server's process": ("sent", "server read"),
    "waits for a thread": ("server read", "server begun"),
    "is sent on": ("server begun", "server done"),
    "travels to the other job process": ("server done", "read"),
    "waits for a thread ": ("read", "begun"),
    "is taken": ("begun", "done"),
    "in all": ("sends", "done"),
}
"""Between which stamps of a message each is."""


def tell_hops(folder: Path) -> None:
    """Prints the median of each hop, to the hub and from it."""
    found: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for file in (folder / "hops").iterdir():
        for cell, about, times in map(json.loads, file.read_text().splitlines()):
            at = "server " if cell == "server" else ""
            found[tuple(about)] |= {f"{at}{name}": time for name, time in times.items()}
    kept = [(about, times) for about, times in found.items() if len(times) == _STAMPS]
    to_hub = [times for (sender, *_), times in kept if not sender.startswith("server")]
    from_hub = [times for (sender, *_), times in kept if sender.startswith("server")]
    print(
        f"\n| a message | to the hub ({len(to_hub)}) | from it ({len(from_hub)}) |\n|---|---|---|"
    )
    for hop, (first, last) in HOPS.items():
        ways = [[1e3 * (one[last] - one[first]) for one in way] for way in (to_hub, from_hub)]
        print(f"| {hop.strip()} |", " | ".join(f"{median(way):.2f}" for way in ways), "|")


def run_site(options: argparse.Namespace) -> None:
    """Writes the median of each kind."""
    torch.set_num_threads(1)
    way, found = og.Star(), {}
    for kind in options.kinds:
        with _stepping(kind, way, options) as step:
            found[kind] = _median(step, options.steps)
    (options.out / f"{options.site}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    options = parse()
    if options.site:
        run_site(options)
    else:
        measure(options)
