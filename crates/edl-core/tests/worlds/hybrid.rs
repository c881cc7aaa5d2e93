// SPDX-License-Identifier: Apache-2.0
//! Workers and servers that hold one model together, by name: what each is told, and when.

use std::time::Duration;

use edl_core::applied::AppliedSet;
use edl_core::id::{BatchId, Generation, Incarnation, PartitionId, PsId, WorldId};
use edl_core::job::{Command, End, Event, Holder, News, PsOrder};
use edl_core::platform::{Ended, InstanceId, Report, Role};
use edl_core::servers::{Member, PartitionState};
use edl_core::spec::{JobSpec, Strategy};

use crate::table::{Table, cut_file, spec};

const N_BATCHES: u32 = 20;

/// The table's job with two servers, which hold partitions 4 to 7.
fn hybrid() -> JobSpec {
    JobSpec { distribution_strategy: Strategy::Hybrid, num_ps_pods: 2, ..spec() }
}

fn hosted(ps: u32) -> std::ops::Range<u32> {
    4 + 2 * ps..6 + 2 * ps
}

fn sets(ps: u32, step: u64) -> Vec<PartitionState> {
    let mut applied = AppliedSet::new(N_BATCHES);
    for step in 0..step {
        let step = u32::try_from(step).expect("a short job");
        applied.insert(BatchId { epoch: step / N_BATCHES, index: step % N_BATCHES });
    }
    let state = |partition| PartitionState {
        partition: PartitionId(partition),
        applied: applied.clone(),
        updates: step,
        n_rows: 3,
    };
    hosted(ps).map(state).collect()
}

/// A server connects, holding `step` in `generation`; in generation 0 it holds nothing.
fn connect_ps(table: &mut Table, ps: u32, incarnation: u64, generation: u64, step: u64) {
    let member = Member {
        incarnation: Incarnation(incarnation),
        address: String::new(),
        unix_path: String::new(),
        generation: Generation(generation),
        sets: if generation == 0 { Vec::new() } else { sets(ps, step) },
    };
    let pid = u32::try_from(incarnation).expect("a small number");
    table.servers.insert(ps, incarnation);
    table.handle(Event::PsConnected { ps: PsId(ps), pid, member: Box::new(member) });
}

/// The generation and the checkpoint of the last load that a server was told of.
fn last_load(table: &Table, ps: u32) -> Option<(u64, Option<String>)> {
    table.told_ps.get(&ps)?.iter().rev().find_map(|order| match order {
        PsOrder::Load { generation, from } => Some((generation.0, from.checkpoint.clone())),
        PsOrder::Welcome | PsOrder::Serve { .. } | PsOrder::Cut { .. } | PsOrder::Stop(_) => None,
    })
}

fn loaded(table: &mut Table, generation: u64, step: u64) {
    for ps in 0..2 {
        let (generation, sets) = (Generation(generation), sets(ps, step));
        table.handle(Event::Loaded { ps: PsId(ps), generation, sets });
    }
}

/// Two servers and `ids` train from the start.
fn started(spec: JobSpec, ids: &[u32]) -> Table {
    let mut table = Table::new(spec, 0);
    let running = |id: &u32| (InstanceId { role: Role::Worker, id: *id }, id + 1);
    table.handle(Event::Platform(Report::Running(ids.iter().map(running).collect())));
    ids.iter().for_each(|id| table.join(*id));
    (0..2).for_each(|ps| connect_ps(&mut table, ps, 100 + u64::from(ps), 0, 0));
    table.pass(Duration::from_millis(1200));
    assert!(!ids.iter().any(|id| was_told_world(&table, *id)), "the servers load first");
    loaded(&mut table, 1, 0);
    table.pass(Duration::from_millis(1200));
    table.form_all(0);
    table
}

fn was_told_world(table: &Table, id: u32) -> bool {
    let told = table.told.get(&id);
    told.is_some_and(|told| told.iter().any(|c| matches!(c, Command::World { .. })))
}

fn kill_ps(table: &mut Table, ps: u32, incarnation: u32) {
    table.servers.remove(&ps);
    let instance = InstanceId { role: Role::Ps, id: ps };
    let report = Report::Ended { instance, pid: incarnation, how: Ended::Signal(9) };
    table.handle(Event::Platform(report));
}

