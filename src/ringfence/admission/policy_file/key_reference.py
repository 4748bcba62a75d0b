"""What each key of a policy means, as data: the site makes the tables of docs/reference/policy.md from it.

The readers of the tables are `policy_file.read_policy` and `read_rules` of each kind of proof; a test compares their keys,
forms and which of them are required with what stands here.
"""

from __future__ import annotations

from typing import Final, NamedTuple

REQUIRED: Final = "required"


class PolicyKey(NamedTuple):
    """One key of a table. Texts are Markdown, with links relative to docs/reference."""

    name: str
    form: str  # the method of `TomlTable` that reads it
    meaning: str
    default: str = REQUIRED


FORMS: Final = {
    "text": "string",
    "texts": "string or list",
    "number": "integer",
    "flag": "boolean",
    "duration": "duration",
    "hexes": "hex or list",
    "file": "file",
    "files": "file or list",
    "contents": "file, folder or list",
    "table": "table",
    "tables": "list of tables",
}

TOP: Final = (
    PolicyKey("version", "number", "Version of the format. Must be 1."),
    PolicyKey(
        "min_workers",
        "number",
        "A run with fewer workers does not start. The store assigns ranks and the world size, so without this key a "
        "store that lies can split one job into several. Set it to the size of your run. If the default process group is "
        "another backend's, it counts the members of each [session](../guides/meshes.md#sessions).",
        "1",
    ),
    PolicyKey(
        "max_session_age",
        "duration",
        'How long a session lasts: `"90s"`, `"30m"`, `"12h"`, `"7d"`. Then every worker raises an error; to continue, create '
        "the process group again with a higher `RINGFENCE_GENERATION`, which verifies all workers again.",
        "no limit",
    ),
    PolicyKey(
        "key_agreement",
        "text",
        'Key agreement in TLS. `"hybrid"`: X25519MLKEM768 only, so that a connection recorded today stays confidential if a '
        "quantum computer exists later; a worker that does not support it is refused, and the error names what was "
        "agreed on. "
        '`"any"`: also X25519 and P-256, for machines whose OpenSSL has no ML-KEM. Rank 0 logs the agreed group when the run '
        "forms, and `ringfence doctor` prints which one this machine would use.",
        '`"hybrid"`',
    ),
    PolicyKey(
        "inside_machine",
        "texts",
        "Backends that a group may use without sealing if all its members have proved to be on one machine: `nccl`, `gloo`. "
        "A group that spans machines is sealed, whatever a script asks for "
        "([Meshes with a fast inside](../guides/meshes.md)).",
        "none: everything is sealed",
    ),
    PolicyKey(
        "same_host",
        "text",
        'How workers on one machine exchange tensors. `"shared"`: through memory that they share, not sealed, if both ends '
        'prove to be on one machine and of one user; otherwise sealed. `"sealed"`: sealed, as between machines.',
        '`"shared"`',
    ),
    PolicyKey("admit", "tables", "The rules, `[[admit]]`. At least one, at most 64."),
)

RULE: Final = (PolicyKey("note", "text", "A comment. `ringfence policy explain` prints it.", "none"),)

TDX: Final[tuple[PolicyKey, ...]] = (
    PolicyKey(
        "collateral",
        "files",
        "Intel's collateral, as `ringfence evidence collateral` fetches it: one file for each kind of platform "
        "(FMSPC and "
        "PCK CA) in the whole policy. A file expires after about a month; fetch the new one into the same file.",
    ),
    PolicyKey(
        "mrtd", "hexes", "Measurement of the guest's firmware: 96 hexadecimal digits, or a list of allowed values."
    ),
    *(
        PolicyKey(
            f"rtmr{number}", "hexes", f"Runtime measurement register {number}, {what}; as `mrtd`.", "see `unpinned`"
        )
        for number, what in enumerate(
            (
                "extended by the firmware",
                "extended by the boot loader",
                "extended by the kernel",
                "free for applications",
            )
        )
    ),
    PolicyKey(
        "unpinned",
        "texts",
        "Registers whose value is not checked. Each of `rtmr0` to `rtmr3` is either given a value or listed here.",
        "none",
    ),
    PolicyKey(
        "tcb_status",
        "texts",
        "Accepted TCB statuses: `UpToDate`, `SWHardeningNeeded`, `ConfigurationNeeded`, "
        "`ConfigurationAndSWHardeningNeeded`, `OutOfDate`, `OutOfDateConfigurationNeeded`.",
        "`UpToDate`",
    ),
    PolicyKey(
        "advisories",
        "texts",
        "Intel advisories, such as `INTEL-SA-00615`, that a platform with another status than `UpToDate` may have.",
        "none",
    ),
    PolicyKey("mr_config_id", "hexes", "Value set by the guest's owner (MRCONFIGID); as `mrtd`.", "any"),
    PolicyKey("mr_owner", "hexes", "Value set by the guest's owner (MROWNER); as `mrtd`.", "any"),
    PolicyKey("mr_owner_config", "hexes", "Value set by the guest's owner (MROWNERCONFIG); as `mrtd`.", "any"),
)

