// SPDX-License-Identifier: Apache-2.0
//! Orders of events that random faults may miss, by name.

use std::time::Duration;

use edl_core::id::WorldId;
use edl_core::job::{End, Event, News};
use edl_core::platform::{Ended, Order, Report};
use edl_core::spec::{JobSpec, SameBits};

use crate::table::{Table, instance, spec};

const MOMENT: Duration = Duration::from_millis(100);
/// Longer than those who are started together wait for each other, shorter than a silence.
const A_WHILE: Duration = Duration::from_millis(1300);

#[test]
fn the_member_with_the_highest_step_dies_before_handing_over() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1, 2]);
    table.train_to(4);
    let before = table.current().id;
    table.stepped(2, before, 5);
    assert_eq!(table.n_done(), 5, "one member has it, so it counts");
    table.die(1);
    let world = table.current();
    assert_eq!(table.told_world(0).members(), [0, 2]);
    // The one that had step 5 dies in the sync of the next world: the step is taken again.
    table.die(2);
    table.formed(0, world.id, 5);
    assert_eq!(table.n_done(), 5, "that world is no more");
    let told = table.told_world(0);
    assert!(told.members() == [0] && told.has_state(0) && told.load.is_none());
    table.formed(0, told.world.id, 4);
    assert_eq!(table.n_done(), 4);
    let until = told.until;
    table.train_to(until);
    assert!(!table.has_note("restored"), "nothing but that step is repeated");
}

#[test]
fn a_member_that_is_alone_and_cut_off_commits_nothing_while_another_world_trains() {
    let mut table = Table::new(JobSpec { checkpoint_steps: 4, ..spec() }, 0);
    table.start(&[0]);
    table.train_to(8);
    table.write_cut(0);
    let (old, incarnation) = (table.current().id, 1);
    // The master hears nothing of it for longer than it waits for anybody; another one comes.
    table.lose_stream(0);
    table.join(1);
    assert!(
        table.told.get(&1).is_some_and(|told| !told.iter().any(is_world)),
        "its state may come"
    );
    table.now = table.now + Duration::from_millis(900);
    table.handle(Event::Tick);
    pass_without(&mut table, 0, Duration::from_secs(3));
    let told = table.told_world(1);
    assert!(told.load.is_some_and(|load| load.checkpoint.is_some()), "from the checkpoint");
    table.formed(1, told.world.id, 8);
    let new = table.current().id;
    table.stepped(1, new, 9);
    // It trained alone to where it was allowed, and comes back with all that.
    let before = table.n_done();
    table.connect(0, Some(14));
    table.stepped(0, old, 14);
    table.formed(0, old, 14);
    assert_eq!((table.n_done(), incarnation), (before, 1), "nothing of it counts");
    let told = table.told_world(0);
    assert_eq!(told.members(), [0, 1]);
    assert!(!told.has_state(0) && told.has_state(1), "and what it holds is void");
}

fn is_world(command: &edl_core::job::Command) -> bool {
    matches!(command, edl_core::job::Command::World { .. })
}

/// Time passes, and one worker gives no sign of life.
fn pass_without(table: &mut Table, silent: u32, time: Duration) {
    let n = time.as_millis() / MOMENT.as_millis();
    for _ in 0..n {
        table.now = table.now + MOMENT;
        for id in [0, 1].into_iter().filter(|id| *id != silent) {
            let waiting_for = "master".into();
            let incarnation = edl_core::id::Incarnation(u64::from(id) + 1);
            let worker = edl_core::id::WorkerId(id);
            table.handle(Event::WorkerHeard { worker, incarnation, waiting_for });
        }
        table.handle(Event::Tick);
    }
}

#[test]
fn a_master_that_dies_between_deciding_a_world_and_pushing_it_loses_nothing() {
    for n_effects in 0..4 {
        let mut table = Table::new(spec(), 0);
        table.start(&[0, 1]);
        table.train_to(6);
        let gone = table.told_world(1).world.members[1].incarnation;
        let event = Event::WorkerGone { worker: edl_core::id::WorkerId(1), incarnation: gone };
        table.handle_and_die(event, n_effects);
        table.connect(0, Some(7));
        table.pass(Duration::from_millis(2500));
        let told = table.told_world(0);
        assert!(told.has_state(0) && told.load.is_none(), "after {n_effects} effects");
        table.formed(0, told.world.id, 7);
        assert_eq!(table.n_done(), 7);
        assert!(told.world.id > WorldId(2 << 40), "worlds of the new master are later ones");
    }
}

