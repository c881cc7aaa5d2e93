// SPDX-License-Identifier: Apache-2.0
//! Members of AllReduce against a mesh in memory, with a test in the master's place.

pub(crate) mod hub;
mod script;
pub(crate) mod stage;
pub(crate) mod toy;

use edl_core::spec::{AllreduceDtype, JobSpec};
use edl_net::mesh::{self, Transport};
use edl_net::proto::{self, worker_message::Kind};

use edl_core::member::Event;
use hub::DeathPoint;
use stage::{Named, Stage, Weights, spec};
use toy::{ABYSS, CORRUPT, OVERFLOW, POISON, ToyModel};

/// Four full steps and one of five records, per epoch.
pub(crate) const N_RECORDS: u64 = 37;
/// Two epochs.
pub(crate) const END: u64 = 10;

/// Trains with these members from first values to `until`, without any fault.
fn stage(members: &[u32], until: u64) -> Stage {
    stage_of(spec(), N_RECORDS, members, until)
}

fn stage_of(spec: JobSpec, n_records: u64, members: &[u32], until: u64) -> Stage {
    let mut stage = Stage::new(spec, n_records);
    members.iter().for_each(|worker| stage.start(*worker));
    stage.form(Named { members, until, load: Some(""), ..Named::default() });
    stage
}

/// What one worker alone gets.
pub(crate) fn reference(spec: JobSpec, n_records: u64) -> Weights {
    let mut stage = stage_of(spec, n_records, &[0], END);
    stage.stepped(&[0], END);
    stage.weights(&[0], END)
}

#[test]
fn any_number_of_members_gives_bit_identical_results() {
    let clipped = JobSpec { clip_norm: Some(0.5), ..spec() };
    let uneven = JobSpec { lanes: Some(7), ..spec() };
    // The last step has five records, one record, or as many as the others.
    let half = JobSpec { allreduce_dtype: AllreduceDtype::Bf16, ..spec() };
    let half_uneven = JobSpec { lanes: Some(7), ..half.clone() };
    let whole = [(spec(), 37), (spec(), 33), (spec(), 40), (clipped, 37), (uneven, 71)];
    for (spec, n_records) in whole.into_iter().chain([(half, 37), (half_uneven, 71)]) {
        let alone = reference(spec.clone(), n_records);
        for n_members in 2..=4 {
            let members: Vec<u32> = (0..n_members).collect();
            let mut stage = stage_of(spec.clone(), n_records, &members, END);
            let stepped = stage.stepped(&members, END);
            assert!(stepped.iter().all(|one| one.hash == stepped[0].hash), "hashes agree");
            assert!(stepped.iter().all(|one| one.loss.to_bits() == stepped[0].loss.to_bits()));
            let weights = stage.weights(&members, END);
            assert!(weights == alone, "{n_members} members, {n_records} records");
        }
    }
}

#[test]
fn any_number_of_members_gives_bit_identical_results_with_bf16_gradients() {
    let whole = reference(spec(), N_RECORDS);
    for (lanes, n_records) in [(4, N_RECORDS), (7, 71)] {
        let half = JobSpec {
            lanes: Some(lanes),
            allreduce_dtype: AllreduceDtype::Bf16,
            clip_norm: Some(0.5),
            ..spec()
        };
        let alone = reference(half.clone(), n_records);
        assert!(alone != whole, "rounding shows");
        for transport in [Transport::SharedMemory, Transport::Tcp] {
            for n_members in 1..=4 {
                let members: Vec<u32> = (0..n_members).collect();
                let mut stage = Stage::new(half.clone(), n_records);
                stage.transport = Some(transport);
                members.iter().for_each(|worker| stage.start(*worker));
                let (members, load) = (&members[..], Some(""));
                stage.form(Named { members, until: END, load, ..Named::default() });
                let stepped = stage.stepped(members, END);
                assert!(stepped.iter().all(|one| one.hash == stepped[0].hash), "hashes agree");
                let weights = stage.weights(members, END);
                assert!(weights == alone, "{n_members} members, {lanes} lanes, {transport}");
            }
        }
    }
}

