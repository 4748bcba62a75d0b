"""DiLoCo (arXiv 2311.08105): sites train on their own for many steps, then average what they have changed over sealed links.

averager.py      `ringfence.DiLoCo`: the outer step, its state, and how a site catches up
outer_state.py   what the outer optimizer keeps for each parameter: compared, and given to a site that catches up
standing.py      what workers tell each other before anything is averaged, and the checks of it
"""
