#!/usr/bin/env python3
"""Draws the figure "Who owns it now?" of each chapter with a program, chapters/N_owner.svg,
and gives every figure its style.
All have the same two lanes, mine above and theirs below. A lane's colour says who may
touch that memory, and four events change it: post, completion, notification, answer
(chapter 9's is a credit).

Usage: scripts/book/owner.py     (make figures)"""

import pathlib
import typing

import style

# Narrower than the other figures, and with no small texts, so that a telephone, on which
# it is made to fit, still shows it large enough to be read.
WIDTH = 520
LEFT, RIGHT = 12, WIDTH - 12
LANE, GAP, ROW = 40, 86, 20  # a lane's height, the space between two, a line of text

# An owner's class, and its words in the legend.
OWNERS = {"mine": ("good", "mine"), "flight": ("data", "in flight: hands off"),
          "theirs": ("second", "theirs"), "lent": ("idle", ""), "gone": ("idle", "")}


class Lane(typing.NamedTuple):
    of: str       # whose memory it is, and what for
    pieces: list  # (from, owner, words): who has it, from then until the next piece
    # (when, lines of text, class, how many lines away): bold is what changes the owner
    events: list

    def rows(self):
        """How many lines of text its events need."""
        return max(len(lines) + sum(further) for _, lines, _, *further in self.events)


class Figure(typing.NamedTuple):
    title: str  # what it shows is told where a chapter shows it
    mine: Lane
    theirs: Lane
    # (class, from, to): down, or up for a reply; "CLASS up" and "CLASS down" say which;
    # "CLASS lost" ends in a cross on its way
    arrows: list
    notes: list   # (when, line, words, class): between the lanes