/// The server writes all files that the last order for a cut names.
fn write_cut(table: &mut Table, ps: u32) -> u64 {
    let order = table.told_ps[&ps].iter().rev().find_map(|order| match order {
        PsOrder::Cut { cut, generation, at, .. } => Some((*cut, *generation, *at)),
        PsOrder::Welcome | PsOrder::Serve { .. } | PsOrder::Load { .. } | PsOrder::Stop(_) => None,
    });
    let (cut, generation, at) = order.expect("a cut was ordered");
    let at = at.expect("servers and workers cut the same step");
    let file = |partition| cut_file(partition, at);
    let (holder, files) = (Holder::Ps(PsId(ps)), hosted(ps).map(file).collect());
    table.handle(Event::CutDone { holder, cut, generation, files });
    at
}

/// A job at step 10 with a checkpoint of step 8, and the checkpoint's folder.
fn with_checkpoint(ids: &[u32]) -> (Table, String) {
    let mut table = started(JobSpec { checkpoint_steps: 4, ..hybrid() }, ids);
    table.train_to(4);
    let at = write_cut(&mut table, 0);
    write_cut(&mut table, 1);
    assert!(table.disk.checkpoints.is_empty(), "half of the model is no checkpoint");
    ids.iter().for_each(|id| table.write_cut(*id));
    assert_eq!(table.disk.checkpoints[0].version, at);
    table.train_to(at + 2);
    let folder = table.disk.checkpoints[0].folder.clone();
    (table, folder)
}

#[test]
fn workers_load_what_the_servers_have_loaded() {
    let table = started(hybrid(), &[0, 1]);
    let told = table.told_world(0);
    assert!(told.load.is_some_and(|load| load.checkpoint.is_none()), "first values for both");
    assert!(table.told[&0].iter().any(|command| matches!(command, Command::Route)));
    assert_eq!(table.job.durable().generation, Generation(1));
}

#[test]
fn a_lost_worker_takes_nobody_back() {
    let mut table = started(hybrid(), &[0, 1]);
    table.train_to(5);
    table.die(1);
    let told = table.told_world(0);
    assert!(told.members() == [0] && told.has_state(0) && told.load.is_none());
    table.formed(0, told.world.id, 5);
    assert_eq!((table.n_done(), last_load(&table, 0)), (5, Some((1, None))));
}

#[test]
fn a_lost_server_takes_servers_and_workers_back_to_one_checkpoint() {
    let (mut table, folder) = with_checkpoint(&[0, 1]);
    let before = table.current().id;
    kill_ps(&mut table, 1, 101);
    assert!(table.told_world(0).members().is_empty(), "nobody waits for a server that is dead");
    table.pass(Duration::from_millis(1500));
    assert!(table.told_world(0).members().is_empty(), "nor trains before it is back");
    // What a member had not heard yet is no fact any more.
    table.stepped(0, before, table.n_done() + 1);
    connect_ps(&mut table, 1, 102, 0, 0);
    assert_eq!(last_load(&table, 0), Some((2, Some(folder.clone()))));
    assert_eq!(last_load(&table, 1), Some((2, Some(folder.clone()))));
    loaded(&mut table, 2, 8);
    table.pass(Duration::from_millis(1200));
    let told = table.told_world(0);
    assert_eq!(told.load.and_then(|load| load.checkpoint), Some(folder));
    assert!(told.world.members.iter().all(|member| !member.has_state), "what they held is void");
    assert_eq!(table.n_done(), 8);
    table.form_all(8);
    table.train_to(9);
}

#[test]
fn when_all_workers_are_lost_the_servers_go_back_with_the_next_ones() {
    let (mut table, folder) = with_checkpoint(&[0]);
    let report = |pid| Report::Ended {
        instance: InstanceId { role: Role::Worker, id: 0 },
        pid,
        how: Ended::Signal(9),
    };
    table.die(0);
    table.handle(Event::Platform(report(1)));
    assert_eq!(last_load(&table, 0), Some((1, None)), "the state may still come");
    table.join(7);
    table.pass(Duration::from_millis(2500));
    assert_eq!(last_load(&table, 0), Some((2, Some(folder.clone()))));
    assert!(!was_told_world(&table, 7), "it waits for the servers");
    loaded(&mut table, 2, 8);
    table.pass(Duration::from_millis(1200));
    let told = table.told_world(7);
    assert_eq!(told.load.and_then(|load| load.checkpoint), Some(folder));
    table.form_all(8);
    table.train_to(10);
}

