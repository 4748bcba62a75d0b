"""Bytes from the network before and during admission: whatever is parsed re-encodes to the same bytes, or is refused."""

from __future__ import annotations

from ringfence import keys
from ringfence.admission import messages
from ringfence.admission.binding import Role
from ringfence.admission.entry import Listing
from ringfence.admission.handshake import State
from ringfence.admission.messages import HANDSHAKE, TREE, MessageSplitter, encode, tree_frame_limit
from ringfence.admission.proofs import bundle
from ringfence.admission.proofs.secret import SharedSecret
from ringfence.admission.tree import Terms, Tree
from ringfence.errors import AdmissionError, AuthenticationError, ProtocolError
from ringfence.link import frames, hello
from ringfence.link.frames import Call, Type
from ringfence.runtime import control
from tests.fuzz.target import Target
from tests.unit.admission_samples import SUITES, Worker, channels, converse, worker

SESSION_KEY = keys.Secret(bytes(32))
WORLD = 4


# -- link -----------------------------------------------------------------------------------------------------------


def _headers() -> list[bytes]:
    call = Call(1, 2, 3, 4, 5, 6, -7).pack()
    return [frames.pack_header(kind, 0, 1, 0, 4096, 2, 3, frames.NO_ORIGIN, 9, 0, bytes(16), call) for kind in Type]


def _read_header(data: bytes) -> None:
    fixed = data[: frames.HEADER_BYTES].ljust(frames.HEADER_BYTES, b"\0")  # what a connection reads, no more, no less
    header = frames.read_header(fixed)
    assert frames.pack_header(*header) == fixed
    if header.type == frames.Type.SHARED:  # its payload is in shared memory
        assert frames.frame_bytes(header) == frames.HEADER_BYTES
    else:
        assert frames.HEADER_BYTES < frames.frame_bytes(header) <= frames.FRAME_BYTES
    assert Call.unpack(header.call).pack() == header.call


def _hellos() -> list[bytes]:
    places = [*((lane, 0) for lane in hello.Lane), (hello.Lane.COLLECTIVE, keys.CHANNEL_LIMIT - 1)]
    made = [hello.LinkHello(1, 2, lane, bytes(32), bytes(range(32)), channel) for lane, channel in places]
    return [hello.write_hello(SESSION_KEY, each) for each in made]


def _read_hello(data: bytes) -> None:
    """As it came, and as a member of the session could have sent it: with a MAC that fits."""
    size = hello.HELLO_BYTES - keys.DIGEST_BYTES
    body = data[:size].ljust(size, b"\0")
    fitting = body + keys.mac(keys.expand(SESSION_KEY, keys.LINK_HELLO), keys.LINK_HELLO, body)
    if data != fitting:
        try:
            hello.read_hello(SESSION_KEY, data)
        except AuthenticationError:
            pass
        else:
            raise AssertionError("a hello without the session's MAC was read")
    assert hello.write_hello(SESSION_KEY, hello.read_hello(SESSION_KEY, fitting)) == fitting


# -- admission ------------------------------------------------------------------------------------------------------

_TABLES = ((HANDSHAKE, keys.ADMISSION_BYTES), (TREE, tree_frame_limit(WORLD)), (control._TYPES, 1024))


def _transcript() -> list[tuple[Role, messages.Message]]:
    """What two workers say to each other when they admit each other."""
    child, parent = worker(1), worker(0)
    ends = channels(child, parent)
    return converse(child.handshake(Role.CHILD), parent.handshake(Role.PARENT), ends)


def _said(role: Role) -> bytes:
    return b"".join(encode(message) for sender, message in _transcript() if sender is role)


def _listing(one: Worker, proof_digest: bytes = bytes(32)) -> Listing:
    return Listing(one.entry, 1, proof_digest, one.shared.endorse(one.entry, proof_digest))


def _tree_messages() -> list[bytes]:
    listings = tuple(_listing(worker(rank)) for rank in range(WORLD))
    welcome = messages.Welcome(SUITES[0], keys.Secret(bytes(32)), b"table", listings)
    digest = bytes(32)
    found: list[messages.Message] = [
        messages.Entries(listings[1:2]),
        messages.Entries(listings[1:]),
        messages.Waiting(3, (1, 2, 3)),
        welcome,
        messages.Acknowledge(digest),
        messages.Acknowledge(digest, (bytes(64),)),
        messages.Go(digest),
        messages.Go(digest, (bytes(64), bytes(72))),
        messages.Failure(2, "a reason"),
    ]
    return [encode(each) for each in found] + [encode(welcome) + encode(messages.Go(digest))]


