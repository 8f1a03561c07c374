"""What the tests know of each program: an entry in TABLE for each src/N_name.cpp but
those in WITHOUT_ENTRY."""

import typing

from messages import (ACCEPT, ALIVE, BYE, CONNECT, FREE, JOIN, LONGEST, MALLOC, PROGRESS,
                      READY, REPLY, TABLE_ALIVE, TABLE_REPLY, TEXT, WAIT, base, chunk, crowd, fill,
                      fill_repeatedly, nonce_fill, plain, put, request)

# Where something is left out, what many programs share, letter for letter, is tried with
# these.
EXAMPLES = "4_hello", "5_reverse", "7_queue", "13_crowd", "14_strangers"


class Entry(typing.NamedTuple):
    """Arguments are those of a client, after the address."""
    # What a client prints once it has checked that all is right.
    success: str
    # Arguments with which it takes long enough to be killed in the middle. Two such
    # clients leave memory for others. The pages are large: a process that is killed
    # while it holds a lock in the shared memory of libfabric 1.17's shm provider takes
    # the others with it, and with small pages it holds one a good part of the time.
    long: list
    # Wrong ones, with the address, by what is wrong with them. Wrong addresses are the
    # same for all: WRONG_ADDRESSES.
    wrong: dict
    # Small and large, each for a client, over verbs.
    sizes: list

    # The fewest arguments that a client takes.
    least: list = []
    # Instead of the defaults, where those take long.
    quick: list = []
    # What takes next to nothing, for tests that look at how long a client waits.
    short: list = []
    # What other clients do, that come and go while something happens to one. It takes
    # a moment, so that they are at it.
    others: list = []
    # It guards itself against strangers and crowds: its messages have a nonce, a client
    # that has to wait is told so, and one that is interrupted says BYE.
    guarded: bool = False
    # Its server takes a directory, and its clients a file. The tests give the size of
    # a file instead of its name: see Server.start_client.
    files: bool = False

    # What its server prints once it knows what a client with the arguments `long`
    # wants, if the client must not be killed before. libfabric 1.17's shm provider does
    # not survive that a sender has gone before its message is seen.
    long_begun: str = ""
    # The file that kills its clients, if test_failures.py is not enough.
    killed_in: str = ""
    # It needs immediate data, which iWARP does not have.
    imm_data: bool = False
    # Providers that lack what it needs.
    refused_by: list = []
    # Providers that lose something on a busy machine. They came and went with net.
    lossy_over: list = []
    # One endpoint of the server is for all, so there are no sessions with a line each
    # about their beginning and their end, and a message begins in another way: what
    # others have in test_messages.py, this one has in test_crowd.py.
    one_endpoint: bool = False
    # The longest text that it sends, in bytes.
    longest_text: int = 0

    # What is wrong, and the messages of a session that end it. Without sessions, any
    # message is a text.
    bad_sessions: dict = {}
    # A message that gives its server something to do; where it has `fill`, that does.
    work: bytes = b""
    # A CONNECT has a number before the address: the same in all of a client.
    numbered: bool = False
    # Makes a request to fill pages, where the program has one.
    fill: typing.Callable | None = None

    # For a program that replaces the application of its parent, and drops whole
    # sections: how many lines it may add before its own application.
    most_added: int | None = None
    # How many of its parent's lines it may remove, in percent: 5_reverse replaces both
    # sides of the application of 4_hello, which is short, 11_rails has several sessions
    # where 7 had one, and 13_crowd has nothing of the sessions of 12.
    most_removed: int = 12

    def base(self, type_):
        """The beginning of a message."""
        return base(type_) if self.guarded else plain(type_)


# ---- Wrong arguments ----

