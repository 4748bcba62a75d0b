"""The data plane: programs made from schedules, their execution over sealed links, buffers and requests."""
