"""What others have published, kept apart from what was measured here: other hardware, other guarantees, other rules.

Each entry says how its source was read, and carries the doubt that belongs to it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

READ: Final = {
    "text": "Primary text, source or data read",
    "abstract": "Abstract or opening only",
    "second-hand": "Second-hand: quoted by another source",
    "recomputed": "Recomputed by us from the authors' data",
}


class Entry(NamedTuple):
    """One published figure."""

    who: str
    what: str
    figure: str
    read: str  # a key of READ
    doubt: str
    source: str  # empty where no address was kept


PUBLISHED: Final = (
    Entry(
        "Lee et al., arXiv 2501.11771 v3 (2025)",
        "data-parallel training with four GPU TEEs, each ring step encrypted and authenticated, against no TEE",
        "8.68 times a plain iteration on average; GPT-2 XL 41.6 times, and 3.03 times with a larger bucket_cap_mb",
        "abstract",
        "Tinfoil says that the one paper on several Hopper GPUs used “emulated drivers”, and probably means this "
        "one: take 41.6 as the result of an emulation until that is checked. Models, batch sizes and the bucket "
        "sizes tried were not found.",
        "https://arxiv.org/html/2501.11771v3",
    ),
    Entry(
        "Fastrack, arXiv 2410.15240",
        "CPU to GPU communication, inference and training under a GPU TEE, and three methods to reduce its cost",
        "communication 12.69 to 33.53 times; training 10 to 455 % slower; up to 84.6 % less run time with all three",
        "abstract",
        "The body of the paper was not found.",
        "https://ar5iv.labs.arxiv.org/html/2410.15240",
    ),
    Entry(
        "PipeLLM, arXiv 2411.03357",
        "throughput of inference with NVIDIA confidential computing",
        "down by up to 52.8 % (OPT-30B) and 88.2 % (OPT-66B); below 19.6 % with PipeLLM",
        "abstract",
        "Inference, not training.",
        "https://arxiv.org/abs/2411.03357",
    ),
    Entry(
        "VerifiableFL, arXiv 2412.10537",
        "federated learning with an attested record of what ran",
        "less than 10 % (v3), less than 12 % (v4)",
        "abstract",
        "Server and clients, on NVFlare.",
        "https://arxiv.org/abs/2412.10537",
    ),
    Entry(
        "HEAR (SC'23)",
        "all-reduce with additive masks: 16 MiB of float, best block size",
        "1.33 times with 1,152 ranks (integers 1.26), 2.47 times with 2 ranks (integers 1.76)",
        "recomputed",
        "Encryption without authentication: changes to a message are not detected.",
        "https://github.com/spcl/libhear",
    ),
    Entry(
        "HEAR (SC'23)",
        "proxies of training with the same",
        "ResNet-152 1.312 times, DLRM 1.173, CosmoFlow 1.113 (256 ranks), GPT-3 1.031 (384 ranks)",
        "recomputed",
        "As above.",
        "https://github.com/spcl/libhear",
    ),
    Entry(
        "Phala",
        "NVIDIA B300 in confidential mode",
        "matrix products at 0.998 of the speed, copies to the GPU at 0.203 and from it at 0.211; about 330 µs for "
        "each small host-device copy",
        "abstract",
        "A vendor's blog.",
        "https://phala.com/posts/blackwell-gpu-cc-serialized-bridge",
    ),
    Entry(
        "Tinfoil",
        "training throughput on NVIDIA Blackwell in confidential mode",
        "18 to 32 % lower",
        "abstract",
        "A vendor's blog.",
        "https://tinfoil.sh/blog/2026-06-23-confidential-computing-overhead",
    ),
    Entry(
        "NVIDIA, as quoted by a blog",
        "encrypted path between CPU and an H100 in confidential mode",
        "about 4 GB/s, limited by the CPU's encryption",
        "second-hand",
        "The original was not read.",
        "",
    ),
)
