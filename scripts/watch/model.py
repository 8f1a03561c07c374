"""Reads what recorder.cpp has written, puts all processes of a run together, and finds
what was wrong.

Memory in flight, or lent, is somebody's again when that somebody *knows*: by a completion
of its own, or by a message or number that was posted after the completion. So ownership
follows what happened before what, as in a race detector, and not what the clock says. A
number that was posted too early is found in a run in which all the bytes came in time.

Each process keeps, for each other, up to which of its moments it knows of it (a vector
clock). Whatever is looked up is sorted, so a run of n operations takes n log n.
"""

import bisect
import collections
import glob
import heapq
import mmap
import os
import re
import struct

(TEXT, PROCESS, REGION, REGION_CLOSED, ENDPOINT, ENDPOINT_CLOSED, PEER, POST, NO_ROOM,
 COMPLETE, NOTICE, CHANGED, FLYING, FREED, UNSEEN, TOUCH, END) = range(1, 18)
SEND, RECV, WRITE, READ, ATOMIC = range(1, 6)
NAMES = {0: "?", SEND: "SEND", RECV: "RECV", WRITE: "WRITE", READ: "READ",
         ATOMIC: "atomic operation"}
RECORD = struct.Struct("<QBBHI8Q")
REMOTE = 1 << 12 | 1 << 13  # FI_REMOTE_READ, FI_REMOTE_WRITE
HAS_IMM, INJECTED = 0x80, 0x20
TRUNCATED = 265  # FI_ETRUNC
SUM = 2  # FI_SUM


class Thing:
    """A region, an endpoint, a process: whatever is known about it."""
    def __init__(self, **known):
        self.__dict__.update(known)


class Op:
    """An operation, from its post (t0) to its completion (t1, or None)."""
    __slots__ = ("p", "id", "what", "ep", "addr", "size", "peer", "t0", "t1", "raddr", "rkey",
                 "data", "imm", "sum", "atomic", "length", "error", "errno", "text", "got",
                 "notice", "match", "target", "there", "offset", "region", "inject", "wrong",
                 "end", "count", "expected")

    def __init__(self, p, number, bits, ep, time, v, text):
        self.p, self.id, self.what, self.ep, self.t0 = p, number, bits & 15, ep, time
        self.addr, self.size, self.peer, self.raddr, self.rkey, self.data, self.sum, self.atomic = v
        self.imm = self.data if bits & HAS_IMM else None
        self.inject = bool(bits & INJECTED)
        self.t1 = time if self.inject else None  # its buffer is free again at once
        self.expected = self.sum if self.what == ATOMIC else None
        self.text, self.error, self.errno, self.length, self.got = text, "", 0, None, 0
        self.notice = self.match = self.target = self.there = self.region = None
        self.offset, self.count, self.wrong, self.end = 0, 0, False, time

    def name(self):
        return f"{NAMES[self.what]} #{self.count}" if self.what >= WRITE else NAMES[self.what]

    def makes(self):
        """What it has made of a word, or None if that isn't known."""
        if self.what != ATOMIC or self.error or not self.t1:
            return None
        if self.atomic == SUM:
            return self.got + self.data & (1 << 64) - 1
        return self.data if self.got == self.expected else self.got  # compare and swap


# ---- Reading ----

def records(path):
    with open(path, "rb") as file:
        # Of a process that was killed, the file is as large as it may be.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    at, size = 0, RECORD.size
    while at + size <= len(data):
        time, kind, what, thing, number, *v = RECORD.unpack_from(data, at)
        at += size
        if kind == 0:  # a process that was killed has left the rest empty
            return
        text = b""
        if at + size <= len(data) and data[at + 8] == TEXT:
            length, = struct.unpack_from("<I", data, at + 12)
            text = data[at + size:at + size + length]
            at += size + (length + size - 1) // size * size
        yield time, kind, what, thing, number, v, text