#[test]
fn worlds_of_a_later_master_are_later_and_what_the_earlier_one_hears_is_not_believed() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(6);
    let old = table.current();
    table.restart_master();
    table.connect(0, Some(6));
    table.connect(1, Some(7));
    let new = table.current();
    assert!(new.id > old.id);
    // What they did for the earlier master reaches the later one late.
    table.stepped(0, old.id, 8);
    table.lost(0, old.id, 1);
    assert_eq!((table.n_done(), table.current().id), (0, new.id));
    table.form_all(7);
    assert_eq!(table.n_done(), 7);
}

#[test]
fn a_new_master_believes_nobody_who_was_left_out() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(6);
    let world = table.current().id;
    // The stream of 1 breaks: 0 trains on alone, and overwrites what 1 may still be reading.
    table.lose_stream(1);
    let alone = table.told_world(0);
    table.formed(0, alone.world.id, 6);
    table.stepped(1, world, 7);
    table.restart_master();
    table.connect(1, Some(7));
    table.connect(0, Some(6));
    let told = table.told_world(0);
    assert!(told.has_state(0) && !told.has_state(1));
}

/// A network between two members and their master breaks: the master hears nothing more of one,
/// names a world of the other alone, and then hears nothing of that one either.
fn both_cut_off_one_after_the_other() -> Table {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(6);
    pass_without(&mut table, 0, Duration::from_millis(2200));
    assert_eq!(table.told_world(1).members(), [1], "which never hears of it");
    for _ in 0..22 {
        table.now = table.now + MOMENT;
        table.handle(Event::Tick);
    }
    assert!(table.job.worlds().is_some_and(|worlds| worlds.current().is_none()));
    table
}

#[test]
fn members_that_come_back_after_a_dissolved_world_train_nothing_again() {
    for is_holder_first in [false, true] {
        let mut table = both_cut_off_one_after_the_other();
        let order = if is_holder_first { [1, 0] } else { [0, 1] };
        for id in order {
            table.connect(id, Some(8));
            table.pass(A_WHILE);
        }
        let told = table.told_world(1);
        assert!(told.has_state(1) && told.load.is_none());
        table.form_all(8);
        table.pass(MOMENT);
        table.form_all(8);
        assert_eq!((table.current().members.len(), table.n_done()), (2, 8));
        assert!(!table.has_note("restored"), "{:?}", table.notes);
    }
}

#[test]
fn the_state_that_a_worker_is_about_to_announce_is_not_loaded_anew() {
    let mut table = both_cut_off_one_after_the_other();
    let (worker, incarnation) = (edl_core::id::WorkerId(1), edl_core::id::Incarnation(2));
    table.handle(Event::WorkerConnected { worker, incarnation, pid: 2 });
    table.connect(0, Some(8));
    table.pass(A_WHILE);
    table.connect(1, Some(8));
    assert!(table.told_world(0).has_state(1) && !table.has_note("restored"));
}

#[test]
fn members_that_hold_the_state_and_do_not_come_back_are_not_waited_for_long() {
    let mut table = both_cut_off_one_after_the_other();
    table.connect(0, Some(8));
    table.pass(Duration::from_millis(1500));
    assert!(!table.has_note("restored"));
    table.pass(Duration::from_millis(1000));
    assert!(table.has_note("restored") && table.told_world(0).load.is_some());
}

#[test]
fn nobody_waits_for_the_state_of_one_that_is_known_to_have_ended() {
    let mut table = both_cut_off_one_after_the_other();
    let ended = Report::Ended { instance: instance(1), pid: 2, how: Ended::Signal(9) };
    table.handle(Event::Platform(ended));
    table.connect(0, Some(8));
    // As long as for any worker that is about to come, but not for a sign of life.
    table.pass(A_WHILE);
    assert!(table.has_note("restored") && table.told_world(0).load.is_some());
}

#[test]
fn under_a_new_master_a_member_may_have_come_further_than_it_said() {
    let spec = JobSpec { checkpoint_steps: 1, ..spec() };
    let mut table = Table::new(spec, 0);
    table.start(&[0]);
    table.restart_master();
    table.connect(0, Some(2));
    table.pass(Duration::from_millis(1100));
    let told = table.told_world(0);
    // Until it heard of the new world it trained on in the old one.
    table.formed(0, told.world.id, 5);
    assert_eq!(table.n_done(), 5);
    let last = table.cuts(0).pop().expect("a checkpoint is due");
    assert!(last >= 5, "a cut of step {last} is over");
}

