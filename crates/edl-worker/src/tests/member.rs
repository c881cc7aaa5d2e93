// SPDX-License-Identifier: Apache-2.0
//! A whole worker of AllReduce against a master that does what the test says.

use std::sync::Arc;
use std::time::Duration;

use edl_core::activity::WaitingFor;
use edl_core::id::WorkerId;
use edl_core::spec::{JobSpec, Strategy};
use edl_net::place::Place;
use edl_net::proto::{self, worker_command as command, worker_message::Kind};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::master::{HANG, ScriptedMaster, ScriptedSession, welcome};
use super::{N_RECORDS, Props};
use crate::allreduce::tests::hub::Hub;
use crate::allreduce::tests::toy::{Gate, ToyModel, ToyRecords};
use crate::session::{Edges, Limits, Session};
use crate::{Config, Error};

const ME: u32 = 7;

struct Stage {
    master: ScriptedMaster,
    gate: Gate,
    spec: JobSpec,
    shutdown: CancellationToken,
    worker: JoinSet<Result<(), Error>>,
    _job_dir: TempDir,
}

impl Stage {
    async fn new(limits: Limits) -> Self {
        let key = Props::default().key;
        let master = ScriptedMaster::start(&key).await;
        let job_dir = tempfile::tempdir().unwrap();
        let config = Config {
            worker: WorkerId(ME),
            master_addr: master.address.to_string(),
            key,
            job_dir: job_dir.path().into(),
            place: Place::default(),
        };
        let gate = Gate::default();
        let shut = gate.clone();
        let records = || Arc::new(ToyRecords { n_records: N_RECORDS, swap: None });
        let edges = Edges {
            open_model: Box::new(|_| Ok(Box::new(ToyModel::with_gate(shut)))),
            open_records: Box::new(move |_| Box::new(move |_| Ok(records()))),
            open_dial: Box::new(|_, _, _| panic!("there are no servers")),
            open_mesh: Hub::default().opener(),
            limits,
        };
        let shutdown = CancellationToken::new();
        let mut worker = JoinSet::new();
        worker.spawn(Session::new(config, edges, shutdown.clone()).run());
        let spec =
            JobSpec { distribution_strategy: Strategy::Allreduce, lanes: Some(4), ..super::spec() };
        Self { master, gate, spec, shutdown, worker, _job_dir: job_dir }
    }

    /// Welcomes the worker; its peer, as it announces it, and its incarnation.
    async fn welcome(&mut self) -> (ScriptedSession, proto::Peer, u64) {
        let mut session = self.master.accept().await;
        let Kind::Hello(hello) = session.next().await else { panic!("a hello comes first") };
        session.send(command::Kind::Welcome(welcome(&self.spec, N_RECORDS))).await;
        let Kind::Ready(ready) = session.next().await else { panic!("ready comes next") };
        (session, ready.peer.expect("peers learn of it"), hello.incarnation)
    }

    async fn ended(&mut self) -> Result<(), Error> {
        timeout(HANG, self.worker.join_next()).await.expect("it never ended").unwrap().unwrap()
    }
}

/// A world of one or more workers; only the first is there.
fn world(world: u64, members: &[(u32, u64)], until: u64, is_first: bool) -> command::Kind {
    let lanes = edl_core::lanes::assign(4, u32::try_from(members.len()).unwrap());
    let member =
        |((worker, incarnation), lanes): (&(u32, u64), std::ops::Range<u32>)| proto::Member {
            worker: *worker,
            incarnation: *incarnation,
            first_lane: lanes.start,
            end_lane: lanes.end,
            has_state: !is_first,
            ..proto::Member::default()
        };
    command::Kind::World(proto::World {
        world,
        members: members.iter().zip(lanes).map(member).collect(),
        after: None,
        until,
        generation: 1,
        load: is_first.then(proto::LoadFrom::default),
        skipped: Vec::new(),
        changes: None,
    })
}