def read_process(path):
    p = Thing(path=path, regions=[], ops={}, eps={}, peers={}, notices=[], touches=[], found=[],
              rooms=[], unseen=0, lost=0, end=0, pid=0, arguments=[], start=None, ended=False,
              status=0)
    for time, kind, what, thing, number, v, text in records(path):
        p.start = p.start or time
        p.end = max(p.end, time)
        if kind == PROCESS:
            p.pid, p.arguments = number, text.decode(errors="replace").rstrip("\0").split("\0")
        elif kind == REGION:
            p.regions.append(Thing(p=p, id=number, t0=time, t1=None, addr=v[0], size=v[1],
                                   access=v[2], key=v[3], device=bool(v[4]), ops=[], remote=[],
                                   touches=[]))
        elif kind == REGION_CLOSED:
            p.regions[number - 1].t1 = time  # in the order of their numbers
        elif kind == ENDPOINT:
            p.eps[thing] = Thing(p=p, id=thing, cq=v[0], av=v[1], name=text.rstrip(b"\0"),
                                 t0=time, t1=None, open=0, number=len(p.eps) + 1)
        elif kind == ENDPOINT_CLOSED:
            if thing in p.eps:
                p.eps[thing].t1, p.eps[thing].open = time, v[0]
        elif kind == PEER:
            p.peers.setdefault((thing, v[0]), []).append((time, text.rstrip(b"\0")))
        elif kind == POST:
            p.ops[number] = Op(p, number, what, p.eps[thing], time, v, text)
        elif kind == COMPLETE:
            complete(p.ops[number], time, v, text)
        elif kind == NOTICE:
            p.notices.append(Thing(p=p, t=time, cq=thing, data=v[0], op=None))
        elif kind == NO_ROOM:
            p.rooms.append(Thing(t=time, what=what))
        elif kind in (CHANGED, FLYING, FREED):
            p.found.append(Thing(p=p, t=time, kind=kind, id=number, v=v))
        elif kind == TOUCH:
            p.touches.append(Thing(p=p, t0=time, t1=v[2], addr=v[0], size=v[1], into=bool(what),
                                   region=None))
        elif kind == END:
            p.lost, p.status, p.ended = v[0], v[1], True
        elif kind == UNSEEN:
            p.unseen += 1
    return p


def complete(op, time, v, text):
    op.t1, op.length, op.errno, op.got = time, v[0], v[2], v[3]
    if v[2]:
        op.error = text.decode(errors="replace") or f"error {v[2]}"
    elif op.what == RECV:
        op.text = text


def load(folder, source=""):
    """The run whose records are in this folder; None if there are none. The names of its
    messages are those of the program's source."""
    ps = [read_process(path) for path in glob.glob(f"{folder}/*.watch")]
    ps = sorted((p for p in ps if p.start), key=lambda p: p.start)
    if not ps:
        return None
    run = Thing(ps=ps, t0=ps[0].start, end=max(p.end for p in ps), edges=[], wrongs=[], notes=[],
                names=message_names(source))
    for number, p in enumerate(ps):
        p.index = number
        p.program = os.path.basename(p.arguments[0]) if p.arguments else "?"
        place_ops(p)
    find_targets(run)
    name_processes(run)
    match_messages(run)
    match_writes(run)
    match_words(run)
    run.clocks = Clocks(run)
    Finder(run).find()
    return run


def place_ops(p):
    """Which region each buffer is in."""
    places, twins = Places(), {}
    for region in p.regions:
        places.at(region.addr, max(region.size, 1)).append(region)
        # The same memory may be registered several times: with each adapter of 11_rails.
        twin = twins.get((region.addr, region.size))
        region.twin = twin if twin and (twin.t1 is None or twin.t1 > region.t0) else region
        twins[region.addr, region.size] = region.twin
    count = 0
    for op in p.ops.values():
        op.end = op.t1 or op.ep.t1 or p.end
        if op.what >= WRITE:
            count += 1
            op.count = count
        for region in places.overlapping(op.addr, 1):
            if region.t0 <= op.t0 and (region.t1 is None or region.t1 >= op.t0):
                op.region = region.twin
        if op.region:
            op.region.ops.append(op)
    for touch in p.touches:
        for region in places.overlapping(touch.addr, touch.size):
            if region.t0 <= touch.t0 and (region.t1 is None or region.t1 >= touch.t0):
                touch.region = region.twin
        if touch.region:
            touch.region.touches.append(touch)


