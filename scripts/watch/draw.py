"""Draws "Who owned it when?" of a run that was recorded, and writes it as text.

write(run, folder) makes picture.svg, page.html (the picture with hints, and the text) and
trace.txt."""

import bisect
import html
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, f"{HERE}/../book")
import style  # noqa: E402
from model import (NAMES, READ, RECV, REMOTE, SEND, WRITE, credits_in, plural,  # noqa: E402
                   size, span, told, words)

LABEL, PLOT, RIGHT = 196, 944, 24
WIDTH = LABEL + PLOT + RIGHT
LANE, THIN, SPACE, GAP = 24, 12, 7, 124
MOST_LANES = 12       # of a region; all other places share one
MOST_PROCESSES = 4    # that are drawn; the others are named
MOST_ARROWS = 400     # then only messages, and the first WRITEs
style.ROLES.update({"touch": ("green", "green"), "lent": ("amber", "pale-amber"),
                    "bad": ("red", "pale-red"), "ink": ("page", "page")})
OWNERS = {"mine": ("good", "mine: I may touch it"), "one": ("good", ""), "flight": ("data", "in flight: hands off"),
          "lent": ("lent", "lent: the others may"), "touch": ("touch", "the program uses it"),
          "bad": ("bad", "wrong")}


def ms(run, t):
    return f"{(t - run.t0) / 1e6:.3f} ms"


# ---- What was found ----

def outcome(run):
    if run.wrongs:
        return plural(sum(1 + w.more for w in run.wrongs), "violation")
    if run.notes:
        return f"no certain violation, {plural(sum(1 + w.more for w in run.notes), 'thing')} to look at"
    return "no violation seen"


def finding(run, w):
    more = f" (and {w.more} more like this)" if w.more else ""
    return f"{w.p.name}, {ms(run, w.t)}: {w.text}{more}. {w.rule} (chapter {w.chapter})."


def unseen(run):
    """What this run could not show."""
    lost = sum(p.lost for p in run.ps)
    if lost:
        yield f"{lost} records had no room: WATCH_MB=N makes more of it"
    for p in run.ps:
        if not run.wrongs and (p.status or not p.ended):
            how = f"with status {p.status}" if p.ended else "by a signal, or hasn't ended"
            yield f"what {p.name} would have done next: it ended {how}"
    posted = sum(p.unseen for p in run.ps)
    if posted:
        yield f"{plural(posted, 'operation')} posted by calls that the recorder does not know"
    if any(r.device for p in run.ps for r in p.regions):
        yield "memory of a GPU is not looked at"
    yield "what the program itself reads or writes in memory that it has lent"
    yield ("what goes wrong only when completions come in another order than in this run: "
           "BEHIND=build/strict.so has another one (by hand: "
           "LD_PRELOAD=build/watch.so:build/strict.so)")


def summary(run):
    """A few lines for the terminal."""
    lines = [f"WRONG: {finding(run, w)}" for w in run.wrongs]
    lines += [f"look:  {finding(run, w)}" for w in run.notes]
    count = sum(len(p.ops) for p in run.ps)
    lines.append(f"{outcome(run)[0].upper()}{outcome(run)[1:]} in {plural(count, 'operation')} of "
                 f"{plural(len(run.ps), 'process')}.")
    return lines + [f"Not seen: {what}." for what in unseen(run)]


# ---- The trace ----

def events(run):
    """All that has happened: when, to whom, in words."""
    for p in run.ps:
        for ep in p.eps.values():
            yield ep.t0, p, f"opens endpoint {ep.number}"
            if ep.t1:
                left = f", with {plural(ep.open, 'operation')} in flight" if ep.open else ""
                yield ep.t1, p, f"endpoint {ep.number} is closed{left}"
        for r in p.regions:
            shared = r.access & REMOTE
            who = f", which others may READ or WRITE, key {r.key}" if shared else ""
            yield r.t0, p, f"registers {size(r.size)} as region {r.id}{who}"
            if r.t1:
                yield r.t1, p, f"region {r.id} is closed"
        for op in p.ops.values():
            yield from op_events(run, p, op)
        for n in p.notices:
            by = f" ({n.op.name()} of {n.op.p.name})" if n.op else ""
            yield n.t, p, f"number {n.data} has arrived{by}"
        for room in p.rooms:
            yield room.t, p, f"-FI_EAGAIN: no room for a {NAMES[room.what]}; it is tried again"
        for t in p.touches:
            if t.region:
                at = f"region {t.region.id} + {t.addr - t.region.addr}"
                yield t.t0, p, (f"{'pread into' if t.into else 'pwrite of'} {at}: {size(t.size)}, "
                                f"{span(t.t1 - t.t0)}")
        yield from waits(run, p)
    for w in run.wrongs:
        yield w.t + 1, w.p, f"*** WRONG: {w.text} (chapter {w.chapter})"
    for w in run.notes:
        yield w.t + 1, w.p, f"*** look: {w.text} (chapter {w.chapter})"


