// SPDX-License-Identifier: Apache-2.0
//! The event loop around both machines of a worker: one event at a time, with all its effects.

use std::collections::VecDeque;
use std::fmt::Debug;

use edl_core::machine::Machine;

use super::Control;
use crate::process::Context;

/// Events that wait for the effects of the one before.
pub(super) struct Events<E> {
    queue: VecDeque<E>,
    is_handling: bool,
}

impl<E> Default for Events<E> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), is_handling: false }
    }
}

pub(super) type Event<S> = <<S as Shell>::Machine as Machine>::Event;
pub(super) type Effect<S> = <<S as Shell>::Machine as Machine>::Effect;

pub(super) trait Shell {
    type Machine: Machine<Event: Debug, Effect: Debug>;
    const NAME: &'static str;

    fn machine(&mut self) -> &mut Self::Machine;

    fn events(&mut self) -> &mut Events<Event<Self>>;

    fn perform(&mut self, control: &mut Control, context: &mut Context<'_>, effect: Effect<Self>);

    fn handle(&mut self, control: &mut Control, context: &mut Context<'_>, event: Event<Self>) {
        let events = self.events();
        events.queue.push_back(event);
        if std::mem::replace(&mut events.is_handling, true) {
            return; // It follows the effects of the event before.
        }
        while let Some(event) = self.events().queue.pop_front().filter(|_| context.exit.is_none()) {
            context.kernel.detail(context.pid, || format!("{} <- {event:?}", Self::NAME));
            let now = control.now(context);
            let effects = self.machine().handle(event, now);
            self.machine().check_invariants();
            for effect in effects {
                context.kernel.detail(context.pid, || format!("{} -> {effect:?}", Self::NAME));
                self.perform(control, context, effect);
            }
        }
        self.events().is_handling = false;
        let deadline = self.machine().next_deadline();
        control.clock.wake_at(context, deadline);
    }
}
