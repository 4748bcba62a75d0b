"""The data plane: programs made from schedules, their execution over sealed links, buffers and requests.

request.py                             what a process group submits: deadline, outcome, waiters
program.py                             a schedule, prepared
execution.py                           one pass of a program over its memory, segment by segment
endpoint.py                            one end of a link: bytes between a stream and the executions on it
buffers.py                             tensors as bytes, and the segments in which frames are built
shared.py, regions.py, link_memory.py  memory that workers of one machine share
csrc/                                  execution, endpoint, buffers and regions in C; send.c opens with the way of a segment
info.py, native.py, choice.py          which of the two this process uses
"""
