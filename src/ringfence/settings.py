"""What the environment says: which policy and credentials, which run, which interface and ports; and their files.

RINGFENCE_POLICY            who may join; default: whoever holds the shared secret
RINGFENCE_SECRET_FILE       the shared secret, made by `ringfence secret new FILE`
RINGFENCE_CERTIFICATE_FILE  this worker's certificate, and those between it and its authority
RINGFENCE_KEY_FILE          the key of that certificate
RINGFENCE_VCEK_FILE         the certificate of this SEV-SNP machine's key, where the host does not hand it over
RINGFENCE_TOKEN_COMMAND     prints a verifier's token for the nonce that it gets as its last argument
RINGFENCE_RUN_ID            default: TORCHELASTIC_RUN_ID, else "none"
RINGFENCE_GENERATION        default: TORCHELASTIC_RESTART_COUNT, else "0"
RINGFENCE_INTERFACE         name or address to listen on; default: the one that reaches MASTER_ADDR, or else the store
RINGFENCE_PORTS             "20000-20100": listen only there; default: any port
RINGFENCE_ADVERTISE         "host:port" that peers dial for links, where that differs from what is bound
RINGFENCE_REQUIRE           "1": refuse process groups of other backends; read by guard.py, at `import torch`
RINGFENCE_JOIN_TIMEOUT      seconds until the run must have formed; default: 300, and never more than torch's own timeout
RINGFENCE_OUTAGE_TIMEOUT    seconds without an answer until a worker is given up; default: 300
RINGFENCE_CORE              which data plane moves the bytes; read by dataplane/native.py
RINGFENCE_METRICS_FILE      where to write counters for Prometheus; {rank} in it is replaced
RINGFENCE_STAGE_TIMES       "1": keep the time of each stage of the data plane

Any other name that begins like these is an error: a policy under a misspelt name would be no policy.
"""

from __future__ import annotations

import contextlib
import difflib
import ipaddress
import itertools
import os
import re
import secrets
import shlex
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ringfence import keys
from ringfence.admission.encoding import is_printable
from ringfence.admission.entry import GENERATION_BYTES, HOST_BYTES, RUN_ID_BYTES
from ringfence.admission.proofs import kinds
from ringfence.admission.proofs.certificate import Credential, read_credential
from ringfence.errors import ConfigurationError, PolicyError
from ringfence.policy.policy_file import PolicyFile
from ringfence.policy.toml_table import POLICY_BYTES

PREFIX: Final = "RINGFENCE_"
_NEAR: Final = 0.88  # likeness of a misspelt prefix: one letter is wrong, missing or too many
CORE: Final = "RINGFENCE_CORE"
CREDENTIALS: Final = (
    "RINGFENCE_POLICY",
    "RINGFENCE_SECRET_FILE",
    "RINGFENCE_CERTIFICATE_FILE",
    "RINGFENCE_KEY_FILE",
    "RINGFENCE_VCEK_FILE",
    "RINGFENCE_TOKEN_COMMAND",
)
KNOWN: Final = (
    *CREDENTIALS,
    "RINGFENCE_RUN_ID",
    "RINGFENCE_GENERATION",
    "RINGFENCE_INTERFACE",
    "RINGFENCE_PORTS",
    "RINGFENCE_ADVERTISE",
    "RINGFENCE_REQUIRE",
    "RINGFENCE_JOIN_TIMEOUT",
    "RINGFENCE_OUTAGE_TIMEOUT",
    "RINGFENCE_METRICS_FILE",
    "RINGFENCE_STAGE_TIMES",
    CORE,
)

_SECRET_FORM: Final = re.compile(rb"[0-9a-f]{64}\n")
_HOW_TO_MAKE: Final = "make one with `ringfence secret new FILE` and give every worker the same file"
_PEM_BYTES: Final = 1 << 20
_LOOPBACK: Final = "127.0.0.1"
_FEWEST_DISTINCT: Final = 16  # 32 random bytes have fewer distinct values once in 10**14


