"""The benchmark: the cost of sealing on this machine, against plaintext Gloo and other implementations of sealing.

    cli.bench -> measure -> worker pool ──commands──► worker: variants, operations, training
                    │                             │
                    └► samples (JSON lines) ◄─────┘ -> intervals -> table

Variants take turns in the same worker processes. The unsealed variant of ringfence lives here and nowhere else.
"""