FIGURES = {
    4: Figure(
        "Who owns it now? A SEND and a RECV",
        Lane("the client's, for a SEND",
             [(12, "mine", "mine"), (112, "flight", "in flight"), (412, "mine", "mine")],
             [(112, ["post"], "bold"), (412, ["completion"], "bold")]),
        Lane("the server's, for a RECV",
             [(12, "theirs", "theirs"), (72, "flight", "in flight"),
              (292, "theirs", "theirs"), (396, "flight", "in flight")],
             [(72, ["post"], "bold"), (292, ["completion"], "bold"),
              (396, ["post again"], "bold")]),
        [("data", 122, 246), ("reply", 256, 406)],
        [(164, 1, "the message", "end"), (356, 1, "delivered", "")]),
    5: Figure(
        "Who owns it now? A SEND to a client that dies",
        Lane("the server's, for a SEND",
             [(12, "mine", "mine"), (92, "flight", "in flight, and no completion comes"),
              (432, "mine", "mine")],
             [(92, ["post"], "bold"), (272, ["10 s of silence,", "then fi_close"], ""),
              (432, ["fi_close", "has returned"], "bold")]),
        Lane("the client's, for a RECV",
             [(12, "flight", "in flight"), (132, "gone", "there is no client any more")],
             [(132, ["kill -9"], "bold")]),
        [("wrong", 102, 196)],
        [(174, 1, "nobody takes it", "wrong")]),
    6: Figure(
        "Who owns it now? WRITEs, and the notification",
        Lane("the client's pages",
             [(12, "mine", "mine"), (62, "lent", "lent"), (106, "flight", "in flight"),
              (384, "mine", "mine")],
             [(62, ["request"], "bold"), (384, ["notification"], "bold")]),
        Lane("the server's pages",
             [(12, "theirs", "theirs"), (106, "flight", "7 WRITEs in flight"),
              (256, "flight", "the last one"), (432, "theirs", "theirs")],
             [(106, ["post 7"], "bold"), (256, ["7 completions,", "post the last"], "bold"),
              (432, ["completion"], "bold")]),
        [("data up", 116, 172), ("reply down", 182, 250), ("data up", 266, 368),
         ("reply down", 376, 426)],
        [(142, 0, "7 pages", "end"), (208, 2, "in place", "end"),
         (324, 0, "page and", "end"), (296, 1, "number", "end")]),
    7: Figure(
        "Who owns it now? A page that waits in pending_ops",
        Lane("a page of the server's",
             [(12, "mine", "mine"), (72, "flight", "waits in pending_ops"),
              (248, "flight", "in flight"), (382, "mine", "mine")],
             [(72, ["post"], "bold"), (248, ["libfabric", "takes it"], ""),
              (382, ["completion"], "bold")]),
        Lane("a page of the client's",
             [(12, "lent", "lent to me"), (248, "flight", "in flight"),
              (382, "lent", "lent"), (456, "theirs", "theirs")],
             [(456, ["notification"], "bold")]),
        [("data", 258, 354), ("reply", 364, 376)],
        [(82, 0, "no room yet: libfabric", ""), (82, 1, "has not seen it", ""),
         (290, 2, "the page", "end")]),
    8: Figure(
        "Who owns it now? A piece that the client has borrowed",
        Lane("a place in the client's pool",
             [(12, "mine", "mine"), (108, "flight", "WRITE"), (188, "mine", "mine"),
              (236, "flight", "READ"), (312, "mine", "mine")],
             [(108, ["post"], "bold"), (188, ["completion"], "bold", 1),
              (236, ["post"], "bold"), (312, ["completion"], "bold", 1)]),
        Lane("a piece of the server's pool",
             [(12, "theirs", "theirs"), (64, "lent", "lent"), (108, "flight", "WRITE"),
              (188, "lent", "lent"), (236, "flight", "READ"), (312, "lent", "lent"),
              (356, "theirs", "another client's?")],
             [(64, ["answer", "to MALLOC"], "bold"), (356, ["post", "of FREE"], "bold")]),
        [("data", 116, 170), ("reply", 178, 186), ("data up", 248, 306),
         ("wrong", 384, 414)],
        [(412, 0, "use after", "wrong"), (412, 1, "FREE", "wrong")]),
    9: Figure(
        "Who owns it now? A slot on either side",
        Lane("a slot of the sender's",
             [(12, "mine", "reads chunk 0"), (128, "flight", "in flight"),
              (238, "mine", "reads chunk 8"), (424, "flight", "in flight")],
             [(128, ["post"], "bold"), (238, ["completion"], "bold"),
              (424, ["post"], "bold")]),
        Lane("a slot of the receiver's",
             [(12, "lent", "lent to me"), (128, "flight", "in flight"),
              (218, "theirs", "saves chunk 0"), (346, "theirs", ""), (374, "lent", "lent"),
              (424, "flight", "in flight")],
             [(218, ["notification"], "bold"), (374, ["credit"], "bold")]),
        [("data", 138, 200), ("reply", 206, 234), ("call up", 346, 372),
         ("data", 434, 500)],
        [(158, 2, "chunk 0", "end"), (342, 1, "CREDIT", "end"),
         (458, 2, "chunk 8", "end")]),
    10: Figure(
        "Who owns it now? A ledger, and the swap that makes it everybody's",
        Lane("the ledger's, then the swap's",
             [(12, "mine", "mine"), (72, "flight", "WRITE"), (172, "mine", "mine"),
              (226, "flight", "swap"), (372, "mine", "mine")],
             [(72, ["post"], "bold"), (172, ["completion"], "bold", 1),
              (226, ["post"], "bold"), (372, ["completion"], "bold", 1)]),
        Lane("a ledger in the server's table",
             [(12, "mine", "mine"), (72, "flight", "WRITE"), (172, "mine", "scratch: mine"),
              (298, "theirs", "everybody's, to READ")],
             [(298, ["the swap"], "bold")]),
        [("data", 80, 154), ("reply", 162, 170), ("call", 234, 292), ("reply", 302, 366)],
        [(352, 1, "as expected", "")]),
    11: Figure(
        "Who owns it now? A page, and a rail that fails",
        Lane("a page of the server's",
             [(12, "mine", "mine"), (76, "flight", "on rail A"), (228, "flight", "on rail B"),
              (324, "mine", "mine")],
             [(76, ["post", "on A"], "bold"), (228, ["4 s of silence:", "close A,", "post on B"], "bold"),
              (324, ["completion"], "bold")]),
        Lane("its place at the client",
             [(12, "lent", "lent"), (76, "flight", "in flight"),
              (356, "flight", "late bytes?"), (450, "theirs", "theirs")],
             [(356, ["notification"], ""), (450, ["rails", "closed"], "bold")]),
        [("data", 238, 306), ("reply", 308, 322), ("wrong", 86, 412)],
        [(102, 2, "bytes of A, late", "wrong"), (330, 0, "in place on B", "")]),
    13: Figure(
        "Who owns it now? A SEND to a client that is forgotten",
        Lane("the server's, for a SEND",
             [(12, "mine", "mine"), (92, "flight", "in flight"), (392, "mine", "mine")],
             [(92, ["post"], "bold"), (242, ["forgotten:", "fi_av_remove"], ""),
              (392, ["completion,", "an error"], "bold")]),
        Lane("the client's, for a RECV",
             [(12, "flight", "in flight"), (132, "theirs", "full, and never read")],
             [(132, ["completion"], "bold")]),
        [("wrong lost", 102, 196)],
        [(174, 1, "no RECV is left for it", "wrong")]),
    14: Figure(
        "Who owns it now? A WAIT to an invented address",
        Lane("the server's, for a WAIT",
             [(12, "mine", "mine"), (112, "flight", ""), (152, "mine", "mine: copied, so change it")],
             [(112, ["fi_inject"], "bold", 1), (152, ["it returns"], "bold")]),
        Lane("the provider's copy",
             [(12, "gone", ""), (132, "flight", "in flight: nobody is there"),
              (412, "gone", "gone")],
             [(132, ["copied"], "bold"), (412, ["fi_close", "has returned"], "bold")]),
        [("data", 122, 142)],
        []),
    15: Figure(
        "Who owns it now? A block of my array, and a slot of my right neighbour",
        Lane("a block of the array",
             [(12, "mine", "mine"), (92, "flight", "in flight"), (346, "mine", "mine, to change")],
             [(92, ["post"], "bold"), (346, ["completion"], "bold")]),
        Lane("a slot of my right neighbour",
             [(12, "lent", "lent"), (92, "flight", "in flight"), (186, "theirs", "adds it"),
              (266, "lent", "lent again"), (400, "flight", "in flight")],
             [(186, ["number n"], "bold"), (266, ["credit"], "bold"),
              (400, ["both: post"], "bold")]),
        [("data", 102, 176), ("reply", 196, 338), ("call up", 268, 310), ("data", 410, 470)],
        [(118, 2, "WRITE n", "end"), (432, 2, "WRITE n + 8", "end")]),
}