@dataclass(frozen=True)
class Settings:
    """One worker's settings, checked."""

    secret: keys.Secret | None = None
    run_id: str = "none"
    generation: str = "0"
    host: str = _LOOPBACK  # bound, and advertised unless `advertise` says otherwise
    ports: range | None = None
    advertise: tuple[str, int] | None = None
    join_timeout: float = keys.JOIN_SECONDS
    outage: float = keys.OUTAGE_SECONDS
    policy: PolicyFile | None = None  # None: whoever holds the secret is admitted
    certificate: Credential | None = None
    vcek: bytes | None = field(default=None, repr=False)  # what the file holds
    token_command: tuple[str, ...] = ()
    metrics_file: str = ""  # with {rank} in it
    stage_times: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], store_host: str | None = None) -> Settings:
        """Raises ConfigurationError, which says what to set. `store_host`: the machine of the store, where it has one."""
        place = cls.without_credentials(environ, store_host)
        policy = _policy(environ)
        return replace(
            place,
            secret=_secret(environ, policy),
            policy=policy,
            certificate=_certificate(environ, policy),
            vcek=_vcek(environ, policy),
            token_command=_token_command(environ, policy),
        )

    @classmethod
    def without_credentials(cls, environ: Mapping[str, str], store_host: str | None = None) -> Settings:
        """Which run this is and where it listens: what can be said of a machine that has no secret yet."""
        _refuse_unknown(environ)
        return cls(
            run_id=_name(environ, "RINGFENCE_RUN_ID", "TORCHELASTIC_RUN_ID", "none", RUN_ID_BYTES),
            generation=_name(environ, "RINGFENCE_GENERATION", "TORCHELASTIC_RESTART_COUNT", "0", GENERATION_BYTES),
            host=_host(environ, store_host),
            ports=_ports(environ.get("RINGFENCE_PORTS", "")),
            advertise=_advertise(environ.get("RINGFENCE_ADVERTISE", "")),
            join_timeout=_seconds(environ, "RINGFENCE_JOIN_TIMEOUT", keys.JOIN_SECONDS, keys.JOIN_RANGE),
            outage=_seconds(environ, "RINGFENCE_OUTAGE_TIMEOUT", keys.OUTAGE_SECONDS, keys.OUTAGE_RANGE),
            metrics_file=_metrics_file(environ.get("RINGFENCE_METRICS_FILE", "")),
            stage_times=_stage_times(environ.get("RINGFENCE_STAGE_TIMES", "")),
        )

    def forget(self) -> None:
        """Hold no key any more, whoever still has these settings."""
        if self.secret is not None:
            self.secret.forget()
        if self.certificate is not None:
            self.certificate.forget()

    def link_address(self, bound: tuple[str, int]) -> tuple[str, int]:
        """Where peers dial this worker's links, given where its listener is bound."""
        return self.advertise or bound

    def admission_address(self, bound: tuple[str, int]) -> tuple[str, int]:
        """Where children dial this worker: behind a translated address, the same port on the advertised host."""
        return (self.advertise[0], bound[1]) if self.advertise else bound


# -- names ----------------------------------------------------------------------------------------------------------


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """A setting under a misspelt name is not there, and a run that lacks its policy would admit others."""
    unknown = sorted(name for name in environ if name not in KNOWN and _is_meant_for_us(name))
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]} is set, and ringfence has no such setting: did you mean {_nearest(unknown[0])}? "
            f"Unset {unknown[0]}; docs/configuration.md lists all settings"
        )


def _is_meant_for_us(name: str) -> bool:
    """Whether its prefix is ours, or nearly: RINGFENSE_POLICY, RING_FENCE_POLICY, ringfence_policy."""
    prefix, underscore, _ = name.upper().partition("_")
    near = difflib.SequenceMatcher(None, prefix + underscore, PREFIX).ratio() >= _NEAR
    return near or name.upper().replace("_", "").startswith(PREFIX[:-1])


def _nearest(name: str) -> str:
    """Of the known ones. Names that begin alike come before those that are alike elsewhere: most end in _FILE."""
    stem = name.upper().removeprefix(PREFIX).removesuffix("_FILE")

    def likeness(known: str) -> float:
        other = known.removeprefix(PREFIX).removesuffix("_FILE")
        alike = len(os.path.commonprefix([stem, other])) / max(1, len(stem))  # noqa: RUF071 (characters are meant)
        return alike + difflib.SequenceMatcher(None, stem, other).ratio()

    return max(KNOWN, key=likeness)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """For a child with a run of its own (the demo's, the benchmark's): a policy and credentials are for the user's runs.

    Which data plane moves the bytes is for all of them.
    """
    return {name: value for name, value in environ.items() if name == CORE or not name.startswith(PREFIX)}


# -- the secret -----------------------------------------------------------------------------------------------------


def new_secret_file(path: str | os.PathLike[str]) -> None:
    """Write 32 random bytes as 64 hexadecimal digits to a new file that only its owner can read."""
    write_new(path, _secret_line(), 0o600, "a secret")