#[test]
fn a_joiner_that_comes_while_an_evaluation_runs_waits_for_nothing_and_breaks_nothing() {
    let mut table = Table::new(JobSpec { evaluation_steps: 8, ..spec() }, 8);
    table.start(&[0, 1]);
    table.train_to(8);
    assert_eq!(table.job.state(), "evaluating");
    table.join(2);
    let told = table.told_world(2);
    assert_eq!((told.world.after, told.members().len()), (Some(8), 3));
    // Shards that were lent before are measured by those who enter the new world meanwhile.
    let n_first = table.evaluate(0);
    assert_eq!(n_first, 1);
    table.form_all(8);
    for _ in 0..8 {
        for id in 0..3 {
            table.evaluate(id);
        }
    }
    assert_eq!(table.disk.evaluations.iter().map(|e| e.version).collect::<Vec<_>>(), [8]);
    assert!(!table.has_note("work_failed"));
}

#[test]
fn an_evaluation_waits_until_everybody_holds_its_version() {
    let mut table = Table::new(JobSpec { evaluation_steps: 8, ..spec() }, 4);
    table.start(&[0, 1]);
    table.train_to(7);
    let world = table.current().id;
    table.stepped(0, world, 8);
    assert_eq!((table.n_done(), table.evaluate(0)), (8, 0), "it could be lost with worker-0");
    table.die(0);
    table.formed(1, table.current().id, 7);
    assert_eq!(table.n_done(), 7);
    let until = table.told_world(1).until;
    assert_eq!(until, 8, "nobody was allowed past the version to be evaluated");
    table.train_to(8);
    while table.evaluate(1) > 0 {}
    assert_eq!(table.disk.evaluations.last().map(|e| e.version), Some(8));
}

#[test]
fn what_one_that_is_left_out_still_measures_goes_to_others() {
    let mut table = Table::new(JobSpec { evaluation_steps: 8, ..spec() }, 4);
    table.start(&[0, 1]);
    table.train_to(8);
    let world = table.current().id;
    table.lost(0, world, 1);
    assert_eq!(table.evaluate(1), 1, "it was lent a shard before");
    table.formed(0, table.current().id, 8);
    while table.evaluate(0) > 0 {}
    assert_eq!(table.disk.evaluations.last().map(|e| e.version), Some(8), "nobody waits for it");
}

#[test]
fn the_only_worker_cuts_a_checkpoint_before_it_leaves() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0]);
    table.train_to(5);
    table.leave(0);
    let at = table.until();
    assert_eq!(table.told_world(0).members(), [0], "it must stay until then");
    assert_eq!(table.cuts(0), [at], "at a step that it has not passed");
    table.train_to(at);
    table.pass(MOMENT);
    assert_eq!(table.until(), at, "no further step is allowed");
    table.write_cut(0);
    assert_eq!(table.told_world(0).members(), [0; 0], "now it is free");
    table.die(0);
    table.join(1);
    table.pass(Duration::from_secs(3));
    let told = table.told_world(1);
    let checkpoint = told.load.expect("a load").checkpoint.expect("a checkpoint");
    assert!(checkpoint.starts_with(&format!("version-{at}.")), "{checkpoint}");
    table.formed(1, told.world.id, at);
    assert_eq!(table.n_done(), at, "nothing is trained twice");
}

#[test]
fn the_only_worker_hands_its_state_to_its_successor_before_it_leaves() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0]);
    table.train_to(5);
    table.leave(0);
    table.join(1);
    let (told, at) = (table.told_world(1), table.until());
    assert_eq!((told.members(), told.world.after), (vec![0, 1], Some(at)));
    assert!(told.has_state(0) && !told.has_state(1) && told.load.is_none());
    table.train_before(&[0], at);
    table.form_all(at);
    let told = table.told_world(0);
    assert_eq!((told.members(), told.world.after), (vec![1], Some(at)), "now it is free");
}

#[test]
fn one_that_leaves_keeps_the_state_when_those_who_stay_die() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(3);
    table.leave(1);
    assert_eq!(table.told_world(1).members(), [0]);
    table.die(0);
    let told = table.told_world(1);
    assert!(told.members() == [1] && told.has_state(1), "it cannot go yet");
    table.formed(1, told.world.id, 3);
    let at = table.cuts(1).pop().expect("it cuts a checkpoint");
    table.train_to(at);
    table.write_cut(1);
    assert_eq!(table.told_world(1).members(), [0; 0], "now it is free");
}