#[test]
fn members_linked_as_in_real_jobs_give_bit_identical_results() {
    let mut stage = Stage::new(spec(), N_RECORDS);
    stage.transport = Some(Transport::SharedMemory);
    (0..4).for_each(|worker| stage.start(worker));
    let members = &[0, 1, 2];
    stage.form(Named { members, until: 3, load: Some(""), ..Named::default() });
    stage.stepped(members, 3);
    // One joins and one leaves at a boundary; later one is gone at once.
    let members = &[0, 2, 3];
    let (void, left_out, after) = (&[3], &[1], Some(5));
    let named = Named { members, void, left_out, after, until: 7, ..Named::default() };
    let world = stage.name(named);
    stage.tell(1, Event::Leave);
    (0..3).for_each(|worker| stage.go_on(worker, 1, 5));
    members.iter().for_each(|worker| assert_eq!(stage.formed(*worker, world).step, 5));
    stage.ended(1).unwrap();
    stage.stepped(members, 7);
    stage.stop(0);
    let members = &[2, 3];
    stage.form(Named { members, until: END, ..Named::default() });
    stage.stepped(members, END);
    assert!(stage.weights(members, END) == reference(spec(), N_RECORDS));
}

#[test]
fn survivors_of_real_links_continue_wherever_a_member_dies() {
    let alone = reference(spec(), N_RECORDS);
    for transport in [Transport::SharedMemory, Transport::Unix, Transport::Tcp] {
        for phase in mesh::ReducePhase::ALL {
            for n_members in 2..=4 {
                let members: Vec<u32> = (0..n_members).collect();
                let mut stage = Stage::new(spec(), N_RECORDS);
                stage.transport = Some(transport);
                stage.fault = Some((1, 4, phase));
                members.iter().for_each(|worker| stage.start(*worker));
                let until = END;
                stage.form(Named { members: &members, until, load: Some(""), ..Named::default() });
                let survivors: Vec<u32> = members.into_iter().filter(|it| *it != 1).collect();
                // Who needs nothing from the dead one hears of it from the master alone.
                assert_eq!(stage.anyone_lost(&survivors), 1, "{transport}, {phase:?}");
                stage.killed(1);
                stage.form(Named { members: &survivors, until, ..Named::default() });
                stage.stepped(&survivors, END);
                let weights = stage.weights(&survivors, END);
                assert!(weights == alone, "{transport}, {phase:?}, {n_members} members");
            }
        }
    }
}

#[test]
fn every_worker_computes_the_same_probe() {
    let mut stage = Stage::new(spec(), N_RECORDS);
    stage.start(0);
    stage.start(1);
    assert_eq!(stage.probe(0), stage.probe(1));
    assert_ne!(stage.probe(0), 0);
    assert_eq!(stage.claim(0), (0, 0));
}

#[test]
fn survivors_continue_wherever_a_member_dies() {
    let alone = reference(spec(), N_RECORDS);
    let half = DeathPoint::HalfGathered { to: 1 };
    let phases = [
        DeathPoint::BeforeSend,
        DeathPoint::HalfSent,
        DeathPoint::Reducing,
        DeathPoint::BeforeGather,
        half,
        DeathPoint::After,
    ];
    for phase in phases {
        for n_members in [2, 3, 5] {
            let members: Vec<u32> = (0..n_members).collect();
            let mut stage = Stage::new(spec(), N_RECORDS);
            stage.hub.fault(0, 4, phase);
            members.iter().for_each(|worker| stage.start(*worker));
            stage.form(Named { members: &members, until: END, load: Some(""), ..Named::default() });
            let survivors = &members[1..];
            let lost = stage.lost(survivors[0]);
            assert_eq!((lost.world, lost.suspect), (1, 0));
            stage.killed(0);
            let formed = stage.form(Named { members: survivors, until: END, ..Named::default() });
            let expected = if matches!(phase, DeathPoint::HalfGathered { .. } | DeathPoint::After) {
                4
            } else {
                3
            };
            assert!(formed.iter().all(|formed| formed.step == expected), "{phase:?}: {formed:?}");
            stage.stepped(survivors, END);
            assert!(stage.weights(survivors, END) == alone, "{phase:?}, {n_members} members");
        }
    }
}

