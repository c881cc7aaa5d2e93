// SPDX-License-Identifier: Apache-2.0
//! Pulls and pushes: what they wait for, and how they are answered.

use std::time::Duration;

use super::held::Verdict;
use super::{Client, Effect, Note, Part, Pull, Push, Refusal, Request, Server, ServerPhase};
use crate::id::Generation;
use crate::time::Time;

/// A request for a generation that is not served yet waits for it this long.
const SERVE_PATIENCE: Duration = Duration::from_secs(10);
/// The longest wait that a client can request.
const MAX_PATIENCE: Duration = Duration::from_secs(3600);
/// How long the rows of the next step are waited for. Workers that wait for longer hold another state
/// than the servers.
const STEP_PATIENCE: Duration = Duration::from_secs(5);

/// A request without a verdict.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Waiting {
    what: What,
    /// Until when it waits for its generation.
    serve_by: Time,
    /// Until when it waits for a round, or in the window.
    deadline: Time,
}

#[derive(Clone, Debug, PartialEq)]
enum What {
    Pull(Pull),
    Push(Push),
}

/// Whether requests for a generation are answered.
enum Gate {
    Open,
    NotYet,
    Refused(Refusal),
}

impl Waiting {
    pub(super) fn generation(&self) -> Generation {
        match &self.what {
            What::Pull(pull) => pull.generation,
            What::Push(push) => push.generation,
        }
    }

    /// When its wait is over.
    pub(super) fn due(&self, is_served: bool) -> Time {
        if is_served { self.deadline } else { self.serve_by }
    }

    fn request(&self) -> Request {
        match &self.what {
            What::Pull(pull) => pull.request,
            What::Push(push) => push.request,
        }
    }

    fn is_pull_of(&self, client: Client) -> bool {
        match &self.what {
            What::Pull(pull) => pull.client == client,
            What::Push(_) => false,
        }
    }
}

impl Server {
    pub(super) fn pull(&mut self, pull: Pull) {
        let most = if pull.step.is_some() { STEP_PATIENCE } else { MAX_PATIENCE };
        let patience = pull.patience.min(most);
        let serve_by = self.now + patience.min(SERVE_PATIENCE);
        let deadline = self.now + patience;
        self.take(Waiting { what: What::Pull(pull), serve_by, deadline });
    }

    pub(super) fn push(&mut self, push: Push) {
        let serve_by = self.now + SERVE_PATIENCE;
        self.take(Waiting { what: What::Push(push), serve_by, deadline: serve_by });
    }

    fn take(&mut self, waiting: Waiting) {
        if self.consider(waiting) {
            self.review();
        }
    }

    /// A client is gone: its pulls are not answered, and no other client waits for it.
    pub(super) fn left(&mut self, client: Client) {
        let is_its = |_: &Request, waiting: &mut Waiting| waiting.is_pull_of(client);
        let gone = self.waiting.extract_if(.., is_its);
        self.effects.extend(gone.map(|(gone, _)| Effect::Refuse(gone, Refusal::NotServing)));
        if let Some(held) = self.held_mut() {
            held.left(client);
        }
        self.review();
    }

    /// An owner is done with a push.
    pub(super) fn pushed(&mut self, generation: Generation, request: Request, parts: Vec<Part>) {
        let held = self.held_mut().filter(|held| held.generation == generation);
        let Some(held) = held else { return };
        let (done, refused) = held.pushed(request, parts);
        self.effects.extend(done.into_iter().map(Effect::Acknowledge));
        if let Some(error) = refused {
            self.effects.push(Effect::Refuse(request, Refusal::Other(error)));
        }
        self.review();
    }

    pub(super) fn unfit(&mut self, request: Request, error: String) {
        if self.held_mut().is_some_and(|held| held.end_push(request)) {
            self.effects.push(Effect::Refuse(request, Refusal::Other(error)));
            self.review();
        }
    }

    /// Looks at every request that waits.
    pub(super) fn review(&mut self) {
        loop {
            let mut is_again = false;
            for waiting in std::mem::take(&mut self.waiting).into_values() {
                is_again |= self.consider(waiting);
            }
            if !is_again {
                return;
            }
        }
    }

    /// Answers a request or lets it wait. True if others may continue because of that.
    fn consider(&mut self, waiting: Waiting) -> bool {
        let request = waiting.request();
        match self.gate(waiting.generation()) {
            Gate::Open => match &waiting.what {
                What::Pull(_) => return self.consider_pull(waiting),
                What::Push(push) => return self.begin_push(push),
            },
            Gate::NotYet if self.now < waiting.serve_by => {
                self.waiting.insert(request, waiting);
            }
            Gate::NotYet => self.effects.push(Effect::Refuse(request, Refusal::NotServing)),
            Gate::Refused(refusal) => self.effects.push(Effect::Refuse(request, refusal)),
        }
        false
    }

    fn consider_pull(&mut self, waiting: Waiting) -> bool {
        let (ServerPhase::Held(held), What::Pull(pull)) = (&mut self.phase, &waiting.what) else {
            return false;
        };
        let request = pull.request;
        match held.verdict(pull, waiting.deadline, self.now) {
            Verdict::Answer { gave_up } => {
                held.answered(pull, self.now);
                self.n_pulls += 1;
                let note = gave_up.map(|version| Effect::Note(Note::GaveUpWaiting { version }));
                self.effects.extend(note);
                self.effects.push(Effect::Answer(request));
                false
            }
            Verdict::Refuse(refusal) => {
                self.effects.push(Effect::Refuse(request, refusal));
                false
            }
            Verdict::WaitForPushes => {
                self.waiting.insert(request, waiting);
                false
            }
            Verdict::WaitInWindow => {
                // No client waits for one that waits itself.
                let is_new = held.waits_in_window(pull);
                self.waiting.insert(request, waiting);
                is_new
            }
        }
    }

    fn begin_push(&mut self, push: &Push) -> bool {
        let ServerPhase::Held(held) = &mut self.phase else { return false };
        match held.push(push) {
            Ok(()) => {
                self.n_pushes += 1;
                self.effects.push(Effect::Apply(push.request));
                true
            }
            Err(refusal) => {
                self.effects.push(Effect::Refuse(push.request, refusal));
                false
            }
        }
    }

    fn gate(&self, generation: Generation) -> Gate {
        match self.newest() {
            None => Gate::Refused(Refusal::NotServing),
            Some(current) if generation < current => Gate::Refused(Refusal::Generation { current }),
            Some(_) if self.is_serving(generation) => Gate::Open,
            Some(_) => Gate::NotYet,
        }
    }

    /// Whether a request that waits could be answered now.
    pub(super) fn could_go_on(&self, waiting: &Waiting) -> bool {
        match (self.gate(waiting.generation()), &waiting.what, self.held()) {
            (Gate::NotYet, ..) => self.now >= waiting.serve_by,
            (Gate::Open, What::Pull(pull), Some(held)) => !matches!(
                held.verdict(pull, waiting.deadline, self.now),
                Verdict::WaitForPushes | Verdict::WaitInWindow
            ),
            (Gate::Open | Gate::Refused(_), ..) => true,
        }
    }
}