#[test]
fn a_stop_between_two_worlds_still_gets_its_checkpoint() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(3);
    table.die(1);
    table.handle(Event::Stop { reason: "enough".into(), with_checkpoint: true });
    assert_eq!(table.ended, None);
    table.formed(0, table.current().id, 3);
    let at = table.cuts(0).pop().expect("it cuts a checkpoint");
    table.train_to(at);
    table.write_cut(0);
    assert_eq!(table.ended, Some(End::Stopped("enough".into())));
    assert_eq!(table.disk.checkpoints.last().map(|c| c.version), Some(at));
}

#[test]
fn a_cut_while_a_join_is_planned_waits_for_the_new_world() {
    let mut table = Table::new(JobSpec { checkpoint_steps: 3, ..spec() }, 0);
    table.start(&[0]);
    table.train_to(2);
    table.join(1);
    assert_eq!(table.told_world(1).world.after, Some(8));
    table.train_before(&[0], 8);
    assert_eq!(table.cuts(0), [0; 0], "whom it should be ordered of is not sure yet");
    table.form_all(8);
    let (first, second) = (table.cuts(0), table.cuts(1));
    assert_eq!(first, second);
    assert!(first[0] >= 8);
    table.train_to(first[0]);
    table.write_cut(0);
    assert!(!table.has_note("checkpoint"), "half of it is missing");
    table.write_cut(1);
    assert!(table.has_note("checkpoint"));
}

#[test]
fn a_join_while_a_cut_is_under_way_spoils_neither() {
    let mut table = Table::new(JobSpec { checkpoint_steps: 3, ..spec() }, 0);
    table.start(&[0]);
    table.train_to(3);
    assert_eq!(table.cuts(0), [8]);
    table.join(1);
    table.train_before(&[0], 8);
    table.form_all(8);
    table.write_cut(0);
    assert_eq!(table.disk.checkpoints.last().map(|c| c.version), Some(8));
}

#[test]
fn a_member_that_owes_files_of_the_final_checkpoint_dies() {
    let mut table = Table::with(spec(), 32, 0);
    table.start(&[0, 1]);
    table.train_to(4);
    assert_eq!((table.cuts(0), table.cuts(1)), (vec![4], vec![4]));
    table.write_cut(0);
    table.die(1);
    table.formed(0, table.current().id, 4);
    assert_eq!(table.cuts(0), [4, 4], "everything is cut anew by those who are left");
    table.write_cut(0);
    assert_eq!(table.ended, Some(End::Succeeded));
    assert!(table.exported.is_some_and(|folder| folder.starts_with("version-4.")));
}

#[test]
fn a_member_that_is_left_out_does_not_hold_up_the_final_checkpoint() {
    let mut table = Table::with(spec(), 32, 0);
    table.start(&[0, 1]);
    table.train_to(4);
    table.write_cut(0);
    let world = table.current().id;
    table.lost(0, world, 1);
    table.formed(0, table.current().id, 4);
    table.write_cut(0);
    assert_eq!(table.ended, Some(End::Succeeded));
}

#[test]
fn a_member_that_cannot_use_its_state_is_not_reported_as_lost_by_itself() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(2);
    let text_after_loss = |table: &mut Table, suspect| {
        table.notes.clear();
        table.lost(0, table.current().id, suspect);
        let note = table.notes.iter().find(|note| note.kind == "peer_lost");
        note.expect("it is reported").text.clone()
    };
    let own = text_after_loss(&mut table, 0);
    assert_eq!(own, "worker-0 left its world (silent); the others continue");
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    let other = text_after_loss(&mut table, 1);
    assert_eq!(other, "worker-0 lost worker-1 (silent); the others continue");
}