#[test]
fn a_member_that_is_one_step_ahead_passes_on_its_state() {
    let mut stage = Stage::new(spec(), N_RECORDS);
    stage.hub.fault(2, 6, DeathPoint::HalfGathered { to: 0 });
    (0..3).for_each(|worker| stage.start(worker));
    stage.form(Named { members: &[0, 1, 2], until: END, load: Some(""), ..Named::default() });
    // Worker 0 has the step and finds out at the next one; worker 1 does not have it.
    assert_eq!(stage.lost(1).suspect, 2);
    assert_eq!(stage.lost(0).suspect, 2);
    assert_eq!((stage.claim(0).1, stage.claim(1).1), (6, 5));
    let formed = stage.form(Named { members: &[0, 1], until: END, ..Named::default() });
    assert_eq!((formed[0].step, formed[1].step), (6, 6));
    assert!(formed[0].state_bytes == 0 && formed[1].state_bytes > 0);
    stage.stepped(&[0, 1], END);
    assert!(stage.weights(&[0, 1], END) == reference(spec(), N_RECORDS));
}

#[test]
fn the_member_ahead_dies_before_it_passes_on_its_state_and_the_step_is_repeated() {
    let mut stage = Stage::new(spec(), N_RECORDS);
    stage.hub.fault(2, 6, DeathPoint::HalfGathered { to: 0 });
    (0..3).for_each(|worker| stage.start(worker));
    stage.form(Named { members: &[0, 1, 2], until: END, load: Some(""), ..Named::default() });
    stage.lost(1);
    stage.lost(0);
    stage.stop(0);
    let formed = stage.form(Named { members: &[1], until: END, ..Named::default() });
    assert_eq!(formed[0].step, 5);
    stage.stepped(&[1], END);
    assert!(stage.weights(&[1], END) == reference(spec(), N_RECORDS));
}

#[test]
fn a_joiner_gets_the_state_at_a_named_step() {
    let mut stage = stage(&[0, 1], 3);
    stage.start(2);
    stage.stepped(&[0, 1], 3);
    let members = &[0, 1, 2];
    let named = Named { members, void: &[2], after: Some(5), until: END, ..Named::default() };
    let world = stage.name(named);
    assert_eq!(stage.waits_for(2), "worker 0, worker 1", "the joiner is there first");
    // The world before is granted the way to the boundary.
    for worker in [0, 1] {
        stage.go_on(worker, 1, 5);
    }
    for worker in members {
        let formed = stage.formed(*worker, world);
        assert_eq!((formed.step, formed.state_bytes > 0), (5, *worker == 2));
    }
    stage.stepped(members, END);
    assert!(stage.weights(members, END) == reference(spec(), N_RECORDS));
}

#[test]
fn a_void_state_is_dropped() {
    let mut stage = stage(&[0, 1], 4);
    stage.stepped(&[0, 1], 4);
    stage.form(Named { members: &[0], left_out: &[1], until: 6, ..Named::default() });
    stage.stepped(&[0], 6);
    assert_eq!(stage.claim(1), (1, 4));
    let members = &[0, 1];
    let formed = stage.form(Named { members, void: &[1], until: END, ..Named::default() });
    assert_eq!((formed[1].step, formed[1].state_bytes > 0), (6, true));
    stage.stepped(members, END);
    assert!(stage.weights(members, END) == reference(spec(), N_RECORDS));
    assert_eq!(stage.claim(1), (3, END));
}