def waits(run, p):
    """When a sender of 9_file has read a chunk into a slot, and has no credit for it: the
    last WRITE from there has used that up, and none has come since."""
    came = [(op.t1, slot) for op in p.ops.values() if op.what == RECV and op.t1 and not op.error
            for slot in credits_in(run, op)]
    for region in p.regions:
        reads = [t for t in region.touches if t.into]
        chunk = max((t.size for t in reads), default=0)
        for t in reads if came else []:
            slot = (t.addr - region.addr) // chunk
            posted = max((op.t0 for op in p.ops.values() if op.what == WRITE and op.t0 < t.t0 and
                          op.addr == region.addr + slot * chunk), default=None)
            back = min((at for at, free in came if free == slot and at > (posted or 0)),
                       default=None)
            if posted and back and back > t.t1:
                yield t.t1, p, f"slot {slot}: no credit, waits {span(back - t.t1)}"


def op_events(run, p, op):
    at = f" to {op.target.p.name}, endpoint {op.target.number}" if op.target else ""
    if op.there:
        way = "from" if op.what == READ else "to"
        at = f" {way} {op.target.p.name}, region {op.there.id} + {op.offset}"
    number = f", number {op.imm}" if op.imm is not None else ""
    says = f": {words(run, op)}" if op.what == SEND else ""
    room = f"up to {size(op.size)}" if op.what == RECV else size(op.size)
    name = f"{op.name()}{' (inject)' if op.inject else ''}"
    yield op.t0, p, f"{name}, {room}{at}{number}{says}   [{op.id}]"
    if op.t1 is None or op.inject:
        return
    if op.what == RECV and not op.error:
        by = f" from {op.match.p.name}" if op.match else ""
        yield op.t1, p, f"RECV completed: {size(op.length)}{by}: {words(run, op)}   [{op.id}]"
    else:
        how = f"failed: {op.error}" if op.error else "completed"
        yield op.t1, p, f"{op.name()} {how} after {span(op.t1 - op.t0)}   [{op.id}]"


def trace(run):
    """All that has happened, a line each."""
    width = max(len(p.name) for p in run.ps)
    return [f"{ms(run, t):>15}  {p.name:{width}}  {text}"
            for t, p, text in sorted(events(run), key=lambda event: event[0])]


def shortened(lines):
    """Of lines that differ in their numbers only, the first ones: for a terminal."""
    seen, left, kept = {}, 0, []
    for line in lines:
        shape = re.sub(r"[0-9.]+( [mµ]?s)?", "0", line)
        seen[shape] = seen.get(shape, 0) + 1
        if seen[shape] <= 3 or "***" in line:
            if left:
                kept.append(f"{'':15}  … {plural(left, 'line')} more like these")
            left = 0
            kept.append(line)
        else:
            left += 1
    return kept + [f"{'':15}  … {plural(left, 'line')} more like these"] * (left > 0)


# ---- Time ----

