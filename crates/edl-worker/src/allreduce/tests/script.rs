// SPDX-License-Identifier: Apache-2.0
//! Members whose training script takes the optimizer steps: its state travels with the parameters.

use edl_core::batch::batch_of;
use edl_core::upcoming::lane_seed;
use edl_net::mesh::Transport;
use edl_tensor::checkpoint::codec;
use edl_tensor::double;

use super::hub::DeathPoint;
use super::stage::{Named, Stage, Weights, spec};
use super::toy::{OVERFLOW, ToyModel, double_gradient, first_doubles};
use super::{END, N_RECORDS, commit};

/// Trains with these members to `until`, without any fault.
fn stage(members: &[u32], until: u64) -> Stage {
    let mut stage = Stage::script();
    members.iter().for_each(|worker| stage.start(*worker));
    stage.form(Named { members, until, load: Some(""), ..Named::default() });
    stage
}

fn reference() -> Weights {
    let mut stage = stage(&[0], END);
    stage.stepped(&[0], END);
    stage.weights(&[0], END)
}

#[test]
fn any_number_of_members_gives_bit_identical_results_and_state() {
    let alone = reference();
    // The file of the first partition holds the script's state as well.
    let state = ToyModel::first_state().len();
    let without = stage(&[0], 1).weights(&[0], 1)[&1].len();
    assert!(alone[&0].len() > without + state, "{} bytes", alone[&0].len());
    for n_members in 2..=5 {
        // Five members have four lanes: one only takes the steps.
        let members: Vec<u32> = (0..n_members).collect();
        let mut stage = stage(&members, END);
        let stepped = stage.stepped(&members, END);
        assert!(stepped.iter().all(|one| one.hash == stepped[0].hash), "hashes agree");
        assert!(stage.weights(&members, END) == alone, "{n_members} members");
    }
}

/// The parameter of 64-bit numbers after the last step, by a loop without a job.
fn doubles() -> Vec<f64> {
    let (spec, mut weights) = (spec(), first_doubles());
    let plan = spec.plan(N_RECORDS);
    for number in 0..END {
        let batch = batch_of(number, plan.n_batches());
        let n_records = plan.n_records_of(batch.index);
        for (place, weight) in weights.iter_mut().enumerate() {
            let lane = |lane: u32| {
                let records = plan.records_of_lane(batch, lane, spec.n_lanes()).unwrap();
                let seed = lane_seed(spec.seed, batch, lane);
                double_gradient(&records, seed, place, *weight) * records.len() as f64
            };
            let sum = match n_records {
                8 => (lane(0) + lane(1)) + (lane(2) + lane(3)),
                5 => lane(0) + lane(1),
                _ => panic!("{n_records} records"),
            };
            *weight -= 0.1 * (sum / f64::from(n_records));
        }
    }
    weights.to_vec()
}

#[test]
fn numbers_of_64_bits_are_those_of_a_loop_without_a_job() {
    let expected = doubles();
    let transports = [None, Some(Transport::SharedMemory), Some(Transport::Tcp)];
    for (n_members, transport) in (1..).zip(transports) {
        let members: Vec<u32> = (0..n_members).collect();
        let mut stage = Stage::script();
        stage.transport = transport;
        members.iter().for_each(|worker| stage.start(*worker));
        stage.form(Named { members: &members, until: END, load: Some(""), ..Named::default() });
        stage.stepped(&members, END);
        let weights = stage.weights(&members, END);
        let segment = |file: &Vec<u8>| codec::decode(&mut file.as_slice()).unwrap().0.dense.weights;
        let mut dense: Vec<f32> = weights.values().flat_map(segment).collect();
        let mut found = Vec::new();
        double::each(&mut dense[..2 * expected.len()], |number| {
            found.push(number);
            number
        });
        assert_eq!(found, expected, "{n_members} members");
    }
}

#[test]
fn survivors_repeat_a_step_with_the_state_before_it() {
    let alone = reference();
    for phase in [DeathPoint::HalfSent, DeathPoint::BeforeGather, DeathPoint::After] {
        let members = [0, 1, 2];
        let mut stage = Stage::script();
        stage.hub.fault(0, 4, phase);
        members.iter().for_each(|worker| stage.start(*worker));
        stage.form(Named { members: &members, until: END, load: Some(""), ..Named::default() });
        stage.lost(1);
        stage.killed(0);
        stage.form(Named { members: &[1, 2], until: END, ..Named::default() });
        stage.stepped(&[1, 2], END);
        assert!(stage.weights(&[1, 2], END) == alone, "{phase:?}");
    }
}

#[test]
fn a_member_that_is_one_step_ahead_passes_on_its_state() {
    let mut stage = Stage::script();
    stage.hub.fault(2, 6, DeathPoint::HalfGathered { to: 0 });
    (0..3).for_each(|worker| stage.start(worker));
    stage.form(Named { members: &[0, 1, 2], until: END, load: Some(""), ..Named::default() });
    assert_eq!((stage.lost(1).suspect, stage.lost(0).suspect), (2, 2));
    let formed = stage.form(Named { members: &[0, 1], until: END, ..Named::default() });
    assert_eq!((formed[0].step, formed[1].step), (6, 6));
    stage.stepped(&[0, 1], END);
    assert!(stage.weights(&[0, 1], END) == reference());
}

#[test]
fn a_joiner_gets_the_state_and_continues_alone() {
    let mut stage = stage(&[0, 1], 3);
    stage.stepped(&[0, 1], 3);
    stage.start(2);
    let members = &[0, 1, 2];
    stage.form(Named { members, void: &[2], until: 5, ..Named::default() });
    stage.stepped(members, 5);
    stage.stop(0);
    stage.stop(1);
    stage.form(Named { members: &[2], until: END, ..Named::default() });
    stage.stepped(&[2], END);
    assert!(stage.weights(&[2], END) == reference());
}

#[test]
fn training_continues_from_a_checkpoint_with_its_state() {
    let mut first = stage(&[0, 1], 7);
    first.stepped(&[0, 1], 7);
    let folder = first.checkpoint(&[0, 1], 7);
    first.written(&[0, 1], &folder);
    commit(&folder, 5);
    let mut second = Stage::script();
    (0..3).for_each(|worker| second.start(worker));
    let (members, load) = (&[0, 1, 2], Some(folder.as_str()));
    second.form(Named { members, until: END, load, ..Named::default() });
    second.stepped(members, END);
    assert!(second.weights(members, END) == reference());
}

#[test]
fn a_script_may_handle_gradients_that_overflow() {
    let weights = [&[0][..], &[0, 1, 2][..]].map(|members| {
        let mut stage = Stage::script();
        stage.swap = Some((5, OVERFLOW));
        members.iter().for_each(|worker| stage.start(*worker));
        stage.form(Named { members, until: END, load: Some(""), ..Named::default() });
        stage.stepped(members, END);
        stage.weights(members, END)
    });
    assert!(weights[0] == weights[1] && weights[0] != reference());
}
