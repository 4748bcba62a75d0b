"""The settings of one worker, from RINGFENCE_* environment variables.

docs/reference/settings-keys.toml says what each means. Any other name with this prefix is an error: a policy under a misspelt
name would be no policy.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from ringfence import keys
from ringfence.admission.encoding import is_printable
from ringfence.admission.entry import GENERATION_BYTES, RUN_ID_BYTES
from ringfence.admission.policy_file.policy_file import PolicyFile
from ringfence.admission.policy_file.toml_table import POLICY_BYTES
from ringfence.admission.proofs import kinds
from ringfence.admission.proofs.certificate import Credential, read_credential
from ringfence.config.interfaces import LOOPBACK, address_of_interface, address_towards, parse_address
from ringfence.config.private_files import (
    HOW_TO_MAKE_SECRET,
    PEM_BYTES,
    StrPath,
    list_unshared,
    load_secret,
    read_private,
    read_unshared,
)
from ringfence.errors import ConfigurationError, PolicyError
from ringfence.evidence import workload_api
from ringfence.release import PAGES

PREFIX: Final = "RINGFENCE_"
_NEAR: Final = 0.88  # likeness of a misspelt prefix: one letter is wrong, missing or too many
DATAPLANE: Final = "RINGFENCE_DATAPLANE"
CREDENTIALS: Final = (  # say who may join, or prove who this worker is
    "RINGFENCE_POLICY",
    "RINGFENCE_SECRET_FILE",
    "RINGFENCE_CERTIFICATE_FILE",
    "RINGFENCE_KEY_FILE",
    "RINGFENCE_SPIFFE_SOCKET",
    "RINGFENCE_VCEK_FILE",
    "RINGFENCE_TOKEN_COMMAND",
)
KNOWN: Final = (
    *CREDENTIALS,
    "RINGFENCE_RUN_ID",
    "RINGFENCE_GENERATION",
    "RINGFENCE_AGENT",
    "RINGFENCE_INTERFACE",
    "RINGFENCE_PORTS",
    "RINGFENCE_ADVERTISE",
    "RINGFENCE_REQUIRE",
    "RINGFENCE_JOIN_TIMEOUT",
    "RINGFENCE_OUTAGE_TIMEOUT",
    "RINGFENCE_CHANNELS",
    "RINGFENCE_RECORD",
    "RINGFENCE_METRICS_FILE",
    "RINGFENCE_STAGE_TIMES",
    "RINGFENCE_SAME_HOST",
    DATAPLANE,
    "RINGFENCE_SIM_DEVICES",
)


@dataclass(frozen=True)
class Settings:
    """One worker's settings, checked."""

    secret: keys.Secret | None = None
    run_id: str = "none"
    generation: str = "0"
    host: str = LOOPBACK  # bound, and advertised unless `advertise` is set
    ports: range | None = None
    advertise: tuple[str, int] | None = None
    join_timeout: float = keys.JOIN_SECONDS
    outage: float = keys.OUTAGE_SECONDS
    policy: PolicyFile | None = None  # None: every worker with the secret is admitted
    policy_path: str | None = None
    certificate: Credential | None = None
    certificate_source: Callable[[], Credential] | None = field(default=None, repr=False)  # reads it as it is now
    vcek: bytes | None = field(default=None, repr=False)  # the content of the file
    token_command: tuple[str, ...] = ()
    metrics_file: str = ""  # with {rank} in it
    stage_times: bool = False
    same_host: str = keys.SAME_HOST[0]  # "sealed" also if the policy permits more
    channels: int | None = None  # None: as many as the roster says
    record: Path | None = None  # the folder of the record, absolute

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], store_host: str | None = None) -> Settings:
        """Read and check all settings, and the files that they name.

        `store_host` is the machine of the store, where it has one. Raises ConfigurationError, which says what to set.
        """
        settings = cls.without_credentials(environ, store_host)
        policy = _policy(environ)
        source = _certificate_source(environ, policy)
        return replace(
            settings,
            secret=_secret(environ, policy),
            policy=policy,
            policy_path=environ.get("RINGFENCE_POLICY"),
            certificate=None if source is None else source(),
            certificate_source=source,
            vcek=_vcek(environ, policy),
            token_command=_token_command(environ, policy),
        )

    @classmethod
    def without_credentials(cls, environ: Mapping[str, str], store_host: str | None = None) -> Settings:
        """Read the settings that need no credentials: which run this is, and where it listens."""
        _refuse_unknown(environ)
        advertise, stages = environ.get("RINGFENCE_ADVERTISE"), environ.get("RINGFENCE_STAGE_TIMES") or "0"
        same_host = environ.get("RINGFENCE_SAME_HOST", keys.SAME_HOST[0])
        return cls(
            run_id=_name(environ, "RINGFENCE_RUN_ID", "TORCHELASTIC_RUN_ID", "none", RUN_ID_BYTES),
            generation=_generation(environ),
            host=_host(environ, store_host),
            ports=_ports(environ.get("RINGFENCE_PORTS", "")),
            advertise=parse_address(advertise, "RINGFENCE_ADVERTISE") if advertise else None,
            join_timeout=_seconds(environ, "RINGFENCE_JOIN_TIMEOUT", keys.JOIN_SECONDS, keys.JOIN_RANGE),
            outage=_seconds(environ, "RINGFENCE_OUTAGE_TIMEOUT", keys.OUTAGE_SECONDS, keys.OUTAGE_RANGE),
            metrics_file=_metrics_file(environ.get("RINGFENCE_METRICS_FILE", "")),
            stage_times=_choice("RINGFENCE_STAGE_TIMES", stages, ("0", "1")) == "1",
            same_host=_choice("RINGFENCE_SAME_HOST", same_host, keys.SAME_HOST),
            channels=_channels(environ.get("RINGFENCE_CHANNELS", "")),
            record=Path(environ["RINGFENCE_RECORD"]).absolute() if environ.get("RINGFENCE_RECORD") else None,
        )

    @property
    def record_required(self) -> bool:
        """Whether the policy asks for a record of the run."""
        return self.policy is not None and self.policy.record != keys.RECORDS[0]

    def read_policy_again(self) -> PolicyFile | None:
        """Read the policy and the files that it names as they are now. Raises PolicyError."""
        return self.policy if self.policy_path is None else load_policy(self.policy_path)

    def forget(self) -> None:
        """Wipe all keys, even if references to these settings remain."""
        if self.secret is not None:
            self.secret.forget()
        if self.certificate is not None:
            self.certificate.forget()

    def link_address(self, bound: tuple[str, int]) -> tuple[str, int]:
        """Return where peers dial this worker's links, given where its listener is bound."""
        return self.advertise or bound

    def admission_address(self, bound: tuple[str, int]) -> tuple[str, int]:
        """Return where children dial this worker: behind address translation, the same port on the advertised host."""
        return (self.advertise[0], bound[1]) if self.advertise else bound


