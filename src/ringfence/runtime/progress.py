"""The progress loop: drives the engine from the thread that waits for a request, or from a background thread.

The caller of a blocking collective drives it, so that a small collective needs no switch between threads. The background
thread drives everything else: asynchronous requests, connections and aborts of other workers. Exactly one thread drives at a
time: the one that holds the lock. The background thread polls only the connections that must be served at any time, so that
a driving caller does not wake it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ringfence.dataplane.request import Request
from ringfence.errors import AbortedError, ProtocolError, RingfenceError
from ringfence.link.frames import Call
from ringfence.runtime.control import ControlEdge
from ringfence.runtime.engine import Engine
from ringfence.runtime.gil_switch import GilSwitch, keep_timers_exact
from ringfence.runtime.links import Inbox
from ringfence.transport.fork import in_child, register_fork_cleanup, unregister_fork_cleanup
from ringfence.transport.outage import Handler, OutageWatch
from ringfence.transport.tcp import TcpNetwork

_log = logging.getLogger(__name__)
_SETTLE_SECONDS = 60.0  # that another thread may take to end what it does


class _Waker:
    """An eventfd that wakes the background thread."""

    served_always = True
    worker = -1

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.RLock()  # reentrant: a signal handler may call `close` in the thread that is in `wake`

    def wake(self) -> None:
        """Wake the background thread; no effect after `close`."""
        with self._lock:  # another thread must not close the descriptor meanwhile: its number may be reused
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """Close the descriptor."""
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """Close the descriptor without the lock, which a thread of the parent may hold in a forked child."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def notify(self, readable: bool, writable: bool, ended: bool = False) -> None:
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return