def box(x, y, width, height, owner):
    kind, _ = OWNERS[owner]
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}"/>'


def text(x, y, words, kind=""):
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:g}" y="{y}">{words}</text>'


def draw_lane(lane, whose, y, above):
    """What it is, who has it when, and the events on its outer side."""
    title = y - 24 - ROW * lane.rows() if above else y + LANE + 38 + ROW * lane.rows()
    yield text(LEFT, title, f'{whose} <tspan font-weight="normal">{lane.of}</tspan>', "bold")
    ends = [start for start, _, _ in lane.pieces[1:]] + [RIGHT]
    for (start, owner, words), end in zip(lane.pieces, ends):
        yield box(start, y, end - start, LANE, owner)
        yield text((start + end) / 2, y + 26, words, "middle")
    for at, words, kind, *further in lane.events:
        far = 10 + ROW * sum(further)
        edge, tip = (y, y - far) if above else (y + LANE, y + LANE + far)
        yield f'<path class="faint" d="M{at},{edge}V{tip}"/>'
        for number, line in enumerate(reversed(words) if above else words):
            line_at = tip - 6 - ROW * number if above else tip + 16 + ROW * number
            yield text(at, line_at, line, f"{kind} middle".strip())


def draw_arrow(kind, start, end, top):
    kind, *rest = kind.split()
    edges = top + 1, top + GAP - 2
    if "up" in rest or kind == "reply" and "down" not in rest:
        edges = top + GAP - 1, top + 2
    if "lost" in rest:
        x, y = start + (end - start) * 3 // 4, edges[0] + (edges[1] - edges[0]) * 3 // 4
        bare = f'<path class="{kind}" style="marker-end: none"'
        return (f'{bare} d="M{start},{edges[0]}L{x},{y}"/>\n'
                f'  {bare} d="M{x - 7},{y - 7}l14,14M{x - 7},{y + 7}l14,-14"/>')
    return f'<path class="{kind}" d="M{start},{edges[0]}L{end},{edges[1]}"/>'


def draw(figure):
    """Returns the figure as it should be in its file."""
    lines = []
    x = LEFT
    for owner, width in ("mine", 90), ("flight", 200), ("theirs", 0):
        lines += [box(x, 10, 20, 20, owner), text(x + 28, 26, OWNERS[owner][1])]
        x += width
    mine = 84 + ROW * figure.mine.rows()  # the upper edges of the lanes
    theirs = mine + LANE + GAP
    time = theirs + LANE + 70 + ROW * figure.theirs.rows()
    lines += draw_lane(figure.mine, "my buffer:", mine, above=True)
    lines += draw_lane(figure.theirs, "their memory:", theirs, above=False)
    lines += [draw_arrow(*arrow, mine + LANE) for arrow in figure.arrows]
    lines += [text(at, mine + LANE + 26 + ROW * row, words, kind)
              for at, row, words, kind in figure.notes]
    lines += [text(LEFT, time, "time", "faint"),
              f'<path class="call" d="M{LEFT + 40},{time - 5}H{RIGHT}"/>']
    kinds = sorted({"call", *(kind.split()[0] for kind, _, _ in figure.arrows)})
    return style.svg(figure.title, WIDTH, time + 8, kinds, lines)


def path_of(number):
    return pathlib.Path(f"{style.ROOT}/chapters/{number}_owner.svg")


def main():
    for number, figure in FIGURES.items():
        path_of(number).write_text(draw(figure), encoding="utf-8")
    for path in style.figures():
        path.write_text(style.styled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