#[test]
fn a_new_master_goes_on_with_what_workers_and_servers_hold() {
    let (mut table, _) = with_checkpoint(&[0, 1]);
    let step = table.n_done();
    table.restart_master();
    table.connect(0, Some(step));
    table.connect(1, Some(step - 1));
    table.pass(Duration::from_millis(1200));
    assert!(!was_told_world(&table, 0), "the servers may have lost everything");
    connect_ps(&mut table, 0, 100, 1, step);
    connect_ps(&mut table, 1, 101, 1, step - 1);
    table.pass(Duration::from_millis(1200));
    let told = table.told_world(0);
    assert!(told.load.is_none() && told.has_state(0) && told.has_state(1));
    assert_eq!(last_load(&table, 0), None);
    table.form_all(step);
    assert_eq!(table.n_done(), step);
}

#[test]
fn a_server_that_died_with_the_master_takes_the_workers_back() {
    let (mut table, folder) = with_checkpoint(&[0, 1]);
    let step = table.n_done();
    table.restart_master();
    table.connect(0, Some(step));
    table.connect(1, Some(step));
    connect_ps(&mut table, 0, 100, 1, step);
    connect_ps(&mut table, 1, 109, 0, 0);
    assert_eq!(last_load(&table, 0), Some((2, Some(folder))));
    loaded(&mut table, 2, 8);
    table.pass(Duration::from_millis(2500));
    assert!(table.told_world(0).load.is_some(), "its state is of the generation before");
}

/// The master dies between its word to the servers and that to the workers.
#[test]
fn what_the_servers_have_loaded_is_not_trained_on_by_those_who_hold_more() {
    let (mut table, _) = with_checkpoint(&[0, 1]);
    kill_ps(&mut table, 1, 101);
    connect_ps(&mut table, 1, 102, 0, 0);
    loaded(&mut table, 2, 8);
    table.restart_master();
    table.connect(0, Some(10));
    table.connect(1, Some(10));
    connect_ps(&mut table, 0, 100, 2, 8);
    connect_ps(&mut table, 1, 102, 2, 8);
    table.pass(Duration::from_millis(2500));
    assert_eq!(last_load(&table, 0).map(|(generation, _)| generation), Some(3));
    loaded(&mut table, 3, 8);
    table.pass(Duration::from_millis(1200));
    let told = table.told_world(0);
    assert!(told.load.is_some() && !told.has_state(0), "step 10 is of a history that is no more");
}

#[test]
fn a_cut_that_a_server_came_too_late_for_fails_and_the_next_one_is_tried() {
    let mut table = started(JobSpec { checkpoint_steps: 4, ..hybrid() }, &[0]);
    table.train_to(4);
    let cuts = |table: &Table| table.told_ps[&0].iter().filter(|o| is_cut(o)).count();
    assert_eq!(cuts(&table), 1);
    let Some(PsOrder::Cut { cut, .. }) = table.told_ps[&0].last().cloned() else { panic!() };
    let error = "step 8 is over".into();
    table.handle(Event::CutFailed { cut, error });
    assert!(table.has_note("checkpoint_failed"));
    table.train_to(table.until());
    table.pass(Duration::from_millis(300));
    table.train_to(table.until());
    assert_eq!(cuts(&table), 2);
}

fn is_cut(order: &PsOrder) -> bool {
    matches!(order, PsOrder::Cut { .. })
}

#[test]
fn those_who_hold_another_step_than_the_servers_go_back_with_them_but_not_for_ever() {
    let (mut table, _) = with_checkpoint(&[0, 1]);
    let torn = |world: WorldId| News::Torn { world, error: "step 9 is wanted, 11 is here".into() };
    table.news(0, torn(WorldId(1)));
    assert_eq!(last_load(&table, 0).map(|load| load.0), Some(1), "of no world that is known");
    for generation in 2..4 {
        let world = table.current().id;
        table.news(0, torn(world));
        assert_eq!(last_load(&table, 0).map(|load| load.0), Some(generation));
        table.news(1, torn(world));
        assert_eq!(last_load(&table, 0).map(|load| load.0), Some(generation), "once is enough");
        loaded(&mut table, generation, 8);
        table.pass(Duration::from_millis(1200));
        table.form_all(8);
    }
    table.news(0, torn(table.current().id));
    assert!(matches!(table.ended, Some(End::Failed(_))), "{:?}", table.ended);
}