# -- names ----------------------------------------------------------------------------------------------------------


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError for a misspelt name: a run that lacks its policy would admit others."""
    unknown = sorted(name for name in environ if name not in KNOWN and _is_meant_for_us(name))
    if unknown:
        raise ConfigurationError(
            f"{unknown[0]} is set, and ringfence has no such setting: did you mean {_nearest(unknown[0])}? "
            f"Unset {unknown[0]}; {PAGES}/reference/settings.html lists all settings"
        )


def _is_meant_for_us(name: str) -> bool:
    """Whether its prefix is ours, or nearly: RINGFENSE_POLICY, RING_FENCE_POLICY, ringfence_policy."""
    prefix, underscore, _ = name.upper().partition("_")
    near = difflib.SequenceMatcher(None, prefix + underscore, PREFIX).ratio() >= _NEAR
    return near or name.upper().replace("_", "").startswith(PREFIX[:-1])


def _nearest(name: str) -> str:
    """The known name most like this one. A common beginning counts more than a common end: most end in _FILE."""
    stem = name.upper().removeprefix(PREFIX).removesuffix("_FILE")

    def likeness(known: str) -> float:
        other = known.removeprefix(PREFIX).removesuffix("_FILE")
        alike = len(os.path.commonprefix([stem, other])) / max(1, len(stem))  # noqa: RUF071 (characters are meant)
        return alike + difflib.SequenceMatcher(None, stem, other).ratio()

    return max(KNOWN, key=likeness)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a child process with a run of its own, such as the demo's or the benchmark's.

    The user's policy and credentials are for the user's runs; the choice of the data plane applies to all.
    """
    return {name: value for name, value in environ.items() if name == DATAPLANE or not name.startswith(PREFIX)}


