"""Members with authorities of their own, the policy that names them, and environments for the workers of a pool."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from tests.certificates import HOUR, Authority, private_pem, spiffe

TODAY = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
PRIVATE = 'same_host = "sealed"\n[private_sum]\n'


def policy_text(members: Mapping[str, str], head: str = PRIVATE, pattern: str = "worker/{rank}") -> str:
    """Return a policy with a rule for each authority's file. `members`: what `member` is, by the authority; "" for none."""
    rules = [
        "[[admit]]\n"
        + (f'member = "{member}"\n' if member else "")
        + f'[admit.certificate]\nca = "{name}.pem"\ntrust_domain = "{name}.test"\nids = "spiffe://{name}.test/{pattern}"\n'
        for name, member in members.items()
    ]
    return "version = 1\n" + head + "".join(rules)


@dataclass
class Consortium:
    """A folder with authorities and certificates; rank r is a worker of authority `owners[r]`."""

    folder: Path
    owners: Sequence[str]
    others: Sequence[str] = ()  # authorities that the policy names, perhaps without a worker

    def __post_init__(self) -> None:
        names = sorted({*self.owners, *self.others})
        self.authorities = {name: Authority(name, start=TODAY - HOUR, end=TODAY + HOUR) for name in names}
        for name, authority in self.authorities.items():
            (self.folder / f"{name}.pem").write_bytes(authority.pem)
        for rank, name in enumerate(self.owners):
            key, holder = ec.generate_private_key(ec.SECP256R1()), spiffe(f"worker/{rank}", f"{name}.test")
            leaf = self.authorities[name].sign("worker", key, (holder,), start=TODAY - HOUR, end=TODAY + HOUR)
            (self.folder / f"{rank}.crt").write_bytes(leaf.public_bytes(Encoding.PEM))
            (self.folder / f"{rank}.key").touch(mode=0o600)
            (self.folder / f"{rank}.key").write_bytes(private_pem(key))

    @classmethod
    def cached(cls, folder: Path, owners: str) -> Consortium:
        """Return the same consortium for the same letters, so that a pool's workers need not join anew."""
        inner = folder / owners
        if inner not in _made:
            inner.mkdir()
            _made[inner] = cls(inner, [*owners])
        return _made[inner]

    def environments(self, text: str | None = None, **variables: str | None) -> list[dict[str, str | None]]:
        """Return the environment of each rank under a policy. Default: every authority is a member."""
        policy = self.folder / "policy.toml"
        policy.write_text(policy_text({name: name for name in self.authorities}) if text is None else text)
        return [
            {
                "RINGFENCE_SECRET_FILE": None,
                "RINGFENCE_SAME_HOST": None,
                "RINGFENCE_POLICY": str(policy),
                "RINGFENCE_CERTIFICATE_FILE": str(self.folder / f"{rank}.crt"),
                "RINGFENCE_KEY_FILE": str(self.folder / f"{rank}.key"),
                **variables,
            }
            for rank in range(len(self.owners))
        ]


_made: dict[Path, Consortium] = {}
