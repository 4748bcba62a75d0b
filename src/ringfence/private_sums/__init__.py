"""Private sums (experimental): the members of a run learn the sum of their tensors, and nothing else (spec/private-sum.md).

graph.py         which workers share a mask, so that the masks of any members that may collude leave the others hidden
members.py       the members of a group, and the groups that are refused
fixed_point.py   tensors as integers whose sum cannot overflow
masks.py         keystreams, added to integers block by block
pairs.py         what a group keeps: the seeds of pairs, and how many sums it has made
agreement.py     all ranks go on, or all refuse, before anything of a tensor is sent
summing.py       `ringfence.private_sum`
updates.py       `ringfence.private_mean`, which clips and weighs, and `ringfence.private_hook` for DDP
"""