/// Both lost the master at once. The one that comes back first trains alone; the other one, which
/// never heard of that, waits where the world of both was allowed to.
#[test]
fn a_member_of_a_world_that_was_replaced_unheard_does_not_wait_for_its_steps() {
    let transports = [None, Some(Transport::SharedMemory), Some(Transport::Tcp)];
    for (transport, first) in transports.into_iter().flat_map(|t| [(t, 0), (t, 1)]) {
        let mut stage = Stage::new(spec(), N_RECORDS);
        stage.transport = transport;
        let members = &[0, 1];
        members.iter().for_each(|worker| stage.start(*worker));
        stage.form(Named { members, until: 4, load: Some(""), ..Named::default() });
        stage.stepped(members, 4);
        stage.form(Named { members: &[first], until: 6, ..Named::default() });
        stage.stepped(&[first], 6);
        let second = 1 - first;
        let named =
            Named { members, void: &[second], after: Some(7), until: END, ..Named::default() };
        let before = stage.world();
        let world = stage.name(named);
        stage.go_on(first, before, 7);
        let formed = stage.formed(second, world);
        assert_eq!((formed.step, formed.state_bytes > 0), (7, true));
        stage.stepped(members, END);
        assert!(stage.weights(members, END) == reference(spec(), N_RECORDS));
    }
}

#[test]
fn training_goes_no_further_than_granted() {
    let mut stage = stage(&[0, 1], 2);
    stage.stepped(&[0, 1], 2);
    assert_eq!((stage.claim(0).1, stage.claim(1).1), (2, 2));
    stage.go(&[0, 1], 4);
    stage.stepped(&[0, 1], 4);
    assert_eq!((stage.claim(0).1, stage.claim(1).1), (4, 4));
}

#[test]
fn a_checkpoint_is_taken_at_its_step_while_training_continues() {
    let members = &[0, 1];
    let mut stage = stage(members, 2);
    stage.stepped(members, 2);
    let folder = stage.checkpoint(members, 5);
    stage.go(members, END);
    let weights = stage.written(members, &folder);
    stage.stepped(members, END);
    let mut alone = stage_of(spec(), N_RECORDS, &[0], 5);
    alone.stepped(&[0], 5);
    assert!(weights == alone.weights(&[0], 5));
}

#[test]
fn a_checkpoint_ordered_too_late_is_refused() {
    let mut stage = stage(&[0], 3);
    stage.stepped(&[0], 3);
    stage.checkpoint(&[0], 2);
    let error = stage.find(0, |kind| {
        if let Kind::CheckpointFailed(failed) = kind { Some(failed.error) } else { None }
    });
    assert_eq!(error, "step 2 has passed: this worker is at step 3");
}

#[test]
fn training_continues_from_a_checkpoint() {
    let mut first = stage(&[0, 1], 7);
    first.stepped(&[0, 1], 7);
    let folder = first.checkpoint(&[0, 1], 7);
    first.written(&[0, 1], &folder);
    commit(&folder, 5);
    let mut second = Stage::new(spec(), N_RECORDS);
    (0..3).for_each(|worker| second.start(worker));
    let members = &[0, 1, 2];
    let load = Some(folder.as_str());
    let formed = second.form(Named { members, until: END, load, ..Named::default() });
    assert!(formed.iter().all(|formed| (formed.step, formed.state_bytes) == (7, 0)));
    second.stepped(members, END);
    assert!(second.weights(members, END) == reference(spec(), N_RECORDS));
}