class Axis:
    """Where a time is: to scale, but what is too close is drawn apart, and waiting is cut."""
    def __init__(self, times):
        self.times = sorted({*times})
        gaps = [b - a for a, b in zip(self.times, self.times[1:])] or [1]
        low, high = min(9.0, 0.6 * PLOT / len(gaps)), max(46.0, 1.6 * PLOT / len(gaps))
        if len(gaps) >= 150:  # to scale, but for the pauses
            low, high = 0.0, 24.0
        self.scale = self.fit(gaps, low, high)
        self.at, self.cuts, x = [LABEL + 4.0], [], LABEL + 4.0
        for gap in gaps:
            step = min(max(gap * self.scale, low), high)
            if gap * self.scale > high * 1.01:
                self.cuts.append((x, x + step, gap))
            x += step
            self.at.append(x)

    @staticmethod
    def fit(gaps, low, high):
        """The scale at which they are as wide as there is room."""
        less, more = 0.0, 1e3
        for _ in range(60):
            scale = (less + more) / 2
            if sum(min(max(gap * scale, low), high) for gap in gaps) > PLOT - 14:
                more = scale
            else:
                less = scale
        return less

    def __call__(self, t):
        i = bisect.bisect_right(self.times, t) - 1
        if i < 0:
            return self.at[0]
        if i >= len(self.times) - 1:
            return self.at[-1]
        a, b = self.times[i], self.times[i + 1]
        return self.at[i] + (self.at[i + 1] - self.at[i]) * (t - a) / (b - a)


# ---- Lanes ----

class Lane:
    """A buffer, a place in a region, or many of these: who owned it when."""
    def __init__(self, p, name, end, note="", region=None, thin=False):
        self.p, self.name, self.note, self.region, self.thin = p, name, note, region, thin
        self.end, self.y = end, 0
        self.height = THIN if thin else LANE
        self.pieces = []     # (from, to, owner, words)
        self.ops, self.there = [], []  # of this process here, of others here
        self.marks, self.shared = [], False

    def add(self, t0, t1, owner, content):
        if t1 > t0:
            self.pieces.append((t0, t1, owner, content))


def lanes_of(run, p):
    """The lanes of a process: those of messages, and those of what is READ or written."""
    own, shared = [], []
    for ep in p.eps.values():
        own += recv_lanes(run, p, ep)
    own += send_lanes(run, p)
    for region in p.regions:
        if region.twin is region:
            shared += region_lanes(run, p, region)
    return own, shared


def recv_lanes(run, p, ep):
    recvs = {}
    for op in p.ops.values():
        if op.what == RECV and op.ep is ep:
            recvs.setdefault(op.addr, []).append(op)
    if not recvs:
        return []
    used = {at: ops for at, ops in recvs.items() if any(op.t1 and not op.error for op in ops)}
    end, note = ep.t1 or p.end, f"endpoint {ep.number}"
    begin = min(op.t0 for ops in recvs.values() for op in ops)
    if len(used) > 3:
        lane = Lane(p, plural(len(recvs), "RECV"), end, note)
        lane.add(begin, end, "flight", f"{len(recvs)} RECVs in flight")
        lane.ops = [op for ops in recvs.values() for op in ops]
        for op, after in ((op, after) for ops in used.values()
                          for op, after in zip(ops, [*ops[1:], None]) if op.t1):
            lane.add(op.t1, after.t0 if after else end, "one", words(run, op))
        return [lane]
    lanes = [message_lane(run, p, f"a RECV of {size(ops[0].size)}", note, ops)
             for ops in used.values()]
    rest = len(recvs) - len(used)
    if rest:
        lane = Lane(p, f"{rest} {'more ' if used else ''}RECV{'s' * (rest > 1)}", end, thin=True)
        lane.add(begin, end, "flight", "no message comes")
        lanes.append(lane)
    return lanes


def send_lanes(run, p):
    sends = {}
    for op in p.ops.values():
        if op.what == SEND and not op.inject:
            sends.setdefault(op.addr, []).append(op)
    return [message_lane(run, p, "a buffer for SENDs", "", ops)
            for ops in sorted(sends.values(), key=lambda ops: ops[0].t0)[:MOST_LANES]]


def message_lane(run, p, name, note, ops):
    region = ops[0].region
    note = note or (f"region {region.id}" if region else "")
    begin = region.t0 if region and region.t0 <= ops[0].t0 else ops[0].t0
    end = region.t1 if region and region.t1 else p.end
    lane = Lane(p, name, end, note, region)
    lane.ops = sorted(ops, key=lambda op: op.t0)
    lane.add(begin, lane.ops[0].t0, "mine", "mine")
    for op, after in zip(lane.ops, [*lane.ops[1:], None]):
        lane.add(op.t0, op.end, "bad" if op.wrong else "flight",
                 f"SEND: {words(run, op)}" if op.what == SEND else "RECV: in flight")
        lane.add(op.end, after.t0 if after else end, "mine",
                 f"{words(run, op)} is mine" if op.what == RECV and op.t1 else "mine")
    lane.marks = [w.t for w in run.wrongs if w.p is p and w.op in lane.ops]
    return lane


