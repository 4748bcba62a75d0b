"""The benchmark: what sealing costs here, against plaintext Gloo and other ways to seal, in a form a sceptic can repeat.

    cli.bench -> measure -> worker pool ──commands──► worker: variants, operations, training
                    │                             │
                    └► samples (JSON lines) ◄─────┘ -> intervals -> table

Variants take turns in the same worker processes. The unsealed variant of ringfence lives here and nowhere else.
"""