async fn formed(session: &mut ScriptedSession, world: u64) -> u64 {
    let is_it = |kind: &Kind| matches!(kind, Kind::Formed(formed) if formed.world == world);
    let Kind::Formed(formed) = find(session, is_it).await else { unreachable!() };
    formed.step
}

async fn stepped(session: &mut ScriptedSession, step: u64) {
    find(session, |kind| matches!(kind, Kind::Stepped(stepped) if stepped.step == step)).await;
}

/// The next message that `is_it`; heartbeats alone do not keep a test waiting forever.
async fn find(session: &mut ScriptedSession, is_it: impl Fn(&Kind) -> bool) -> Kind {
    let found = async {
        loop {
            let kind = session.next().await;
            if is_it(&kind) {
                return kind;
            }
        }
    };
    timeout(HANG, found).await.expect("no such message came")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_stream_does_not_stop_training_before_the_granted_step() {
    let mut stage = Stage::new(Props::default().limits).await;
    let (mut session, peer, me) = stage.welcome().await;
    assert_eq!((peer.address.as_str(), peer.step), ("toy:7", None));
    let probe = peer.probe;
    stage.gate.shut(true);
    session.send(world(5, &[(ME, me)], 6, true)).await;
    assert_eq!(formed(&mut session, 5).await, 0);
    drop(session);
    stage.gate.shut(false);
    // The probe and six steps of four lanes, without any word of a master.
    stage.gate.wait(25);
    let (mut session, peer, again) = stage.welcome().await;
    assert_eq!((again, peer.step.is_some(), peer.probe), (me, true, probe));
    assert_eq!(formed(&mut session, 5).await, 0, "said again, for it may have been lost");
    stepped(&mut session, 6).await;
    session.heartbeat(WaitingFor::Master).await;
    session.send(command::Kind::Stop(proto::StopWork { reason: "done".into() })).await;
    assert!(session.last().await.is_none());
    drop(session);
    stage.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_are_waited_for_are_named_and_a_new_world_ends_the_wait() {
    let mut stage = Stage::new(Props::default().limits).await;
    let (mut session, _, me) = stage.welcome().await;
    session.heartbeat(WaitingFor::Master).await;
    session.send(world(1, &[(ME, me), (8, 1)], 2, true)).await;
    session.heartbeat(WaitingFor::Members).await;
    session.send(world(2, &[(ME, me)], 2, true)).await;
    assert_eq!(formed(&mut session, 2).await, 0);
    session.send(world(3, &[(ME, me), (8, 1)], 4, false)).await;
    session.heartbeat(WaitingFor::Members).await;
    session.send(command::Kind::Stop(proto::StopWork { reason: "done".into() })).await;
    drop(session);
    stage.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_asked_to_leave_reports_it_at_once_and_trains_until_a_world_is_without_it() {
    let mut stage = Stage::new(Props::default().limits).await;
    let (mut session, _, me) = stage.welcome().await;
    session.send(world(1, &[(ME, me)], 2, true)).await;
    stepped(&mut session, 2).await;
    stage.shutdown.cancel();
    assert!(matches!(session.next().await, Kind::Leaving(_)));
    session.heartbeat(WaitingFor::Master).await;
    session.send(command::Kind::Go(proto::Go { world: 1, until: 4 })).await;
    stepped(&mut session, 4).await;
    session.send(world(2, &[(8, 1)], 9, false)).await;
    assert!(session.last().await.is_none(), "it has said everything");
    drop(session);
    stage.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_leaves_does_not_wait_for_a_master_that_is_gone() {
    let mut limits = Props::default().limits;
    limits.exit.finish = Duration::ZERO;
    let mut stage = Stage::new(limits).await;
    let (mut session, _, me) = stage.welcome().await;
    session.send(world(1, &[(ME, me)], 2, true)).await;
    stepped(&mut session, 2).await;
    stage.shutdown.cancel();
    assert!(matches!(session.next().await, Kind::Leaving(_)));
    stage.master.stop();
    drop(session);
    stage.ended().await.unwrap();
}
