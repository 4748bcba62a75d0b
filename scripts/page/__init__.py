"""The page "What it costs": tables and pictures from raw samples, so that no figure in a document is typed by hand.

    docs/results/samples.jsonl -> edition ─┬► tables ─► between markers in docs/benchmarks/what-it-costs.md and README.md
                                           └► series ─► draw ─► docs/figures/*.svg

It is a script and no command of ringfence, because it writes this repository's documents; its charts are those of
`ringfence report`. Every picture carries a digest of the numbers it was drawn from, so that a test can tell a
stale one without drawing it.
"""