def _control_messages() -> list[bytes]:
    late = messages.Failure(2, "a reason")
    return [encode(each) for each in (control.Abort(1, -1, 3, "all_reduce", "why"), control.Bye(7), late)]


def _streams() -> list[bytes]:
    """A byte that chooses what may come, then frames."""
    streams = [b"\0" + _said(role) for role in Role]
    streams += [b"\1" + each for each in _tree_messages()]
    return streams + [b"\2" + each for each in _control_messages()]


def _cut(data: bytes) -> None:
    types, limit = _TABLES[data[0] % len(_TABLES)] if data else _TABLES[0]
    stream = data[1:]
    cutter = MessageSplitter(types, limit)
    half = len(stream) // 2
    seen = b""
    for piece in (stream[:half], stream[half:]):
        cutter.feed(piece)
        while (message := cutter.next()) is not None:
            seen += encode(message)
    assert seen + cutter.rest() == stream


def _recordings() -> list[bytes]:
    return [bytes([1 - role]) + _said(role) for role in Role]


def _handshake(data: bytes) -> None:
    """An unauthenticated peer that recorded another connection of the same two workers connects to one of them."""
    role = Role(data[0] & 1) if data else Role.CHILD
    own, peer = (worker(1), worker(0)) if role is Role.CHILD else (worker(0), worker(1))
    ends = channels(worker(1), worker(0), exporter=b"another connection".ljust(32))
    handshake = own.handshake(role)
    handshake.begin(ends[role])
    cutter = MessageSplitter(HANDSHAKE, keys.ADMISSION_BYTES)
    cutter.feed(data[1:])
    try:
        while handshake.state is not State.REFUSED and (message := cutter.next()) is not None:
            for answer in handshake.receive(message):
                assert len(encode(answer)) <= keys.ADMISSION_BYTES
    finally:
        assert handshake.admitted is None, f"{peer.entry} was admitted by a recording"
        assert handshake.state is not State.DONE


def _tree(data: bytes) -> None:
    """A worker that was admitted sends to its parent, rank 0, or to its child, rank 1, whatever it likes."""
    is_root = not data or data[0] & 1 == 0
    own = worker(0 if is_root else 1)
    tree = Tree(own.entry, own.policy, own.shared, Terms(keys.Secret(bytes(32)), b"table", SUITES))
    tree.begin()
    if is_root:
        for rank in range(1, WORLD):
            tree.attach_child(worker(rank).entry, bytes(32), SharedSecret.kind)
    else:
        tree.attach_parent(worker(0).entry, bytes(32))
    cutter = MessageSplitter(TREE, tree_frame_limit(WORLD))
    cutter.feed(data[1:])
    while (message := cutter.next()) is not None:
        tree.receive(1 if is_root else 0, message)
        assert tree.session is None or [entry.rank for entry in tree.session.roster.entries] == list(range(WORLD))


def _bundles() -> list[bytes]:
    return [
        bundle.encode([(1, bytes(32)), (2, b"certificate"), (5, b"gpus")]),
        bundle.encode([(1, b""), (6, b"token")]),
    ]


def _read_bundle(data: bytes) -> None:
    assert bundle.encode(bundle.decode(data, keys.PROOF_LIMIT_BYTES)) == data


TARGETS = (
    Target("frame-header", _headers, _read_header, (ProtocolError,), longest=frames.HEADER_BYTES),
    Target("link-hello", _hellos, _read_hello, (AuthenticationError,), longest=2 * hello.HELLO_BYTES),
    Target("admission-frames", _streams, _cut, (ProtocolError,)),
    Target("handshake", _recordings, _handshake, (ProtocolError,)),
    Target(
        "tree",
        lambda: [bytes([place]) + each for place in (0, 1) for each in _tree_messages()],
        _tree,
        (ProtocolError, AdmissionError),
    ),
    Target("bundle", _bundles, _read_bundle, (ProtocolError,)),
)