# -- policy and credentials -----------------------------------------------------------------------------------------


def load_policy(path: StrPath) -> PolicyFile:
    """Read a policy file and all files that it names, relative to its own folder. Raises PolicyError."""
    name, folder = os.fspath(path), Path(path).parent
    found: dict[str, bytes] = {}

    def read(file: str, limit: int) -> bytes:
        found[file] = read_unshared(folder / file, limit)
        return found[file]

    try:
        found[Path(path).name] = text = read_unshared(Path(path), POLICY_BYTES + 1)
    except OSError as error:
        raise PolicyError(
            f"cannot read the policy {name}: {error.strerror}; `ringfence policy new` makes one"
        ) from error
    policy = kinds.read(text, read, name, lambda file: list_unshared(folder / file))
    return replace(policy, name=Path(path).name, contents=found)


def load_credential(certificate: StrPath, key: StrPath) -> Credential:
    """Read a worker's certificate, with its intermediates, and its key, both in PEM form. Raises ConfigurationError."""
    try:
        with open(certificate, "rb") as file:
            chain = file.read(PEM_BYTES)
        secret = read_private(key, "key")
    except OSError as error:
        raise ConfigurationError(f"cannot read {error.filename}: {error.strerror}") from error
    try:
        return read_credential(chain, secret)
    except ValueError as error:
        raise ConfigurationError(f"{os.fspath(certificate)} and {os.fspath(key)}: {error}") from error


def _policy(environ: Mapping[str, str]) -> PolicyFile | None:
    path = environ.get("RINGFENCE_POLICY")
    if path == "":  # a variable that was not filled in: to continue with the secret alone would admit others
        raise ConfigurationError("RINGFENCE_POLICY is set and empty: name the policy file, or unset it")
    return None if path is None else load_policy(path)


def _secret(environ: Mapping[str, str], policy: PolicyFile | None) -> keys.Secret | None:
    if policy is not None and "secret" not in policy.kinds:
        return None  # the policy does not use it, so it is not read
    path = environ.get("RINGFENCE_SECRET_FILE")
    if not path:
        raise ConfigurationError(
            "RINGFENCE_SECRET_FILE is not set, and without a secret or a policy the workers of this run cannot authenticate "
            "each other; " + HOW_TO_MAKE_SECRET
        )
    return load_secret(path)


def _certificate_source(environ: Mapping[str, str], policy: PolicyFile | None) -> Callable[[], Credential] | None:
    certificate, key = environ.get("RINGFENCE_CERTIFICATE_FILE"), environ.get("RINGFENCE_KEY_FILE")
    if socket := environ.get("RINGFENCE_SPIFFE_SOCKET"):
        _check_used(("certificate",), policy, "RINGFENCE_SPIFFE_SOCKET", "certificates")
        if certificate or key:
            raise ConfigurationError(
                "RINGFENCE_SPIFFE_SOCKET and RINGFENCE_CERTIFICATE_FILE or RINGFENCE_KEY_FILE are both set: a worker has one "
                "certificate, so unset the one or the others"
            )
        return partial(workload_api.fetch, socket)
    if not certificate and not key:
        return None
    _check_used(("certificate",), policy, "RINGFENCE_CERTIFICATE_FILE or RINGFENCE_KEY_FILE", "certificates")
    if not certificate or not key:
        raise ConfigurationError("RINGFENCE_CERTIFICATE_FILE and RINGFENCE_KEY_FILE go together: set both")
    return partial(load_credential, certificate, key)


def _check_used(kinds: Collection[str], policy: PolicyFile | None, name: str, what: str) -> None:
    """Raise ConfigurationError if no rule asks for a credential that is set: to continue without it would admit others."""
    if policy is None or not set(kinds) & set(policy.kinds):
        raise ConfigurationError(
            f"{name} is set, and no policy asks for {what}: set RINGFENCE_POLICY to one that does, or unset it"
        )


