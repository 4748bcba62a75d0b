"""What `ringfence policy new` writes: a table for each kind of proof, with a word on every key that must be filled in."""

from __future__ import annotations

from typing import Final

HEAD: Final = """\
# Who may join the run. Every worker needs a copy that says the same, with the files that it names beside it:
# workers with different policies refuse each other. `ringfence policy explain` says in words whom this admits.
version = 1
# min_workers = 8          # a run of fewer workers does not begin, so that nobody can split it
# max_session_age = "24h"  # after which all workers must be verified again
# verify_every = "10m"     # how often neighbours verify each other again meanwhile; not with the shared secret alone
# key_agreement = "any"    # if some machine has no post-quantum key agreement; by default all need it
# inside_machine = "nccl"  # groups inside one machine may use it without sealing; by default none may use another backend
# same_host = "sealed"     # seal inside a machine too; by default workers there share memory and seal between machines only
# forwarded = "every_hop"  # if workers do not trust each other: each link authenticates what it forwards, for more CPU time
# record = "required"      # every worker writes a signed record of the run; by default only those with RINGFENCE_RECORD
# private_sum = { colluding = 1 }  # members learn sums and not each other's tensors; each rule then names its member
"""

RULE: Final = """
# Any one rule admits. Inside a rule, all proofs are needed.
[[admit]]
"""

TABLES: Final[dict[str, str]] = {
    "secret": """\
[admit.secret]             # RINGFENCE_SECRET_FILE, made by `ringfence secret new`
""",
    "certificate": """\
[admit.certificate]        # RINGFENCE_CERTIFICATE_FILE and RINGFENCE_KEY_FILE
ca = {ca}              # authorities in PEM form, or a SPIFFE trust bundle
trust_domain = "{trust_domain}"
ids = ["spiffe://{trust_domain}/worker/*"]   # * is one part of a path, /** at the end is all below
# With {{rank}} or {{rank/8}} instead of *, a name is bound to a rank or to the 8 ranks of a machine.
# crl = "lists"            # a folder with the authorities' lists of revoked certificates; without it none is refused
# crl_max_age = "2d"       # how old the newest list may be
""",
    "tdx": """\
[admit.tdx]                # Intel TDX; `ringfence evidence measure` prints the values
collateral = ["FILL IN: file"]
mrtd = ["FILL IN"]
rtmr0 = ["FILL IN"]
rtmr1 = ["FILL IN"]
rtmr2 = ["FILL IN"]
unpinned = ["rtmr3"]       # registers whose value does not matter
# tcb_status = ["UpToDate"]
""",
    "snp": """\
[admit.snp]                # AMD SEV-SNP; `ringfence evidence measure` prints the values
measurement = ["FILL IN"]
# allow_smt = true
# vlek_providers = []
# require_alias_check = true            # the answer to BadRAM; reports of version 2 cannot say it
# allow_provisional_firmware = false    # firmware that the host can still take back
[admit.snp.minimum_tcb]    # a product line that is not named here is not admitted
genoa = {{ bootloader = "FILL IN", tee = "FILL IN", snp = "FILL IN", microcode = "FILL IN" }}
""",
    "nvidia": """\
[admit.nvidia]             # the worker's GPUs; set gpus to their number
reference_values = ["FILL IN: file"] # one for each model, driver and VBIOS; `ringfence evidence measure` writes it
# gpus = 8                 # exactly so many; without it, one that is left out is not missed
# ocsp = "status"          # a folder with NVIDIA's OCSP responses; `ringfence evidence ocsp` fetches them
# ocsp_max_age = "1d"      # how old the newest response may be
""",
    "token": """\
[admit.token]              # a verifier's token; RINGFENCE_TOKEN_COMMAND fetches it
issuer = "FILL IN"
keys = "FILL IN: file"     # the service's public keys, a JWK set
# audience = "FILL IN"
[admit.token.claims]       # what the token must say, such as:
# x-nvidia-overall-att-result = true
""",
    "azure_snp": """\
[admit.azure_snp]          # an SEV-SNP VM on Azure; `ringfence evidence measure` prints the values
measurement = ["FILL IN"]  # of the paravisor
# allow_provisional_firmware = false    # firmware that the host can still take back
# require_secure_boot = true
[admit.azure_snp.minimum_tcb]
genoa = {{ bootloader = "FILL IN", tee = "FILL IN", snp = "FILL IN", microcode = "FILL IN" }}
[admit.azure_snp.pcrs]     # of the guest; a PCR that is not named here is not checked
4 = ["FILL IN"]            # boot loader
7 = ["FILL IN"]            # secure boot
""",
    "azure_tdx": """\
[admit.azure_tdx]          # a TDX VM on Azure; `ringfence evidence measure` prints the values
collateral = ["FILL IN: file"]
mrtd = ["FILL IN"]         # of the paravisor
unpinned = ["rtmr0", "rtmr1", "rtmr2", "rtmr3"]   # zero on Azure: the vTPM measures the guest
# require_secure_boot = true
[admit.azure_tdx.pcrs]     # of the guest; a PCR that is not named here is not checked
4 = ["FILL IN"]            # boot loader
7 = ["FILL IN"]            # secure boot
""",
}