#[test]
fn two_members_that_accuse_each_other_do_not_go_round_in_circles() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(2);
    let mut n_worlds = 0;
    let mut step = 2;
    for _ in 0..600 {
        let world = table.current();
        if world.members.len() == 2 && world.after.is_none_or(|after| after <= step) {
            table.lost(0, world.id, 1);
            table.lost(1, world.id, 0);
            n_worlds += 1;
        } else if let Some(after) = world.after {
            table.train_before(&[0], after);
            step = after;
            table.lost(0, world.id, 1);
            table.lost(1, world.id, 0);
            n_worlds += 1;
        } else if world.members.len() == 1 {
            let (id, until) = (world.members[0].worker.0, table.told_world(0).until);
            assert_eq!(id, 0, "the one that was accused first waits");
            table.formed(id, world.id, step);
            if step < until.min(20) {
                step += 1;
                table.stepped(id, world.id, step);
            }
        }
        table.pass(MOMENT);
        if table.ended.is_some() || step == 20 {
            break;
        }
    }
    assert_eq!(step, 20, "the other one trains on: {:?}", table.current());
    assert!(n_worlds <= 8, "{n_worlds} worlds were tried in vain");
}

#[test]
fn one_that_everybody_has_lost_still_trains_if_it_is_the_only_one_left() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    table.train_to(2);
    table.lost(0, table.current().id, 1);
    table.formed(0, table.current().id, 2);
    table.die(0);
    table.pass(Duration::from_secs(3));
    assert_eq!(table.told_world(1).members(), [1], "however long it should have waited");
}

#[test]
fn a_newcomer_that_reaches_nobody_does_not_drive_out_those_who_hold_the_state() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0]);
    table.train_to(8);
    table.join(1);
    let world = table.current();
    assert_eq!(world.members.len(), 2);
    table.lost(1, world.id, 0);
    let told = table.told_world(0);
    assert!(told.members() == [0] && told.has_state(0) && told.load.is_none());
}

#[test]
fn a_worker_with_another_probe_is_refused_or_reported() {
    for same_bits in [SameBits::Strict, SameBits::Report] {
        let mut table = Table::new(JobSpec { same_bits, ..spec() }, 0);
        table.start(&[0]);
        table.probe = 8;
        table.join(1);
        table.pass(MOMENT);
        let is_member = table.current().members.len() == 2;
        match same_bits {
            SameBits::Strict => {
                assert!(!is_member && table.has_note("refused"));
                assert!(matches!(&table.closed[..], [(1, why)] if why.contains("--same_bits")));
                assert!(!table.disk.bits_differ);
            }
            SameBits::Report => {
                assert!(is_member && table.has_note("bits_differ"));
                assert!(table.disk.bits_differ, "that outlives the master");
            }
        }
    }
}

#[test]
fn two_results_of_one_step_end_a_job_that_promised_equal_bits() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    let world = table.current().id;
    table.stepped(0, world, 1);
    table.news(1, News::Stepped { world, step: 1, hash: 99, loss: 0.5 });
    assert!(matches!(&table.ended, Some(End::Failed(why)) if why.contains("different gradient")));
}

#[test]
fn those_who_waited_long_for_the_master_are_not_blamed_for_it() {
    let mut table = Table::new(JobSpec { evaluation_steps: 8, ..spec() }, 4);
    table.start(&[0]);
    table.train_to(8);
    // An evaluation that takes longer than a step may, shard by shard.
    for _ in 0..3 {
        table.pass(Duration::from_secs(15));
        table.evaluate(0);
    }
    table.pass(MOMENT);
    assert_eq!(table.disk.evaluations.len(), 1);
    assert!(!table.has_note("work_failed") && !table.has_note("stuck"));
    let is_its_end =
        |order: &Order| matches!(order, Order::Stop { instance, .. } if instance.id == 0);
    assert!(!table.orders.iter().any(is_its_end), "it is not replaced");
}

#[test]
fn a_member_that_hangs_is_replaced_and_one_that_waits_for_it_is_not() {
    let mut table = Table::new(spec(), 0);
    table.start(&[0, 1]);
    let heard = |table: &mut Table, id: u32, waiting_for: &str| {
        let (worker, waiting_for) = (edl_core::id::WorkerId(id), waiting_for.into());
        let incarnation = edl_core::id::Incarnation(u64::from(id) + 1);
        table.handle(Event::WorkerHeard { worker, incarnation, waiting_for });
    };
    for _ in 0..220 {
        table.now = table.now + MOMENT;
        heard(&mut table, 0, "");
        heard(&mut table, 1, "worker-0");
        table.handle(Event::Tick);
    }
    let stopped = table.orders.iter().filter_map(|order| match order {
        Order::Stop { instance, .. } => Some(instance.id),
        Order::Launch { .. } | Order::Dismiss { .. } | Order::Harm { .. } => None,
    });
    assert_eq!(stopped.collect::<Vec<_>>(), [0]);
}