def region_lanes(run, p, region):
    """One for each place that was READ or written. Of many, those with something wrong, and
    the first ones; one lane for the others."""
    local = [op for op in region.ops if op.what >= WRITE]
    places = sorted({(op.addr - region.addr, op.size) for op in local} |
                    {(op.offset, op.size) for op in region.remote})
    merged = []
    for at, length in places:  # what overlaps shares a lane: the last chunk is shorter
        if merged and at < sum(merged[-1]):
            merged[-1] = merged[-1][0], max(sum(merged[-1]), at + length) - merged[-1][0]
        else:
            merged.append((at, length))
    starts = [at for at, _ in merged]

    def number(at):
        return bisect.bisect_right(starts, at) - 1
    wrong = {number(op.addr - region.addr) for op in local if op.wrong} | {
        number(op.offset) for op in region.remote if op.wrong}
    kept = sorted(sorted(range(len(merged)), key=lambda i: i not in wrong)[:MOST_LANES])
    lanes = [place_lane(run, p, region, *merged[i], local) for i in kept]
    if len(kept) < len(merged):
        lane = Lane(p, f"{len(merged) - len(kept)} more places", region.t1 or p.end, thin=True)
        lane.shared = True
        lane.ops = [op for op in local if number(op.addr - region.addr) not in kept]
        lane.there = [op for op in region.remote if number(op.offset) not in kept]
        for op in lane.ops + lane.there:
            lane.add(op.t0, op.end, "flight", op.name())
        lanes.append(lane)
    return lanes


def lent_at(region):
    """When the owner has sent the key to somebody: not later than it was used."""
    key = region.key.to_bytes(8, "little")
    used = min((op.t0 for op in region.remote), default=None)
    sent = min((op.t0 for op in region.p.ops.values() if op.what == SEND and
                op.t0 >= region.t0 and region.key > 0xffff and key in op.text), default=None)
    return min((t for t in (sent, used) if t), default=region.t0)


def lent_again(run, p, op, back, touches):
    """When a place was lent again, for this operation: with the first message to its peer
    after the place was the owner's again, and after the program has touched it."""
    done = max((t.t1 for t in touches if back <= t.t0 < op.t0), default=back)
    sent = run.between.get((p, op.p), [])
    at = bisect.bisect_left(sent, done, key=lambda e: e.t0)
    return sent[at].t0 if at < len(sent) and sent[at].t1 <= op.t0 else back


def place_lane(run, p, region, at, length, local):
    name = f"all {size(length)}" if (at, length) == (0, region.size) else \
        f"{size(length)}, part {at // length}" if at % length == 0 else \
        f"{size(length)} at {at}"
    where = f"region {region.id} + {size(at) if at else 0}"
    end = region.t1 or p.end
    lane = Lane(p, name, end, where, region)

    def overlaps(begin, count):
        return begin < at + length and at < begin + count

    lane.ops = sorted((op for op in local if overlaps(op.addr - region.addr, op.size)),
                      key=lambda op: op.t0)
    lane.there = [op for op in region.remote if overlaps(op.offset, op.size)]
    touches = [t for t in region.touches if overlaps(t.addr - region.addr, t.size)]
    if region.access & REMOTE and not lane.ops:
        lend(run, lane, touches)
    else:
        since = region.t0
        for op in lane.ops:
            lane.add(since, op.t0, "mine", "mine")
            number = f", number {op.imm}" if op.imm is not None else ""
            lane.add(op.t0, op.end, "bad" if op.wrong else "flight", op.name() + number)
            since = max(since, op.end)
        lane.add(since, end, "mine", "mine")
        for op in lane.there:
            lane.add(op.t0, op.end, "flight", op.name())
    for t in touches:
        lane.add(t.t0, t.t1, "touch", "pread" if t.into else "pwrite")
    lane.marks = [w.t for w in run.wrongs if w.region is region and w.p is p and
                  any(overlaps(op.offset, op.size) for op in w.ops or [w.op] if op)]
    return lane