class Places:
    """Things that have a place, to be found by it. Those of like size are kept together, so
    that one large one does not make all small ones be looked at."""
    def __init__(self):
        self.classes = {}

    def at(self, at, size):
        """The list of what has exactly this place."""
        places, things = self.classes.setdefault(size.bit_length(), ([], {}))
        if (at, size) not in things:
            bisect.insort(places, (at, size))
        return things.setdefault((at, size), [])

    def overlapping(self, at, size):
        for bits, (places, things) in self.classes.items():
            for i in range(bisect.bisect_left(places, (at - (1 << bits), 0)), len(places)):
                if places[i][0] >= at + size:
                    break
                if at < sum(places[i]):
                    yield from things[places[i]]


# ---- Who speaks to whom ----

def find_targets(run):
    by_name = {}
    for p in run.ps:
        for ep in p.eps.values():
            by_name.setdefault(ep.name, []).append(ep)
    for eps in by_name.values():
        eps.sort(key=lambda ep: ep.t0)
    for p in run.ps:
        for op in p.ops.values():
            if op.what == RECV:
                continue
            known = p.peers.get((op.ep.av, op.peer), [])
            name = next((name for time, name in reversed(known) if time <= op.t0), None)
            # A port may have had several owners.
            op.target = next((ep for ep in reversed(by_name.get(name, [])) if ep.t0 <= op.t0), None)


def name_processes(run):
    """Who speaks first is a client. Peers have a rank: PROGRAM FOLDER RANK N."""
    for p in run.ps:
        first = min((op for op in p.ops.values() if op.what != RECV or op.t1 and not op.error),
                    key=lambda op: op.t1 if op.what == RECV else op.t0, default=None)
        p.role = "server" if first is None or first.what == RECV else "client"
        if re.match(r"(?![0-9a-f]{16})\S+ \d+ \d+\b", " ".join(p.arguments[1:])):
            p.role, p.name = "peer", f"rank {p.arguments[2]}"
    for role in "server", "client":
        alike = [p for p in run.ps if p.role == role]
        for number, p in enumerate(alike, 1):
            p.name = role if len(alike) == 1 else f"{role} {number}"


def message_names(source):
    """What the program's own source calls its messages: kConnect = 1 is CONNECT."""
    if not source or not os.path.exists(source):
        return {}
    with open(source, encoding="utf-8") as file:
        enum = re.search(r"enum class AppMessageType.*?\{(.*?)\};", file.read(), re.S)
    return {int(number): re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
            for name, number in re.findall(r"\bk(\w+) = (\d+)", enum[1])} if enum else {}


def credits_in(run, op):
    """The number of the slot in a CREDIT of 9_file; none in other messages."""
    if len(op.text) < 12 or run.names.get(struct.unpack_from("<I", op.text)[0]) != "CREDIT":
        return ()
    return struct.unpack_from("<Q", op.text, 4)


def words(run, op):
    """What a message says: its name, or its text."""
    if run.names and len(op.text) >= 4:
        name = run.names.get(struct.unpack_from("<I", op.text)[0], "?")
        return " ".join([name, *map(str, credits_in(run, op)[:5])])
    count = op.length if op.what == RECV else op.size
    text = op.text[:40].rstrip(b"\0").decode(errors="replace")
    if text and text.isprintable():
        return f'"{text[:24]}{"…" if count and count > 24 else ""}"'
    return f"{count} bytes"


def match_messages(run):
    """Which RECV has taken which SEND: the first of those with the same text, or else, if it
    was changed on its way, with the same length."""
    sends = {}
    for p in run.ps:
        for op in p.ops.values():
            if op.what == SEND and op.target and not (op.error and not op.length):
                sends.setdefault(op.target, []).append(op)
    for p in run.ps:
        for op in p.ops.values():
            if op.what == RECV and op.t1 and not op.error:
                sends.setdefault(op.ep, []).append(op)
    for ops in sends.values():
        recvs = sorted((op for op in ops if op.what == RECV), key=lambda op: op.t1)
        for same in True, False:
            queues = {}
            for op in sorted((op for op in ops if op.what == SEND and not op.match),
                             key=lambda op: op.t0):
                queues.setdefault((op.size, op.sum if same else 0), collections.deque()).append(op)
            for recv in recvs:
                queue = queues.get((recv.length, recv.got if same else 0))
                if recv.match or not queue or queue[0].t0 > recv.t1:
                    continue
                send = queue.popleft()
                send.match, recv.match = recv, send
                run.edges.append(Thing(a=send.p, b=recv.p, t0=send.t0, t1=recv.t1, op=send))