def _secret_line() -> bytes:
    return f"{secrets.token_hex(keys.SECRET_BYTES)}\n".encode("ascii")


def replace_secret_file(path: str | os.PathLike[str]) -> None:
    """Put a new secret in the place of this file, in one step; on failure it is as it was."""
    try:
        with _builder(path, _secret_line(), 0o600) as builder:
            os.replace(builder, path)
    except OSError as error:
        raise ConfigurationError(f"cannot replace {os.fspath(path)}: {error.strerror}; it is as it was") from error
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # or a crash could bring the old secret back
    finally:
        os.close(folder)


def write_new(path: str | os.PathLike[str], content: bytes, mode: int, what: str) -> None:
    """Write a new file with exactly this mode, whole or not at all. What exists is kept, and links are not followed."""
    try:
        with _builder(path, content, mode) as builder:
            _take_name(path)
            os.replace(builder, path)
    except FileExistsError:
        raise ConfigurationError(f"{os.fspath(path)} exists; {what} is never overwritten: name a new file") from None
    except OSError as error:
        raise ConfigurationError(f"cannot write {os.fspath(path)}: {error.strerror}") from error


def _take_name(path: str | os.PathLike[str]) -> None:
    """So that a rename goes over nothing that was there before. A hard link would do both; not every disk has them."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


@contextlib.contextmanager
def _builder(path: str | os.PathLike[str], content: bytes, mode: int) -> Iterator[str]:
    """A file beside `path` with this content, all of it on the disk, for as long as it takes to give it its name.

    Under that name a full disk or a kill would leave a part of it, which a second try must not overwrite.
    """
    builder = os.path.join(os.path.dirname(path), f".ringfence-{secrets.token_hex(8)}")
    descriptor = os.open(builder, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)  # whatever the umask
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        yield builder
    finally:
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            os.unlink(builder)


def load_secret(path: str | os.PathLike[str]) -> keys.Secret:
    """Read a file that `new_secret_file` wrote. Anything else is refused: what can be guessed falls offline."""
    name = os.fspath(path)
    try:
        content = read_private(path, "secret")
    except FileNotFoundError as error:
        raise ConfigurationError(f"cannot read the secret file {name}: {error.strerror}; {_HOW_TO_MAKE}") from error
    except PermissionError as error:  # a new one would be a secret that the other workers refuse
        raise ConfigurationError(
            f"cannot read the secret file {name}: {error.strerror}. The user who runs this must own it: "
            f"run `chown {os.geteuid()} {name} && chmod 600 {name}`"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the secret file {name}: {error.strerror}; name the file itself"
        ) from error
    if not _SECRET_FORM.fullmatch(content):
        raise ConfigurationError(f"{name} is not a secret file (64 hexadecimal digits and a newline); {_HOW_TO_MAKE}")
    material = bytes.fromhex(content.decode("ascii"))
    if not _looks_random(material):
        raise ConfigurationError(f"the secret in {name} was not drawn at random; {_HOW_TO_MAKE}")
    return keys.Secret(material)


def read_private(path: str | os.PathLike[str], what: str) -> bytes:
    """The content of a file that nobody else may open."""
    with open(path, "rb") as file:
        _check_owner_only(what, os.fspath(path), os.fstat(file.fileno()))
        return file.read(_PEM_BYTES)


def _check_owner_only(what: str, name: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"the {what} file {name} is not a regular file")
    if status.st_mode & 0o077:
        raise ConfigurationError(f"others can open the {what} file {name}: run `chmod 600 {name}`")
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"the {what} file {name} belongs to another user (uid {status.st_uid}): it must be yours, or root's. "
            f"Run `chown {os.geteuid()} {name}`, or copy it with `install -m 600`"
        )


def _looks_random(material: bytes) -> bool:
    """Catches what people type: one byte repeated, a counting sequence, a passphrase in hexadecimal."""
    steps = {(b - a) % 256 for a, b in itertools.pairwise(material)}
    is_text = all(0x20 <= byte < 0x7F for byte in material)
    return len(set(material)) >= _FEWEST_DISTINCT and len(steps) >= _FEWEST_DISTINCT and not is_text


# -- the policy and the certificate -----------------------------------------------------------------------------------


def load_policy(path: str | os.PathLike[str]) -> PolicyFile:
    """Read a policy file and all that it names, relative to its own folder."""
    name, folder = os.fspath(path), Path(path).parent

    def read(file: str, limit: int) -> bytes:
        return _read_unshared(folder / file, limit)

    try:
        text = _read_unshared(Path(path), POLICY_BYTES + 1)
    except OSError as error:
        raise PolicyError(
            f"cannot read the policy {name}: {error.strerror}; `ringfence policy new` makes one"
        ) from error
    return kinds.read(text, read, name)


def _read_unshared(path: Path, limit: int) -> bytes:
    """A file that says who is admitted must not be one that others on the machine can change."""
    with open(path, "rb") as file:
        _check_unshared(path, os.fstat(file.fileno()))
        return file.read(limit)


def _check_unshared(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise PolicyError(f"{path} is not a regular file")
    if status.st_mode & 0o022:
        raise PolicyError(f"others on this machine can change {path}: run `chmod go-w {path}`")
    if status.st_uid not in (os.geteuid(), 0):
        raise PolicyError(
            f"{path} belongs to another user (uid {status.st_uid}), who can change it: it must be yours, or root's"
        )


def load_credential(certificate: str | os.PathLike[str], key: str | os.PathLike[str]) -> Credential:
    """Read a worker's certificate, with those between it and its authority, and its key; both in PEM form."""
    try:
        with open(certificate, "rb") as file:
            chain = file.read(_PEM_BYTES)
        secret = read_private(key, "key")
    except OSError as error:
        raise ConfigurationError(f"cannot read {error.filename}: {error.strerror}") from error
    try:
        return read_credential(chain, secret)
    except ValueError as error:
        raise ConfigurationError(f"{os.fspath(certificate)} and {os.fspath(key)}: {error}") from error


