"""A study: a grid of cells measured one by one, and three layers of results, each made from the one before.

    grid (TOML) -> cells -> run ──► raw/<cell>.jsonl       as it was measured, append-only
                                      │ tidy
                                      ▼
                                    tidy/samples.parquet   a row for each round and variant, types checked
                                      │ summary
                                      ▼
                                    summary/cells.parquet  a row for each cell and variant -> query, report, plan

A layer is replaced whole or not at all, and made again only when what it is made from has changed. Nothing but `run` measures.
"""
