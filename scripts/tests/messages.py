"""The messages of the programs, as bytes."""

import struct
import typing

LONGEST = 65536  # bytes of a message

CONNECT, ACCEPT, BYE, WAIT, REFUSED = range(1, 6)
TEXT = 6  # of 5_reverse, 12_sleep and 13_crowd
RANDOM_FILL, PROGRESS = 6, 7  # of 6_write, 7_queue, 11_rails and 14_strangers
MALLOC, FREE, REPLY, REFUSAL, ALIVE = range(6, 11)  # of 8_malloc
PUT = 6  # and PROGRESS, of 9_file
READY, CHUNK, CREDIT, SAVED, FAILED = range(8, 13)
JOIN, TABLE_REPLY, TABLE_ALIVE = 7, 9, 10  # of 10_lock


def plain(type_):
    """The beginning of each message of 5 to 8."""
    return struct.pack("<I", type_)


def base(type_, nonce=0):
    """The beginning of each message of a program that guards itself. What sends it in a
    session puts in the nonce of the session, as the programs do: see FakeClient.send."""
    return struct.pack("<2I", type_, nonce)


def type_of(message):
    return struct.unpack_from("<I", message)[0]


def type_and_nonce(message):
    return struct.unpack_from("<2I", message)


def with_nonce(message, nonce):
    """The message in a session. One that is too short for a nonce stays as it is."""
    if len(message) < len(base(0)):
        return message
    return base(type_and_nonce(message)[0], nonce) + message[len(base(0)):]


def fill(page_size=4096, indices=(0, 1), imm_data=7, addr=0, size=1 << 20, rkey=1,
         repeat=None):
    """A RANDOM_FILL of 6_write, by default for memory that is not there; with a
    number of repeats, one of 7_queue."""
    return plain(RANDOM_FILL) + struct.pack(
        "<4Q2I", addr, size, rkey, 42, page_size, imm_data) + (
            b"" if repeat is None else struct.pack("<Q", repeat)
    ) + struct.pack(f"<{len(indices)}I", *indices)


def fill_repeatedly(*args, repeat=1, **kwargs):
    """A RANDOM_FILL of 7_queue and 11_rails."""
    return fill(*args, repeat=repeat, **kwargs)


def nonce_fill(*args, **kwargs):
    """A RANDOM_FILL of 14_strangers."""
    return base(RANDOM_FILL) + fill_repeatedly(*args, **kwargs)[len(plain(0)):]


def read_fill(message, begin=plain(0)):
    """Returns the address, the key and the number in a RANDOM_FILL of 6_write or
    7_queue, or, after another beginning, of 14_strangers."""
    addr, _, key, _, _, imm_data = struct.unpack_from("<4Q2I", message, len(begin))
    return addr, key, imm_data


def request(type_, number):
    """To the server of 8_malloc: the size of a MALLOC, or the address of a FREE."""
    return plain(type_) + struct.pack("<Q", number)


class Piece(typing.NamedTuple):
    """Memory that the server of 8_malloc lends."""
    addr: int
    size: int
    key: int


def reply(*piece):
    """The answer of the server of 8_malloc to a MALLOC."""
    return plain(REPLY) + struct.pack("<3Q", *piece)


def read_reply(message):
    return Piece(*struct.unpack("<3Q", message[len(plain(0)):]))


def put(name=b"file", size=0, slots=1):
    """A PUT to the server of 9_file."""
    return plain(PUT) + struct.pack("<2Q", size, slots) + name


def ready(slots=4):
    """A READY of the server of 9_file. The memory is not there."""
    return plain(READY) + struct.pack("<3Q", 0, 1, slots)


def chunk(slot, checksum=0):
    """A CHUNK to the server of 9_file."""
    return plain(CHUNK) + struct.pack("<2Q", slot, checksum)


def credit(slot):
    """A CREDIT of the server of 9_file."""
    return plain(CREDIT) + struct.pack("<Q", slot)


def crowd(type_, body=b""):
    """A message of 13_crowd. What sends it puts in the number of the client."""
    return struct.pack("<IQ", type_, 0) + body


class CrowdMessage(typing.NamedTuple):
    """A message of 13_crowd."""
    type: int
    number: int
    body: bytes


def read_crowd(message):
    return CrowdMessage(*struct.unpack_from("<IQ", message), message[12:])