# -- one setting each -----------------------------------------------------------------------------------------------


def _policy(environ: Mapping[str, str]) -> PolicyFile | None:
    path = environ.get("RINGFENCE_POLICY")
    if path == "":  # a variable that was meant to be filled in: to go on by the secret alone would admit others
        raise ConfigurationError("RINGFENCE_POLICY is set and empty: name the policy file, or unset it")
    return None if path is None else load_policy(path)


def _secret(environ: Mapping[str, str], policy: PolicyFile | None) -> keys.Secret | None:
    if policy is not None and "secret" not in policy.kinds:
        return None  # not asked for, so not read
    path = environ.get("RINGFENCE_SECRET_FILE")
    if not path:
        raise ConfigurationError(
            "RINGFENCE_SECRET_FILE is not set, so nobody could tell this run's workers from unauthenticated peers; "
            + _HOW_TO_MAKE
        )
    return load_secret(path)


def _certificate(environ: Mapping[str, str], policy: PolicyFile | None) -> Credential | None:
    certificate, key = environ.get("RINGFENCE_CERTIFICATE_FILE"), environ.get("RINGFENCE_KEY_FILE")
    if not certificate and not key:
        return None
    _check_asked("certificate", policy, "RINGFENCE_CERTIFICATE_FILE or RINGFENCE_KEY_FILE", "certificates")
    if not certificate or not key:
        raise ConfigurationError("RINGFENCE_CERTIFICATE_FILE and RINGFENCE_KEY_FILE go together: set both")
    return load_credential(certificate, key)


def _check_asked(kind: str, policy: PolicyFile | None, name: str, what: str) -> None:
    """Who sets a credential means a policy that asks for it: to go on without would admit others."""
    if policy is None or kind not in policy.kinds:
        raise ConfigurationError(
            f"{name} is set, and no policy asks for {what}: set RINGFENCE_POLICY to one that does, or unset it"
        )


def _vcek(environ: Mapping[str, str], policy: PolicyFile | None) -> bytes | None:
    path = environ.get("RINGFENCE_VCEK_FILE")
    if not path:
        return None
    _check_asked("snp", policy, "RINGFENCE_VCEK_FILE", "SEV-SNP")
    try:
        with open(path, "rb") as file:
            return file.read(_PEM_BYTES)
    except OSError as error:
        raise ConfigurationError(f"RINGFENCE_VCEK_FILE: cannot read {path}: {error.strerror}") from error


def _token_command(environ: Mapping[str, str], policy: PolicyFile | None) -> tuple[str, ...]:
    """Split as a shell would, and run without one."""
    value = environ.get("RINGFENCE_TOKEN_COMMAND")
    if not value:
        return ()
    _check_asked("token", policy, "RINGFENCE_TOKEN_COMMAND", "tokens")
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise ConfigurationError(f"RINGFENCE_TOKEN_COMMAND: {error}") from None


