# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps in the user's loop, on gradients that the job has added up.

A worker computes its lanes of a step one by one. After the last one, the job passes it the mean
gradient of all lanes, and the user's code takes the step. Every worker takes the same step, so
everything that the step depends on must be registered with the job: it is part of the job's state.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from elasticdl._zoo import ZooError

# What the job wants next: records and a seed; `step` with a seed and the mean loss; `state` or
# `load`. Then the number of steps before, and whether this worker leads the others.
Request = tuple[Any, Any, int, bool]

# Methods that change registered objects; they only work while a step is taken.
_GUARDED = ("step", "update", "update_parameters", "unscale_")
_MARK = "_elasticdl_guard"

NOT_STEPPED = (
    "this step ended without a call to the `step()` of a registered optimizer; call "
    "`optimizer.step()` in every iteration after `job.allreduce(model)`, or after the last batch "
    "of each step of `job.steps(…)`"
)


class OwnStep:
    """What the user's code has registered, and whether it may take a step now."""

    def __init__(self, set_place: Callable[[int, bool], None]) -> None:
        self._set_place = set_place
        self.objects: dict[str, Any] = {}
        # Whether steps are taken in Python.
        self.is_on = False
        # Whether the parameters have the mean gradient of a step that is being taken.
        self.is_step = False
        # The mean loss of that step.
        self.loss: float | None = None
        # Whether `commit` takes the steps, because the user's code does not; None: not known yet.
        self.is_implicit: bool | None = None
        # Whether the job waits for an answer.
        self.is_asked = False
        self.is_over = False
        # Calls of `step()` of an optimizer, or of what calls it, in this step.
        self.n_calls = 0
        # Whether the user's code has changed the gradient of a step.
        self.is_changed = False
        # Advances the schedule that the job follows.
        self._advance: Callable[[], Any] = lambda: None
        # Whether such calls do nothing, because this worker has more batches in this step.
        self._is_idle = False
        # The guarded objects, their methods, and what hid these before.
        self._guards: list[tuple[Any, str, Any]] = []
        self._loop: Any = None
        self._model: Any = None
        # The next batch or step.
        self._turn: Request | None = None
        self._step: Request | None = None
        self._last = np.zeros(0, np.uint64)

    def register(self, name: str, value: Any) -> None:
        """Makes an object part of the job's state."""
        if self.objects.get(name, value) is not value:
            raise RuntimeError(f"the job already has another `{name}`; register it once")
        if name in self.objects:
            return
        if self.is_on:
            raise RuntimeError(f"`{name}` was registered during training; pass it to `init`")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise ZooError(
                    f"`{name}` is of type {type(value).__name__}, which has no `{method}`; the job "
                    "can only keep the state of objects with `state_dict` and `load_state_dict`"
                )
        self.objects[name] = value

    def start(self, loop: Any, model: Any, first: Request) -> None:
        """Begins to take the steps; `first` is what the job has requested."""
        self.is_asked = True
        if model is None:
            raise RuntimeError(
                "the job does not know the model or the optimizer, but your code takes the "
                "optimizer steps; pass both to `elasticdl.init(model, optimizer)`"
            )
        self.is_on, self._loop, self._model = True, loop, model
        model.allow_steps()
        self.guard()
        self._accept(first)

    def guard(self) -> None:
        """Lets methods that change registered objects only work while a step is taken."""
        for name, value in self.objects.items():
            for method in _GUARDED:
                if callable(getattr(value, method, None)):
                    self._guard(name, value, method)

    def unguard(self) -> None:
        """Puts the methods back."""
        for value, method, own in reversed(self._guards):
            delattr(value, method)
            if own is not None:
                setattr(value, method, own)
        self._guards.clear()

    def replace_loop(self, loop: Any) -> None:
        """Continues with another loop."""
        self._loop, self.is_asked = loop, False

    def stop(self) -> None:
        """The job takes the steps from now on."""
        self.is_on = self.is_step = self.is_asked = False
        self._model.refuse_steps()

    def idle(self) -> None:
        """Until the next step, methods of registered objects do nothing."""
        self._is_idle = True

    @property
    def is_taken(self) -> bool:
        """Whether the user's code has taken the step that is open."""
        return self.is_step and self.n_calls > 0

    def peek(self) -> Request | None:
        """Ends the step that was taken and waits for the next batch or step, which stays the next
        one; None at the end of the job.
        """
        self._finish()
        self._wait()
        return self.pending

    @property
    def pending(self) -> Request | None:
        """The batch or step that the job waits for, unless the user's code has it."""
        return self._turn or self._step

    def leave(self) -> bool:
        """The user's code has left the loop; returns whether the job waits for an answer."""
        if self.is_taken:
            self._finish()
        self.is_step, self._turn, self._step = False, None, None
        is_asked, self.is_asked = self.is_asked, False
        return is_asked

    def serve(self, request: Request) -> bool:
        """Serves a request for state; False if it is another one."""
        kind = request[0]
        if not self.is_on or not isinstance(kind, str) or kind == "step":
            return False
        self.is_asked = True
        self._accept(request)
        self.is_asked = False
        return True

    def next_turn(self) -> Request | None:
        """Returns the batch that `peek` has found."""
        if self._turn is None and self._step is not None:
            # This worker has no lane in this step: the loop gets a batch that does not count.
            _, (seed, _), step, leads = self._step
            return self._last, seed, step, leads
        return self._take_turn()

    def next_lane(self) -> Request | None:
        """Returns the next batch of this step, or None when the step can be taken."""
        if not self.is_step:
            self._wait()
        if self._turn is None:
            self._open()
        if self.is_over:
            self.idle()
        return self._take_turn()

    def hand_over(self, loss: float) -> None:
        """Passes the gradient of a batch to the job and waits for what comes next."""
        if self._step is None:
            self._model.take()
            self._loop.computed(loss)
            self._wait()
        self._is_idle = self._step is None
        self._open()

    def pass_over(self) -> None:
        """Takes a step that changes nothing: buffers are as they were before its batches."""
        self._model.receive()
        self.n_calls += 1

    def commit(self, is_schedule_due: bool, is_open: bool = False) -> None:
        """Ends an iteration; takes the step unless the user's code has, and keeps it open if more
        code belongs to it.
        """
        if self.is_step and self.n_calls == 0 and self.is_implicit is not False:
            self.is_implicit = True
            self.objects["optimizer"].step()
            if is_schedule_due:
                self._advance()
        if not is_open:
            self._finish()

    def dump(self) -> bytes:
        """Returns the state of all registered objects."""
        from elasticdl import _state

        return _state.dump({name: _state_of(value) for name, value in self.objects.items()})

    def check_state(self) -> None:
        """Rejects objects that do not restore their state exactly."""
        self.load(self.dump())

    def load(self, data: bytes) -> None:
        """Loads the state of all registered objects."""
        from elasticdl import _state

        states = _state.parse(data)
        if states.keys() != self.objects.keys():
            theirs, ours = (", ".join(sorted(names)) for names in (states, self.objects))
            raise ZooError(f"the job's state is that of [{theirs}], but the script has [{ours}]")
        for name, state in states.items():
            _state.load(self.objects[name], state)
        again = self.dump()
        if again == data:
            return
        changed = _state.difference(_state.parse(data), _state.parse(again))
        if changed:  # Not only the order of entries.
            name = changed[0]
            raise ZooError(
                f"the job cannot keep the state of `{name}`: its `load_state_dict` does not "
                f"restore {_state.show(changed)} exactly"
            )

    def _open(self) -> None:
        """Lets the user's code take the step that the job has requested, if it has."""
        if self._step is None:
            return
        _, (seed, self.loss), step, leads = self._step
        self._step = None
        self._set_place(step, leads)
        self._model.begin_step(seed)
        self.is_step, self.n_calls = True, 0

    def _finish(self) -> None:
        """Passes the result of a step to the job."""
        self._is_idle = False
        if not self.is_step:
            return
        if self.n_calls == 0:
            raise RuntimeError(NOT_STEPPED)
        self.is_implicit = bool(self.is_implicit)
        self.is_step = False
        self._model.end_step()
        self._loop.stepped()
        self.is_asked = False

    def _wait(self) -> None:
        """Waits for a batch, a step or the end of the job; serves requests for state."""
        while self._turn is None and self._step is None and not self.is_over:
            self.is_asked = False
            request = self._loop.next()
            self.is_asked = request is not None
            if request is None:
                self.is_over = True
            else:
                self._accept(request)

    def _accept(self, request: Request) -> None:
        kind, content, *_ = request
        if not isinstance(kind, str):
            self._turn = request
        elif kind == "step":
            self._step = request
        elif kind == "state":
            self._loop.state(self.dump)
        else:
            self.load(content)
            self._loop.loaded()

    def _take_turn(self) -> Request | None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._last = turn[0]
        return turn

    def _guard(self, name: str, value: Any, method: str) -> None:
        bound = getattr(value, method)
        is_followed = name == "lr_schedule" and method == "step"
        if is_followed:
            self._advance = bound
        # Schedulers have an optimizer; gradient scalers have none, and call its `step()`.
        is_counted = method == "step" and not hasattr(value, "optimizer")

        @functools.wraps(bound)
        def guard(_self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_followed:
                raise RuntimeError(
                    "`step()` of the learning-rate schedule was called, but the job advances it; "
                    "do not call it, or take the optimizer steps in your loop as well and pass the "
                    "schedule by another name: `elasticdl.init(model, optimizer, scheduler=…)`"
                )
            if self._is_idle:
                return None
            if not self.is_step:
                raise RuntimeError(
                    f"`{name}.{method}()` was called outside a step; call it between "
                    "`job.allreduce(model)` and `job.commit()`, or after the last batch of a step "
                    "of `job.steps(…)`"
                )
            if method == "step" and args and callable(args[0]) and hasattr(value, "param_groups"):
                raise RuntimeError(
                    f"`{name}.step()` was called with a closure, which each worker would compute "
                    "with its own records; compute the loss before `job.allreduce(model)`"
                )
            self.n_calls += is_counted
            return bound(*args, **kwargs)

        setattr(guard, _MARK, True)
        self._guards.append((value, method, vars(value).get(method)))
        setattr(value, method, types.MethodType(guard, value))


def _state_of(value: Any) -> Any:
    state = value.state_dict()
    if isinstance(state, dict):  # Schedulers return all their attributes.
        state = {key: part for key, part in state.items() if not _is_guard(part)}
    return state


def _is_guard(value: Any) -> bool:
    function: Callable[..., Any] | None = getattr(value, "__func__", None)
    return getattr(function, _MARK, False)