SNP: Final[tuple[PolicyKey, ...]] = (
    PolicyKey("measurement", "hexes", "Launch measurement: 96 hexadecimal digits, or a list of allowed values."),
    PolicyKey(
        "minimum_tcb",
        "table",
        "`[admit.snp.minimum_tcb]`: for each admitted product line (`milan`, `genoa`, `turin`) a table of minimum "
        "versions: "
        "`bootloader`, `tee`, `snp`, `microcode`, on Turin also `fmc`. The minimum applies to REPORTED_TCB, "
        "LAUNCH_TCB and COMMITTED_TCB; CURRENT_TCB must not be older than REPORTED_TCB and COMMITTED_TCB.",
    ),
    PolicyKey(
        "mitigations",
        "table",
        "`[admit.snp.mitigations]`: for a product line, a number whose bits must all be set in LAUNCH_MIT_VECTOR and "
        "CURRENT_MIT_VECTOR, such as `genoa = 0x1`. AMD's bulletins define the bits. Reports have these fields "
        "from version 5 on; older reports of such a line are refused.",
        "none",
    ),
    PolicyKey("vmpl", "number", "Privilege level (VMPL) at which the report was requested.", "0"),
    PolicyKey("guest_svn", "number", "Minimum security version of the guest.", "0"),
    PolicyKey("host_data", "hexes", "HOST_DATA: 64 hexadecimal digits, or a list of allowed values.", "any"),
    PolicyKey(
        "id_key_digest",
        "hexes",
        "Digest of the key that signed the guest's ID block: 96 hexadecimal digits, or a list.",
        "any",
    ),
    PolicyKey(
        "author_key_digest",
        "hexes",
        "Digest of the author key of the ID block: 96 hexadecimal digits, or a list.",
        "any",
    ),
    PolicyKey(
        "chip_id", "hexes", "Admitted chips: 128 hexadecimal digits, or a list. Excludes `vlek_providers`.", "any"
    ),
    PolicyKey(
        "vlek_providers",
        "texts",
        "Cloud providers whose loaded keys (VLEK) are accepted besides the chip's own key (VCEK). Excludes `chip_id`.",
        "none",
    ),
    PolicyKey("allow_smt", "flag", "Accept a guest policy that permits SMT.", "true"),
    PolicyKey("allow_migration", "flag", "Accept a guest policy that permits a migration agent.", "false"),
    PolicyKey("allow_cxl", "flag", "Accept a guest policy that permits CXL.", "false"),
    PolicyKey("require_single_socket", "flag", "The guest policy must demand a single socket.", "false"),
    PolicyKey("require_ciphertext_hiding", "flag", "The guest policy must demand ciphertext hiding.", "false"),
    PolicyKey(
        "allow_provisional_firmware",
        "flag",
        "Accept firmware that the host has not committed, and can replace by an older version, down to the "
        "minimum, while the guest runs. Some clouds load microcode in this way.",
        "false",
    ),
    PolicyKey(
        "require_alias_check",
        "flag",
        "The platform must have checked its memory for aliases since its last reset (ALIAS_CHECK_COMPLETE; AMD-SB-3015, "
        "BadRAM). Reports of version 2 do not have this field: they need `false`.",
        "true",
    ),
    PolicyKey(
        "crl",
        "files",
        "AMD's revocation lists for product lines, in DER or PEM form. If any is given, every admitted line needs "
        "one that is "
        "current. A certificate that any rule's list revokes is refused by all rules. AMD serves the lists at "
        "`https://kdsintf.amd.com/vcek/v1/LINE/crl`.",
        "revocation is not checked",
    ),
)