def _name(environ: Mapping[str, str], own: str, elastic: str, default: str, limit: int) -> str:
    value = environ.get(own) or environ.get(elastic) or default
    if len(value) > limit or not is_printable(value):
        raise ConfigurationError(f"{own} (or {elastic}) must be at most {limit} printable ASCII characters")
    return value


def _host(environ: Mapping[str, str], store_host: str | None) -> str:
    wanted = environ.get("RINGFENCE_INTERFACE")
    if wanted:
        address = _address_of_interface(wanted)
        if ipaddress.ip_address(address).is_unspecified and not environ.get("RINGFENCE_ADVERTISE"):
            raise ConfigurationError(f"RINGFENCE_INTERFACE={wanted}: peers cannot dial that; name one interface")
        return address
    master = environ.get("MASTER_ADDR") or store_host  # a script with init_method="tcp://..." needs no MASTER_ADDR
    if not master:
        return _LOOPBACK
    try:
        return _address_towards(master)
    except (OSError, UnicodeError) as error:
        if environ.get("LOCAL_WORLD_SIZE") and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
            return _LOOPBACK  # all are on this machine
        source = "MASTER_ADDR" if environ.get("MASTER_ADDR") else "the store's host"
        raise ConfigurationError(
            f"{source}, {master}, cannot be found from this machine ({getattr(error, 'strerror', None) or error}), so "
            "there is no telling where to listen: correct it, or set RINGFENCE_INTERFACE to what other workers reach"
        ) from error


def _address_of_interface(wanted: str) -> str:
    try:
        return str(ipaddress.ip_address(wanted))
    except ValueError:
        pass
    if wanted not in {name for _, name in socket.if_nameindex()}:
        known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
        raise ConfigurationError(f"RINGFENCE_INTERFACE={wanted}: neither an address nor an interface ({known})")
    address = _ipv4_of(wanted) or _ipv6_of(wanted)
    if address is None:
        raise ConfigurationError(f"RINGFENCE_INTERFACE={wanted}: the interface has no usable address")
    return address


def _ipv4_of(interface: str) -> str | None:
    import fcntl  # Linux only, like the ioctl below; everything else here is portable

    request = interface.encode()[:15].ljust(256, b"\0")
    get_interface_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, get_interface_address, request)[20:24])
        except OSError:
            return None


def _ipv6_of(interface: str) -> str | None:
    """The first address that is not link-local, which would need a scope that means nothing to peers."""
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        digits, _, _, _, _, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if name == interface and not address.is_link_local:
            return str(address)
    return None


def _address_towards(master: str) -> str:
    """The address this machine uses to reach `master`. Connecting a UDP socket sends nothing."""
    trouble: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            trouble = trouble or error
    assert trouble is not None
    raise trouble


def _ports(value: str) -> range | None:
    if not value:
        return None
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", value)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < first <= last <= 0xFFFF:
        raise ConfigurationError(f"RINGFENCE_PORTS={value}: write a range such as 20000-20100")
    return range(first, last + 1)


def _seconds(environ: Mapping[str, str], name: str, default: float, limits: tuple[float, float]) -> float:
    value = environ.get(name)
    if not value:
        return default
    seconds = float(value) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value) else -1.0
    if not limits[0] <= seconds <= limits[1]:
        raise ConfigurationError(f"{name}={value[:64]}: write a number of seconds from {limits[0]:g} to {limits[1]:g}")
    return seconds


def _metrics_file(path: str) -> str:
    """Workers of one machine that shared a file would overwrite each other's numbers."""
    if path and "{rank}" not in path:
        raise ConfigurationError(
            f"RINGFENCE_METRICS_FILE is {path!r}; it needs {{rank}} in it, such as /var/lib/metrics/run-{{rank}}.prom: each "
            "worker writes a file of its own"
        )
    return path


def _stage_times(text: str) -> bool:
    if text not in ("", "0", "1"):
        raise ConfigurationError(f"RINGFENCE_STAGE_TIMES is {text!r}; it may be 0 or 1, or not set")
    return text == "1"


def _advertise(value: str) -> tuple[str, int] | None:
    return parse_address(value, "RINGFENCE_ADVERTISE") if value else None


# -- addresses ------------------------------------------------------------------------------------------------------


def parse_address(value: str, source: str) -> tuple[str, int]:
    """ "host:port" or "[v6]:port"."""
    host, _, port = value.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    well_formed = host and len(host) <= HOST_BYTES and is_printable(host) and not any(each in host for each in " []")
    if not well_formed or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) <= 0xFFFF:
        raise ConfigurationError(f"{source}={value[:64]!r}: write host:port")
    return host, int(port)
