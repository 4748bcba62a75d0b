"""Every environment variable of ringfence, declared once: settings.py knows no other, and the documentation lists these."""

from __future__ import annotations

from typing import Final, NamedTuple


class Setting(NamedTuple):
    """One environment variable. Texts are Markdown, with links relative to docs/reference."""

    name: str
    meaning: str
    default: str
    per_worker: str = "no"  # whether workers of one run may have different values
    credential: bool = False  # says who may join, or proves who this worker is


SETTINGS: Final = (
    Setting(
        "RINGFENCE_POLICY",
        "Path of the [policy file](policy.md), which says who may join. An empty value is an error.",
        "no policy, so that the shared secret admits a worker",
        "path only",
        credential=True,
    ),
    Setting(
        "RINGFENCE_SECRET_FILE",
        "Path of the shared secret that `ringfence secret new` wrote. Required without a policy, and with a policy "
        "that has a rule with `[admit.secret]`. Only the owner may have access to the file.",
        "none",
        "path only",
        credential=True,
    ),
    Setting(
        "RINGFENCE_CERTIFICATE_FILE",
        "Path of this worker's certificate in PEM form, followed by its intermediate certificates. For policies that ask for "
        "[certificates](../guides/admit-by-certificate.md).",
        "none",
        "yes",
        credential=True,
    ),
    Setting(
        "RINGFENCE_KEY_FILE",
        "Path of the certificate's private key in PEM form, not encrypted. Only the owner may have access to the file.",
        "none",
        "yes",
        credential=True,
    ),
    Setting(
        "RINGFENCE_SPIFFE_SOCKET",
        "Unix socket of a SPIFFE Workload API, such as `unix:///run/spire/sockets/agent.sock`, which provides this worker's "
        "certificate and key instead of the two files. Asked anew for each session, for at most 20 seconds. Needs grpcio "
        '(`pip install ".[spiffe]"` in a clone).',
        "none",
        "yes",
        credential=True,
    ),
    Setting(
        "RINGFENCE_VCEK_FILE",
        "Path of the certificate of this machine's SEV-SNP key (VCEK) from AMD's key service. Set it where the host does not "
        "pass the certificate to its guests. For policies that ask for SEV-SNP.",
        "the certificate that the host provides, on Azure its metadata service",
        "yes",
        credential=True,
    ),
    Setting(
        "RINGFENCE_TOKEN_COMMAND",
        "Command that prints a verifier's token. It gets a nonce as its last argument, runs without a shell, once for each "
        "connection attempt, and has 20 seconds. For policies that ask for tokens.",
        "none",
        "yes",
        credential=True,
    ),
    Setting(
        "RINGFENCE_RUN_ID",
        "Name of this run. Runs that share a secret must have different names.",
        "torchrun's run id (`TORCHELASTIC_RUN_ID`), else `none`",
    ),
    Setting(
        "RINGFENCE_GENERATION",
        "Which start of the run this is. A worker of another generation is refused. `ringfence run` sets it. With torchrun's "
        "own rendezvous, set it from the scheduler that starts torchrun anew, such as Slurm's `SLURM_RESTART_COUNT`; "
        "torchrun's restart count is added to it, as in `2.1`.",
        "torchrun's restart count (`TORCHELASTIC_RESTART_COUNT`), else `0`",
    ),
    Setting(
        "RINGFENCE_AGENT",
        "Socket of the agent that started this worker. `ringfence run` sets it; in a process that has it, all process groups "
        "are ringfence's.",
        "not set outside of `ringfence run`",
        "set by `ringfence run`",
    ),
    Setting(
        "RINGFENCE_INTERFACE",
        "Network interface or IP address to listen on and to publish to the other workers.",
        "the address from which this machine reaches `MASTER_ADDR`, or else the host of the store "
        '(`init_method="tcp://HOST:PORT"`); the loopback if neither is known. A host that does not resolve is an '
        "error, unless "
        "torchrun's variables say that all workers are on this machine",
        "yes",
    ),
    Setting(
        "RINGFENCE_PORTS",
        "Range of ports to listen on, such as `20000-20100`, for firewalls. A worker takes the first free ones: one "
        "for links, and one for admission while it joins. Allow two ports for each worker on the machine, and as many again "
        "for each further [session](../guides/meshes.md#sessions) of a worker.",
        "any free port",
        "yes",
    ),
    Setting(
        "RINGFENCE_ADVERTISE",
        "`host:port` that other workers dial for links to this worker, if it differs from the address it listens on: behind "
        "NAT or port forwarding. For admission they dial the same host, at the port that the worker listens on. If the "
        "host is a name, workers use the first address that their resolver returns. A worker with this setting has one "
        "[session](../guides/meshes.md#sessions) at most.",
        "the address it listens on",
        "yes",
    ),
    Setting(
        "RINGFENCE_REQUIRE",
        "`1`: process groups of other backends, and RPC, raise an error in this process "
        "([details](#never-plaintext-by-accident)). `0`: such a group is logged as a warning if credentials are set.",
        "`0`",
        "yes",
    ),
    Setting(
        "RINGFENCE_JOIN_TIMEOUT",
        "Seconds that a worker waits for the run to form, from 1 to 86400. A shorter timeout of `init_process_group` takes "
        "precedence. Set it to more than the time between the start of the first worker and that of the last.",
        "300",
    ),
    Setting(
        "RINGFENCE_OUTAGE_TIMEOUT",
        "Seconds without an answer from a worker until the run ends, from 2 to 86400. A shorter "
        "[outage](../guides/outages.md) "
        "only delays the run. If workers have different values, the shortest ends the run.",
        "300",
    ),
    Setting(
        "RINGFENCE_CHANNELS",
        "Connections and threads for each link between machines, from 1 to 8, for large collectives "
        "([guide](../guides/channels.md)). Rank 0's value applies to the whole run; another worker with another value "
        "fails to start.",
        "1",
        "if not set",
    ),
    Setting(
        "RINGFENCE_METRICS_FILE",
        "File to write [counters](../guides/observability.md#counters) to, in Prometheus form, every 15 s and at the "
        "end. The name must contain `{rank}`, which is replaced by the worker's rank; in a [session of some "
        "workers](../guides/meshes.md#sessions) also by the first digits of its digest.",
        "no file",
        "yes",
    ),
    Setting(
        "RINGFENCE_STAGE_TIMES",
        "`1`: the counters include the time of each stage of the data plane and of staging. This costs a few system calls "
        "for each segment.",
        "`0`",
        "yes",
    ),
    Setting(
        "RINGFENCE_SAME_HOST",
        "`sealed`: workers on one machine seal what they exchange, as between machines, also if the policy says "
        '`same_host = "shared"` ([Several workers on one machine](../guides/one-machine.md)). '
        "`shared` changes nothing: a policy that seals still does. The policy digest covers it, so workers with different "
        "values refuse each other.",
        "the policy's [`same_host`](policy.md#top-level-keys); without a policy `shared`",
    ),
    Setting(
        "RINGFENCE_DATAPLANE",
        "Data plane to use: `compiled` (C, built when ringfence is installed) or `python`, many times slower. Both exchange "
        "the same bytes.",
        "`compiled`. Without it ringfence does not start",
        "yes",
    ),
    Setting(
        "RINGFENCE_SIM_DEVICES",
        "Number of devices of the [simulated accelerator](simulated-accelerator.md), from 1 to 8. Only the lab and tests "
        "load it.",
        "2",
        "yes",
    ),
)