def lend(run, lane, touches):
    """The pieces of a place that others READ or WRITE: mine, lent, in flight, mine."""
    region, p, end = lane.region, lane.p, lane.end
    at = min(lent_at(region), min((op.t0 for op in lane.there), default=end))
    lane.add(region.t0, at, "mine", "mine")
    writes = [op for op in lane.there if op.what == WRITE]
    for op in lane.there:
        if op.what != WRITE:  # nobody tells the owner of a READ
            lane.add(op.t0, op.end, "flight", op.name())
    for i, op in enumerate(writes):
        lane.add(at, op.t0, "lent", "lent")
        back = told(run, op)
        after = writes[i + 1].t0 if i + 1 < len(writes) else end
        number = f": number {op.imm}" if op.imm is not None else ": in flight"
        at = max(min(back or end, after), op.t0)
        lane.add(op.t0, at, "bad" if op.wrong else "flight", f"#{op.count}{number}")
        if back and back < after:
            again = lent_again(run, p, writes[i + 1], back, touches) if i + 1 < len(writes) else end
            lane.add(back, again, "mine", "mine")
            at = again
    lane.add(at, end, "lent", "lent")


# ---- The picture ----

def text(x, y, content, kind=""):
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{html.escape(content)}</text>'


def tiny(x, y, content):
    return (f'<text class="faint end" style="font-size: 11px" x="{x:.1f}" y="{y:.1f}">'
            f"{html.escape(content)}</text>")


def box(x, y, width, height, owner, hint=""):
    hint = f"<title>{html.escape(hint)}</title>" if hint else ""
    return (f'<rect class="{OWNERS[owner][0]}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" '
            f'height="{height:.1f}">{hint}</rect>')


def wide(content):
    """About how wide a small text is."""
    return sum(4.7 if c in " !'\",.:;/|()[]Iijltfr-" else 9.9 if c.isupper() or c in "mw+…→" else
               7.8 for c in content)


def draw_lane(run, lane, axis):
    yield text(LABEL - 10, lane.y + 11, lane.name, "small end")
    if not lane.thin:
        yield tiny(LABEL - 10, lane.y + 23, lane.note)
    last = {}  # of each owner, where the last box began

    def is_seen(t0, t1, key):
        """Of boxes that are narrower than a pixel, one is seen for each."""
        x = axis(t0)
        if axis(t1) - x < 1 and x - last.get(key, -1) < 1:
            return False
        last[key] = x
        return True

    for t0, t1, owner, content in lane.pieces:
        if not is_seen(t0, t1, owner):
            continue
        y = lane.y + 5 * (owner == "touch")
        height = lane.height - 10 if owner == "touch" else lane.height // (1 + (owner == "one"))
        yield box(axis(t0), y, axis(t1) - axis(t0), height, owner,
                  f"{OWNERS[owner][1].split(':')[0]}: {content}, {span(t1 - t0)}, from {ms(run, t0)}")
    for t in lane.marks:
        x = min(axis(t), WIDTH - RIGHT - 8)
        yield ('<path class="wrong" style="marker-end: none; stroke-width: 3" '
               f'd="M{x - 7:.1f},{lane.y + 5}l14,14m-14,0l14,-14"/>')


def lane_words(lane, axis):
    """What is in the pieces of a lane, where there is room."""
    if lane.thin:
        return
    covered = [(a, b) for a, b, o, *_ in lane.pieces if o == "touch"]
    for t0, t1, owner, content in lane.pieces:
        x = axis(t0)  # up to a mark, if there is one
        width = min([axis(t1), *(axis(t) - 8 for t in lane.marks if t0 < t < t1)]) - x
        if owner == "one" or owner == "mine" and any(a < t1 and t0 < b for a, b in covered):
            continue
        timed = f"{content}, {span(t1 - t0)}" if owner == "flight" and content[:4] != "RECV" else ""
        short = content.split(" is ")[-1].split(":")[0].split(",")[0]
        for shown in (timed, content, short, short.split(" ")[-1]):
            if shown and wide(shown) + 8 <= width:
                yield text(x + width / 2, lane.y + lane.height / 2 + 5, shown,
                           "small middle" + (" ink" if owner == "touch" else ""))
                break


