"""A cable between two network interfaces that is long, lossy and can be cut: netns_wire.py [options] LEFT RIGHT.

Every frame of one end leaves the other a fixed delay later, or never, with a given probability from a seeded generator.
It needs no help of the kernel's traffic control, only packet sockets, so real TCP on both sides resends what is lost.

SIGUSR1 arms a cut: the cable is cut for a time, both ways, in the middle of the next hand-off from LEFT to RIGHT, which
is when a key or value of the middle layer is set. SIGTERM ends it; what happened is a line of JSON each on standard output.

With --plain it sets up an end instead: its kernel then computes checksums itself and sends no frame longer than the link,
as a frame that leaves through a packet socket must be.
"""

import argparse
import fcntl
import heapq
import json
import random
import re
import select
import signal
import socket
import struct
import time

# linux/sockios.h, linux/ethtool.h, linux/if_packet.h
SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM, ETHTOOL_SSG, ETHTOOL_STSO, ETHTOOL_SGSO = 0x17, 0x19, 0x1F, 0x24
ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP, PACKET_IGNORE_OUTGOING = 1, 23
PACKET_MR_PROMISC = 1
SO_RCVBUFFORCE = 33

LONGEST = 65_536


def say(**event):
    print(json.dumps(event), flush=True)


def plain(name):
    """Switches off what the kernel leaves to a network card."""
    import array

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        # Segmentation first: it needs checksums.
        for command in (ETHTOOL_SGSO, ETHTOOL_STSO, ETHTOOL_STXCSUM):
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP16x", name.encode(), value.buffer_info()[0])
            try:
                fcntl.ioctl(control, SIOCETHTOOL, request)
            except OSError as error:
                raise SystemExit(f"{name}: the offload {command:#x} cannot be switched off: {error}") from error


def opened(name):
    """All frames that come in at an interface."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 32 << 20)
    end.bind((name, 0))
    promiscuous = struct.pack("iHH8s", socket.if_nametoindex(name), PACKET_MR_PROMISC, 0, b"")
    end.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, promiscuous)
    end.setblocking(False)
    return end


class Wire:
    def __init__(self, options):
        self.left, self.right = opened(options.left), opened(options.right)
        self.delay, self.loss, self.cut_for = options.delay / 1000, options.loss / 100, options.cut_for
        self.draw = random.Random(options.seed).random
        # ggml-rpc: SET_TENSOR (6), a length of 8 bytes, 228 bytes of the tensor, its name.
        self.middle = re.compile(rb"\x06.{236}cache_[kv]_l%d[^0-9]" % options.layer, re.DOTALL)
        self.under_way = []
        self.armed, self.mended_at = False, None
        self.n = {"carried": 0, "lost": 0, "cut": 0}

    def arm(self, *_):
        self.armed = True

    def take(self, end, other, now):
        """All that has come in at one end."""
        for _ in range(256):
            try:
                frame = end.recv(LONGEST)
            except BlockingIOError:
                return
            if self.armed and end is self.left and self.middle.search(frame):
                self.armed, self.mended_at = False, now + self.cut_for
                # What is between the ends is lost with the cable.
                self.n["cut"] += len(self.under_way)
                self.under_way.clear()
                say(event="cut", seconds=self.cut_for)
            if self.mended_at is not None:
                self.n["cut"] += 1
            elif self.draw() < self.loss:
                self.n["lost"] += 1
            else:
                heapq.heappush(self.under_way, (now + self.delay, self.n["carried"], other, frame))
                self.n["carried"] += 1

    def run(self):
        say(event="up")
        while True:
            now = time.monotonic()
            if self.mended_at is not None and now >= self.mended_at:
                self.mended_at = None
                say(event="mended")
            while self.under_way and self.under_way[0][0] <= now:
                _, _, other, frame = heapq.heappop(self.under_way)
                try:
                    other.send(frame)
                except OSError:
                    # Its queue is full: lost, as on any cable.
                    self.n["lost"] += 1
            times = [at for at in [self.mended_at, *(row[0] for row in self.under_way[:1])] if at is not None]
            ready, _, _ = select.select([self.left, self.right], [], [], max(0, min(times) - now) if times else 1)
            now = time.monotonic()
            for end in ready:
                self.take(end, self.right if end is self.left else self.left, now)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", metavar="INTERFACE")
    parser.add_argument("--delay", type=float, default=5, help="ms each way")
    parser.add_argument("--loss", type=float, default=0.5, help="per cent of the frames")
    parser.add_argument("--cut-for", type=float, default=5, help="seconds")
    parser.add_argument("--layer", type=int, default=3, help="the layer in whose hand-off a cut happens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("left", nargs="?")
    parser.add_argument("right", nargs="?")
    options = parser.parse_args()
    if options.plain:
        return plain(options.plain)
    wire = Wire(options)

    def end(*_):
        say(event="end", frames=wire.n)
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, wire.arm)
    wire.run()


main()
