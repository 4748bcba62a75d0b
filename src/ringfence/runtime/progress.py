"""Who drives the engine: the thread that waits, if nobody else does, and otherwise one background thread per process.

A blocking collective is driven by its own caller, so that a small one costs no hand-over between threads. What is left
(asynchronous operations, other workers' dials and aborts) is the background thread's. Exactly one thread drives at a
time: whoever holds the lock. The background thread sleeps on what must be served at any time, so that a driving caller
does not wake it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ringfence.control import ControlEdge
from ringfence.dataplane.request import Request
from ringfence.errors import AbortedError, ProtocolError, RingfenceError
from ringfence.link.frames import Call
from ringfence.runtime.connection import Inbox
from ringfence.runtime.engine import Engine
from ringfence.runtime.gil_switch import GilSwitch, keep_timers_exact
from ringfence.transport.fork import in_child, register_fork_cleanup, unregister_fork_cleanup
from ringfence.transport.outage import Handler, OutageWatch
from ringfence.transport.tcp import TcpNetwork


class _Waker:
    """An eventfd that is always served."""

    served_always = True
    worker = -1

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: a signal handler may close it in the thread that wakes it

    def wake(self) -> None:
        with self._lock:  # or another thread closes it meanwhile, and this writes to whoever has its number then
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """Its number will be somebody else's: keep it no longer."""
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """The same in a forked child, where a thread that is not there may hold the lock."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return


class _EdgeHandler:
    served_always = True

    def __init__(self, engine: Engine, edge: ControlEdge) -> None:
        self._engine = engine
        self._edge = edge
        self.worker = edge.peer

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        self._engine.call_soon(self._work)

    def _work(self) -> None:
        if self._edge.wants_write:
            self._edge.flush()
        if self._edge in self._engine.edges:
            self._engine.on_control(self._edge)


class ProgressLoop:
    """Drives one engine over TCP."""

    def __init__(self, engine: Engine, network: TcpNetwork, edges: Sequence[ControlEdge]) -> None:
        self.engine = engine
        self._edges = tuple(edges)
        self.network = network
        self._lock = threading.RLock()
        # Whether the calling thread drives already: then a signal handler asks, in the middle of things half changed. It
        # may not wait, and `leave` does not drive on, so the lock is never taken twice. A note beside the lock would be
        # wrong where the handler comes between the two.
        self._mine: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._asked: deque[Callable[[], None]] = deque()
        self._waker = _Waker()
        self._gil_switch = GilSwitch()
        network.watch_readable(self._waker.descriptor, self._waker)
        network.serve(engine.acceptor.accept, engine.fail_on_os_error)
        for edge in edges:
            handler = _EdgeHandler(engine, edge)
            network.watch(edge.socket, handler)
            handler.notify(True, True)  # something may have come in one piece with the last of admission
        self._stopping = False
        self._thread = threading.Thread(target=self._background, name="ringfence", daemon=True)
        self._outages = OutageWatch(engine.outage, network.connections, self._on_outage, self._on_silence)
        register_fork_cleanup(self)
        self._thread.start()
        if engine.world_size > 1:
            self._outages.start()

    # -- for any thread ----------------------------------------------------------------------------------------------

    def ask(self, work: Callable[[], None]) -> None:
        """Have whoever drives do `work`; `wake` or `wait` makes sure that somebody does."""
        if in_child(self.engine.keys.alive):
            raise ProtocolError("this is a forked child: the process group belongs to its parent")
        if self._stopping:
            raise ProtocolError("this worker has left the run; initialise the process group again")
        self._asked.append(work)

    def wake(self) -> None:
        self._gil_switch.begin()
        self._waker.wake()

    def wait(self, request: Request, seconds: float = float("inf")) -> bool:
        """Wait for the end of an operation, driving if nobody does. Whatever interrupts it aborts the session."""
        if request.done:
            return True
        try:
            return self._wait(request, seconds)
        except BaseException as error:
            if self._stopping or in_child(self.engine.keys.alive):
                raise
            self.abort(self._interruption(error))
            raise

    def _wait(self, request: Request, seconds: float) -> bool:
        if in_child(self.engine.keys.alive):
            raise ProtocolError("this is a forked child: the process group belongs to its parent")
        limit = self.engine.clock() + seconds
        if self._mine() and not request.done:
            raise ProtocolError(
                "a signal handler cannot wait for a collective while it interrupts one: return from it first"
            )
        while not request.done and self.engine.clock() < limit:
            if not self._drive_inline(lambda: request.done or self.engine.clock() >= limit, limit):
                request.block(max(0.0, limit - self.engine.clock()))
        return request.done

    def _drive_inline(self, enough: Callable[[], bool], limit: float) -> bool:
        """Drive, unless somebody does. Wherever an interrupt comes, the lock is given back."""
        try:
            if not self._lock.acquire(blocking=False):
                return False
            self._drive_for_caller(enough, limit)
            if not (self._asked or self.engine.busy()):
                self._gil_switch.end()  # the background thread may have slept through what another thread woke it for
            return True
        finally:
            try:  # noqa: SIM105  # nothing may be called before the release: an interrupt could come in its place
                self._lock.release()
            except RuntimeError:  # it is another thread's
                pass
            if self._asked or self.engine.busy():
                self.wake()

    def _drive_for_caller(self, enough: Callable[[], bool], limit: float) -> None:
        try:
            if torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
                with torch.inference_mode(False), _disable_current_modes():  # the caller's modes are none of the loop's
                    self._drive(enough, limit)
            else:
                self._drive(enough, limit)
        except BaseException as error:
            # What it interrupted is half done: nobody may drive on before the session has ended.
            failure = self._interruption(error)
            self._asked.appendleft(lambda: self.engine.fail(failure, self.engine.rank))
            raise

    def _interruption(self, error: BaseException) -> AbortedError:
        return AbortedError(f"worker {self.engine.rank} was interrupted ({type(error).__name__})")

    def abort(self, error: AbortedError) -> None:
        """End the session from outside the loop."""
        self.ask(lambda: self.engine.fail(error, self.engine.rank))
        self.wake()

    def _on_outage(self, handler: Handler) -> None:
        if isinstance(handler, Inbox):
            self._ask_unless_leaving(lambda: self.engine.on_outage(handler))

    def _on_silence(self, worker: int) -> None:
        self._ask_unless_leaving(lambda: self.engine.on_silence(worker))

    def _ask_unless_leaving(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(ProtocolError):
            self.ask(work)
            self.wake()

    # -- driving -----------------------------------------------------------------------------------------------------

    def _drive(self, enough: Callable[[], bool], limit: float = float("inf")) -> None:
        engine, asked = self.engine, self._asked
        while True:
            self._do_what_was_asked()
            engine.run_ready()
            if enough() and not asked:
                return
            if asked:
                continue
            deadline = min(engine.next_deadline(), limit)
            self.network.poll(max(0.0, deadline - engine.clock()))
            engine.expire()

    def _do_what_was_asked(self) -> None:
        """What is interrupted stays: done again when the session has failed, it ends as all does then."""
        asked = self._asked
        while asked:
            try:
                asked[0]()
            except BaseException:
                if self.engine.failure is not None:
                    asked.popleft()
                raise
            asked.popleft()

    def _background(self) -> None:
        keep_timers_exact()
        torch.set_grad_enabled(False)  # a new thread begins with it enabled, and in-place sums would be refused
        while not self._stopping:
            self.network.sleep()
            self._lock.acquire()
            try:
                self.network.poll(0)
                if self._asked or self.engine.busy():
                    self._gil_switch.begin()
                self._drive(lambda: self._stopping or not self.engine.busy())
            except BaseException as error:  # this thread must outlive any mistake: what it serves would hang
                failure = RingfenceError(f"worker {self.engine.rank}: internal error {type(error).__name__}: {error}")
                failure.__cause__ = error
                self.engine.fail(failure, self.engine.rank)
                self._waker.wake()  # for what was asked for behind it, by those who have woken this thread before
            finally:
                self._gil_switch.end()
                self._lock.release()

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self, seconds: float, finish: bool = False) -> None:
        """Let collectives end, if they are to `finish`, and what is written reach the wire; say goodbye, stop.

        If they are not, whoever waits for them is told at once, and what is written of them helps nobody.
        """
        limit = self.engine.clock() + seconds
        left = Request(Call(0), float("inf"))

        def drained() -> bool:
            engine = self.engine
            if engine.failure is not None:
                return True
            requests = engine.requests
            return (
                not (engine.blocked or requests.collectives())
                if finish
                else not engine.blocked or requests.in_progress()
            )

        def go() -> None:
            if drained() or self.engine.clock() >= limit:
                self.engine.leave()
                left.finish()
            else:
                self.network.poll(0.01)
                self.engine.expire()
                self.engine.call_soon(go)

        interrupting = self._mine()  # a signal handler, in a collective of this very thread
        if interrupting:
            self.engine.leave()
        else:
            self.ask(go)
            self._wait(left, seconds + 1)
        self._stopping = True
        self._outages.stop()
        self.wake()
        if threading.current_thread() is not self._thread and not interrupting:
            self._thread.join(timeout=5)
        self._gil_switch.end()  # and that thread may have ended before it was woken
        unregister_fork_cleanup(self)  # the numbers of its descriptors will be somebody else's
        for edge in self._edges:
            edge.close()
        self._edges = ()
        self.network.close()
        self._waker.close()

    def forget(self) -> None:
        """In a forked child: hold no descriptor and no key, answer nothing."""
        self._gil_switch.end()
        self.engine.forget()
        for edge in self._edges:
            edge.abandon()
        self._edges = ()
        self.network.close()
        self._waker.forget()
