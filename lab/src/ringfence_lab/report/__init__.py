"""The report of a study: one HTML page and its figures.

    summary/*.json ─► study ─► figures (numbers, one sentence each) ─┬► charts ─► SVG and PNG
                                                                     └► text, tables ─► page ─► report.html

Everything up to `figures` is plain data; only `charts` and `style` need matplotlib, which is imported late. The same study
gives the same bytes: no date stands in the page but those of the samples.
"""