/// Makes the files in a folder a complete checkpoint, as the master does.
fn commit(folder: &str, n_partitions: u32) {
    use edl_core::id::{CheckpointId, Generation, PartitionId, Term};
    use edl_core::optimizer;
    use edl_tensor::checkpoint::{FileEntry, Manifest, commit_manifest, file_name};
    use edl_tensor::model::Model;
    let folder = std::path::Path::new(folder);
    let file = |partition: u32| {
        let name = file_name(PartitionId(partition));
        let bytes = std::fs::read(folder.join(&name)).unwrap();
        let (snapshot, checksum) =
            edl_tensor::checkpoint::codec::decode(&mut bytes.as_slice()).unwrap();
        FileEntry {
            partition: PartitionId(partition),
            name,
            bytes: bytes.len() as u64,
            checksum: checksum.iter().map(|byte| format!("{byte:02x}")).collect(),
            updates: snapshot.header.updates,
        }
    };
    let model = ToyModel::new().spec().clone();
    let manifest = Manifest {
        format: edl_tensor::checkpoint::FORMAT,
        version: 7,
        exact: None,
        generation: Generation(1),
        checkpoint: CheckpointId(1),
        term: Term(1),
        run: "00".repeat(16),
        job: "toy".into(),
        seed: spec().seed,
        optimizer: optimizer::resolve(&spec(), &model).unwrap(),
        model,
        n_batches: 5,
        n_partitions,
        fingerprint: String::new(),
        files: (0..n_partitions).map(file).collect(),
        metrics: std::collections::BTreeMap::new(),
        skipped: Default::default(),
    };
    commit_manifest(folder, &manifest).unwrap();
}

#[test]
fn a_checkpoint_that_cannot_be_loaded_is_reported() {
    let mut stage = Stage::new(spec(), N_RECORDS);
    stage.start(0);
    stage.name(Named { members: &[0], until: 1, load: Some("/nowhere"), ..Named::default() });
    let Kind::LoadFailed(failed) = stage.next(0) else { panic!("it cannot be loaded") };
    assert_eq!(failed.generation, 1);
    assert!(failed.error.contains("/nowhere"), "{}", failed.error);
    stage.form(Named { members: &[0], until: 1, load: Some(""), ..Named::default() });
}

#[test]
fn shards_are_evaluated_at_their_step_while_all_members_wait() {
    let work = |shard: u32, version: u64| proto::EvalWork {
        eval: 1,
        version,
        shard,
        first_record: u64::from(shard) * 7,
        end_record: u64::from(shard) * 7 + 7,
    };
    let measure =
        |members: &[u32]| {
            let mut stage = stage(members, 3);
            // One comes before its step; all are measured with the state of step 3.
            stage.assign_shard(members[0], 1, work(0, 3));
            stage.stepped(members, 3);
            stage.assign_shard(members[members.len() - 1], 2, work(1, 3));
            let mut measures = Vec::new();
            for worker in [members[0], members[members.len() - 1]] {
                let done = stage.find(worker, |kind| {
                    if let Kind::EvalDone(done) = kind { Some(done) } else { None }
                });
                let measured = edl_net::convert::master::measures(done.measures).unwrap();
                measures.push((done.shard, measured));
            }
            stage.go(members, END);
            stage.stepped(members, END);
            measures
        };
    assert_eq!(measure(&[0]), measure(&[0, 1]));
}

#[test]
fn a_shard_of_a_past_step_is_returned() {
    let mut stage = stage(&[0], 3);
    stage.stepped(&[0], 3);
    let work = proto::EvalWork { version: 2, shard: 4, end_record: 5, ..Default::default() };
    stage.assign_shard(0, 9, work);
    let failed =
        stage.find(0, |kind| if let Kind::Failed(failed) = kind { Some(failed) } else { None });
    assert_eq!((failed.lease, failed.index), (9, 4));
    assert_eq!(failed.error, "step 2 has passed: this worker is at step 3");
}

#[test]
fn a_member_that_leaves_trains_to_the_boundary_and_succeeds() {
    let mut stage = stage(&[0, 1, 2], 3);
    stage.tell(1, Event::Leave);
    stage.stepped(&[0, 1, 2], 3);
    let folder = stage.checkpoint(&[0, 1, 2], 6);
    let members = &[0, 2];
    let named = Named { members, left_out: &[1], after: Some(6), until: END, ..Named::default() };
    let world = stage.name(named);
    for worker in [0, 1, 2] {
        stage.go_on(worker, 1, 6);
    }
    for worker in members {
        assert_eq!(stage.formed(*worker, world).step, 6);
    }
    stage.ended(1).unwrap();
    assert_eq!(stage.written(&[0, 1, 2], &folder).len(), 5);
    stage.stepped(members, END);
    assert!(stage.weights(members, END) == reference(spec(), N_RECORDS));
}

