// SPDX-License-Identifier: Apache-2.0
//! One line per state that a pod was seen in, and what must hold for all of them.

use proptest::prelude::*;
use proptest::sample::select;

use super::*;

fn running() -> PodFacts {
    PodFacts { phase: PodPhase::Running, container: Container::Running, ..PodFacts::default() }
}

fn terminated(code: i32, reason: &str) -> PodFacts {
    let phase = if code == 0 { PodPhase::Succeeded } else { PodPhase::Failed };
    PodFacts {
        phase,
        container: Container::Terminated { code, reason: reason.into() },
        ..running()
    }
}

fn waiting(reason: &str, message: &str) -> PodFacts {
    let container = Container::Waiting { reason: reason.into(), message: message.into() };
    PodFacts { container, ..PodFacts::default() }
}

fn disrupted(by: &str, facts: PodFacts) -> PodFacts {
    PodFacts { disruption: Some(by.into()), ..facts }
}

fn failed(reason: &str) -> PodFacts {
    PodFacts { phase: PodPhase::Failed, reason: reason.into(), ..PodFacts::default() }
}

#[test]
fn every_state_of_a_pod_has_its_meaning() {
    use Ended::{Deleted, Evicted, Exit, NodeLost, OutOfMemory, Preempted, Signal};
    use PodState::{Leaving, Running, Waiting};
    let leaving = |facts: PodFacts| PodFacts { is_leaving: true, ..facts };
    let gone = |facts: PodFacts| PodFacts { is_gone: true, ..facts };
    let unknown = PodFacts { phase: PodPhase::Unknown, ..running() };
    let no_room = "0/3 nodes are available: 3 Insufficient cpu.";
    let unschedulable = PodFacts { unschedulable: Some(no_room.into()), ..PodFacts::default() };
    let preempted = || disrupted("PreemptionByScheduler", leaving(running()));
    let table = [
        (PodFacts::default(), Waiting(Wait::Starting)),
        (waiting("ContainerCreating", ""), Waiting(Wait::Starting)),
        (unschedulable, Waiting(Wait::Unschedulable(no_room.into()))),
        (waiting("ErrImageNeverPull", "no `x`"), Waiting(Wait::Image("no `x`".into()))),
        (waiting("ImagePullBackOff", ""), Waiting(Wait::Image("ImagePullBackOff".into()))),
        (waiting("CreateContainerConfigError", "s"), Waiting(Wait::Container("s".into()))),
        (running(), Running),
        (unknown, Running),
        (leaving(running()), Leaving(Deleted)),
        (preempted(), Leaving(Preempted)),
        (disrupted("EvictionByEvictionAPI", leaving(running())), Leaving(Evicted)),
        (disrupted("DeletionByTaintManager", leaving(running())), Leaving(NodeLost)),
        (gone(preempted()), PodState::Ended(Preempted)),
        (
            disrupted("PreemptionByScheduler", terminated(0, "Completed")),
            PodState::Ended(Preempted),
        ),
        (disrupted("PreemptionByScheduler", terminated(137, "Error")), PodState::Ended(Preempted)),
        (gone(running()), PodState::Ended(Deleted)),
        (gone(leaving(terminated(143, "Error"))), PodState::Ended(Deleted)),
        (gone(leaving(terminated(0, "Completed"))), PodState::Ended(Deleted)),
        (terminated(0, "Completed"), PodState::Ended(Exit(0))),
        (terminated(101, "Error"), PodState::Ended(Exit(101))),
        (terminated(137, "Error"), PodState::Ended(Signal(9))),
        (terminated(139, "Error"), PodState::Ended(Signal(11))),
        (terminated(137, "OOMKilled"), PodState::Ended(OutOfMemory)),
        (
            disrupted("TerminationByKubelet", terminated(137, "OOMKilled")),
            PodState::Ended(OutOfMemory),
        ),
        (terminated(137, "ContainerStatusUnknown"), PodState::Ended(NodeLost)),
        (failed("Evicted"), PodState::Ended(Evicted)),
        (failed("NodeLost"), PodState::Ended(NodeLost)),
        (failed("OutOfcpu"), PodState::Ended(Evicted)),
        (failed(""), PodState::Ended(Evicted)),
    ];
    for (facts, expected) in table {
        assert_eq!(facts.state(), expected, "{facts:?}");
    }
}

#[test]
fn a_refusal_of_the_api_server_is_quoted() {
    let rights = "pods is forbidden: User \"system:serviceaccount:x:default\" cannot create \
                  resource \"pods\" in API group \"\" in the namespace \"x\"";
    let forbidden = Wait::of_refusal(403, rights);
    let said = forbidden.to_string();
    assert!(said.starts_with(rights), "{said}");
    assert!(said.contains("kubectl apply -f manifests/elasticdl-rbac.yaml"), "{said}");
    let quota = "pods \"a\" is forbidden: exceeded quota: q, requested: pods=1, used: pods=2";
    assert_eq!(Wait::of_refusal(403, quota), Wait::Quota(quota.into()));
    let class = "pods \"a\" is forbidden: no PriorityClass with name high was found";
    assert_eq!(Wait::of_refusal(403, class), Wait::Refused(class.into()));
    assert_eq!(Wait::of_refusal(503, "busy"), Wait::Unreachable("busy".into()));
}

fn any_facts() -> impl Strategy<Value = PodFacts> {
    let phase = select(vec![
        PodPhase::Pending,
        PodPhase::Running,
        PodPhase::Succeeded,
        PodPhase::Failed,
        PodPhase::Unknown,
    ]);
    let word = |table: &'static [(&'static str, Ended)]| {
        let known = table.iter().map(|(word, _)| (*word).to_owned());
        select(known.chain(["".to_owned(), "Another".to_owned()]).collect::<Vec<_>>())
    };
    let container =
        (0..4, 0..160, word(&TERMINATIONS)).prop_map(|(kind, code, reason)| match kind {
            0 => Container::Unknown,
            1 => Container::Waiting { reason: "ErrImagePull".into(), message: String::new() },
            2 => Container::Running,
            _ => Container::Terminated { code, reason },
        });
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (phase, word(&REASONS), proptest::option::of(word(&DISRUPTIONS)), container, flags).prop_map(
        |(phase, reason, disruption, container, (unschedulable, is_leaving, is_gone))| PodFacts {
            phase,
            reason,
            message: String::new(),
            unschedulable: unschedulable.then(|| "no room".into()),
            disruption,
            container,
            is_leaving,
            is_gone,
        },
    )
}

proptest! {
    #[test]
    fn an_end_is_final_and_only_a_process_that_ends_by_itself_can_crash(facts in any_facts()) {
        let has_ended = facts.is_gone || matches!(facts.phase, PodPhase::Succeeded | PodPhase::Failed);
        let state = facts.state();
        prop_assert_eq!(matches!(state, PodState::Ended(_)), has_ended);
        // What vanishes has ended in the way that it was about to.
        if let PodState::Leaving(how) = state {
            let gone = PodFacts { is_gone: true, ..facts.clone() };
            prop_assert_eq!(gone.state(), PodState::Ended(how));
        }
        if let PodState::Ended(Ended::Exit(code)) = state && code != 0 {
            prop_assert!(!facts.is_leaving && facts.disruption.as_deref().is_none_or(|by| find(&DISRUPTIONS, by).is_none()));
            let is_own = matches!(facts.container, Container::Terminated { code: own, .. } if own == code);
            prop_assert!(is_own);
        }
    }
}
