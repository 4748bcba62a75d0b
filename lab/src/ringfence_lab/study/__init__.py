"""A study: a grid of cells measured one by one, and two layers of results, the second made from the first.

    grid (TOML) -> cells -> run ──► raw/<cell>.jsonl     rounds as they were measured, append-only
                                      │ rounds, summary
                                      ▼
                                    summary/cells.json   a row for each cell and variant -> report, plan

A file of the summary is replaced whole or not at all, and only if it would change. Nothing but `run` measures.
"""