#[test]
fn a_worker_that_is_in_no_world_leaves_at_once() {
    let mut stage = Stage::new(spec(), N_RECORDS);
    stage.start(0);
    stage.tell(0, Event::Leave);
    stage.ended(0).unwrap();
}

#[test]
fn a_new_world_ends_a_blocked_reduction_at_once() {
    let members = &[0, 1];
    let mut stage = stage(members, 2);
    stage.stepped(members, 2);
    // Worker 1 does not know this, so worker 0 waits for it.
    stage.go(&[0], 4);
    assert_eq!(stage.waits_for(0), "worker 1");
    let formed = stage.form(Named { members: &[0], left_out: &[1], until: 5, ..Named::default() });
    assert_eq!(formed[0].step, 2);
    stage.stepped(&[0], 5);
    // The same while a world forms.
    let until = END;
    stage.name(Named { members: &[0, 7], until, ..Named::default() });
    assert_eq!(stage.waits_for(0), "worker 7");
    stage.form(Named { members, void: &[1], until, ..Named::default() });
    stage.stepped(members, END);
    assert!(stage.weights(members, END) == reference(spec(), N_RECORDS));
}

/// Record 11 stands for a bad one; what the member that trains it says.
fn bad_record(bad: u64) -> String {
    let mut stage = Stage::new(JobSpec { shuffle: false, ..spec() }, N_RECORDS);
    stage.swap = Some((11, bad));
    stage.start(0);
    stage.start(1);
    let members = &[0, 1];
    stage.form(Named { members, until: END, load: Some(""), ..Named::default() });
    // The second step's records are 8 to 16; lane 1 is worker 0's and has 10 and 11.
    let (place, error) = stage.find(0, |kind| {
        if let Kind::StepFailed(proto::StepFailed { world, step, error }) = kind {
            return Some(((world, step), error));
        }
        let Kind::StepNonFinite(proto::StepNonFinite { world, step, error }) = kind else {
            return None;
        };
        Some(((world, step), error))
    });
    assert_eq!(place, (1, 1));
    error
}

#[test]
fn records_that_cannot_be_trained_are_named() {
    let place = "(batch 0/1, lane 1: 2 records starting at toy file, record 10)";
    assert_eq!(bad_record(POISON), format!("record {POISON}: poison {place}"));
    assert_eq!(bad_record(ABYSS), format!("the loss is not finite {place}"));
    assert_eq!(bad_record(OVERFLOW), format!("the gradient is not finite {place}"));
    assert_eq!(bad_record(CORRUPT), format!("toy file, record {CORRUPT} is corrupt"));
}

#[test]
fn first_records_that_cannot_be_read_are_reported_before_the_worker_ends() {
    let mut stage = Stage::new(JobSpec { shuffle: false, ..spec() }, N_RECORDS);
    stage.swap = Some((1, CORRUPT));
    stage.launch(0, ToyModel::new());
    let Kind::StepFailed(failed) = stage.next(0) else { panic!("it cannot be probed") };
    assert_eq!((failed.world, failed.step), (0, 0));
    assert_eq!(failed.error, format!("toy file, record {CORRUPT} is corrupt"));
    assert!(stage.ended(0).is_err());
}

#[test]
fn a_model_with_tables_is_refused() {
    let mut stage = Stage::new(spec(), N_RECORDS);
    stage.launch(0, ToyModel::with_table());
    let error = stage.ended(0).unwrap_err().to_string();
    let expected = "cannot build the model: model `toy` has embedding tables";
    assert!(error.starts_with(expected), "{error}");
}