def depth(p, axis, y, height):
    """How many operations that others don't take part in are in flight."""
    steps = sorted(step for op in p.ops.values() if op.what >= WRITE
                   for step in ((op.t0, 1), (op.end, -1)))
    most = count = 0
    columns = {}
    for t, step in steps:
        count += step
        most = max(most, count)
        x = int(axis(t))
        columns[x] = max(columns.get(x, (0, 0))[0], count), count
    d, now = f"M{LABEL},{y + height}", 0
    for x, (top, after) in sorted(columns.items()):
        d += "L" + "V".join(f"{x},{y + height - height * n / most:.1f}" if i == 0 else
                            f"{y + height - height * n / most:.1f}"
                            for i, n in enumerate((now, top, after)))
        now = after
    yield (f'<path fill="{style.PALETTE["pale-blue"]}" stroke="{style.PALETTE["blue"]}" '
           f'stroke-width="1.2" d="{d}V{y + height}Z"/>')
    yield text(LABEL - 10, y + 14, f"in flight: {most} at most", "small end")
    if p.rooms:
        yield text(LABEL - 10, y + 30, f"no room: {len(p.rooms)} ×", "small end")
    for r in p.rooms:
        yield ('<path class="reply" style="marker-end: none; stroke-width: 1; stroke-dasharray: '
               f'none" d="M{axis(r.t):.1f},{y - 5}v5"/>')


def arrows(run, lanes, axis):
    """SENDs, and WRITEs, from their post to their arrival."""
    place = {op: lane for lane in lanes for op in lane.ops}
    there = {op: lane for lane in lanes for op in lane.there}
    many = len(place) > MOST_ARROWS
    seen = {}
    for op, here in place.items():
        if op.what == RECV or many and op.what != SEND and op.imm is None:
            continue
        kind = op.p, words(run, op).split(" ")[0] if op.what == SEND else op.what
        seen[kind] = seen.get(kind, 0) + 1
        if many and seen[kind] > 2 and not op.wrong:
            continue
        if op.what == SEND:
            target, arrive = place.get(op.match), op.match and op.match.t1
        else:
            target, arrive = there.get(op), op.notice or op.t1
        down = target.y > here.y if target else here.p is run.ps[0]
        y0 = here.y + here.height if down else here.y
        kind = "wrong" if op.wrong else "call" if op.what == SEND else "data"
        x0 = axis(op.t0)
        if target is None or arrive is None:
            if op.what == SEND and op.target and op.target.p in {lane.p for lane in lanes}:
                y1 = y0 + (26 if down else -26)
                yield op, ('<path class="wrong" style="marker-end: none" d="M'
                           f'{x0:.1f},{y0}L{x0 + 18:.1f},{y1}m-6,-6l12,12m0,-12l-12,12"/>'), x0
            continue
        y1 = target.y if down else target.y + target.height
        ends = (x0, y1, axis(arrive), y0) if op.what == READ else (x0, y0, axis(arrive), y1)
        yield op, (f'<path class="{kind}" style="opacity: 0.55; stroke-width: 1.4" d="M{ends[0]:.1f},'
                   f'{ends[1]:.1f}L{ends[2]:.1f},{ends[3]:.1f}"/>'), (ends[0] + ends[2]) / 2


def legend(run, lanes):
    x = 12
    used = {piece[2] for lane in lanes for piece in lane.pieces} | {"mine", "flight"}
    if run.wrongs:
        used.add("bad")
    for owner, (_, content) in OWNERS.items():
        if owner in used and content:
            yield box(x, 38, 18, 18, owner)
            yield text(x + 25, 52, content, "small")
            x += 52 + wide(content)


def axis_lines(axis, y):
    """The time: to scale between the cuts."""
    yield f'<path class="call" style="stroke-width: 1.5" d="M{LABEL},{y}H{WIDTH - 8}"/>'
    free = LABEL
    for x0, x1, length in axis.cuts:
        middle = (x0 + x1) / 2
        yield ('<path class="call" style="marker-end: none; stroke-width: 1.5" '
               f'd="M{middle - 6:.1f},{y + 6}l5,-12m4,0l-5,12"/>')
        content = span(length)
        if middle - wide(content) / 2 > free:
            yield text(middle, y + 22, content, "small middle")
            free = middle + wide(content) / 2 + 6


def times_of(p):
    return [t for t in (
        *(n.t for n in p.notices),
        *(t for op in p.ops.values() for t in (op.t0, op.t1, op.match.t1 if op.match else None)),
        *(t for touch in p.touches for t in (touch.t0, touch.t1)),
        *(r.t0 for r in p.regions if r.access & REMOTE),
        *(ep.t1 for ep in p.eps.values())) if t]