ADDRESS = "0200a3c90a0000010000000000000000"
WRONG_ADDRESSES = {
    "no hexadecimal": ["xyz1"],
    "odd length": [ADDRESS + "0"],
    "too long": ["00" * 257],
    "much too long": ["0" * 100000],
    "empty": [""],
    "an option": ["--port"],
    "minus": ["-1"],
}
WRONG_TEXTS = {
    "empty text": [ADDRESS, ""],
    "text too long": [ADDRESS, "x" * 65537],
    "too many": [ADDRESS, "a", "b"],
}


def wrong_number(*before, most, behind=()):
    """What no number from 1 to `most` is, behind these arguments."""
    numbers = {"zero": "0", "negative": "-8", "no number": "4k", "fraction": "1.5", "empty": "",
               "space": " 1", "too large": str(most + 1), "overflow": str(2**64 + 1)}
    return {f"{what} behind {len(before)}": [ADDRESS, *before, number, *behind]
            for what, number in numbers.items()}


# Of 6_write and 7_queue.
WRONG_PAGES = {
    **wrong_number(most=1 << 20, behind=["8"]),
    **wrong_number("4096", most=16000),
    "size only": [ADDRESS, "4096"],
    "too much": [ADDRESS, str(1 << 20), "65"],
    "--gpu at the end": [ADDRESS, "--gpu"],
    "too many": [ADDRESS, "8", "8", "8", "8"],
}
WRONG_REPEATS = wrong_number("8", "8", most=10**9)
WRONG_LISTS = {
    "no second address": [ADDRESS + ","],
    "no first address": ["," + ADDRESS],
    "an address too many": [ADDRESS + ",," + ADDRESS],
    "no hexadecimal in a list": [ADDRESS + ",xyz1"],
    "a space in a list": [ADDRESS + ", " + ADDRESS],
}
WRONG_COUNTS = {**wrong_number(most=1000000), "too many": [ADDRESS, "1", "1"]}
WRONG_FILES = {
    "no file": [ADDRESS],
    **wrong_number("Makefile", most=16),
    "too many": [ADDRESS, "Makefile", "8", "8"],
}
WRONG_CROWDS = {
    **wrong_number(most=2**64),
    **wrong_number("1", most=2**64),
    "no period": [ADDRESS, "1", "1", "1s"],
    "huge product": [ADDRESS, "2", str(2**63)],
    "huge period": [ADDRESS, "1", "1", str(2**63)],
    "too many": [ADDRESS, "1", "1", "1", "1"],
    "get without a key": [ADDRESS, "get"],
    "get with a value": [ADDRESS, "get", "key", "value"],
    "put without a value": [ADDRESS, "put", "key"],
    "put too much": [ADDRESS, "put", "key", "value", "value"],
    "delete without a key": [ADDRESS, "delete"],
    "another word": [ADDRESS, "take", "key"],
    "key too long": [ADDRESS, "get", "k" * 65],
    "value too long": [ADDRESS, "put", "key", "v" * 1025],
}


# ---- Messages that end a session ----

HUGE = 2**64 - 1
# In a session of 5 to 13. BYE cut short has no type.
BAD_PLAIN = {"empty": [b""], "cut short": [plain(BYE)[:-1]]}
for begin, bad in (plain, BAD_PLAIN), (base, BAD_GUARDED := {}):
    bad.update({"type": [begin(99)], "type 0": [begin(0)],
                "CONNECT": [begin(CONNECT) + bytes(256)], "ACCEPT": [begin(ACCEPT) + bytes(256)]})