def match_writes(run):
    """Where WRITEs, READs and atomic operations go, and whose number is whose."""
    waiting = {}
    for p in run.ps:
        p.keys = {}
        for region in p.regions:
            if region.access & REMOTE:
                p.keys.setdefault(region.key, []).append(region)
    for p in run.ps:
        for op in p.ops.values():
            if op.what < WRITE or op.target is None:
                continue
            fitting = [r for r in op.target.p.keys.get(op.rkey, []) if r.t0 <= op.t0]
            # Of several with this key, one that is open.
            region = next((r for r in reversed(fitting) if r.t1 is None or r.t1 >= op.t0),
                          fitting[-1] if fitting else None)
            if region:
                inside = region.addr <= op.raddr < region.addr + region.size
                op.there, op.offset = region, op.raddr - region.addr if inside else op.raddr
                region.twin.remote.append(op)
            if op.imm is not None:
                waiting.setdefault((op.target.p, op.target.cq, op.imm), []).append(op)
    for ops in waiting.values():
        ops.sort(key=lambda op: op.t0)
    waiting = {key: collections.deque(ops) for key, ops in waiting.items()}
    for p in run.ps:
        for region in p.regions:
            region.remote.sort(key=lambda op: op.t0)
        for notice in p.notices:
            queue = waiting.get((p, notice.cq, notice.data))
            if queue and queue[0].t0 <= notice.t:
                op = notice.op = queue.popleft()
                op.notice = notice.t
                run.edges.append(Thing(a=op.p, b=p, t0=op.t0, t1=notice.t, op=op))


def match_words(run):
    """Who reads a word that an atomic operation of another has made knows what that one
    knew: so do locks and tickets work."""
    for p in run.ps:
        for region in p.regions:
            makers, ops = {}, []
            for op in region.remote:
                made = op.makes()
                if made is not None:
                    makers.setdefault((op.offset, made), []).append((op.t0, op.id, op))
                if made is not None or op.what == READ and op.size == 8:
                    ops.append(op)
            for list_ in makers.values():
                list_.sort(key=lambda item: item[:2])
            for op in ops:
                if not op.t1 or op.error:
                    continue
                list_ = makers.get((op.offset, op.got), [])
                for t0, _, maker in reversed(list_[:bisect.bisect_left(list_, (op.t1,))]):
                    if maker is not op and maker.p is not op.p:
                        run.edges.append(Thing(a=maker.p, b=op.p, t0=t0, t1=op.t1, op=None))
                        break
                    if maker is not op:
                        break


class Clocks:
    """What each process knows of each other."""
    def __init__(self, run):
        count = len(run.ps)
        self.history = [([], []) for _ in run.ps]  # times, and clocks
        self.known = {}
        events = []
        for edge in run.edges:
            events.append((edge.t0, 0, edge))
            events.append((max(edge.t1, edge.t0 + 1), 1, edge))
        events.sort(key=lambda event: event[:2])
        now = [[0] * count for _ in run.ps]
        for time, arrives, edge in events:
            a, b = edge.a.index, edge.b.index
            if not arrives:
                edge.clock = tuple(now[a])
                continue
            new = list(map(max, now[b], edge.clock))
            new[a] = max(new[a], edge.t0)
            if new != now[b]:
                now[b] = new
                self.history[b][0].append(time)
                self.history[b][1].append(tuple(new))

    def knows(self, b, time, a):
        """Up to which of its moments the process b knows of a, at this time."""
        if a is b:
            return time
        times, clocks = self.history[b.index]
        at = bisect.bisect_right(times, time)
        return clocks[at - 1][a.index] if at else 0

    def before(self, a, t0, b, t1):
        """Whether what a did at t0 happened before what b did at t1."""
        return t0 <= self.knows(b, t1, a)

    def when(self, a, t0, b):
        """When b first knows what a did at t0, or None."""
        if a is b:
            return t0
        if (a, b) not in self.known:
            self.known[a, b] = [clock[a.index] for clock in self.history[b.index][1]]
        at = bisect.bisect_left(self.known[a, b], t0)
        return self.history[b.index][0][at] if at < len(self.known[a, b]) else None