def draw(run, title):
    run.between = {}  # the messages and numbers from one process to another, in their order
    for e in sorted(run.edges, key=lambda e: e.t0):
        run.between.setdefault((e.a, e.b), []).append(e)
    # Servers above clients and peers, of which those with something wrong come first.
    ps = [p for p in run.ps if p.role == "server"][:2]
    ps += sorted((p for p in run.ps if p.role != "server"),
                 key=lambda p: p not in {w.p for w in run.wrongs})
    ps, others = ps[:MOST_PROCESSES], len(run.ps) - len(ps[:MOST_PROCESSES])
    times = [t for p in ps for t in times_of(p)]
    axis = Axis(times or [run.t0, run.end])
    y, lines, lanes, heads, gaps = 74, [], [], [], []
    for number, p in enumerate(ps):
        own, shared = lanes_of(run, p)
        # What is shared is next to the gap: below a server, above a client.
        order = own + shared if p.role == "server" else shared + own
        if number > 0 and (ps[number - 1].role != p.role or number == 1):
            gaps.append(y)
            y += GAP
        heads.append((p, y + 14))
        y += 26
        graph = any(lane.shared and lane.ops for lane in order)
        for lane in order:
            lane.y = y
            y += lane.height + SPACE
        if graph:
            lines += depth(p, axis, y + 4, 34)
            y += 48
        lanes += order
        y += 6
    lines += legend(run, lanes)
    lines.append(text(12, 22, title, "bold"))
    lines[:0] = [f'<rect fill="{style.PALETTE["host"]}" x="{x0:.1f}" y="72" '
                 f'width="{x1 - x0:.1f}" height="{y - 72}"/>' for x0, x1, _ in axis.cuts]
    for lane in lanes:
        lines += draw_lane(run, lane, axis)
    taken, labels = [[] for _ in range(5)], []  # of rows in the first gap
    for op, line, x in sorted(arrows(run, lanes, axis), key=lambda a: a[2]):
        lines.append(line)
        content = words(run, op) if op.what == SEND else \
            f"number {op.imm}" if op.imm is not None else ""
        half = wide(content) / 2 + 4
        x = min(max(x, LABEL + half), WIDTH - half)
        row = next((row for row in range(5) if content and all(
            abs(x - at) > half + other for at, other in taken[row])), None)
        if row is not None and gaps:
            taken[row].append((x, half))
            at = gaps[0] + 8 + 21 * row
            labels += [f'<rect fill="{style.PALETTE["page"]}" opacity="0.85" x="{x - half:.1f}" '
                       f'y="{at}" width="{2 * half:.1f}" height="18"/>',
                       text(x, at + 14, content, "small middle" + " wrong" * op.wrong)]
    for lane in lanes:
        lines += lane_words(lane, axis)
    for p, at in heads:
        lines.append(f'<text class="bold" x="12" y="{at}">{p.name} <tspan font-weight="normal">'
                     f"{html.escape(p.program)}, process {p.pid}</tspan></text>")
    lines += labels + list(axis_lines(axis, y))
    y += 34
    if others:
        lines.append(text(12, y + 14, f"{plural(others, 'process')} more in trace.txt", "small"))
        y += 19
    # Of boxes that are a pixel wide, round corners would be all that is seen.
    return style.svg(html.escape(title), WIDTH, f"{y + 10:.0f}", ("call", "data", "wrong"), lines,
                     "  rect[class] { rx: 3px; stroke-width: 1 }\n")


def page(picture, lines, found, title):
    lines, found = (html.escape("\n".join(all_lines)) for all_lines in (lines, found))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark }}
svg {{ max-width: 100%; min-width: 1000px; height: auto }}
pre {{ white-space: pre-wrap }}
</style>
{picture}
<pre>{found}</pre>
<pre>{lines}</pre>
</html>
"""


def write(run, folder):
    """Writes all files, and returns the lines of the text."""
    title = f"Who owned it when? {run.ps[0].program}: {outcome(run)}"
    lines, picture = trace(run), draw(run, title)
    shown = shortened(lines) if len(lines) > 2000 else lines
    for name, content in (("picture.svg", picture), ("trace.txt", "\n".join(lines) + "\n"),
                          ("page.html", page(picture, shown, summary(run), title))):
        with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
            file.write(content)
    return lines