def bad_fills(fill, largest, most):
    """Those of a program with this request, whose server fills at most that many
    of its largest pages."""
    good = fill()
    return {
        "short": [good[:20]],
        "no indices": [good[:-8]],
        "no pages": [fill(indices=())],
        "page_size 0": [fill(page_size=0)],
        "page_size too large": [fill(page_size=largest + 8, size=1 << 40)],
        "page_size huge": [fill(page_size=2**32 - 8, size=HUGE)],
        "too much": [fill(page_size=largest, size=1 << 40, indices=[0] * (most + 1))],
        "index": [fill(indices=(0, 256))],
        "index huge": [fill(indices=(2**32 - 1, 0))],
        "number 0": [fill(imm_data=0)],
        "memory too small": [fill(size=8191)],
        "no memory": [fill(size=0)],
        "page larger than memory": [fill(size=4095, indices=[0])],
        "longest": [fill(page_size=8, indices=[2**30] * (
            (LONGEST - len(good) + 8) // 4))],
    }


def bad_repeats(fill):
    return {f"repeat {repeat}": [fill(repeat=repeat)] for repeat in (0, 10**9 + 1, HUGE)}


BAD_REQUESTS = {
    "type of a request": [request(99, 64)],
    "REPLY": [request(REPLY, 64)],
    "MALLOC cut short": [request(MALLOC, 64)[:-1]],
    "MALLOC too long": [request(MALLOC, 64) + b"x"],
    "type only": [plain(FREE)],
    "after good ones": [plain(ALIVE), request(MALLOC, 64), plain(MALLOC)],
}
GOOD_PUT = put(size=9 << 20, slots=8)
BAD_FILES = {
    **BAD_PLAIN,
    "PUT cut short": [GOOD_PUT[:19]],
    "no slots": [put(size=9 << 20, slots=0)],
    "too many slots": [put(size=9 << 20, slots=17)],
    "slots huge": [put(size=9 << 20, slots=HUGE)],
    "no name": [put(b"", size=9 << 20)],
    "CHUNK before PUT": [chunk(0)],
    "second PUT": [GOOD_PUT, GOOD_PUT],
    "no such slot": [GOOD_PUT, chunk(8)],
    "slot huge": [GOOD_PUT, chunk(HUGE)],
    "half a CHUNK": [GOOD_PUT, chunk(0)[:-8]],
    "CHUNK of an empty file": [put(b"empty"), chunk(0)],
    "READY": [GOOD_PUT, plain(READY) + bytes(24)],
    "after a good one": [GOOD_PUT, plain(PROGRESS), plain(99)],
}
BAD_CROWDS = {
    "type": [crowd(99, b"text")],
    "type 0": [crowd(0, b"text")],
    "ACCEPT": [crowd(ACCEPT)],
    "after good ones": [crowd(TEXT, b"text"), crowd(TEXT), crowd(0)],
}
BAD_TABLES = {
    "REPLY": [plain(TABLE_REPLY) + bytes(32)],
    "after good ones": [plain(TABLE_ALIVE), plain(JOIN), plain(JOIN), plain(99)],
}


# ---- The table ----

# Its server takes one message and ends, it looks at no argument, and it is silent where
# others give up. No test of all programs is about it, and test_first.py is. 2_verbs needs
# an RDMA device: test_rdma.py. The sides of 15_ring are peers: test_ring.py.
WITHOUT_ENTRY = ["2_first", "2_verbs", "15_ring"]

TABLE = {
    "4_hello": Entry(
        success="Sent ",
        long=["x" * 60000],
        wrong=WRONG_TEXTS,
        sizes=[["x"], ["x" * 65536]],
        longest_text=65536),
    "5_reverse": Entry(
        success="The text is correct.",
        long=["x" * 60000],
        wrong=WRONG_TEXTS,
        sizes=[["x"], ["0123456789" * 6000]],
        others=["0123456789" * 6000],
        longest_text=65532,
        bad_sessions={**BAD_PLAIN, "after a good one": [plain(TEXT) + b"text", plain(7)]},
        work=plain(TEXT) + b"x" * 60000,
        most_removed=17),
    "6_write": Entry(
        success="Data is correct.",
        long=["1048576", "64"],
        wrong={**WRONG_PAGES, "repeat": [ADDRESS, "8", "8", "8"]},
        sizes=[["1", "1"], ["64", "1000"], ["1048576", "32"]],
        short=["4096", "10"],
        others=["65536", "20"],
        long_begun="^.*RandomFill.*=1048576",
        imm_data=True,
        bad_sessions={**BAD_PLAIN, **bad_fills(fill, 1 << 20, 64),
                      "PROGRESS": [plain(PROGRESS)]},
        fill=fill),
    "8_malloc": Entry(
        success="Data is correct.",
        long=["100"],
        wrong=WRONG_COUNTS,
        sizes=[["1"], ["200"]],
        quick=["8"],
        short=["1"],
        others=["16"],
        killed_in="test_malloc.py",
        lossy_over=["udp;ofi_rxd"],  # now and then one of many READs
        bad_sessions={**BAD_PLAIN, **BAD_REQUESTS},
        work=request(MALLOC, 1 << 20),
        most_added=45),
    "9_file": Entry(
        success="The server has saved the file.",
        long=["1000000000", "1"],
        wrong=WRONG_FILES,
        sizes=[["0"], ["1"], ["1048577", "1"], ["30000000", "8"]],
        least=["Makefile"],
        quick=["5000001", "2"],
        short=["1"],
        others=["5000001", "2"],
        files=True,
        killed_in="test_file.py",
        bad_sessions=BAD_FILES,
        work=GOOD_PUT,
        most_added=45),
    "10_lock": Entry(
        success="Data is correct.",
        long=["10000"],
        wrong=WRONG_COUNTS,
        sizes=[["1"], ["300"]],
        quick=["50"],
        short=["1"],
        others=["50"],
        killed_in="test_lock.py",
        refused_by=["net"],  # has no atomic operations
        lossy_over=["udp;ofi_rxd"],  # now and then one of many atomic operations
        bad_sessions={**BAD_PLAIN, **BAD_TABLES},
        work=plain(JOIN),
        most_added=100),
    "13_crowd": Entry(
        success=" texts, all correct, ",
        long=["8", "1000000"],
        wrong=WRONG_CROWDS,
        sizes=[["1", "1"], ["50", "20"]],
        quick=["20", "20"],
        short=["1", "1"],
        others=["5", "50"],
        killed_in="test_crowd.py",
        one_endpoint=True,
        bad_sessions=BAD_CROWDS,
        most_removed=26),
}

# It sends the texts of 5_reverse, a thousand times each: test_texts need not.
TABLE["12_sleep"] = TABLE["5_reverse"]._replace(
    success="Of 1000 answers, half took up to ", sizes=[["x"], ["0123456789" * 600]],
    others=[], longest_text=0, most_removed=12)
# It asks for the same as 6_write, and says how often.
TABLE["7_queue"] = TABLE["6_write"]._replace(
    long=["1048576", "8", "1000000"],
    wrong={**WRONG_PAGES, **WRONG_REPEATS},
    sizes=[["1", "1", "1"], ["64", "1000", "5"], ["1048576", "32", "3"]],
    quick=["65536", "100", "3"],
    short=["4096", "10", "1"],
    others=["65536", "20", "10"],
    bad_sessions={**BAD_PLAIN, **bad_fills(fill_repeatedly, 1 << 20, 64),
                  **bad_repeats(fill_repeatedly), "PROGRESS": [plain(PROGRESS)]},
    fill=fill_repeatedly)
# It asks for the same as 7_queue, and may ask for more.
TABLE["14_strangers"] = TABLE["7_queue"]._replace(
    guarded=True,
    wrong={**WRONG_PAGES, **WRONG_REPEATS, "too much": [ADDRESS, str(1 << 20), "513"]},
    bad_sessions={**BAD_GUARDED, **bad_fills(nonce_fill, 1 << 20, 512), **bad_repeats(nonce_fill),
                  "WAIT": [base(WAIT)]},
    fill=nonce_fill)
# It does, too, through several adapters.
TABLE["11_rails"] = TABLE["7_queue"]._replace(
    numbered=True,
    wrong={**WRONG_PAGES, **WRONG_REPEATS, **WRONG_LISTS},
    most_removed=14)