def _vcek(environ: Mapping[str, str], policy: PolicyFile | None) -> bytes | None:
    path = environ.get("RINGFENCE_VCEK_FILE")
    if not path:
        return None
    _check_used(("snp", "azure_snp"), policy, "RINGFENCE_VCEK_FILE", "SEV-SNP")
    try:
        with open(path, "rb") as file:
            return file.read(PEM_BYTES)
    except OSError as error:
        raise ConfigurationError(f"RINGFENCE_VCEK_FILE: cannot read {path}: {error.strerror}") from error


def _token_command(environ: Mapping[str, str], policy: PolicyFile | None) -> tuple[str, ...]:
    """Split as a shell would; the command is run without one."""
    value = environ.get("RINGFENCE_TOKEN_COMMAND")
    if not value:
        return ()
    _check_used(("token",), policy, "RINGFENCE_TOKEN_COMMAND", "tokens")
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise ConfigurationError(f"RINGFENCE_TOKEN_COMMAND: {error}") from None


# -- other settings -------------------------------------------------------------------------------------------------


def _name(environ: Mapping[str, str], own: str, elastic: str, default: str, limit: int) -> str:
    value = environ.get(own) or environ.get(elastic) or default
    if len(value) > limit or not is_printable(value):
        raise ConfigurationError(f"{own} (or {elastic}) must be at most {limit} printable ASCII characters")
    return value


def _generation(environ: Mapping[str, str]) -> str:
    """Return which start of the run this is.

    Under `ringfence run` its agent sets it for each round. Otherwise a scheduler may give it, and torchrun's own restarts are
    counted on top: a scheduler that starts torchrun anew starts that count anew as well.
    """
    generation = _name(environ, "RINGFENCE_GENERATION", "TORCHELASTIC_RESTART_COUNT", "0", GENERATION_BYTES)
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if environ.get("RINGFENCE_AGENT") or not environ.get("RINGFENCE_GENERATION") or count in ("", "0"):
        return generation
    return _name({"RINGFENCE_GENERATION": f"{generation}.{count}"}, "RINGFENCE_GENERATION", "", "0", GENERATION_BYTES)


def _host(environ: Mapping[str, str], store_host: str | None) -> str:
    wanted = environ.get("RINGFENCE_INTERFACE")
    if wanted:
        address = address_of_interface(wanted)
        if ipaddress.ip_address(address).is_unspecified and not environ.get("RINGFENCE_ADVERTISE"):
            raise ConfigurationError(f"RINGFENCE_INTERFACE={wanted}: peers cannot dial that; name one interface")
        return address
    master = environ.get("MASTER_ADDR") or store_host  # a script with init_method="tcp://..." needs no MASTER_ADDR
    if not master:
        return LOOPBACK
    try:
        return address_towards(master)
    except (OSError, UnicodeError) as error:
        if environ.get("LOCAL_WORLD_SIZE") and environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
            return LOOPBACK  # all workers are on this machine
        source = "MASTER_ADDR" if environ.get("MASTER_ADDR") else "the store's host"
        raise ConfigurationError(
            f"{source}, {master}, cannot be resolved or reached from this machine "
            f"({getattr(error, 'strerror', None) or error}), so the interface to listen on is unknown: correct it, or set "
            "RINGFENCE_INTERFACE to one that other workers reach"
        ) from error


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
    """Workers of one machine that shared a file would overwrite each other's counters."""
    if path and "{rank}" not in path:
        raise ConfigurationError(
            f"RINGFENCE_METRICS_FILE is {path!r}; it needs {{rank}} in it, such as /var/lib/metrics/run-{{rank}}.prom: each "
            "worker writes a file of its own"
        )
    return path


def _choice(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise ConfigurationError(f"{name} is {value!r}; it may be {' or '.join(allowed)}, or not set")
    return value


def _channels(value: str) -> int | None:
    if not value:
        return None
    channels = int(value) if re.fullmatch(r"[0-9]{1,3}", value) else 0
    if not 1 <= channels <= keys.CHANNEL_LIMIT:
        raise ConfigurationError(f"RINGFENCE_CHANNELS={value[:64]}: write a number from 1 to {keys.CHANNEL_LIMIT}")
    return channels
