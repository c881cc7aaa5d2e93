// SPDX-License-Identifier: Apache-2.0
//! A hook for tests of whole processes: an environment variable that ends or stops a worker at
//! an exact point of a step.
//!
//! `ELASTICDL_FAULT="worker=1,step=7,phase=half_sent,action=kill"` kills worker 1 when it has
//! sent half of what it sends for step 7, the step after which 7 steps are done. Phases:
//! `before_send`, `half_sent`, `reducing`, `before_gather`, `after`. Actions: `kill` (SIGKILL),
//! `stop` (SIGSTOP), `exit` (status 1). It happens once in a process. A worker that trains one lane alone
//! sends and reduces nothing, and so reaches none of the phases.

use edl_core::id::WorkerId;
use edl_net::mesh::ReducePhase;
use rustix::process::{Signal, getpid, kill_process};

const VARIABLE: &str = "ELASTICDL_FAULT";

/// What happens, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    worker: WorkerId,
    step: u64,
    phase: ReducePhase,
    action: Action,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Kill,
    Stop,
    Exit,
}

impl Fault {
    /// The fault in this worker's environment, if any. An invalid one is an error: a test must not
    /// pass because nothing happened.
    pub(crate) fn from_env(worker: WorkerId) -> Result<Option<Self>, String> {
        let Ok(text) = std::env::var(VARIABLE) else { return Ok(None) };
        let fault = Self::parse(&text).ok_or_else(|| format!("invalid {VARIABLE}={text}"))?;
        Ok((fault.worker == worker).then_some(fault))
    }

    fn parse(text: &str) -> Option<Self> {
        let (mut worker, mut step, mut phase, mut action) = (None, None, None, None);
        for field in text.split(',') {
            match field.trim().split_once('=')? {
                ("worker", number) => worker = Some(WorkerId(number.parse().ok()?)),
                ("step", number) => step = Some(number.parse().ok()?),
                ("phase", name) => {
                    phase = ReducePhase::ALL.into_iter().find(|known| known.name() == name)
                }
                ("action", "kill") => action = Some(Action::Kill),
                ("action", "stop") => action = Some(Action::Stop),
                ("action", "exit") => action = Some(Action::Exit),
                _ => return None,
            }
        }
        Some(Self { worker: worker?, step: step?, phase: phase?, action: action? })
    }

    /// Whether `phase` of `step` is the place.
    pub(crate) fn is_at(&self, phase: ReducePhase, step: u64) -> bool {
        self.step == step && self.phase == phase
    }

    pub(crate) fn happen(&self) {
        tracing::warn!(step = self.step, phase = self.phase.name(), "injecting a fault");
        // A signal to oneself cannot fail in a way that a test could use.
        match self.action {
            Action::Kill => drop(kill_process(getpid(), Signal::KILL)),
            Action::Stop => drop(kill_process(getpid(), Signal::STOP)),
            Action::Exit => std::process::exit(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_parsed_field_by_field() {
        let fault = Fault::parse("worker=1,step=7,phase=half_sent,action=stop").unwrap();
        let phase = ReducePhase::HalfSent;
        assert_eq!(fault, Fault { worker: WorkerId(1), step: 7, phase, action: Action::Stop });
        assert!(fault.is_at(ReducePhase::HalfSent, 7));
        assert!(!fault.is_at(ReducePhase::HalfSent, 8) && !fault.is_at(ReducePhase::After, 7));
    }

    #[test]
    fn an_incomplete_or_unknown_fault_is_rejected() {
        for text in [
            "",
            "worker=1,step=7,phase=half_sent",
            "worker=1,step=7,phase=sometime,action=kill",
            "worker=1,step=7,phase=after,action=sing",
            "worker=one,step=7,phase=after,action=kill",
            "worker=1,step=7,phase=after,action=kill,more=1",
        ] {
            assert_eq!(Fault::parse(text), None, "{text}");
        }
    }
}