class _EdgeHandler:
    """Passes the messages of a control edge to the engine."""

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
        engine.post, engine.settle = self.call_unless_leaving, self._call_and_wait
        self._edges = tuple(edges)
        self.network = network
        self._lock = threading.RLock()
        # Whether the calling thread drives already. Then it is in a signal handler that has interrupted the engine, and must
        # not drive or wait. A flag beside the lock would be wrong if the handler ran between the two.
        self._is_driving: Callable[[], bool] = self._lock._is_owned  # type: ignore[attr-defined]
        self._submitted: deque[Callable[[], None]] = deque()
        self._waker = _Waker()
        self._gil_switch = GilSwitch()
        network.watch_readable(self._waker.descriptor, self._waker)
        network.serve(engine.acceptor.accept, engine.fail_on_os_error)
        for edge in edges:
            handler = _EdgeHandler(engine, edge)
            network.watch(edge.socket, handler)
            handler.notify(True, True)  # a message may have arrived together with the last one of admission
        self._stopping = False
        name = f"ringfence channel {engine.channel}" if engine.channel else "ringfence"
        self._thread = threading.Thread(target=self._background, name=name, daemon=True)
        self._outages = OutageWatch(
            engine.outage,
            network.connections,
            self._on_outage,
            self._on_unanswered,
            self._on_silence,
            None if engine.channel else engine.requests.name_of,
        )
        register_fork_cleanup(self)
        self._thread.start()
        if engine.world_size > 1:
            self._outages.start()

    # -- for any thread ----------------------------------------------------------------------------------------------

    def call_soon_threadsafe(self, work: Callable[[], None]) -> None:
        """Queue `work` for the driving thread; call `wake` or `wait` afterwards, so that a thread drives.

        Raises ProtocolError in a forked child and after `leave`.
        """
        if in_child(self.engine.keys.alive):
            raise ProtocolError("this is a forked child: the process group belongs to its parent")
        if self._stopping:
            raise ProtocolError("this worker has left the run; initialise the process group again")
        self._submitted.append(work)

    def wake(self) -> None:
        """Wake the background thread."""
        self._gil_switch.begin()
        self._waker.wake()

    def wait(self, request: Request, seconds: float = float("inf")) -> bool:
        """Wait for a request, driving if no other thread does. Return whether it is done within `seconds`.

        An exception that interrupts the wait, such as KeyboardInterrupt, aborts the session.
        """
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
        if self._is_driving() and not request.done:
            raise ProtocolError(
                "a signal handler cannot wait for a collective while it interrupts one: return from it first"
            )
        while not request.done and self.engine.clock() < limit:
            if not self._drive_inline(lambda: request.done or self.engine.clock() >= limit, limit):
                request.block(max(0.0, limit - self.engine.clock()))
        return request.done

    def _drive_inline(self, enough: Callable[[], bool], limit: float) -> bool:
        """Drive unless another thread does; return whether this thread drove. An interrupt releases the lock, too."""
        try:
            if not self._lock.acquire(blocking=False):
                return False
            self._drive_for_caller(enough, limit)
            if not (self._submitted or self.engine.busy()):
                self._gil_switch.end()  # the background thread may not have run since another thread woke it
            return True
        finally:
            try:  # noqa: SIM105  # a call before the release could be interrupted instead of it
                self._lock.release()
            except RuntimeError:  # another thread holds it
                pass
            if self._submitted or self.engine.busy():
                self.wake()

    def _drive_for_caller(self, enough: Callable[[], bool], limit: float) -> None:
        try:
            if torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
                # Modes of the calling thread do not apply here.
                with torch.inference_mode(False), _disable_current_modes():
                    self._drive(enough, limit)
            else:
                self._drive(enough, limit)
        except BaseException as error:
            # The interrupted work is incomplete: the session fails before any thread drives again.
            failure = self._interruption(error)
            self._submitted.appendleft(lambda: self.engine.fail(failure, self.engine.rank))
            raise

    def _interruption(self, error: BaseException) -> AbortedError:
        return AbortedError(f"worker {self.engine.rank} was interrupted ({type(error).__name__})")

    def abort(self, error: AbortedError) -> None:
        """Abort the session from any thread."""
        self.call_soon_threadsafe(lambda: self.engine.fail(error, self.engine.rank))
        self.wake()

    def _on_outage(self, handler: Handler) -> None:
        if isinstance(handler, Inbox):
            self.call_unless_leaving(lambda: self.engine.on_outage(handler))

    def _on_unanswered(self, workers: frozenset[int]) -> None:
        self.call_unless_leaving(lambda: self.engine.on_unanswered(workers))

    def _on_silence(self, worker: int) -> None:
        self.call_unless_leaving(lambda: self.engine.on_silence(worker))

    def call_unless_leaving(self, work: Callable[[], None]) -> None:
        """Queue `work` for the driving thread and wake it; no effect while this worker leaves the run."""
        with contextlib.suppress(ProtocolError):
            self.call_soon_threadsafe(work)
            self.wake()

    def _call_and_wait(self, work: Callable[[], None]) -> None:
        """Have the driving thread, which is another one, do `work`, and wait for it."""
        done = threading.Event()

        def settle() -> None:
            try:
                work()
            finally:
                done.set()

        with contextlib.suppress(ProtocolError):  # it has ended: nothing is in progress
            self.call_soon_threadsafe(settle)
            self.wake()
            if not done.wait(_SETTLE_SECONDS):
                _log.error("worker %d: channel %d does not respond", self.engine.rank, self.engine.channel)

    # -- driving -----------------------------------------------------------------------------------------------------

    def _drive(self, enough: Callable[[], bool], limit: float = float("inf")) -> None:
        engine, submitted = self.engine, self._submitted
        while True:
            self._run_submitted()
            engine.run_ready()
            if enough() and not submitted:
                return
            if submitted:
                continue
            deadline = min(engine.next_deadline(), limit)
            self.network.poll(max(0.0, deadline - engine.clock()))
            engine.expire()

    def _run_submitted(self) -> None:
        """Run the queued work. Interrupted work stays queued: after the failure it is run again, and its request fails."""
        submitted = self._submitted
        while submitted:
            try:
                submitted[0]()
            except BaseException:
                if self.engine.failure is not None:
                    submitted.popleft()
                raise
            submitted.popleft()

    def _background(self) -> None:
        keep_timers_exact()
        torch.set_grad_enabled(False)  # enabled in a new thread; in-place sums would be refused
        while not self._stopping:
            self.network.sleep()
            self._lock.acquire()
            try:
                self.network.poll(0)
                if self._submitted or self.engine.busy():
                    self._gil_switch.begin()
                self._drive(lambda: self._stopping or not self.engine.busy())
            except BaseException as error:  # this thread must survive a bug, or requests would hang
                failure = RingfenceError(f"worker {self.engine.rank}: internal error {type(error).__name__}: {error}")
                failure.__cause__ = error
                self.engine.fail(failure, self.engine.rank)
                self._waker.wake()  # for work that was queued behind it and has used up its wake
            finally:
                self._gil_switch.end()
                self._lock.release()

    # -- the end -----------------------------------------------------------------------------------------------------

    def leave(self, seconds: float, finish: bool = False) -> None:
        """Send what is written, send BYE to all workers, and stop, within `seconds`.

        With `finish`, collectives in progress are completed first. Without it, other workers that wait for them get the BYE
        at once.
        """
        limit = self.engine.clock() + seconds
        done = Request(Call(0), float("inf"))

        def drained() -> bool:
            engine = self.engine
            if engine.failure is not None:
                return True
            for channel in engine.channels:
                channel.settle(lambda: None)  # it may still write the end of a pass that it has reported as done
            requests = engine.requests
            blocked = engine.blocked or any(channel.blocked for channel in engine.channels)
            return not (blocked or requests.collectives()) if finish else not blocked or requests.in_progress()

        def leave_when_drained() -> None:
            if drained() or self.engine.clock() >= limit:
                self.engine.leave()
                done.finish()
            else:
                self.network.poll(0.01)
                self.engine.expire()
                self._run_submitted()  # requests on device tensors are completed by their device's thread
                self.engine.call_soon(leave_when_drained)

        interrupting = self._is_driving()  # in a signal handler, while this thread drives
        if interrupting:
            self.engine.leave()
        else:
            self.call_soon_threadsafe(lambda: self.engine.call_soon(leave_when_drained))
            self._wait(done, seconds + 1)
        self._stopping = True
        self._outages.stop()
        self.wake()
        if threading.current_thread() is not self._thread and not interrupting:
            self._thread.join(timeout=5)
            self._outages.join(timeout=5)
        self._gil_switch.close()  # the background thread may have ended before it was woken
        unregister_fork_cleanup(self)  # its descriptor numbers will be reused
        for edge in self._edges:
            edge.close()
        self._edges = ()
        self.network.close()
        self._waker.close()

    def forget(self) -> None:
        """Drop descriptors and keys in a forked child."""
        self._submitted.clear()
        self._gil_switch.close()
        self.engine.forget()
        for edge in self._edges:
            edge.abandon()
        self._edges = ()
        self.network.close()
        self._waker.forget()