VTPM: Final = (
    PolicyKey(
        "pcrs",
        "table",
        "Table of the guest's PCRs in the vTPM's SHA-256 bank, by number (`0` to `23`): 64 hexadecimal digits, or a list of "
        "allowed values. At least one; a PCR that is not named is not checked.",
    ),
    PolicyKey(
        "require_secure_boot", "flag", "The paravisor must report that the VM was started with secure boot.", "true"
    ),
    PolicyKey("tpm_firmware", "hexes", "Firmware version of the vTPM: 16 hexadecimal digits, or a list.", "any"),
    PolicyKey("vm_id", "texts", "Admitted VMs, by `vmUniqueId` as the paravisor reports it.", "any"),
)

KINDS: Final[dict[str, tuple[PolicyKey, ...]]] = {
    "secret": (),
    "certificate": (
        PolicyKey(
            "ca",
            "files",
            "Trusted certificate authorities: certificates in PEM form or, with `trust_domain`, a SPIFFE trust bundle "
            "in JSON. At most 64 in a file.",
        ),
        PolicyKey(
            "ids",
            "texts",
            "Patterns, one of which the certificate's name must match. `*` matches one segment of a URI's path, or one label "
            "of a DNS name; `/**` at the end of a URI matches everything below. `{rank}` is the rank of the worker that "
            "presents the certificate, `{rank/8}` its rank divided by 8, rounded down: the number of its machine, if each has "
            "8 workers. A pattern has at most one of these.",
        ),
        PolicyKey(
            "trust_domain",
            "text",
            "SPIFFE trust domain of these authorities. The name is then a SPIFFE ID of this domain.",
            "the name is the only URI, or else the only DNS name",
        ),
        PolicyKey(
            "ranks",
            "text",
            'Ranks that this rule admits: `"5"` or `"0-7"`. Names are [bound to '
            "ranks](../guides/admit-by-certificate.md#bind-names-to-ranks) by this key, or by `{rank}` in `ids`.",
            "any rank",
        ),
        PolicyKey(
            "crl",
            "contents",
            "Certificate revocation lists, in DER or PEM form: files, or folders of such files. Every certificate below the "
            "authority then needs a list that its issuer has signed. They are read again for each session, and the newest "
            "list of an issuer counts. Workers may have different lists. If one rule names lists, they apply to "
            "the same authorities in all rules.",
            "certificates cannot be revoked",
        ),
        PolicyKey(
            "crl_max_age",
            "duration",
            "How long ago the newest list may have been issued (`thisUpdate`). A list is also refused after its "
            "`nextUpdate`. Required with `crl`.",
            "none",
        ),
    ),
    "tdx": TDX,
    "snp": SNP,
    "nvidia": (
        PolicyKey(
            "reference_values",
            "files",
            "Reference values for one model, driver and VBIOS each, as `ringfence evidence measure` writes them.",
        ),
        PolicyKey(
            "gpus",
            "number",
            "Exact number of GPUs. A verifier cannot detect a GPU that the worker leaves out, so set this key.",
            "any number, at least one",
        ),
        PolicyKey(
            "protected_pcie",
            "flag",
            "Accept GPUs in protected-PCIe mode, whose NVLink traffic is not encrypted.",
            "false",
        ),
        PolicyKey("revoked", "texts", "Serial numbers of certificates that this rule and all others refuse.", "none"),
        PolicyKey(
            "ocsp",
            "contents",
            "OCSP responses in DER, one file each: files, or folders of such files. Every certificate of a device but "
            "its first, which the device itself issues, then needs a response with the status good. They are read again for "
            "each session, and the newest response counts. NVIDIA's responder is `https://ocsp.ndis.nvidia.com`. If "
            "one rule names responses, all rules need them.",
            "only the serial numbers in `revoked` are refused",
        ),
        PolicyKey(
            "ocsp_max_age",
            "duration",
            "How long ago the newest response may have been issued (`thisUpdate`). A response is also refused after "
            "its `nextUpdate`. Required with `ocsp`.",
            "none",
        ),
    ),
    "token": (
        PolicyKey("issuer", "text", "Required issuer (`iss`)."),
        PolicyKey("keys", "file", "The issuer's public keys, as a JWK set."),
        PolicyKey(
            "claims",
            "table",
            "`[admit.token.claims]`: required claims, at least one. A value is a string, a list of allowed strings, a "
            "number, a boolean, or a table of such values.",
        ),
        PolicyKey("audience", "text", "Required audience (`aud`).", "the token must have none"),
        PolicyKey("submodules", "number", "Exact number of submodules, such as GPUs.", "any number"),
        PolicyKey(
            "submodule_claims", "table", "`[admit.token.submodule_claims]`: required claims of each submodule.", "none"
        ),
    ),
    "azure_snp": (*SNP, *VTPM),
    "azure_tdx": (*TDX, *VTPM),
}