def told(run, op):
    """When the owner of the memory there knows that an operation is over: by its own number,
    by what was posted after its completion, or because its endpoint is closed."""
    when = [op.notice, op.target.t1 if op.target else None]
    if op.t1:
        when.append(run.clocks.when(op.p, op.t1, op.there.p))
    return min((t for t in when if t), default=None)


# ---- What is wrong ----

RULES = {
    "flight": ("From its post to its completion, a buffer belongs to libfabric", "4"),
    "number": ("A number says nothing of WRITEs that had not completed when it was posted", "6"),
    "told": ("The owner knows that a WRITE is there by what was posted after its completion", "6"),
    "lent": ("Memory that you have lent is not yours until you have been told", "6"),
    "credit": ("A slot is lent again only when what was in it has been saved", "9"),
    "writers": ("Two WRITEs in flight to one place may overtake each other", "7"),
    "words": ("A word that atomic operations change is changed by nothing else", "10"),
    "region": ("A region, and its memory, outlive all that is in flight to or from them", "4"),
    "captured": ("What an operation's callback captures is in flight as well", "4"),
    "room": ("A message needs a RECV that waits for it, and is large enough", "4"),
    "failed": ("A failed operation has an owner who is told", "4"),
}


class Finder:
    def __init__(self, run):
        self.run = run
        self.said = {}
        self.waiting = {}  # of each endpoint, how many RECVs wait until its end
        for p in run.ps:
            for op in p.ops.values():
                if op.what == RECV and not op.t1:
                    self.waiting[op.ep] = self.waiting.get(op.ep, 0) + 1

    def wrong(self, p, t, rule, text, op=None, region=None, ops=(), sure=True, key=None):
        """Notes a violation, or something to look at. Of many alike, the first one."""
        for one in (*ops, *([op] if op is not None else [])):
            one.wrong = one.wrong or sure
        key = key and (p, sure, rule, key)
        if key in self.said:
            self.said[key].more += 1
            return
        found = Thing(p=p, t=t, rule=RULES[rule][0], chapter=RULES[rule][1], text=text, op=op,
                      region=region, ops=ops, more=0)
        if key:
            self.said[key] = found
        (self.run.wrongs if sure else self.run.notes).append(found)

    def find(self):
        run = self.run
        for p in run.ps:
            self.recorded(p)
            self.messages(p)
            self.completions(p)
            for region in p.regions:
                self.numbers(region)
                self.conflicts(region)
                self.touched(region)
                self.unsaved(region)
                self.untold(region)
        for found in run.wrongs, run.notes:
            found.sort(key=lambda w: w.t)

    def recorded(self, p):
        """What the recorder has seen while it happened."""
        for w in p.found:
            op, v = p.ops.get(w.id), w.v
            if w.kind == CHANGED and op:
                where = f"byte {v[0]}: {show(v[1])} became {show(v[2])}" if v[3] else \
                    f"in its {size(op.size)}"
                where = "behind its message, " * (op.what == RECV) + where
                self.wrong(p, w.t, "flight", f"the buffer of {label(self.run, op)} was changed "
                           f"between post and completion ({where})", op, key=("changed", op.what))
            elif w.kind == FLYING and op:
                what = {0: f"region {v[1]}, with the buffer of {label(self.run, op)}, was closed",
                        1: f"the buffer of {label(self.run, op)} was freed",
                        2: f"the record of {label(self.run, op)} (its context) was freed"}[v[0]]
                rule = {0: "region", 1: "flight", 2: "captured"}[v[0]]
                self.wrong(p, w.t, rule, f"{what} while it was in flight", op,
                           key=(v[0], op.what))
            elif w.kind == FREED:
                self.wrong(p, w.t, "region", f"memory was freed that is registered as region "
                           f"{w.id}", region=p.regions[w.id - 1], key="freed")

    def messages(self, p):
        """SENDs without a RECV, and RECVs that are too short."""
        run = self.run
        for op in p.ops.values():
            if op.what == RECV and op.errno == TRUNCATED:
                self.wrong(p, op.t1, "room", f"a message did not fit into a RECV of "
                           f"{size(op.size)}", op)
            if op.what != SEND or op.target is None:
                continue
            there = op.target.p
            if op.match and op.match.t0 > op.t0 + 1000:
                self.wrong(there, op.t0, "room", f"{words(run, op)} of {p.name} waited "
                           f"{span(op.match.t0 - op.t0)} for a RECV", op.match, sure=False,
                           key="late")
            elif not op.match and not op.error:
                if not self.waiting.get(op.target, 0) and op.t0 < (op.target.t1 or there.end):
                    self.wrong(there, op.t0, "room", f"there was no RECV for {words(run, op)} of "
                               f"{p.name}", op, sure=there.ended, key="none")

    def completions(self, p):
        for op in p.ops.values():
            if op.error and op.errno != TRUNCATED and op.ep.t1 != op.t1:
                self.wrong(p, op.t1, "failed", f"{label(self.run, op)} has failed: {op.error}",
                           op, sure=False, key=(op.what, op.error))

    def numbers(self, region):
        """A number that was posted while other WRITEs to the same memory were in flight."""
        flying = {}
        for op in region.remote:
            if op.what not in (WRITE, ATOMIC):
                continue
            heap = flying.setdefault(op.p, [])
            while heap and heap[0][0] <= op.t0:
                heapq.heappop(heap)
            if op.what == WRITE and op.imm is None:
                heapq.heappush(heap, (op.end, op.id, op))
                continue
            if not heap:
                continue
            were, these = ("were", "these") if len(heap) > 1 else ("was", "it")
            what = op.name() if op.imm is None else f"number {op.imm}"
            self.wrong(op.p if op.imm is None else region.p, op.notice or op.t0, "number",
                       f"{what} was posted while {plural(len(heap), 'WRITE')} to the same memory "
                       f"{were} in flight, and says nothing about {these}", region=region,
                       ops=[item[2] for item in heap], sure=op.imm is not None, key=op.what)

    def conflicts(self, region):
        """Operations of the same bytes without an order, one of which changes them."""
        run, places = self.run, Places()
        for op in region.remote:
            if op.error and not op.length:
                continue
            for old in places.overlapping(op.offset, op.size):
                if WRITE not in (old.what, op.what):
                    continue
                if old.t1 and run.clocks.before(old.p, old.t1, op.p, op.t0):
                    continue
                if not old.t1 and old.ep.t1 and old.ep.t1 <= op.t0:
                    continue  # it was given up: chapter 11 sends such a page again
                if op.t1 and old.p is not op.p and run.clocks.before(op.p, op.t1, old.p, old.t0):
                    continue
                same = old.sum == op.sum if old.sum else old.p is op.p and old.addr == op.addr
                if old.what == op.what and same and (old.offset, old.size) == (op.offset, op.size):
                    continue  # the same bytes, or the same buffer
                self.conflict(region, old, op)
            # Of each place, the last ones are kept: those that may still be in flight, and
            # one of each process and kind that is over.
            there, over = places.at(op.offset, op.size), {}
            for old in sorted((o for o in there if o.t1 and o.t1 <= op.t0), key=lambda o: o.t1):
                over[old.p, old.what] = old
            there[:] = [*over.values(), *[o for o in there if not o.t1 or o.t1 > op.t0][-8:], op]

    def conflict(self, region, old, op):
        kinds, mine = {old.what, op.what}, old.p is op.p
        read = READ in kinds
        state = "which had completed, but nobody had said so" if old.t1 and old.t1 <= op.t0 else \
            "which had not completed yet"
        self.wrong(op.p, op.t0, "words" if ATOMIC in kinds else "lent" if read else "writers",
                   f"{label(self.run, op)} goes where {label(self.run, old)}"
                   f"{'' if mine else ' of ' + old.p.name} goes, {size(op.size)} at "
                   f"{size(op.offset)} of region {region.id} of {region.p.name}, {state}"
                   + ": fine only if what was READ is checked afterwards" * (read and not mine),
                   # In a GPU, the bytes of two WRITEs may be the same.
                   op, region, ops=(old,), sure=mine if read else bool(old.sum or op.sum),
                   key="conflict")

    def touched(self, region):
        """Has the owner touched a place while a WRITE to it, or a READ of it, could come?"""
        run = self.run
        if not region.touches or not region.remote:
            return
        places = Places()
        for op in region.remote:
            if op.what != ATOMIC:
                places.at(op.offset, op.size).append(op)
        for touch in region.touches:
            for op in places.overlapping(touch.addr - region.addr, touch.size):
                if op.what == READ and not touch.into or op.error and not op.length:
                    continue
                done = told(run, op)
                if done and done <= touch.t0:
                    continue
                if run.clocks.before(touch.p, touch.t1, op.p, op.t0):
                    continue
                if op.t0 > touch.t1:
                    state = "which was posted later, although nothing sent since had lent it again"
                elif op.t1 and op.t1 <= touch.t0:
                    state = "which had completed, but nobody had said so"
                else:
                    state = "which had not completed yet"
                self.wrong(region.p, touch.t0, "lent", f"{how(touch)} of {size(touch.size)} at "
                           f"{size(touch.addr - region.addr)} of region {region.id}, where "
                           f"{label(run, op)} of {op.p.name} may be in flight, {state}", op, region,
                           key=("race", how(touch), op.what))

    def unsaved(self, region):
        """What was told with a number, and is overwritten before the owner has answered;
        or before a program that takes it with pwrite has done so."""
        saves = Places()
        for touch in region.touches:
            if not touch.into:
                saves.at(touch.addr - region.addr, touch.size).append(touch)
        last = {}
        for op in region.remote:
            if op.what != WRITE or op.error:
                continue
            before, last[op.offset] = last.get(op.offset), op
            if before and before.imm is not None and before.p is op.p and before.t1 and \
                    before.t1 <= op.t0 and before.sum != op.sum and before.notice and \
                    self.run.clocks.knows(op.p, op.t0, region.p) < before.notice:
                self.wrong(op.p, op.t0, "credit", f"{label(self.run, op)} goes over "
                           f"{label(self.run, before)}, at {size(op.offset)} of region "
                           f"{region.id} of {region.p.name}, which was told of that with number "
                           f"{before.imm}, and has said nothing since", op, region,
                           ops=(before,), key="over")
                continue
            if not saves.classes:
                continue
            # One that was saved before anybody had said that it was there is named for that.
            if before and not any(before.t0 <= touch.t0 < op.t0 for touch in
                                  saves.overlapping(op.offset, 1)):
                self.wrong(region.p, op.t0, "credit", f"{label(self.run, op)} came over the "
                           f"{size(before.size)} of {label(self.run, before)} at "
                           f"{size(op.offset)}, which the program had not saved yet", op, region,
                           ops=(before,), key="over")

    def untold(self, region):
        """A WRITE that had completed, and of which its owner has never been told."""
        run = self.run
        if any(p.lost or not p.ended for p in run.ps):
            return
        readers = Places()
        for op in region.remote:
            if op.what != WRITE and not op.error:
                readers.at(op.offset, op.size).append(op)
        # Where a conversation was broken off, there was nothing to tell.
        cut = {op.ep for op in region.remote if not op.t1 or op.error}
        never = [op for op in region.remote if op.what == WRITE and op.t1 and not op.error and
                 not op.wrong and not op.notice and op.ep not in cut and
                 not (op.target.t1 and op.target.t1 < op.t1) and
                 not any(run.clocks.when(op.p, op.t1, p) for p in run.ps if p is not op.p) and
                 not any(o.t0 >= op.t1 for o in readers.overlapping(op.offset, op.size))]
        for op in never:
            self.wrong(op.p, op.t1, "told", f"{label(run, op)} had completed, but nothing that was "
                       f"posted afterwards tells {region.p.name}, whose memory it is", op,
                       region, sure=False, key="untold")


def label(run, op):
    """What an operation is called in a sentence."""
    if op.what == SEND:
        return f"the SEND of {words(run, op)}"
    return f"a RECV of {size(op.size)}" if op.what == RECV else op.name()


def how(touch):
    return "pread" if touch.into else "pwrite"


def plural(count, name):
    return f"{count} {name}{'es' if name[-1] == 's' else 's'}" if count != 1 else f"1 {name}"


def show(byte):
    return f"'{chr(byte)}'" if 32 <= byte < 127 else str(byte)


def size(count):
    for unit, name in (1 << 20, "MiB"), (1 << 10, "KiB"):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return plural(count, "byte")


def span(ns):
    for unit, name in (1e9, "s"), (1e6, "ms"):
        if ns >= unit:
            return f"{ns / unit:.3g} {name}"
    return f"{max(ns, 0) / 1e3:.3g} µs"
